"""Which faults a drill injects, and when.

Owns: the fault's record, its text form (``worker:1@40``) and the spread over a run. Never does:
I/O; randomness comes in as a seed. Called by: the drill's loop, cli.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Sequence
from typing import Literal, cast, get_args

import msgspec

from everstep.core import points
from everstep.errors import UsageError

Kind = Literal["worker", "keeper", "agent", "everything", "corrupt", "disk-full", "torn-write"]

MEANING: dict[Kind, str] = {
    "worker": "SIGKILL of one worker",
    "keeper": "SIGKILL of the keeper",
    "agent": "SIGKILL of the agent alone; the job is started again",
    "everything": "SIGKILL of agent, keeper and workers at once; the job is started again",
    "corrupt": "as `everything`, and one byte of the newest checkpoint is flipped",
    "disk-full": "every write to the store fails with ENOSPC for a while",
    "torn-write": "a write to the store stops in the middle with an I/O error",
}
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT: tuple[Kind, ...] = ("worker", "keeper", "agent", "corrupt")
OF_STORE: frozenset[Kind] = frozenset({"disk-full", "torn-write"})
"""Faults of the store's backend: no process dies."""

COMMITS_NEEDED: dict[Kind, int] = {"everything": 1, "corrupt": 2}
"""Committed checkpoints that must exist before a fault: without one, starting again from scratch
would be right, and nothing would be shown."""

_TEXT = re.compile(
    r"(?P<kind>[a-z-]+)(?::(?P<rank>\d+))?(?:@(?P<when>[^#]+)(?:#(?P<passes>\d+))?)?"
)


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault to inject.

    ``rank`` is the worker to kill (None: drawn from the seed). Of ``step`` (as soon as that many
    steps are done) and ``point`` (a named point of :mod:`everstep.core.points`, after ``passes``
    passes) at most one is given; with neither the fault finds its place in the spread.
    """

    kind: Kind
    rank: int | None = None
    step: int | None = None
    point: str | None = None
    passes: int = 0

    def __str__(self) -> str:
        rank = "" if self.rank is None else f":{self.rank}"
        if self.point is not None:
            return f"{self.kind}{rank}@{self.point}" + (f"#{self.passes}" if self.passes else "")
        return f"{self.kind}{rank}" + ("" if self.step is None else f"@{self.step}")


class Planned(msgspec.Struct, frozen=True):
    """A fault with its time: at ``step``, or ``gap`` steps after the one before was overcome."""

    index: int
    fault: Fault
    step: int | None
    gap: int


def parse_fault(text: str) -> Fault:
    """The fault of ``KIND[:RANK][@STEP | @POINT[#PASSES]]``. Raises :class:`UsageError`."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match["kind"] not in KINDS:
        raise UsageError(
            f"{text!r} is not a fault.",
            hint=f"Say KIND, KIND@STEP or KIND@POINT, KIND one of {', '.join(KINDS)}.",
        )
    kind = cast(Kind, match["kind"])
    rank = None if match["rank"] is None else int(match["rank"])
    if rank is not None and kind != "worker":
        raise UsageError(f"{text!r}: only a worker has a rank.")
    when = match["when"]
    if when is None or when.isdigit():
        if match["passes"] is not None:
            raise UsageError(f"{text!r}: '#' counts passes of a named point, not of a step.")
        return Fault(kind, rank, None if when is None else int(when))
    return _at_point(text, kind, rank, when, int(match["passes"] or 0))


def _at_point(text: str, kind: Kind, rank: int | None, point: str, passes: int) -> Fault:
    if kind not in ("worker", "keeper", "agent"):
        raise UsageError(
            f"{text!r}: a process fails at a point, {kind!r} is not one process.",
            hint="Use worker, keeper or agent with a point.",
        )
    if point not in points.KNOWN:
        close = difflib.get_close_matches(point, points.KNOWN, n=1)
        raise UsageError(
            f"{text!r}: {point!r} is neither a step nor a named point.",
            hint=f"Did you mean {close[0]}?" if close else "A step is a number, as in worker@40.",
        )
    return Fault(kind, rank, point=point, passes=passes)


def schedule(
    faults: Sequence[Fault], *, total: int | None = None, gap: int = 10
) -> tuple[Planned, ...]:
    """The order and time of ``faults``: those at points first (they fire by themselves), then
    those with a step, sorted, and the others in the order given.

    With ``total`` (the run's last step) faults without a step are spread evenly over the first
    nine tenths of the run; without it each follows the one before by ``gap`` steps.
    """
    points = [fault for fault in faults if fault.point is not None]
    timed = [fault for fault in faults if fault.point is None]
    steps = _spread(timed, total)
    order = sorted(range(len(timed)), key=lambda i: (steps[i] is None, steps[i] or 0, i))
    placed = [(fault, None) for fault in points] + [(timed[i], steps[i]) for i in order]
    return tuple(Planned(n, fault, step, gap) for n, (fault, step) in enumerate(placed))


def _spread(timed: Sequence[Fault], total: int | None) -> list[int | None]:
    steps = [fault.step for fault in timed]
    loose = [i for i, step in enumerate(steps) if step is None]
    if total is not None:
        for place, i in enumerate(loose, 1):
            steps[i] = max(1, total * 9 * place // (10 * (len(loose) + 1)))
    return steps


def draw_rank(fault: Fault, world: Sequence[int], *, seed: int, index: int) -> int:
    """The rank to kill: the fault's own, or one of ``world`` drawn from the seed.

    Raises :class:`UsageError` where the job has no such rank.
    """
    if fault.rank is None:
        return random.Random(f"{seed}/{index}").choice(sorted(world))
    check_rank(fault, world)
    return fault.rank


def check_rank(fault: Fault, world: Sequence[int]) -> None:
    """Raises :class:`UsageError` where the fault names a rank that a job of ``world`` lacks."""
    if fault.rank is not None and fault.rank not in world:
        ranks = "rank 0 alone" if len(world) == 1 else f"ranks 0 to {len(world) - 1}"
        raise UsageError(f"{fault}: the job has no rank {fault.rank}, but {ranks}.")
