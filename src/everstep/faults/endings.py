"""Ends of processes in words, where nothing else tells why an attempt ended.

Owns: which end came first, its sentence, its rank's last words. Never does: I/O, choose. Called by:
:mod:`everstep.faults.judge`.

A sentence names one rank and no step: the same kind of death is the same failure whatever rank it
met (numbers are no part of a fingerprint).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from signal import Signals

from everstep.faults.exits import KILL, End
from everstep.faults.lines import Line
from everstep.faults.records import Evidence, Role
from everstep.faults.scene import Scene

SHOWN = 12
"""Ends that a verdict lists; those that came first."""
LAST_S = 2.0
"""Words so long before an end are its rank's last ones."""

_NUMBERED = re.compile(r"(?i)\b(?:step|iter(?:ation)?|epoch|it/s|loss)\b|^\s*(?:File|Traceback)\b")
_OF_EVERSTEP = re.compile(r"^everstep \d\d:\d\d:\d\d |^Traceback |^\s")


def first_ends(scene: Scene) -> list[End]:
    """The ends that nobody of ours made and that are no success, the first one first."""
    ends = [end for end in scene.ends.values() if end.code != 0 and end.rank not in scene.ours]
    return sorted(ends, key=_when)


def in_words(scene: Scene) -> str:
    """What is known of the first end; empty where none is."""
    ends = first_ends(scene)
    return of_end(ends[0]) if ends else ""


def of_end(end: End) -> str:
    """``rank 1 was killed by SIGKILL, and nothing says by whom``."""
    if end.signal == KILL:
        return f"rank {end.rank} was killed by SIGKILL, and nothing says by whom"
    if end.signal:
        return f"rank {end.rank} was ended by {_name(end.signal)}, and nothing says why"
    return f"rank {end.rank} ended with exit code {end.code} without a word of why"


def last_words(end: End, scene: Scene) -> str:
    """The last line of a rank that left by a code of its own, where it was printed just before, is
    no line of progress, and is none of a traceback; else empty."""
    if end.code <= 0:
        return ""
    said: Line | None = None
    for line in scene.lines:
        own = line.source == "log" and line.rank == end.rank
        if own and not _OF_EVERSTEP.search(line.text) and _is_near(line, end):
            said = line if said is None or _place(said) <= _place(line) else said
    return said.text if said is not None and not _NUMBERED.search(said.text) else ""


def ends_as_evidence(scene: Scene, roots: Iterable[int] = ()) -> tuple[Evidence, ...]:
    """How the ranks ended: ``roots`` by themselves, those that everstep ended as victims."""
    known = frozenset(roots)
    ends = sorted(
        (end for end in scene.ends.values() if end.code != 0),
        key=lambda end: (end.rank not in known, end.rank in scene.ours, *_when(end)),
    )
    return tuple(_evidence(end, scene, known) for end in ends[:SHOWN])


def _evidence(end: End, scene: Scene, roots: frozenset[int]) -> Evidence:
    role: Role = "noise"
    how = _name(end.signal) if end.signal else f"exit code {end.code}"
    why = f"it ended with {how}, and nothing says why"
    if end.rank in scene.ours:
        role, why = "victim", f"it was ended with {how} after the failure"
    elif end.rank in roots:
        role = "root"
    return Evidence(
        text=end.line.text[:500], source=end.line.source, role=role, rank=end.rank,
        node=end.node or scene.node_of(end.rank), time=end.time, why=why,
    )  # fmt: skip


def _when(end: End) -> tuple[float, int]:
    return (end.time if end.time is not None else float("inf"), end.rank)


def _place(line: Line) -> tuple[float, int, int]:
    return (line.time if line.time is not None else 0.0, line.signal, line.order)


def _is_near(line: Line, end: End) -> bool:
    if line.time is None or end.time is None:
        return False
    return line.time <= end.time + LAST_S and end.time - line.time <= LAST_S


def _name(number: int) -> str:
    return Signals(number).name if number in list(Signals) else f"signal {number}"
