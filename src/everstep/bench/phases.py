"""Where the time between a kill and the first new step went. Pure.

Owns: the phases and their boundaries. Called by: the recovery benchmark, tests.

A boundary is passed when the last rank has passed it, so the phases follow one another and sum to
the whole. A boundary that was passed early (a survivor that died before the launcher noticed) gives
its phase no time, never a negative one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from everstep.bench.marks import Mark, Name
from everstep.core.events import Event
from everstep.errors import BenchError

BOUNDARIES: tuple[tuple[str, Name], ...] = (
    ("start", "began"),
    ("import", "imported"),
    ("rendezvous", "joined"),
    ("build", "built"),
    ("restore", "restored"),
    ("first step", "step"),
)
PHASES = ("detect", "stop", *(phase for phase, _ in BOUNDARIES))
"""detect: the launcher knows; stop: the survivors are gone; start: the new processes are there;
import: their imports are done; rendezvous: the process group stands; build: the model is made;
restore: the state is back; first step: the first step is finished."""

TORCHRUN_KNOWS = ("closing signal", "failed (exitcode")
"""What torchrun's log says first when it has noticed a dead worker."""


class Recovery(msgspec.Struct, frozen=True):
    """One kill. Seconds; ``detect`` is missing from ``phases`` where the launcher did not tell.

    ``total`` is from the kill to the end of the first step of the slowest rank, ``caught_up`` to
    the end of the first step that had not been done before, ``repeated`` the steps between.
    ``between_saves`` is what as many steps as are between two saves took before the kill.
    """

    total: float
    caught_up: float
    repeated: int
    phases: dict[str, float]
    between_saves: float = 0.0


def recovery(
    *,
    killed: float,
    detected: float | None,
    survivors_gone: float,
    old: Sequence[Mark],
    new: Sequence[Mark],
    world: int,
) -> Recovery:
    """The recovery from the marks of the attempt before (``old``) and after (``new``) the kill.

    Raises :class:`BenchError` where a rank did not tell of a boundary, or ranks restored
    different steps.
    """
    reached = max((m.step for m in old if m.name == "step" and m.at <= killed), default=0)
    restored = {mark.step for mark in new if mark.name == "restored"}
    if len(restored) != 1:
        raise BenchError(f"the ranks restored different steps: {sorted(restored)}.")
    moments: list[tuple[str, float]] = [] if detected is None else [("detect", detected)]
    moments.append(("stop", survivors_gone))
    moments += [(phase, _last_first(new, name, world)) for phase, name in BOUNDARIES]
    first = moments[-1][1]
    ahead = [m for m in new if m.name == "step" and m.step > reached]
    return Recovery(
        total=first - killed,
        caught_up=_last_first(ahead, "step", world) - killed,
        repeated=reached - restored.pop(),
        phases=_lengths(killed, moments),
    )


def everstep_detected(events: Iterable[Event], pid: int) -> float | None:
    """When everstep's agent knew that the worker ``pid`` had ended; None where it did not say."""
    for event in events:
        if event.kind == "worker.exited" and event.facts.get("pid") == pid:
            return event.mono
    return None


def torchrun_detected(said: Iterable[tuple[float, str]], killed: float) -> float | None:
    """When torchrun first told of the failure; None where it did not."""
    for at, line in said:
        if at >= killed and any(words in line for words in TORCHRUN_KNOWS):
            return at
    return None


def _lengths(start: float, moments: Sequence[tuple[str, float]]) -> dict[str, float]:
    lengths: dict[str, float] = {}
    for phase, moment in moments:
        end = max(start, moment)
        lengths[phase] = end - start
        start = end
    return lengths


def _last_first(new: Sequence[Mark], name: Name, world: int) -> float:
    """When the last rank passed the boundary for the first time."""
    first: dict[int, float] = {}
    for mark in new:
        if mark.name == name:
            first.setdefault(mark.rank, mark.at)
    if len(first) != world:
        raise BenchError(f"ranks {sorted(first)} of {world} told of {name!r}.")
    return max(first.values())
