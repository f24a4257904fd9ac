"""What a rank or a node went on after: it did not end of it, whatever it printed.

Owns: what shows that steps were made after a line, and that an end is of another kind than an
exception. Never does: I/O, choose. Called by: :mod:`everstep.faults.facts`.

Without times, and without heartbeats or lines of progress, nothing is known, and every line may
have ended its rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.faults.exits import BUS, CRASHES, KILL, End
from everstep.faults.match import Fact
from everstep.faults.scene import Scene

BURST_S = 0.4
"""Output is dated by the first byte of what came together: the rest of it may be so much later."""
STEPS_S = 5.0
"""Steps that a rank tells of so long after a line are no rest of what was printed before it."""
ENDS_S = 2.0
"""An exception that nobody caught ends its process within this time."""
LONG_S = 60.0
"""What was printed so long before anything failed had no part in it."""

_RAN = re.compile(
    r"ran for (\d+) milliseconds|Timed out waiting (\d+)ms|within (\d+)ms|in (\d+) ?ms\b"
)
_DEATHS = frozenset((*CRASHES, BUS, KILL))
_CRASHED = frozenset(("NATIVE_CRASH", "SIGBUS_SHM"))
_OF_NODES = frozenset(("gpu_hardware", "host", "network"))


@dataclass(frozen=True)
class Onset:
    """When it began to fail: by the first end or error of a peer, less the time that was waited.
    ``ended``: the first end; ``first``: the ranks that ended then."""

    time: float
    ended: float
    first: frozenset[int]


def onset(facts: Iterable[Fact], scene: Scene) -> Onset | None:
    """None where no end has a time."""
    ends = [end for end in scene.ends.values()
            if end.code != 0 and end.rank not in scene.ours and end.time is not None]  # fmt: skip
    if not ends:
        return None
    earliest = min(end.time for end in ends if end.time is not None)
    first = {end.rank for end in ends if end.time is not None and end.time <= earliest + ENDS_S}
    times = [earliest, *(time for fact in facts for time in _felt(fact))]
    times += [beat.time - beat.age for beat in scene.beats
              if beat.time is not None and beat.age >= LONG_S]  # fmt: skip
    return Onset(min(times), earliest, frozenset(first))


def waited(text: str) -> float:
    """Seconds for which a line says that it waited."""
    found = _RAN.search(text)
    return float(next(filter(None, found.groups()))) / 1000 if found else 0.0


def outlived(fact: Fact, scene: Scene, began: Onset | None) -> str:
    """Why what a line says did not end anything; empty where nothing shows it."""
    if fact.line.time is None or fact.severity == "notice":
        return ""
    if fact.kind == "node":
        return _of_node(fact, fact.line.time, scene)
    if fact.kind == "signal" or fact.line.source != "log" or fact.line.rank is None:
        return ""
    return _of_rank(fact, fact.line.time, fact.line.rank, scene, began)


def _of_rank(fact: Fact, time: float, rank: int, scene: Scene, began: Onset | None) -> str:
    boundary = scene.boundaries.get(rank)
    if boundary is not None and boundary > time + BURST_S:
        return f"rank {rank} finished a step {boundary - time:.1f} s later"
    if went_on(rank, time + STEPS_S, scene):
        return f"rank {rank} told of further steps later"
    if fact.kind != "program":
        return ""
    end = scene.ends.get(rank)
    if end is not None and rank not in scene.ours and (why := _contradicts(fact, time, end)):
        stuck = boundary is not None and (end.time or time) - time > LONG_S
        return "" if stuck else why  # it printed it, and then made no step for long
    if boundary is None and began is not None and rank not in began.first:
        early = began.time - time
        return f"nothing failed for {early:.0f} s after it" if early > LONG_S else ""
    return ""


def went_on(rank: int, after: float, scene: Scene) -> bool:
    """Whether a rank tells of two steps, the later one with a higher number, after a time."""
    first: dict[str, int] = {}
    for time, unit, number in scene.told_steps.get(rank, ()) if scene.last_output > after else ():
        if time > after and number > first.setdefault(unit, number):
            return True
    return False


def _contradicts(fact: Fact, time: float, end: End) -> str:
    """Where an exception was printed, and its rank ended later and otherwise than by one."""
    if end.time is None or not fact.message or fact.fault in _CRASHED:
        return ""
    late = end.time - time
    if end.signal in _DEATHS and late > ENDS_S:
        return f"rank {end.rank} was killed by signal {end.signal}, {late:.1f} s later"
    if end.code > 1 and late > LONG_S:
        return f"rank {end.rank} ended with exit code {end.code}, {late:.0f} s later"
    return ""


def _of_node(fact: Fact, time: float, scene: Scene) -> str:
    """A device, the memory or a link that had failed would have let nobody make a step a minute
    later. Disks and schedulers are another matter: there it comes later."""
    if fact.line.source not in ("kernel", "gpu") or fact.meaning.domain not in _OF_NODES:
        return ""
    for rank in scene.ranks_of(fact.node):
        stepped = scene.boundaries.get(rank, time) > time + LONG_S
        if stepped or went_on(rank, time + LONG_S, scene):
            return f"rank {rank} of this node made steps for more than {LONG_S:.0f} s after it"
    return ""


def _felt(fact: Fact) -> list[float]:
    if fact.kind not in ("peer", "watchdog") or fact.line.time is None:
        return []
    return [fact.line.time - waited(fact.line.text)]
