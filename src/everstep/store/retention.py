"""What to keep and what to delete (S7): a pure function of what is there.

Called by: job, which gathers the facts and executes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from everstep.core.health import DETECTION_DELAY, Health
from everstep.core.ids import Point
from everstep.store.records import Proof

CheckpointState = Literal["committed", "tombstoned", "incomplete"]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One step folder. ``modified`` is of its newest object (the tombstone's for a tombstoned
    one), in the store's time; ``bytes`` and ``world`` are 0 where they are not known.
    ``error`` says why its manifest cannot be read, ``newer_format`` that a later version can.
    ``committed_at`` is of the manifest: what damages an object later may make it newer.
    ``undecided``: a branch is missing or cannot be read, so that nobody knows whether the point is
    on the current lineage. ``health`` is None where none was written down.
    """

    point: Point
    state: CheckpointState
    modified: float
    world: int = 0
    bytes: int = 0
    verified: Proof | None = None
    on_lineage: bool = False
    error: str = ""
    newer_format: bool = False
    committed_at: float | None = None
    undecided: bool = False
    health: Health | None = None

    @property
    def sound(self) -> bool:
        """Committed, and not known to be damaged."""
        return self.state == "committed" and not self.error and self.verified != "damaged"

    def healthy(self, *, now: float, delay: float) -> bool:
        """Whether its bytes are sound, its values were, and it is ``delay`` seconds old: what is
        wrong with it would have shown by now. ``now`` is the store's time."""
        aged = self.committed_at is not None and now - self.committed_at >= delay
        return self.sound and aged and self.health is not None and self.health.sound


class Retention(msgspec.Struct, frozen=True):
    """``keep_last`` checkpoints of the current lineage are kept (at least 1), the newest one that
    is healthy after ``detection_delay``, and whatever is younger than ``grace_seconds``.
    """

    keep_last: int = 3
    grace_seconds: float = 600.0
    detection_delay: float = DETECTION_DELAY


class Ruling(msgspec.Struct, frozen=True):
    """What happens to one point, and why, in words for people."""

    point: Point
    reason: str


class RetentionPlan(msgspec.Struct, frozen=True):
    """``remove`` is what may go; ``blocked`` says why nothing may, where that is so."""

    policy: Retention
    remove: tuple[Ruling, ...]
    keep: tuple[Ruling, ...]
    blocked: str = ""


def plan(
    found: Iterable[CheckpointInfo],
    policy: Retention,
    *,
    now: float,
    highest_attempt: int,
    proofs_known: bool,
) -> RetentionPlan:
    """Rule on every point.

    ``now`` is the store's time; ``proofs_known`` is False where ``refs/verified`` is unreadable.
    """
    infos = sorted((i for i in found if i.state != "tombstoned"), key=lambda i: i.point)
    if not proofs_known:
        keep = tuple(Ruling(i.point, "which one was verified last is not known") for i in infos)
        return RetentionPlan(policy, (), keep, "refs/verified cannot be read")
    judge = _Judge(infos, policy, now, highest_attempt)
    rulings = [(info, *judge.rule(info)) for info in infos]
    return RetentionPlan(
        policy,
        tuple(Ruling(info.point, reason) for info, goes, reason in rulings if goes),
        tuple(Ruling(info.point, reason) for info, goes, reason in rulings if not goes),
    )


class _Judge:
    def __init__(
        self, infos: Sequence[CheckpointInfo], policy: Retention, now: float, highest: int
    ) -> None:
        self._policy, self._now, self._highest = policy, now, highest
        good = [i.point for i in infos if i.sound and i.on_lineage]
        keep_last = max(1, policy.keep_last)
        self._last = frozenset(good[-keep_last:])
        self._full = len(good) >= keep_last
        self._proved = _newest_of([i for i in infos if i.sound and i.verified == "bytes"])
        delay = policy.detection_delay
        self._healthy = _newest_of([i for i in infos if i.healthy(now=now, delay=delay)])

    def rule(self, info: CheckpointInfo) -> tuple[bool, str]:
        """Whether a point goes, and why."""
        if self._now - info.modified < self._policy.grace_seconds:
            return False, "younger than the grace period"
        if info.undecided:
            return False, "a branch cannot be read: whether it is on the lineage is not known"
        if info.state == "incomplete":
            return self._rule_incomplete(info)
        if info.point in self._last:
            return False, f"one of the last {self._policy.keep_last}"
        if info.point in self._proved:
            return False, "the last verified"
        if info.point in self._healthy:
            return False, "the last healthy"
        if not self._full:
            return False, f"the lineage has fewer than {self._policy.keep_last} good ones"
        if info.on_lineage and not info.sound and info.point > min(self._last):
            return False, "damaged, kept for inspection"
        return True, self._why(info)

    def _why(self, info: CheckpointInfo) -> str:
        if not info.on_lineage:
            return "the job went on from elsewhere"
        if not info.sound:
            return "damaged, and enough newer good ones exist"
        return f"older than the last {self._policy.keep_last}"

    def _rule_incomplete(self, info: CheckpointInfo) -> tuple[bool, str]:
        """A committer may complete it at any time, also while it is being deleted. So it goes only
        where nothing is lost by that: where the checkpoint would not be kept either."""
        if info.on_lineage:
            if self._full and info.point < min(self._last):
                return True, f"incomplete, and older than the last {self._policy.keep_last}"
            return False, "may still be completed"
        if info.point.attempt < self._highest:
            return True, "incomplete, and the job went on from elsewhere"
        return False, "being written"


def _newest_of(infos: Sequence[CheckpointInfo]) -> Collection[Point]:
    """The newest, of the current lineage where one is on it."""
    preferred = [i for i in infos if i.on_lineage] or infos
    return {preferred[-1].point} if preferred else set()


class Recoverable(NamedTuple):
    """A checkpoint that the job could go back to, in the form that the decision core takes.
    ``sound`` is healthy but for its age."""

    point: Point
    tier: str
    healthy: bool
    sound: bool


def recoverable(
    found: Iterable[CheckpointInfo], *, now: float, delay: float
) -> tuple[Recoverable, ...]:
    """Those of ``found`` that are on the current lineage and not known to be damaged, oldest
    first."""
    infos = sorted((i for i in found if i.sound and i.on_lineage), key=lambda i: i.point)
    return tuple(
        Recoverable(
            i.point, "store", i.healthy(now=now, delay=delay), i.healthy(now=now, delay=-math.inf)
        )
        for i in infos
    )
