"""The same incident told otherwise: other names, other ranks, other wrapping, less or more text.

Each change takes an incident and what is expected, and gives both as they are then.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

import msgspec

from everstep.faults.read import Expected, Read
from everstep.faults.records import Incident, Signal

Change = Callable[[Read, random.Random], Read]

_RANKED = (
    re.compile(r"(\[rank)(\d+)(\])"), re.compile(r"(\[Rank )(\d+)(\])"), re.compile(r"( Rank )(\d+)(\b)"),
    re.compile(r"(\brank )(\d+)(\b)"), re.compile(r"(from  rank )(\d+)(\b)"),
)  # fmt: skip
_LISTS = re.compile(r"(ranks:? |ranks: \{|dict_keys\(\[|Ranks |ranks )([\d, \-and{}]+)")


def _texts(read: Read, change: Callable[[Signal], str]) -> Read:
    signals = tuple(
        msgspec.structs.replace(signal, text=change(signal)) for signal in read.incident.signals
    )
    return Read(msgspec.structs.replace(read.incident, signals=signals), read.expect)


def renamed(read: Read, rng: random.Random) -> Read:
    """Hosts and directories have other names; addresses follow."""
    incident, expect = read.incident, read.expect
    assert expect is not None
    names = sorted(set(incident.nodes) | {s.node for s in incident.signals if s.node})
    new = {
        name: f"gpu{chr(97 + rng.randrange(26))}{rng.randrange(100, 999)}-r{i}"
        for i, name in enumerate(names)
    }

    def text(value: str) -> str:
        for old in sorted(names, key=len, reverse=True):
            value = re.sub(rf"\b{re.escape(old)}(?![\w-])", new[old], value)
        value = re.sub(r"\b10\.0\.0\.(\d+)", r"172.19.4.\1", value)
        return value.replace("/workspace/", "/scratch/ada/exp/").replace("/data/", "/mnt/lake/")

    signals = tuple(
        msgspec.structs.replace(s, text=text(s.text), node=new.get(s.node) if s.node else None)
        for s in incident.signals
    )
    node = new[expect.root_node] if expect.root_node else None
    return Read(
        Incident(
            incident.id, signals, {new[n]: r for n, r in incident.nodes.items()},
            addresses={re.sub(r"^10\.0\.0\.", "172.19.4.", a): new.get(n, n) for a, n in incident.addresses.items()},
        ),
        msgspec.structs.replace(expect, root_node=node),
    )  # fmt: skip


def permuted(read: Read, rng: random.Random) -> Read:
    """Nodes are told in another order, signals arrive in another order."""
    nodes = list(read.incident.nodes.items())
    signals = list(read.incident.signals)
    rng.shuffle(nodes)
    rng.shuffle(signals)
    changed = msgspec.structs.replace(read.incident, nodes=dict(nodes), signals=tuple(signals))
    return Read(changed, read.expect)


def reranked(read: Read, rng: random.Random) -> Read:
    """Every rank has another number, in texts, too. Cases whose texts count ranks are left alone."""
    incident, expect = read.incident, read.expect
    assert expect is not None
    every = sorted({r for ranks in incident.nodes.values() for r in ranks}
                   | {s.rank for s in incident.signals if s.rank is not None})  # fmt: skip
    if any(
        re.search(r"(?i)local index|task \d|GPU \d+:|GPU ?\d+\b|\branks \d+-\d+|shard \d", s.text)
        for s in incident.signals
    ):
        return read
    shuffled = every.copy()
    rng.shuffle(shuffled)
    new = dict(zip(every, shuffled, strict=True))

    def number(found: re.Match[str]) -> str:
        return found[1] + str(new.get(int(found[2]), int(found[2]))) + found[3]

    def several(found: re.Match[str]) -> str:
        return found[1] + re.sub(r"\d+", lambda m: str(new.get(int(m[0]), int(m[0]))), found[2])

    def text(value: str) -> str:
        value = _LISTS.sub(several, value)
        for form in _RANKED:
            value = form.sub(number, value)
        return value

    signals = tuple(
        msgspec.structs.replace(s, text=text(s.text), rank=None if s.rank is None else new[s.rank])
        for s in incident.signals
    )
    moved: Mapping[str, tuple[int, ...]] = {
        node: tuple(sorted(new[r] for r in ranks)) for node, ranks in incident.nodes.items()
    }
    return Read(
        msgspec.structs.replace(incident, signals=signals, nodes=moved),
        msgspec.structs.replace(
            expect, root_ranks=tuple(sorted(new[r] for r in expect.root_ranks)),
            victim_ranks=tuple(sorted(new.get(r, r) for r in expect.victim_ranks)),
        ),
    )  # fmt: skip


def prefixed(read: Read, rng: random.Random) -> Read:
    """A collector put something before each line of the ranks' logs."""

    def change(signal: Signal) -> str:
        if signal.source != "log":
            return signal.text
        forms = [
            "2026-11-04 09:42:36,123 ",
            "[pod/job-worker-2/trainer] ",
            "2026-02-04T11:15:20.123456789Z stderr F ",
        ]
        if signal.rank is not None:
            forms += [f"[rank{signal.rank}]: ", f"[1,{signal.rank}]<stderr>:"]
        form = rng.choice(forms)
        return "\n".join(form + line for line in signal.text.split("\n"))

    return _texts(read, change)


