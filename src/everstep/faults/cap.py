"""Evidence in bounds: what of a node's signals is kept of an incident.

Owns: the age and the size that evidence may have, and what is left out first. Never does: I/O,
clocks, judge. Called by: the agent, once for its node, before evidence is sent or stored.

An agent that keeps everything loses it to its own storm: one rank may print a gigabyte in the
seconds before it dies. Ends of processes are kept before all else, then what the catalogue knows,
then what is nearest to the end; sources and ranks take turns, so that the loudest hides nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from everstep.faults.catalog import Catalog
from everstep.faults.lines import clean
from everstep.faults.records import Signal
from everstep.faults.sieve import sieved

MOST_BYTES = 256 << 10
"""Of one node's evidence, as JSON."""
LONGEST = MOST_BYTES // 8
"""Bytes of one signal's text: a rank's whole output comes as one."""
BEFORE, AFTER = 600.0, 300.0
"""Seconds around the end within which what was seen belongs to it."""
NOTE = 512
"""Bytes that are held back for the word of what was left out."""


def capped(
    signals: Iterable[Signal],
    ended: float,
    catalog: Catalog,
    *,
    node: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> tuple[Signal, ...]:
    """The signals of ``node`` that are kept, in their order, at most ``most_bytes`` as JSON.

    ``ended`` is when the failure came, on the clock of the signals' ``mono``; one without it has
    no age. What was left out is told by a signal of its own at the end. Redact before: of a
    secret that is cut in two neither half is known for one.
    """
    given = list(dict.fromkeys(signals))
    fresh = [signal for signal in given if _is_fresh(signal, ended)]
    short = [_shortened(signal, catalog, most_bytes) for signal in fresh]
    kept = _chosen(short, ended, catalog, most_bytes - NOTE)
    cut = sum(a is not b for a, b in zip(short, fresh, strict=True))
    note = _note(len(given) - len(fresh), len(short) - len(kept), cut, _bytes(given) - _bytes(kept))
    return (*kept, Signal("agent", note, node=node)) if note else tuple(kept)


def _is_fresh(signal: Signal, ended: float) -> bool:
    if signal.mono is None or signal.source == "exit":
        return True
    return ended - BEFORE <= signal.mono <= ended + AFTER


def _shortened(signal: Signal, catalog: Catalog, most_bytes: int) -> Signal:
    """A long text down to the lines that can matter and its last ones; of what is still too long
    the two ends."""
    longest = max(64, min(LONGEST, most_bytes // 8))
    raw = signal.text.encode("utf-8", "surrogatepass")
    if len(raw) <= longest:
        return signal
    left = sieved([raw], catalog)
    if len(left) > longest:
        half = longest // 2
        left = left[:half] + b"\n...\n" + left[-half:]
    return msgspec.structs.replace(signal, text=left.decode("utf-8", "replace"))


def _chosen(signals: list[Signal], ended: float, catalog: Catalog, most_bytes: int) -> list[Signal]:
    """Those that there is room for, in their order."""
    left = most_bytes
    kept: set[int] = set()
    for number in _by_worth(signals, ended, catalog):
        size = _size(signals[number])
        if size <= left:
            left -= size
            kept.add(number)
    return [signal for number, signal in enumerate(signals) if number in kept]


def _by_worth(signals: list[Signal], ended: float, catalog: Catalog) -> list[int]:
    """The best first, and in turns the best of each source and rank. Not by their order, so that
    none of it depends on which arrived first."""
    groups: dict[tuple[str, int | None], list[tuple[tuple[object, ...], int]]] = defaultdict(list)
    for number, signal in enumerate(signals):
        far = abs((signal.mono if signal.mono is not None else ended) - ended)
        worth = (signal.source != "exit", not _tells(signal, catalog), far, signal.text)
        groups[signal.source, signal.rank].append((worth, number))
    turns = []
    for (source, rank), found in groups.items():
        found.sort()
        rank_first = -1 if rank is None else rank
        turns += [
            (worth[0], turn, worth[1:], source, rank_first, number)
            for turn, (worth, number) in enumerate(found)
        ]
    return [turn[-1] for turn in sorted(turns)]


def _tells(signal: Signal, catalog: Catalog) -> bool:
    return any(catalog.found_in(line) for line in clean(signal.text))


def _note(old: int, crowded: int, cut: int, fewer: int) -> str:
    told = [
        f"{old} older or later than what belongs to it" if old else "",
        f"{crowded} for which there was no room" if crowded else "",
        f"and parts of {cut} long ones" if cut else "",
    ]
    said = ", ".join(part for part in told if part)
    return f"evidence left out ({max(fewer, 0)} bytes): signals: {said}" if said else ""


def _bytes(signals: list[Signal]) -> int:
    return sum(map(_size, signals))


def _size(signal: Signal) -> int:
    return len(msgspec.json.encode(signal)) + 1
