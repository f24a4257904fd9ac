"""Which snapshot is made durable when, and who waits for it (R3).

Owns: the checkpoint in progress, its retries, those who wait for a step, what was committed.
Never does: I/O; a failure never reaches training. Called by: coordinate.

One checkpoint at a time. While one fails, its slots are not kept from training between the tries:
a newer complete snapshot then takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.cadence.policy import checkpoint_due
from everstep.core.ids import Point
from everstep.keeper.commands import AnswerDurable, Commit, Persist
from everstep.keeper.facts import (
    CommitFailed,
    Committed,
    DurableAsked,
    PersistFailed,
    RankPersisted,
)
from everstep.keeper.situation import Situation
from everstep.keeper.table import Complete, Key

FIRST_RETRY = 1.0
LAST_RETRY = 30.0
GIVE_UP = 3600.0
"""Seconds for which a keeper that nobody is attached to goes on trying."""

KEPT_COMMITS = 32


@dataclass
class Persisting:
    """``running`` are ranks whose part is being written now, ``waiting`` those to be tried again
    at ``retry_at``."""

    point: Point
    world: int
    slots: dict[int, Key]
    sequence: int
    began: float
    running: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    retry_at: float | None = None
    nbytes: int = 0
    failures: int = 0
    committing: bool = False
    abandoned: bool = False

    @property
    def idle(self) -> bool:
        return not self.running and not self.committing


@dataclass
class _Wait:
    step: int
    deadline: float


@dataclass
class Durable:
    at: Situation
    current: Persisting | None = None
    wanted: Point | None = None
    waits: dict[int, _Wait] = field(default_factory=dict)
    commits: dict[Point, None] = field(default_factory=dict)
    last_began: float | None = None
    last_failure: str = ""
    last_lost: str = ""
    fenced: bool = False
    deserted_at: float | None = None

    def begin(self) -> None:
        """A new attempt: who waited is gone; what is being written goes on."""
        self.waits.clear()
        self.deserted_at = None
        if self.fenced:
            # A higher claim stopped us, and now we serve it.
            self.fenced = False
            self.want_newest()

    # -- facts

    def completed(self, snapshot: Complete, asked: bool) -> None:
        """A snapshot is complete on all ranks; for the second time where it was cut twice."""
        if snapshot.point in self.commits:
            self._answer(snapshot.point, durable=True)
            return
        if self.current is not None and self.current.point == snapshot.point:
            return
        due = checkpoint_due(self.at.policy, now=self.at.now, last_persist_began=self.last_began)
        if asked or due or self._awaited(snapshot.point):
            self.wanted = snapshot.point

    def durable_asked(self, fact: DurableAsked) -> None:
        points = self._points(fact.step)
        if any(point in self.commits for point in points):
            self._reply(fact.rank, True, "")
            return
        self.waits[fact.rank] = _Wait(fact.step, self.at.now + fact.timeout)
        work = self.current
        if work is not None and work.point in points and not work.abandoned:
            return
        for point in points:
            if self.at.table.complete(point) is not None:
                self.wanted = point
                return
        if not any(self.at.table.holds(fact.rank, point) for point in points):
            # Its cut was dropped before it could ask.
            del self.waits[fact.rank]
            why = self.last_lost or f"rank {fact.rank} holds no cut of step {fact.step}"
            self._reply(fact.rank, False, why)

    def lost(self, step: int, why: str, ranks: set[int]) -> None:
        """A cut of ``step`` was dropped, which ``ranks`` had taken."""
        self.last_lost = f"the cut at step {step} was dropped: {why}"
        for rank in ranks:
            if rank in self.waits and self.waits[rank].step == step:
                del self.waits[rank]
                self._reply(rank, False, self.last_lost)

    def persisted(self, fact: RankPersisted) -> None:
        key = Key(fact.node, fact.rank, fact.index)
        self.at.release(key, "persist")
        work = self._work(fact.point, fact.rank)
        if work is None:
            return
        work.running.discard(fact.rank)
        work.slots.pop(fact.rank, None)
        work.nbytes += fact.nbytes
        if work.abandoned:
            self._abandoned(work)
        elif not work.slots:
            self._commit(work)

    def persist_failed(self, fact: PersistFailed) -> None:
        key = Key(fact.node, fact.rank, fact.index)
        self.at.release(key, "persist")
        self.last_failure = f"{fact.code}: {fact.what}"
        self._tell_failure(fact.point, fact.rank, fact.code, fact.what)
        work = self._work(fact.point, fact.rank)
        if work is not None:
            work.running.discard(fact.rank)
            work.waiting.add(fact.rank)
            self._failed(work, fact.superseded)

    def committed(self, fact: Committed) -> None:
        work = self.current
        if not (self.at.elected and self.at.beyond(fact.point)):
            self.commits[fact.point] = None
        for old in list(self.commits)[:-KEPT_COMMITS]:
            del self.commits[old]
        if work is None or work.point != fact.point:
            return
        self.current = None
        self.at.tell(
            "checkpoint.committed", f"checkpoint of step {fact.point.step} is committed",
            step=fact.point.step, seconds=self.at.now - work.began, bytes=work.nbytes,
            attempt=fact.point.attempt,
        )  # fmt: skip
        self._answer(fact.point, durable=True)

    def commit_failed(self, fact: CommitFailed) -> None:
        work = self.current
        self.last_failure = f"{fact.code}: {fact.what}"
        self._tell_failure(fact.point, None, fact.code, fact.what)
        if work is not None and work.point == fact.point:
            work.committing = False
            self._failed(work, fact.superseded)

    def node_left(self, node: int) -> None:
        """What the node was writing will be asked of it again; its answer may be lost."""
        work = self.current
        if work is None:
            return
        for rank, key in work.slots.items():
            if key.node == node and rank in work.running:
                self.at.release(key, "persist")
                work.running.discard(rank)
                work.waiting.add(rank)
                work.retry_at = self.at.now + FIRST_RETRY

    def off_lineage(self) -> None:
        """The job has been elected: what it left behind is of no use any more (S6)."""
        work = self.current
        if work is not None and self.at.beyond(work.point):
            work.abandoned = True
            self._abandoned(work)
        if self.wanted is not None and self.at.beyond(self.wanted):
            self.wanted = None
        for point in [p for p in self.commits if self.at.beyond(p)]:
            del self.commits[point]

    def desert(self) -> None:
        """Nobody is attached any more, or will be: the newest snapshot is all there will be."""
        if self.deserted_at is None:
            self.deserted_at = self.at.now
        self.want_newest()

    def fence(self, what: str) -> None:
        """Another runs the job: whatever is being written is not committed."""
        self.last_failure = what
        self.fenced, self.wanted = True, None
        for rank in list(self.waits):
            self._reply(rank, False, what)
        self.waits.clear()
        if self.current is not None:
            self.current.abandoned = True
            self._abandoned(self.current)

    def settle(self) -> None:
        """Called after each fact: begin, try again, answer those who waited long enough."""
        for rank, wait in list(self.waits.items()):
            if self.at.now >= wait.deadline:
                why = self.last_failure or "it was not committed in time"
                del self.waits[rank]
                self._reply(rank, False, why)
        work = self.current
        if work is not None and work.retry_at is not None and self.at.now >= work.retry_at:
            self._retry(work)
        if self.current is not None and self.current.retry_at is not None:
            self._supersede(self.current)
        self._start()

    @property
    def pending(self) -> bool:
        """Whether there is work that the keeper must not end before."""
        if self.fenced:
            return self.current is not None and not self.current.idle
        tired = self.deserted_at is not None and self.at.now - self.deserted_at > GIVE_UP
        return (self.current is not None or self.wanted is not None) and not tired

    # -- one checkpoint

    def _start(self) -> None:
        if self.current is not None or self.wanted is None or self.fenced:
            return
        snapshot = self.at.table.complete(self.wanted) or self.at.table.newest()
        if snapshot is None or snapshot.point in self.commits:
            self.wanted = None
            if snapshot is not None:
                self._answer(snapshot.point, durable=True)  # who asked before the store was read
            return
        if snapshot.point.attempt not in self.at.branches:
            return  # the branch of the snapshot's own attempt comes first (S6)
        self.wanted = None
        self.last_began = self.at.now
        self.current = Persisting(
            snapshot.point, self.at.world, dict(snapshot.slots), snapshot.sequence, self.at.now
        )
        self._write(self.current, set(snapshot.slots))

    def _write(self, work: Persisting, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            key = work.slots[rank]
            self.at.table.lease(key, "persist")
            work.running.add(rank)
            self.at.say(Persist(key.node, key.rank, key.index, work.point))

    def _commit(self, work: Persisting) -> None:
        work.committing = True
        self.at.say(Commit(0, work.point, work.world))

    def _failed(self, work: Persisting, superseded: bool) -> None:
        if superseded:
            self.fence(self.last_failure)
        if work.abandoned:
            self._abandoned(work)
            return
        work.failures += 1
        pause: float = min(LAST_RETRY, FIRST_RETRY * 2 ** min(work.failures - 1, 10))
        work.retry_at = self.at.now + pause

    def _retry(self, work: Persisting) -> None:
        """Try again what failed, as long as the slots still hold it."""
        work.retry_at = None
        if not work.slots:
            self._commit(work)
            return
        if not work.waiting:
            return
        ranks, work.waiting = work.waiting, set()
        for rank in ranks:
            key = self.at.table.anywhere(rank, work.point, work.sequence)
            if key is None:
                self._give_up(work, "its memory was needed for a newer snapshot")
                return
            work.slots[rank] = key
        self._write(work, ranks)

    def _supersede(self, work: Persisting) -> None:
        newest = self.at.table.newest()
        newer = newest is not None and newest.point > work.point
        if newest is not None and newer and work.idle and not self._awaited(work.point):
            self._give_up(work, f"the snapshot of step {newest.point.step} takes its place")

    def _give_up(self, work: Persisting, why: str) -> None:
        work.abandoned = True
        newest = self.at.table.newest()
        again = newest is not None and newest.point == work.point
        if newest is not None and (again or newest.point > work.point):
            self.wanted = newest.point
        if not again:  # else the same step was cut once more, and that one is stored now
            self._answer(work.point, durable=False, reason=f"{why} ({self.last_failure})")
        self._abandoned(work)

    def _abandoned(self, work: Persisting) -> None:
        if work.idle and self.current is work:
            self.current = None
            self.at.tell(
                "persist.abandoned",
                f"the checkpoint of step {work.point.step} is given up",
                level="warning", step=work.point.step, reason=self.last_failure,
            )  # fmt: skip

    def want_newest(self) -> None:
        """Make the newest snapshot durable, whatever the cadence says."""
        newest = self.at.table.newest()
        if newest is None or newest.point in self.commits or self.fenced:
            return
        if self.current is None or self.current.point < newest.point:
            self.wanted = newest.point

    def _work(self, point: Point, rank: int) -> Persisting | None:
        work = self.current
        return work if work and work.point == point and rank in work.running else None

    # -- those who wait

    def _points(self, step: int) -> list[Point]:
        """What a rank of this attempt means by ``step``: its own cut of it, or the very point
        that it went on from. Another attempt's point of that step is another state."""
        origin = self.at.origin
        went_on = [origin] if origin is not None and origin.step == step else []
        return [self.at.point(step), *went_on]

    def _awaited(self, point: Point) -> bool:
        return any(point in self._points(wait.step) for wait in self.waits.values())

    def _answer(self, point: Point, *, durable: bool, reason: str = "") -> None:
        for rank, wait in list(self.waits.items()):
            if point in self._points(wait.step):
                del self.waits[rank]
                self._reply(rank, durable, reason)

    def _reply(self, rank: int, durable: bool, reason: str) -> None:
        self.at.say(AnswerDurable(self.at.node_of(rank), rank, durable, reason))

    def _tell_failure(self, point: Point, rank: int | None, code: str, what: str) -> None:
        whose = "the commit" if rank is None else f"rank {rank}'s part"
        self.at.tell(
            "persist.failed",
            f"{whose} of the checkpoint of step {point.step} failed; training goes on: {what}",
            level="warning", rank=rank, step=point.step, code=code, reason=what,
        )  # fmt: skip