def oddly_prefixed(read: Read, rng: random.Random) -> Read:
    """A prefix of no known form."""

    def change(signal: Signal) -> str:
        if signal.source != "log":
            return signal.text
        form = rng.choice(["worker-7 | ", "[job/lm-2] ", "<n17> ", "trainer-0: ", "(w4) : "])
        return "\n".join(form + line for line in signal.text.split("\n"))

    return _texts(read, change)


def twice_prefixed(read: Read, rng: random.Random) -> Read:
    """One collector behind another."""
    return prefixed(prefixed(read, rng), rng)


def readdressed(read: Read, rng: random.Random) -> Read:
    """Nodes have other names, and nobody says which addresses are theirs."""
    other = renamed(read, rng)
    incident = msgspec.structs.replace(other.incident, addresses={})
    return Read(incident, other.expect)


def coloured(read: Read, rng: random.Random) -> Read:
    """Terminals' colours and a progress bar."""

    def change(signal: Signal) -> str:
        if signal.source != "log":
            return signal.text
        lines = [
            f"\x1b[31m{line}\x1b[0m" if line and rng.random() < 0.7 else line
            for line in signal.text.split("\n")
        ]
        return (
            " 12%|█▏        | 120/1000 [00:10<01:12, 12.1it/s]\r 13%|█▎        | 130/1000 [00:11<01:11]\r\n"
            + "\n".join(lines)
        )

    return _texts(read, change)


def shortened(read: Read, rng: random.Random) -> Read:
    """Of each text the last 30 lines are left."""
    del rng
    return _texts(read, lambda signal: "\n".join(signal.text.split("\n")[-30:]))


BENIGN = (
    "INFO: step 10 loss 2.31 lr 3e-4 tokens/s 41000", "NCCL INFO Channel 03/0 : 0[0] -> 1[1] via P2P/CUMEM",
    "saved checkpoint to /ckpt/latest", "DEBUG dataloader: prefetch queue 8 of 8", "eval accuracy 0.713",
    "  warnings.warn(", "/opt/venv/lib/python3.11/site-packages/torch/x.py:12: UserWarning: lr_scheduler order",
)  # fmt: skip


def interleaved(read: Read, rng: random.Random) -> Read:
    """Benign lines stand before, between and after, but not inside a traceback's own lines."""

    def change(signal: Signal) -> str:
        if signal.source != "log" or not signal.text:
            return signal.text
        before = rng.sample(BENIGN, 3)
        out = list(before)
        for line in signal.text.split("\n"):
            out.append(line)
            if line.startswith(("[rank", "[E ", "node-")) and rng.random() < 0.3:
                other = (signal.rank or 0) + 100
                out.append(f"[rank{other}]: {rng.choice(BENIGN)}")
        return "\n".join(out)

    return _texts(read, change)


def wrapped(read: Read, rng: random.Random) -> Read:
    """A terminal broke long lines at its width."""
    width = rng.choice((80, 100, 120))

    def change(signal: Signal) -> str:
        if signal.source != "log":
            return signal.text
        out: list[str] = []
        for line in signal.text.split("\n"):
            out += [line[i : i + width] for i in range(0, len(line), width)] or [""]
        return "\n".join(out)

    return _texts(read, change)


def merged(read: Read, rng: random.Random) -> Read:
    """Line by line the ranks' logs of one node are one stream, with the ranks as prefixes."""
    del rng
    incident = read.incident
    by_node: dict[str | None, list[Signal]] = {}
    rest: list[Signal] = []
    for signal in sorted(incident.signals, key=lambda s: s.time or 0.0):
        if signal.source == "log" and signal.rank is not None and len(by_node) < 50:
            by_node.setdefault(signal.node, []).append(signal)
        else:
            rest.append(signal)
    for node, signals in by_node.items():
        text = "\n".join(
            line if line.startswith(f"[rank{s.rank}]") else f"[rank{s.rank}]: {line}"
            for s in signals for line in s.text.split("\n")
        )  # fmt: skip
        rest.append(Signal("log", text, None, node, signals[0].time))
    return Read(msgspec.structs.replace(incident, signals=tuple(rest)), read.expect)


CHANGES: dict[str, Change] = {
    "renamed": renamed, "permuted": permuted, "reranked": reranked, "prefixed": prefixed,
    "coloured": coloured, "shortened": shortened, "interleaved": interleaved, "wrapped": wrapped,
    "merged": merged, "readdressed": readdressed, "oddly prefixed": oddly_prefixed, "twice prefixed": twice_prefixed,
}  # fmt: skip

__all__ = ["BENIGN", "CHANGES", "Expected"]
