"""Where and when an incident happened: who is on which node and device, who still lives, what was
done to whom, what earlier attempts were like.

Owns: maps between ranks, nodes, addresses, devices and processes; our own signals; liveness;
recurrence. Never does: I/O, judge. Called by: :mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import TypeVar

from everstep.faults.catalog import Catalog
from everstep.faults.exits import End, ends_of
from everstep.faults.lines import Line, lines_of
from everstep.faults.match import Index, is_past
from everstep.faults.records import Incident

MOST_RANKS = 1_000_000
"""A larger number that a line calls a rank is none."""
FRESH_S = 20.0
"""A heartbeat younger than this is a sign of life."""

_DEVICE = re.compile(
    r"(?i)rank (?P<rank>\d+)[:,]? [^\n]{0,40}?GPU (?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})"
    r"|(?P<pci2>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.0)? \((?:local )?index"
    r" (?P<local>\d+)(?:, rank (?P<rank2>\d+))?"
)
_RUNS = re.compile(
    r"(?i)\brank (?P<rank>\d+) (?:(?:runs|is|running|listens) (?:at"
    r"|on) (?P<address>[\w.:-]+)(?: \((?P<node>[\w.-]+))?|(?:is |= ?"
    r"|: ?)?(?P<a2>\d+\.\d+\.\d+\.\d+))"
)
_IS_PID = re.compile(r"(?i)\brank (?P<rank>\d+)(?: is|:|=)?,? \(?pid[ =:]+(?P<pid>\d+)")
_USES = re.compile(
    r"Bootstrap : Using [\w.-]+:(?P<address>[\d.]+)<|NET/(?:Socket"
    r"|IB) : Using [^\n]*?:(?P<a2>\d+\.\d+\.\d+\.\d+)<"
)
_OWN = frozenset(("kernel", "agent", "exit"))
_COMMITS = re.compile(r"(?i)\b(?:last committed|no (?:new(?:er)? )?(?:committed )?checkpoint)\b")
_SENT = re.compile(
    r"(?i)\bsent (?:SIG(?:TERM|KILL|INT|ABRT)|signal \d+)[^\n;]{0,12}? to "
    r"(?P<who>(?:all )?(?:other )?ranks?[ \d,and-]*|all [\w ]+|every[\w ]+)"
    r"|\bSIG(?:TERM|KILL|INT|ABRT) (?:was )?sent to (?P<w2>(?:all )?(?:other )?ranks?[ \d,and-]*"
    r"|all [\w ]+)"
    r"|\b(?:kill|terminat|stopp)(?:ed|ing) (?P<w3>(?:the )?(?:survivors?"
    r"|(?:all )?(?:other )?(?:ranks?|workers?))[ \d,and-]*)"
)
_CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal SIG")
_NUMBERS = re.compile(r"(\d+)(?: ?(?:-|to) ?(\d+))?")
_AGE = re.compile(r"\blast_beat_age_s=(?P<age>\d+(?:\.\d+)?)")
_STEP_AGE = re.compile(r"\blast_step_age_s=(?P<age>\d+(?:\.\d+)?)")
_BEAT_STEP = re.compile(r"\bstep=(?P<step>\d+)")
_PHASE = re.compile(r"\bphase=(?P<phase>\S+)")
_PROGRESS = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|epoch|it)\b[^\n]{0,80}\bloss\b[^\n]{0,4}[\d.]"
)
_FINISHED = re.compile(
    r"(?i)\btraining (?:is )?(?:finished|complete[d]?|done)\b|\bfinal checkpoint (?:saved|written"
    r"|committed|complete)"
    r"|max_steps[^\n]{0,20}reached|\b(?:run|job) (?:finished|completed) (?:successfully|normally)"
    r"|^done\.?$"
)
_STEPS = re.compile(r"(?i)\bstep:? (?P<step>\d+) ?(?:/|of) ?(?P<last>\d+)\b")
_COUNTS = re.compile(r"[Ss]tep|[Ii]ter|[Ee]poch|[Bb]atch")
_TOLD = re.compile(
    r"(?i)^[^\n]{0,60}?\b(?:global_?)?(?P<unit>step|iter(?:ation)?|epoch|batch)"
    r"[ =:#]{1,12}(?P<step>\d{1,12})\b"
)
"""Bars of progress tell nothing: a loader, a download and an evaluation have them too."""
_STEPPING = ("step", "train")


@dataclass(frozen=True)
class Beat:
    """What a heartbeat says. ``age`` in seconds at ``time``; ``stepped``: since a step ended, None
    where that is not told."""

    rank: int
    step: int | None
    phase: str
    age: float
    time: float | None
    alive: bool
    stepped: float | None = None


@dataclass
class Scene:
    """Everything around the facts. ``ours``: ranks that everstep or the launcher ended. ``past``:
    lines about earlier attempts and other jobs."""

    incident: Incident
    lines: list[Line]
    index: Index
    nodes: dict[str, tuple[int, ...]]
    addresses: dict[str, str]
    devices: dict[tuple[str | None, str], int] = field(default_factory=dict)
    pids: dict[tuple[str | None, int], int] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    ours: set[int] = field(default_factory=set)
    beats: list[Beat] = field(default_factory=list)
    past: list[Line] = field(default_factory=list)
    commits: list[Line] = field(default_factory=list)
    finished: float | None = None
    over: bool = False
    world: int = 0
    _of: tuple[dict[str, tuple[int, ...]], dict[int, str]] | None = None

    def node_of(self, rank: int | None) -> str | None:
        if self._of is None or self._of[0] is not self.nodes:
            of = {r: node for node, ranks in reversed(self.nodes.items()) for r in ranks}
            self._of = self.nodes, of
        return None if rank is None else self._of[1].get(rank)

    def ranks_of(self, node: str | None) -> tuple[int, ...]:
        return self.nodes.get(node, ()) if node is not None else ()

    def of_device(self, node: str | None, pci: str) -> int | None:
        """The rank on a device."""
        return _only(self._on_bus.get(bus_id(pci), ()), node)

    def of_pid(self, node: str | None, pid: int) -> int | None:
        """The rank of a process."""
        return _only(self._with_pid.get(pid, ()), node)

    def node_at(self, address: str) -> str | None:
        """The node that an address or a host's name in a message means."""
        name = address.strip("[]() ")
        host = name.rsplit(":", 1)[0] if name.count(":") == 1 else name
        host = host.removeprefix("::ffff:")
        if host in self.addresses:
            return self.addresses[host]
        if host in self.nodes:
            return host
        if not host or host[0].isdigit():
            return None
        near = self._short_names.get(host.split(".")[0], [])
        return near[0] if len(near) == 1 else None

    def is_multi(self) -> bool:
        return len([node for node, ranks in self.nodes.items() if ranks]) > 1

    @cached_property
    def _short_names(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = defaultdict(list)
        for node in self.nodes:
            names[node.split(".")[0]].append(node)
        return dict(names)

    @cached_property
    def _on_bus(self) -> dict[str, list[tuple[str | None, int]]]:
        return _by_key(self.devices)

    @cached_property
    def _with_pid(self) -> dict[int, list[tuple[str | None, int]]]:
        return _by_key(self.pids)

    @cached_property
    def beats_of(self) -> dict[int, list[Beat]]:
        """The heartbeats of each rank."""
        beats: dict[int, list[Beat]] = defaultdict(list)
        for beat in self.beats:
            beats[beat.rank].append(beat)
        return dict(beats)

    def pids_on(self, node: str | None) -> set[int]:
        """The processes of ranks that are known to run on a node, or may."""
        if node is None:
            return {pid for _, pid in self.pids}
        nowhere = self._pids_of.get(None, set())
        return self._pids_of.get(node, set()) | nowhere

    @cached_property
    def _pids_of(self) -> dict[str | None, set[int]]:
        pids: dict[str | None, set[int]] = defaultdict(set)
        for host, pid in self.pids:
            pids[host].add(pid)
        return dict(pids)

    @cached_property
    def ends_on(self) -> dict[str | None, list[End]]:
        """The ends of each node's ranks that were none of ours."""
        ends: dict[str | None, list[End]] = defaultdict(list)
        for end in self.ends.values():
            if end.rank not in self.ours:
                ends[end.node or self.node_of(end.rank)].append(end)
        return dict(ends)

    @cached_property
    def heard(self) -> frozenset[int | None]:
        """Ranks of which there is output."""
        return frozenset(line.rank for line in self.lines if line.source == "log")

    @cached_property
    def alive(self) -> set[int]:
        """Ranks with a fresh heartbeat, but for those whose end is known."""
        fresh = {beat.rank for beat in self.beats if beat.alive and beat.age < FRESH_S}
        return fresh - set(self.ends)

    @cached_property
    def dead(self) -> bool:
        """Whether any rank ended otherwise than with code 0 and than by us."""
        return any(end.code != 0 and end.rank not in self.ours for end in self.ends.values())

    @cached_property
    def boundaries(self) -> dict[int, float]:
        """When each rank finished a step last, as its heartbeats tell. Without that word, a beat
        in another phase may be that phase's begin, and says nothing of a step."""
        last: dict[int, float] = {}
        for beat in self.beats:
            stepping = beat.age if beat.phase.startswith(_STEPPING) else None
            age = beat.stepped if beat.stepped is not None else stepping
            if beat.time is not None and age is not None:
                last[beat.rank] = max(last.get(beat.rank, -inf), beat.time - age)
        return last

    @cached_property
    def last_output(self) -> float:
        """When any rank printed something last."""
        times = [signal.time for signal in self.incident.signals
                 if signal.source == "log" and signal.time is not None]  # fmt: skip
        return max(times, default=-inf)

    @cached_property
    def told_steps(self) -> dict[int, list[tuple[float, str, int]]]:
        """Time, unit and number of each step (iteration, epoch, batch) that a rank's output tells
        of, in order of time."""
        told: dict[int, list[tuple[float, str, int]]] = defaultdict(list)
        for line in self.lines:
            if line.source != "log" or line.rank is None or line.time is None:
                continue
            if _COUNTS.search(line.text) and (step := _TOLD.search(line.text)):
                told[line.rank].append((line.time, step["unit"].lower(), int(step["step"])))
        return {rank: sorted(steps) for rank, steps in told.items()}

    def steps_after(self, line: Line) -> int:
        """How many lines of the same output tell of the loss of a step after that line."""
        orders = self._losses.get((line.signal, line.rank), [])
        return len(orders) - bisect_right(orders, line.order)

    @cached_property
    def _losses(self) -> dict[tuple[int, int | None], list[int]]:
        orders: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        for line in self.index.about("loss"):
            if _PROGRESS.search(line.text):
                orders[line.signal, line.rank].append(line.order)
        return dict(orders)

    @cached_property
    def recovered(self) -> list[Line]:
        """What an agent's watches say of things that are well again."""
        return [line for line in self.lines if line.source == "agent" and "again" in line.text]

    def repeats(self, *words: str) -> list[Line]:
        """Lines of the past that name any of the words."""
        return [line for line in self.past if any(word in line.text for word in words if word)]


def scene_of(incident: Incident, catalog: Catalog) -> Scene:
    """Read everything that is not itself a failure."""
    apart = is_structured(incident)
    lines = [
        line
        for number, signal in enumerate(incident.signals)
        for line in lines_of(
            signal, number, incident.nodes, merged=not apart or signal.rank is None
        )
    ]
    nodes = {node: tuple(sorted(ranks)) for node, ranks in incident.nodes.items()}
    index = Index(lines, catalog)
    if left := _of_last_attempt(lines, index):
        lines, index = left, Index(left, catalog)
    scene = Scene(incident, lines, index, nodes, dict(incident.addresses))
    _places(scene)
    scene.ends = {
        end.rank: end
        for end in _firsts(ends_of(incident, lines, scene.index.about("end of a process")))
    }
    _fill(scene)
    scene.past = [line for line in lines if is_past(line)]
    scene.commits = [line for line in lines if line.source == "agent" and not is_past(line)
                     and _COMMITS.search(line.text)]  # fmt: skip
    _own_signals(scene)
    _life(scene)
    return scene


def is_structured(incident: Incident) -> bool:
    """Whether what kernels, agents and ends of processes say comes from sources of their own: then
    the output of a rank is what its program printed, whatever it looks like."""
    return any(signal.source in _OWN for signal in incident.signals)


def _of_last_attempt(lines: list[Line], index: Index) -> list[Line]:
    """Without what a merged log tells of attempts before its last restart, where anything failed
    after it; empty where all counts."""
    marks = [line for line in index.about("restart") if line.source in ("log", "agent")]
    last = {line.signal: line.order for line in marks}
    if not last:
        return []

    def after(line: Line) -> bool:
        return line.order > last.get(line.signal, -1)

    failed = (*index.about("traceback"), *index.about("end of a process"), *index.matched())
    if not any(line.signal in last and after(line) for line in failed):
        return []
    return [line for line in lines if line.source != "log" or after(line)]


_Key = TypeVar("_Key")


def _by_key(
    ranks: dict[tuple[str | None, _Key], int],
) -> dict[_Key, list[tuple[str | None, int]]]:
    by: dict[_Key, list[tuple[str | None, int]]] = defaultdict(list)
    for (host, key), rank in ranks.items():
        by[key].append((host, rank))
    return dict(by)


def _only(ranks: Iterable[tuple[str | None, int]], node: str | None) -> int | None:
    """The one rank that fits a node, as far as nodes are known."""
    found = {rank for host, rank in ranks if host == node or host is None or node is None}
    return found.pop() if len(found) == 1 else None


def bus_id(pci: str) -> str:
    """A PCI address as ``9a:00``, without domain, function and case."""
    parts = pci.lower().split(".")[0].split(":")
    return ":".join(parts[-2:]) if len(parts) > 2 or len(parts[0]) <= 2 else parts[-1] + ":00"


def numbers_in(text: str) -> set[int]:
    """``0-2 and 4, 7`` as a set."""
    found: set[int] = set()
    for first, last in _NUMBERS.findall(text):
        found |= (
            set(range(int(first), int(last or first) + 1))
            if int(last or first) - int(first) < 10**5
            else set()
        )
    return found


def _firsts(ends: Iterable[End]) -> list[End]:
    """Of several ends of one rank the last listed would win in a dict: keep the earliest."""
    return sorted(ends, key=lambda end: (-(end.time if end.time is not None else 0), -end.code))


def _places(scene: Scene) -> None:
    for line in scene.index.about("place"):
        text = line.text
        for found in _DEVICE.finditer(text) if "GPU" in text or "index" in text else ():
            pci = bus_id(found["pci"] or found["pci2"])
            rank = found["rank"] or found["rank2"]
            if rank is not None:
                scene.devices[line.node, pci] = int(rank)
            elif found["local"] and int(found["local"]) < len(scene.ranks_of(line.node)):
                scene.devices[line.node, pci] = scene.ranks_of(line.node)[int(found["local"])]
        for found in _RUNS.finditer(text) if "rank" in text else ():
            node = found["node"] or scene.node_of(int(found["rank"]))
            address = found["address"] or found["a2"]
            if node and address not in scene.nodes:
                scene.addresses.setdefault(address, node)
        for found in _IS_PID.finditer(text) if "pid" in text else ():
            scene.pids[line.node or scene.node_of(int(found["rank"])), int(found["pid"])] = int(
                found["rank"]
            )
        if line.node and "Using" in text and (uses := _USES.search(text)):
            scene.addresses.setdefault(uses["address"] or uses["a2"], line.node)


def _fill(scene: Scene) -> None:
    """Without a map of nodes the lines give one, as far as they go."""
    if not scene.nodes:
        seen: dict[str, set[int]] = defaultdict(set)
        for end in scene.ends.values():
            if end.node:
                seen[end.node].add(end.rank)
        for line in scene.lines:
            if line.node and line.rank is not None:
                seen[line.node].add(line.rank)
        scene.nodes = {node: tuple(sorted(ranks)) for node, ranks in seen.items()}
    known = {rank for ranks in scene.nodes.values() for rank in ranks}
    told = {signal.rank for signal in scene.incident.signals if signal.rank is not None}
    heard = told | set(scene.ends)
    if not scene.incident.nodes:
        heard |= {line.rank for line in scene.lines if line.rank is not None}
        highest = max((rank for rank in heard if rank < MOST_RANKS), default=-1)
        scene.world = highest + 1
    scene.world = max(scene.world, len(known | heard))
    for end in scene.ends.values():
        if end.pid is not None and end.pid > 1:
            scene.pids[end.node or scene.node_of(end.rank), end.pid] = end.rank


def _own_signals(scene: Scene) -> None:
    closing = {
        int(found["pid"])
        for line in scene.index.about("end of a process")
        if (found := _CLOSING.search(line.text))
    }
    for end in scene.ends.values():
        if end.ours or (end.pid is not None and end.pid in closing):
            scene.ours.add(end.rank)
    for line in scene.lines:
        told = line.source == "agent" or (line.source == "log" and line.rank is None)
        if told and not is_past(line):
            for found in _SENT.finditer(line.text):
                scene.ours |= _whom(found, line, scene)


def _whom(found: re.Match[str], line: Line, scene: Scene) -> set[int]:
    if re.search(r"(?i)\b(?:no|never|not) (?:signal )?(?:was )?$", line.text[: found.start()]):
        return set()
    named = numbers_in(found["who"] or found["w2"] or found["w3"])
    if named:
        return named
    failed = re.search(r"rank (\d+) (?:failed|ended|exited|died)", line.text)
    first = {int(failed[1])} if failed else set()
    return set(scene.ends) - first


def _life(scene: Scene) -> None:
    for line in scene.lines:
        if line.source == "heartbeat":
            scene.beats += _beat(line)
    for line in scene.index.about("end of the run"):
        if line.source == "log" and _ended(line.text):
            scene.over = True
            if line.time is not None:
                scene.finished = max(scene.finished or line.time, line.time)
    codes = [end.code for end in scene.ends.values()]
    if codes and all(code == 0 for code in codes) and len(codes) >= max(scene.world, 1):
        scene.over = True


def _beat(line: Line) -> list[Beat]:
    age = _AGE.search(line.text)
    if age is None or line.rank is None:
        return []
    step, phase = _BEAT_STEP.search(line.text), _PHASE.search(line.text)
    stepped = _STEP_AGE.search(line.text)
    return [
        Beat(
            line.rank, int(step["step"]) if step else None, phase["phase"] if phase else "",
            float(age["age"]), line.time, "process=dead" not in line.text,
            float(stepped["age"]) if stepped else None,
        )
    ]  # fmt: skip


def _ended(text: str) -> bool:
    found = None if "poch" in text else _STEPS.search(text)
    return bool(_FINISHED.search(text)) or bool(found and found["step"] == found["last"])
