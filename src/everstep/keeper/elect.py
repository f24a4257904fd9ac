"""What the attempt goes on from: one candidate at a time, the same for all ranks (R5, R6).

Owns: the candidates, the offer, the votes. Never does: I/O; know what the store has of other
attempts (branches). Called by: coordinate.

The order is: the newest snapshot that all ranks hold in memory (where it is not older than the
newest checkpoint), then the checkpoints newest first, then, if none is expected, nothing.

A rollback names its target: that checkpoint (from memory where the same point is still there),
then those older that are known to be sound, then those of which nothing is known. One that is known
to be unsound is none, whatever is newer is none, and the job never begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.core.events import counted
from everstep.core.ids import Point
from everstep.errors import (
    KeeperError,
    NoRecoveryPoint,
    RestoreError,
    StoreError,
    WorldChanged,
)
from everstep.keeper.branches import Branches
from everstep.keeper.commands import (
    CheckMemory,
    ElectTo,
    OfferTo,
    ReadStore,
    RefuseTo,
    WriteBranch,
)
from everstep.keeper.facts import (
    BranchWritten,
    MemoryChecked,
    OfferAsked,
    StoreRead,
    Voted,
)
from everstep.keeper.rollback import rollback_order
from everstep.keeper.situation import Situation
from everstep.keeper.table import Complete
from everstep.keeper.wire import SlotName, WentOn
from everstep.store.lineage import on_lineage

STORE_RETRIES = 5
MEMORY_RETRIES = 1
"""The same where a snapshot is complete in memory: the store is hardly ever ahead of it."""
STORE_RETRY_SECONDS = 1.0
READ_SECONDS = 15.0
"""For the store to answer at all, where a complete snapshot in memory waits to be restored."""
BRANCH_RETRIES = 3
BRANCH_RETRY_SECONDS = 0.5


class Choice(NamedTuple):
    """A candidate; ``point`` None for a start from nothing."""

    source: str
    point: Point | None


@dataclass
class Election:
    """``settled`` is called once, with the step, when the recovery point stands."""

    at: Situation
    settled: Callable[[Choice], None]
    branches: Branches
    store: StoreRead | None = None
    asked: set[int] = field(default_factory=set)
    votes: dict[int, Voted] = field(default_factory=dict)
    rejected: set[Choice] = field(default_factory=set)
    rootless: set[Point] = field(default_factory=set)
    tried: list[str] = field(default_factory=list)
    offer: Choice | None = None
    offered: bool = False
    checking: set[int] = field(default_factory=set)
    branching: bool = False
    elected: Choice | None = None
    refusal: tuple[str, str, str] | None = None
    read_failures: int = 0
    branch_failures: int = 0
    read_at: float | None = None
    singles: dict[int, bool] = field(default_factory=dict)
    asked_at: float | None = None

    def begin(self) -> None:
        """A new attempt: everything but the branches that are owed begins anew."""
        self._release()
        self.store, self.offer, self.elected, self.refusal = None, None, None, None
        self.asked, self.votes, self.rejected, self.rootless = set(), {}, set(), set()
        self.tried, self.checking, self.singles = [], set(), {}
        self.offered = self.branching = False
        self.read_failures = self.branch_failures = 0
        self.read_at = self.asked_at = None
        self.branches.begin()
        self.at.say(self._reading())

    # -- facts

    def elections_known(self, told: tuple[WentOn, ...]) -> None:
        """What attempts went on from, as nodes and ranks say that lived through it."""
        mine = self.branches.learn(told)
        if mine is None or self.elected is not None or self.offer is not None:
            return  # an offer is made when all ranks ask: none of them has gone on yet
        self.branches.owe_missing(mine.attempt)
        self._learn(Choice(mine.source, mine.point))

    def store_read(self, fact: StoreRead) -> None:
        if fact.attempt != self.at.attempt:
            return
        held = self._in_hand()
        retries = 0 if fact.final else MEMORY_RETRIES if held else STORE_RETRIES
        if fact.error and self.read_failures < retries:
            self.read_failures += 1
            self.read_at = self.at.now + STORE_RETRY_SECONDS
            return
        self.store = fact
        self.branches.stored(fact.branches, fact.unreadable)
        if not fact.error:
            self.branches.reread |= self.branches.refused
            self._mend()
        for what in fact.damaged:
            self.at.tell("checkpoint.damaged", what, level="warning")
        if fact.branched and self.elected is None:
            self.at.branches[fact.attempt] = fact.branch
            self._learn(Choice(fact.branch_source, fact.branch))
        newest = self.at.table.newest()
        on = newest is not None and self.branches.on_lineage(newest.point)
        if newest is not None and on and self.branches.missing(newest.point.attempt) is None:
            # It may have to be stored before, or without, another restore.
            self.branches.owe_missing(newest.point.attempt)

    def offer_asked(self, fact: OfferAsked) -> None:
        at = self.at
        if fact.world != at.world:
            self._refuse_one(fact.rank, WorldChanged.code, _world_text(fact.world, at.world))
        elif self.refusal is not None:
            self._refuse_one(fact.rank, *self.refusal)
        elif self.elected is not None:
            self._serve_single(fact.rank)
        else:
            self.asked_at = at.now if self.asked_at is None else self.asked_at
            self.asked.add(fact.rank)
            self.votes.pop(fact.rank, None)
            if self.offered and self.offer is not None:
                self._offer_to(fact.rank, self.offer)

    def voted(self, fact: Voted) -> None:
        if self.elected is not None:
            self._single_voted(fact)
            return
        if not self.offered:
            return
        self.votes[fact.rank] = fact
        if len(self.votes) < self.at.world:
            return
        bad = [vote for _, vote in sorted(self.votes.items()) if not vote.ok]
        if bad:
            self._reject("; ".join(_reason(vote) for vote in bad))
        else:
            self.branching = True
            self._write_branch()

    def memory_checked(self, fact: MemoryChecked) -> None:
        for rank in fact.bad:
            self._corrupt(rank, fact)
        if self.elected is not None:
            self._singles_checked(fact)
            return
        if self.offer is None or self.offer.point != fact.point or fact.node not in self.checking:
            return
        self.checking.discard(fact.node)
        if fact.bad:
            self.checking.clear()
            self._reject(f"the memory of ranks {list(fact.bad)} is damaged")
        elif not self.checking:
            self._offer_all(self.offer)

    def branch_written(self, fact: BranchWritten) -> None:
        taken = self.branches.written(fact)
        if taken == "reread":
            self.read_at, self.read_failures = self.at.now, 0
        if taken:
            return
        if not self.branching or fact.attempt != self.at.attempt or self.offer is None:
            return
        if not fact.error:
            self.at.branches[fact.attempt] = self.offer.point
            self._settle(self.offer)
        elif not fact.retryable:
            self.branching = False
            self._refuse_all(fact.error_code, fact.error)
        elif self.branch_failures < BRANCH_RETRIES:
            self.branch_failures += 1
            self.branches.due = self.at.now + BRANCH_RETRY_SECONDS
        else:
            self._owe(fact.error)

    def rank_gone(self, rank: int) -> None:
        """It may come back and ask again; the offer to the others stands until it does."""
        self.votes.pop(rank, None)
        self.singles.pop(rank, None)
        if not self.offered:
            self.asked.discard(rank)

    def rank_ended(self, rank: int, why: str) -> None:
        """Where no agent runs nobody ends the ranks that would wait for this one."""
        waited_for = self.at.alone and rank in self.at.table.home
        if self.elected is not None or self.branching or self.refusal is not None:
            return
        if waited_for and (why or rank not in self.at.registered):
            because = why or "its process has ended"
            self._refuse_all(
                RestoreError.code,
                f"rank {rank} cannot take part in the restore: {because}",
                f"What rank {rank} printed says more; start all ranks again.",
            )

    def training_seen(self, ranks: set[int]) -> None:
        """These ranks train already: an attempt whose election this keeper has not seen."""
        if self.elected is None and self.store is not None and ranks - self.asked:
            self.at.tell(
                "restore.unknown",
                "the workers train and the store has no branch of this attempt: snapshots go on "
                "in memory, checkpoints begin again with the next attempt.",
                level="error",
            )
            self._learn(Choice("memory", None))

    def _learn(self, choice: Choice) -> None:
        """An election that an earlier keeper held; ranks that asked before that was known here
        are served, or refused, one by one."""
        self._settle(choice, announce=False)
        for rank in sorted(self.asked):
            self._serve_single(rank)

    def settle(self) -> None:
        """Called after each fact."""
        at = self.at
        if self.read_at is not None and at.now >= self.read_at:
            self.read_at = None
            at.say(self._reading())
        if self.branches.due is not None and at.now >= self.branches.due:
            self.branches.due = None
            if self.branching:
                self._write_branch()
            else:
                self.branches.write_first()
        if self.store is None and at.now - at.began >= READ_SECONDS and self._in_hand():
            self._give_up_reading()
        ready = self.elected is None and self.refusal is None and self.offer is None
        if ready and self.store is not None and len(self.asked) == at.world and at.assembled:
            self._next()

    def _reading(self) -> ReadStore:
        return ReadStore(0, self.at.attempt, self.at.recover)

    def _in_hand(self) -> bool:
        """Whether a snapshot in memory could be restored without the store."""
        target = self.at.recover
        found = self.at.table.newest() if target is None else self.at.table.complete(target)
        return found is not None

    def _give_up_reading(self) -> None:
        """A file system that hangs answers nothing; when it does, that is taken all the same."""
        self.read_failures = STORE_RETRIES
        what = f"the store has not answered for {READ_SECONDS:g} s"
        self.store_read(StoreRead(self.at.attempt, error=what, error_code=StoreError.code))

    # -- candidates

    def _next(self) -> None:
        """Choose the next candidate, or refuse where none is left."""
        self._forget_strays()
        changed = self._world_changed()
        if changed:
            self._refuse_all(WorldChanged.code, changed, _WORLD_HINT)
            return
        choice = self._choose()
        if choice is None:
            return
        self.offer, self.votes, self.offered = choice, {}, False
        snapshot = self.at.table.complete(choice.point) if choice.point is not None else None
        if choice.source == "memory" and snapshot is not None:
            self._check(snapshot)
        else:
            self._offer_all(choice)

    def _choose(self) -> Choice | None:
        assert self.store is not None, "asked before the store was read"
        if self.at.recover is not None:
            return self._choose_for_rollback(self.at.recover)
        if self.at.resume == "never" and not self.at.expected:
            return self._fresh_or_refuse(expected=False)
        memory = self._memory()
        stored = self._stored()
        if memory is not None and (stored is None or memory.step >= stored.step):
            return Choice("memory", memory)
        if stored is not None:
            return Choice("store", stored)
        rootless = self._memory(rooted=False)
        if rootless is not None:
            return Choice("memory", rootless)
        if self.store.error:
            self._refuse_all(self.store.error_code, self.store.error)
            return None
        required = self.at.resume == "require" or self.at.expected or self.at.lived
        # What some ranks alone hold is not a snapshot: the first attempt ended before it was one.
        return self._fresh_or_refuse(expected=required or self.store.expected or bool(self.tried))

    def _choose_for_rollback(self, target: Point) -> Choice | None:
        """Where the store cannot be read the target may be in memory; no older one is known."""
        assert self.store is not None, "asked before the store was read"
        in_memory = Choice("memory", target)
        held = self.at.table.complete(target) is not None and in_memory not in self.rejected
        if held and self._rooted(target):
            return in_memory
        stored = self._stored()
        if stored is not None:
            return Choice("store", stored)
        if self.store.error:
            self._refuse_all(self.store.error_code, self.store.error)
            return None
        return self._fresh_or_refuse(expected=True)

    def _memory(self, *, rooted: bool = True) -> Point | None:
        for snapshot in self.at.table.completes():
            choice = Choice("memory", snapshot.point)
            if choice not in self.rejected and (not rooted or self._rooted(snapshot.point)):
                return snapshot.point
        return None

    def _rooted(self, point: Point) -> bool:
        """Whether a branch can name ``point``: its chain is in the store, or can be written. Else
        what the store has is taken, and only where it has nothing a root is made (S6)."""
        assert self.store is not None, "asked before the store was read"
        broken = None if self.store.error else self.branches.missing(point.attempt)
        if broken is not None and point not in self.rootless:
            self.rootless.add(point)
            why = f"what attempt {broken} went on from is known to nobody any more"
            self.tried.append(f"memory step {point.step}: {why}")
            self.at.tell(
                "restore.rejected",
                f"step {point.step} (memory) is not restored as long as anything else can be: "
                f"{why}",
                level="error", step=point.step, source="memory", reason=why,
            )  # fmt: skip
        return broken is None

    def _stored(self) -> Point | None:
        assert self.store is not None, "asked before the store was read"
        candidates = self.store.candidates
        if self.at.recover is not None:
            candidates = rollback_order(candidates, self.at.recover)
        points = [candidate.point for candidate in candidates]
        return next((p for p in points if Choice("store", p) not in self.rejected), None)

    def _fresh_or_refuse(self, *, expected: bool) -> Choice | None:
        fresh = Choice("fresh", None)
        if not expected and fresh not in self.rejected:
            return fresh
        assert self.store is not None, "asked before the store was read"
        tried = [*self.store.damaged, *self.tried]
        self._refuse_all(
            NoRecoveryPoint.code,
            f"a recovery point of the job is expected and none verifies. "
            f"Tried: {_listed(tried) or 'nothing is in memory or in the store'}.",
            "Check that the store is the right one and is mounted. To start anew on purpose, "
            "give --resume never or another --job (without `everstep run`: EVERSTEP_RESUME=never "
            "or another EVERSTEP_JOB).",
        )
        return None

    def _world_changed(self) -> str:
        assert self.store is not None, "asked before the store was read"
        rollback = self.at.recover is not None
        if self.at.resume == "never" and not (self.at.expected or rollback):
            return ""
        stored = self._stored()
        for candidate in self.store.candidates:
            if candidate.point == stored and candidate.world not in (0, self.at.world):
                return _world_text(self.at.world, candidate.world)
        other = None if rollback else self.at.table.other_world()
        if other is not None and (stored is None or other[0].step > stored.step):
            return _world_text(self.at.world, other[1])
        return ""

    def _reject(self, why: str) -> None:
        assert self.offer is not None, "rejected without an offer"
        where = f"step {self.offer.point.step}" if self.offer.point else "a start from nothing"
        self.tried.append(f"{self.offer.source} {where}: {why}")
        self.at.tell(
            "restore.rejected", f"{where} ({self.offer.source}) cannot be restored: {why}",
            level="warning", step=self.offer.point.step if self.offer.point else None,
            source=self.offer.source, reason=why,
        )  # fmt: skip
        self.rejected.add(self.offer)
        self._release()
        self.offer, self.offered, self.votes = None, False, {}

    # -- memory

    def _forget_strays(self) -> None:
        """What the memory holds of a life that the job went on without, here or elsewhere, is no
        state of the job (S6). A later attempt than all that are known is none: nothing has gone
        on without it, its branch just could not be written yet."""
        known = self.branches.origins()
        strays = set()
        for key, entry in list(self.at.table.entries.items()):
            point = entry.point
            if point is None or point.attempt > max(known, default=0) or entry.doomed:
                continue
            if not on_lineage(known, [point]):
                strays.add(point)
                self.at.forget(key)
        for point in sorted(strays):
            self.at.tell(
                "memory.off_lineage",
                f"the snapshot of step {point.step} of attempt {point.attempt} in memory is not "
                "used: the job went on without it.",
                step=point.step, attempt=point.attempt,
            )  # fmt: skip

    def _check(self, snapshot: Complete) -> None:
        self.checking = {key.node for key in snapshot.slots.values()}
        for key in snapshot.slots.values():
            self.at.table.lease(key, "restore")
        for node in sorted(self.checking):
            self.at.say(CheckMemory(node, snapshot.point, self._names(snapshot.point, node)))

    def _names(self, point: Point, node: int) -> tuple[SlotName, ...]:
        snapshot = self.at.table.complete(point)
        held = sorted(snapshot.slots.items()) if snapshot is not None else []
        return tuple(SlotName(key.rank, key.index) for _, key in held if key.node == node)

    def _corrupt(self, rank: int, fact: MemoryChecked) -> None:
        step = fact.point.step
        self.at.tell(
            "memory.corrupt",
            f"the snapshot of step {step} of rank {rank} in the memory of node {fact.node} is not "
            f"what was written: {fact.why} It is dropped; an older one is taken.",
            level="error", rank=rank, step=step,
        )  # fmt: skip
        for key, entry in list(self.at.table.of_rank(rank)):
            if entry.point == fact.point:
                self.at.forget(key)

    def _release(self) -> None:
        for key in list(self.at.table.entries):
            self.at.release(key, "restore")

    # -- offers and election

    def _offer_all(self, choice: Choice) -> None:
        self.offered = True
        for rank in sorted(self.at.table.home):
            self._offer_to(rank, choice)

    def _offer_to(self, rank: int, choice: Choice) -> None:
        node = self.at.node_of(rank)
        memory = choice.source == "memory" and choice.point is not None
        names = self._names(choice.point, node) if memory and choice.point else ()
        self.at.say(OfferTo(node, rank, choice.source, choice.point, names))

    def _write_branch(self) -> None:
        assert self.offer is not None, "a branch without an election"
        if self.offer.point is not None:
            self.branches.owe_missing(self.offer.point.attempt)
        self._mend()
        if self.branches.owed:
            # An earlier attempt's branch comes first: the later one names that attempt.
            self._owe("an earlier attempt's branch is not written yet")
            return
        self.at.say(
            WriteBranch(0, self.at.attempt, self.offer.point, self.offer.source, self.at.world)
        )

    def _owe(self, why: str) -> None:
        assert self.offer is not None, "a branch without an election"
        mine = WentOn(self.at.attempt, self.offer.source, self.offer.point, self.at.world)
        self.branches.owe(mine, why)
        self._settle(self.offer)

    def _mend(self) -> None:
        if self.store is None or self.store.error or not (self.elected or self.branching):
            return
        choice = self.elected or self.offer
        self.branches.mend(choice.point if choice is not None else None)

    def _settle(self, choice: Choice, *, announce: bool = True) -> None:
        self.elected = choice
        self.branching = False
        self._release()
        self.at.elected, self.at.origin = True, choice.point
        self.at.start = choice.point.step if choice.point else 0
        self.at.lived = self.at.lived and choice.point is not None
        self._forget_strays()
        self.settled(choice)
        if not announce:
            return
        for rank in sorted(self.at.table.home):
            self._elect_to(rank, choice)
        since = self.at.began if self.asked_at is None else self.asked_at
        what = f"step {choice.point.step}, from {choice.source}" if choice.point else "the start"
        self.at.tell(
            "restore.elected", f"attempt {self.at.attempt} goes on from {what}",
            step=self.at.start, source=choice.source, seconds=self.at.now - since,
        )  # fmt: skip

    def _elect_to(self, rank: int, choice: Choice) -> None:
        before = self.branches.before(self.at.attempt)
        node = self.at.node_of(rank)
        self.at.say(ElectTo(node, rank, choice.source, choice.point, before))

    # -- a rank that comes late: its keeper died after the election

    def _serve_single(self, rank: int) -> None:
        assert self.elected is not None, "served before the election"
        if self.elected.point is None and self.elected.source != "fresh":
            what = "the others train, and what they went on from is not known any more."
            self._refuse_one(rank, KeeperError.code, what, "Start the attempt again.")
            return
        node = self.at.node_of(rank)
        point = self.elected.point
        snapshot = self.at.table.complete(point) if point is not None else None
        if point is not None and snapshot is not None:
            self.singles[rank] = False
            for key in snapshot.slots.values():
                if key.node == node:
                    self.at.table.lease(key, f"restore {rank}")
            self.at.say(CheckMemory(node, point, self._names(point, node)))
        elif point is not None:
            self._offer_to(rank, Choice("store", point))
        else:
            self._offer_to(rank, Choice("fresh", None))

    def _singles_checked(self, fact: MemoryChecked) -> None:
        assert self.elected is not None, "checked before the election"
        for rank, offered in list(self.singles.items()):
            if not offered and self.at.node_of(rank) == fact.node:
                self.singles[rank] = True
                source = "store" if fact.bad else "memory"
                self._offer_to(rank, Choice(source, self.elected.point))

    def _single_voted(self, fact: Voted) -> None:
        assert self.elected is not None, "voted before the election"
        self.singles.pop(fact.rank, None)
        for key in list(self.at.table.entries):
            self.at.release(key, f"restore {fact.rank}")
        if fact.ok:
            self._elect_to(fact.rank, self.elected)
        else:
            self._refuse_one(
                fact.rank,
                KeeperError.code,
                f"rank {fact.rank} cannot restore what the others hold already: {fact.reason}",
            )

    # -- refusals

    def _refuse_all(self, code: str, what: str, hint: str = "") -> None:
        self.refusal = (code, what, hint)
        self._release()
        for rank in sorted(self.asked):
            self._refuse_one(rank, code, what, hint)
        self.at.tell("restore.refused", what, level="error", code=code)

    def _refuse_one(self, rank: int, code: str, what: str, hint: str = "") -> None:
        self.at.say(RefuseTo(self.at.node_of(rank), rank, code, what, hint))


_WORLD_HINT = (
    "Start the job with the saved world size, or begin anew under another name: --job, or "
    "EVERSTEP_JOB without `everstep run`."
)


def _listed(reasons: list[str]) -> str:
    return "; ".join(reason.rstrip(".") for reason in reasons)


def _reason(vote: Voted) -> str:
    whose = f"rank {vote.rank}: "
    return vote.reason if vote.reason.startswith(whose) else whose + vote.reason


def _world_text(world: int, saved: int) -> str:
    return f"this run has {counted(world, 'rank')}, what is to be restored belongs to {saved}."
