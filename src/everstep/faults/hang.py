"""Whether a job hangs, in two stages: suspected by the time without a step, found by what its ranks
do meanwhile.

Owns: the policy and both stages. Pure: observations in, a finding out; no clock, no process.
Called by: :mod:`everstep.agent.hang`, tests and the simulator.

Time alone is no proof: an evaluation that nobody declared takes minutes as well. So a suspected
rank's stack is looked at several times. Where nothing moves in any rank that ends no steps, or one
stands still outside a collective in which all others wait, the job hangs. What moves (another
frame, another variable of the program) is alive until the deadline. That a rank burns its CPU or
that its device is busy counts for nothing: both do so while they wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

NEVER_JUDGED = frozenset({"", "starting", "ended"})
"""Phases in which a rank does what its script likes: before it attached, before it restores, and
after its run has ended. Without a limit they excuse for ever."""
STEP = "step"


@dataclass(frozen=True)
class RankBeat:
    """What one rank says of itself. Times are seconds of the node's monotonic clock.

    ``step`` is the last one finished (-1: none) and ``boundary_at`` when; ``steps`` how many this
    attempt did, ``longest`` the longest of the recent ones, ``longest_cut`` how long its last
    snapshot blocked. ``phase`` since ``phase_since``, for at most ``limit`` s where it said so.
    """

    rank: int
    step: int
    phase: str
    phase_since: float
    boundary_at: float
    limit: float | None = None
    steps: int = 0
    longest: float = 0.0
    longest_cut: float = 0.0

    @property
    def moved_at(self) -> float:
        """Its last sign of progress: a step, or another phase."""
        return max(self.boundary_at, self.phase_since)


@dataclass(frozen=True)
class Look:
    """What one rank was seen to do. ``stack`` is its main thread's, innermost frame first, empty
    where it could not be read; ``waits`` that it stands in a collective; ``where`` is the
    innermost frame of the program itself. ``turn`` changes when its
    program moves, None where it did not answer; ``came_late`` that it answers now to what it was
    asked at the look before, so that it has come out of something since."""

    rank: int
    stack: tuple[str, ...] = ()
    waits: bool = False
    where: str = ""
    turn: int | None = None
    came_late: bool = False


@dataclass(frozen=True)
class Standing:
    """How another node's ranks stand. ``excused``: one is in a phase that may take long, or in its
    first steps. ``moving``: the fewest steps of a rank there that still ends steps. ``still``:
    whether all its others were seen not to move (None: it does not know yet)."""

    excused: bool = False
    moving: int | None = None
    still: bool | None = None


@dataclass(frozen=True)
class HangPolicy:
    """When a job is looked at and when it is ended. Seconds.

    ``floor``: no job is ended that has finished a step within it; :data:`math.inf`: none ever is.
    ``k``: nor within so many times the longest recent step. ``least_steps``: of this attempt, from
    which on steps tell something. ``samples``: looks, all of which must agree. ``deadline``: for a
    rank that moves and ends no step; at least ``least_deadline``, and never less than
    ``slowest_steps`` times the longest step of the attempt. ``limits``: for how long a phase is an
    excuse; ``declared``: one of the script's own that gave no limit.
    """

    floor: float = 30.0
    k: float = 5.0
    least_steps: int = 20
    samples: int = 4
    deadline: float = 0.0
    least_deadline: float = 900.0
    slowest_steps: float = 3.0
    declared: float = 3600.0
    limits: Mapping[str, float] = field(
        default_factory=lambda: {
            "restore": 1800.0, "first_step": 1800.0, "compile": 1800.0, "save": 300.0,
        }
    )  # fmt: skip

    @property
    def look_at(self) -> float:
        """Seconds without a step from which on looks are taken: so that they are done at the
        floor."""
        return self.floor / 2

    def confirm(self, patience: float) -> float:
        """Seconds over which looks are taken: steps that take long are looked at for longer."""
        return max(self.floor - self.look_at, patience / 4)

    def patience(self, beat: RankBeat) -> float:
        """Seconds without a step after which that rank is suspected."""
        return max(self.look_at, self.k * beat.longest)

    def last(self, longest: float) -> float:
        """Seconds without a step after which a rank is ended though it moves."""
        given = self.deadline or max(20 * self.floor, self.least_deadline)
        return max(given, self.slowest_steps * longest)


Stage = Literal["watching", "suspect", "act"]


@dataclass(frozen=True)
class Finding:
    """What is known now. ``ranks`` are those that end no step, ``culprits`` those of them that
    do not merely wait for others (all of them where none stands out). ``age``: seconds without a
    step. ``look``: it is time for a look at the ranks."""

    stage: Stage
    ranks: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    step: int = -1
    age: float = 0.0
    reason: str = ""
    look: bool = False


@dataclass(frozen=True)
class Watch:
    """What is remembered between observations. ``clear_at`` is when a rank was last excused,
    ``since`` when the suspicion began (inf: there is none), ``looks`` what was seen since, oldest
    first."""

    seen_at: float = -math.inf
    clear_at: float = -math.inf
    since: float = math.inf
    looked_at: float = -math.inf
    looks: tuple[tuple[Look, ...], ...] = ()
    slowest: float = 0.0

    def looked(self, now: float, look: Iterable[Look]) -> Watch:
        """After a look that was done at ``now``; none counts once the suspicion is over."""
        if math.isinf(self.since):
            return self
        return replace(self, looked_at=now, looks=(*self.looks, tuple(look)))


AWAY = 10.0
"""Seconds without an observation after which what came before says nothing: the observer, and
perhaps the whole machine, stood still."""


def observe(
    watch: Watch,
    policy: HangPolicy,
    now: float,
    beats: Iterable[RankBeat],
    others: Iterable[Standing] = (),
) -> tuple[Watch, Finding]:
    """One observation of this node's ranks, and of how the other nodes' stand."""
    beats, others = tuple(beats), tuple(others)
    if now - watch.seen_at > AWAY:
        watch = replace(watch, clear_at=now, since=math.inf, looks=())
    watch = replace(watch, seen_at=now, slowest=max((watch.slowest, *(b.longest for b in beats))))
    silent = silent_ranks(policy, now, beats, watch.clear_at)
    if math.isinf(policy.floor) or _is_excused(policy, now, beats, others):
        watch = replace(watch, clear_at=now)
        silent = ()
    if not silent:
        return replace(watch, since=math.inf, looks=()), Finding("watching")
    if math.isinf(watch.since):
        watch = replace(watch, since=now, looks=(), looked_at=-math.inf)
    return watch, _judge(watch, policy, now, silent, others)


def standing(watch: Watch, policy: HangPolicy, now: float, beats: Iterable[RankBeat]) -> Standing:
    """What the other nodes are told of this one."""
    beats = tuple(beats)
    silent = silent_ranks(policy, now, beats, watch.clear_at)
    moving = [beat.step for beat in beats if beat not in silent]
    still = _is_still(watch.looks, silent, policy) if silent else None
    return Standing(
        excused=_is_excused(policy, now, beats, ()), moving=min(moving, default=None), still=still
    )


def silent_ranks(
    policy: HangPolicy, now: float, beats: Iterable[RankBeat], clear_at: float = -math.inf
) -> tuple[RankBeat, ...]:
    """The ranks that have ended no step for longer than :meth:`HangPolicy.patience`, and that
    wait for none which has done no more and still moves."""
    beats = tuple(beats)
    late = [b for b in beats if now - max(b.moved_at, clear_at) >= policy.patience(b)]
    moving = [b.step for b in beats if b not in late]
    return tuple(b for b in late if not any(step <= b.step for step in moving))


def excuse(policy: HangPolicy, now: float, beat: RankBeat) -> str:
    """Why that rank may end no step for now; empty where nothing speaks for it."""
    if beat.phase == STEP:
        warm = now - beat.moved_at < policy.limits["first_step"]
        return f"has done {beat.steps} steps" if beat.steps < policy.least_steps and warm else ""
    if beat.phase in NEVER_JUDGED or now - beat.phase_since < _limit(policy, beat):
        return f"is in {beat.phase or 'its start'}"
    return ""


def _limit(policy: HangPolicy, beat: RankBeat) -> float:
    if beat.limit is not None:
        return beat.limit
    if beat.phase == "save" and beat.longest_cut > 0:
        # How long a snapshot of this state takes is known.
        return min(policy.limits["save"], max(policy.look_at, 10 * beat.longest_cut))
    return policy.limits.get(beat.phase, policy.declared)


def _is_excused(
    policy: HangPolicy, now: float, beats: tuple[RankBeat, ...], others: tuple[Standing, ...]
) -> bool:
    """Whether a rank of the job may take its time: all may be waiting for it."""
    mine = any(excuse(policy, now, beat) for beat in beats)
    return not beats or mine or any(other.excused for other in others)


def _judge(
    watch: Watch,
    policy: HangPolicy,
    now: float,
    silent: tuple[RankBeat, ...],
    others: tuple[Standing, ...],
) -> Finding:
    age = max(now - max(beat.moved_at, watch.clear_at) for beat in silent)
    found = Finding(
        "suspect", tuple(beat.rank for beat in silent), step=min(b.step for b in silent), age=age
    )
    patience = max(policy.patience(beat) for beat in silent)
    confirm = policy.confirm(patience)
    enough = len(watch.looks) >= policy.samples and now - watch.since >= confirm
    if enough and age >= max(policy.floor, patience):
        if why := _proof(watch.looks, silent, policy, others):
            culprits = _culprits(watch.looks, silent)
            return replace(found, stage="act", culprits=culprits, reason=_told(age, why))
        if age >= policy.last(watch.slowest) and all(_has_deadline(beat) for beat in silent):
            why = "it moves, but has ended no step by the deadline"
            return replace(found, stage="act", culprits=found.ranks, reason=_told(age, why))
    return replace(
        found,
        reason=_told(age, "it is looked at"),
        look=_is_due(watch, now, confirm / max(policy.samples - 1, 1)),
    )


def _is_due(watch: Watch, now: float, between: float) -> bool:
    """Looks are taken at fixed times, so that they are done in time; one that was late does not
    bring the next one too near, where it would see the same."""
    return now >= watch.since + between * len(watch.looks) and now - watch.looked_at >= between / 2


def _has_deadline(beat: RankBeat) -> bool:
    """What may take any time (compiling, reaching a place in the data again, a phase of the
    script's own without a limit) is ended by what is seen alone."""
    return beat.phase in (STEP, "save") or beat.limit is not None


def _proof(
    looks: tuple[tuple[Look, ...], ...],
    silent: tuple[RankBeat, ...],
    policy: HangPolicy,
    others: tuple[Standing, ...],
) -> str:
    """Why the job hangs, empty where it need not. A node that ends steps without these ranks does
    not wait for them, nor they for it unless it has done no more of them."""
    least = min(beat.step for beat in silent)
    if any(o.still is not True and (o.moving is None or o.moving <= least) for o in others):
        return ""
    if _is_still(looks, silent, policy):
        return f"nothing has moved in {len(looks)} looks"
    return (
        "one stands still while all others wait for it" if _outlier(looks, silent, policy) else ""
    )


def _is_still(
    looks: tuple[tuple[Look, ...], ...], silent: tuple[RankBeat, ...], policy: HangPolicy
) -> bool | None:
    """Whether no silent rank moved over the last looks; None before there are enough."""
    if len(looks) < policy.samples:
        return None
    return all(_stands(looks[-policy.samples :], beat.rank) for beat in silent)


def _outlier(
    looks: tuple[tuple[Look, ...], ...], silent: tuple[RankBeat, ...], policy: HangPolicy
) -> bool:
    """Whether one rank stands still outside a collective, and all others wait in one, each time
    they were looked at, whatever else changes in them."""
    recent = looks[-policy.samples :]
    waiting = {beat.rank for beat in silent if _waits(recent, beat.rank)}
    apart = [beat.rank for beat in silent if beat.rank not in waiting]
    return len(apart) == 1 and bool(waiting) and _stands(recent, apart[0])


def _culprits(looks: tuple[tuple[Look, ...], ...], silent: tuple[RankBeat, ...]) -> tuple[int, ...]:
    ranks = tuple(beat.rank for beat in silent)
    apart = tuple(rank for rank in ranks if not _waits(looks[-1:], rank))
    return apart if apart and len(apart) < len(ranks) else ranks


def _stands(looks: Iterable[tuple[Look, ...]], rank: int) -> bool:
    """Whether that rank was seen at one and the same place each time. One that could not be seen
    once is not known to stand still."""
    seen = [look for one in looks for look in one if look.rank == rank]
    if not seen or not all(look.stack for look in seen) or any(look.came_late for look in seen):
        return False
    turns = {look.turn for look in seen if look.turn is not None}
    return len({look.stack for look in seen}) == 1 and len(turns) <= 1


def _waits(looks: Iterable[tuple[Look, ...]], rank: int) -> bool:
    seen = [look for one in looks for look in one if look.rank == rank]
    return bool(seen) and all(look.stack and look.waits for look in seen)


def _told(age: float, why: str) -> str:
    return f"no step for {age:.0f} s: {why}"
