"""The coordinator of a job: facts in, commands out. It runs in the keeper of node 0 alone (R2).

Owns: the order in which a fact reaches the parts (cuts, durable, elect, stop) and what one part's
result means to another. Never does: I/O, clocks, threads. Called by: server.
"""

from __future__ import annotations

from everstep.keeper.branches import Branches
from everstep.keeper.commands import Command
from everstep.keeper.cuts import Cuts
from everstep.keeper.durable import Durable
from everstep.keeper.elect import Choice, Election
from everstep.keeper.facts import (
    AnyFact,
    Begun,
    Boundaries,
    BranchWritten,
    CommitFailed,
    Committed,
    CutMade,
    CutMissed,
    Digested,
    DurableAsked,
    ElectionKnown,
    Fenced,
    Left,
    MemoryChecked,
    NodeJoined,
    NodeLeft,
    OfferAsked,
    PersistFailed,
    PolicySaid,
    PreemptAsked,
    RankArrived,
    RankEnded,
    RankGone,
    RankPersisted,
    Registered,
    SlotAsked,
    SlotsSeen,
    StoreRead,
    Tick,
    Voted,
    WorkersOver,
)
from everstep.keeper.replay import Replay
from everstep.keeper.situation import Situation
from everstep.keeper.stop import Stop
from everstep.keeper.table import Key

POLL_SECONDS = 0.05
TICK_SECONDS = 0.25
IDLE_TICK_SECONDS = 5.0


class Coordinator:
    """The whole state of the decisions. :meth:`handle` is deterministic: the same facts at the
    same times give the same commands."""

    def __init__(self) -> None:
        self.at = Situation()
        self.durable = Durable(self.at)
        self.cuts = Cuts(self.at, self.durable.completed, self.durable.lost)
        self.election = Election(self.at, self._elected, Branches(self.at))
        self.stop = Stop(self.at, self._stopping, self._stop_failed)
        self.replay = Replay(self.at)

    def handle(self, fact: AnyFact, now: float) -> list[Command]:
        """The commands that ``fact`` at ``now`` (seconds of one monotonic clock) leads to, in the
        order in which they are to be carried out."""
        self.at.now = now
        self.at.out = []
        self._take(fact)
        self.election.settle()
        self.stop.settle(self.cuts.boundaries)
        self.cuts.settle()
        self.durable.settle()
        return self.at.out

    def wait(self) -> float:
        """Seconds after which the next look at the pages or the next Tick is due at the latest."""
        if self.at.registered and self.cuts.wants_boundaries:
            return POLL_SECONDS
        busy = bool(self.at.registered) or self.durable.pending or self.stop.asked
        return TICK_SECONDS if busy else IDLE_TICK_SECONDS

    @property
    def pending(self) -> bool:
        """Whether there is work that must not be left undone."""
        return self.durable.pending

    def _take(self, fact: AnyFact) -> None:
        if isinstance(fact, Begun):
            self._begin(fact)
        elif isinstance(fact, PolicySaid):
            self.at.policy = fact.policy
        elif isinstance(fact, NodeJoined | NodeLeft | Registered | SlotsSeen | RankGone):
            self._take_presence(fact)
        elif isinstance(
            fact, CutMade | CutMissed | SlotAsked | Boundaries | RankArrived | DurableAsked
        ):
            self._take_training(fact)
        elif isinstance(
            fact, StoreRead | OfferAsked | Voted | MemoryChecked | BranchWritten | ElectionKnown
        ):
            self._take_restore(fact)
        else:
            self._take_work(fact)

    # -- presence

    def _begin(self, fact: Begun) -> None:
        at = self.at
        fresh = fact.attempt != at.attempt
        at.joined &= {0}
        at.table.only_node(0)
        for node in range(1, len(fact.ranks_of_node)):
            self.durable.node_left(node)
        at.table.home = {
            rank: node for node, ranks in enumerate(fact.ranks_of_node) for rank in ranks
        }
        at.attempt, at.resume, at.expected = fact.attempt, fact.resume, fact.expected
        at.alone = fact.alone
        at.recover, at.replay_until = fact.recover, fact.replay_until
        at.policy, at.began, at.start = fact.policy, at.now, 0
        at.elected, at.origin = False, None
        at.registered, at.finished, at.gone = set(), set(), set()
        for rank in at.table.home:
            at.table.resolve(rank)
        self.cuts.begin()
        self.durable.begin()
        self.stop.begin(fresh=fresh)
        self.election.begin()
        self.replay.begin()

    def _take_presence(
        self, fact: NodeJoined | NodeLeft | Registered | SlotsSeen | RankGone
    ) -> None:
        at = self.at
        match fact:
            case NodeJoined():
                at.joined.add(fact.node)
                at.table.see_node(fact.node, fact.slots)
                self.election.elections_known(fact.went_on)
            case NodeLeft():
                at.joined.discard(fact.node)
                self.durable.node_left(fact.node)
                for rank in [r for r, node in at.table.home.items() if node == fact.node]:
                    self._rank_gone(rank)
            case Registered():
                if fact.rank in at.table.home:
                    at.registered.add(fact.rank)
                    at.gone.discard(fact.rank)
                    at.table.resolve(fact.rank)
            case SlotsSeen():
                at.table.see(fact.node, fact.rank, fact.slots)
            case RankGone():
                at.table.see(fact.node, fact.rank, fact.slots)
                if fact.finished:
                    self._rank_finished(fact.rank)
                elif fact.rank in at.table.home:
                    at.gone.add(fact.rank)
                self._rank_gone(fact.rank)

    def _rank_gone(self, rank: int) -> None:
        self.at.registered.discard(rank)
        self.cuts.rank_gone(rank)
        self.election.rank_gone(rank)
        self.stop.rank_gone(rank)

    def _rank_finished(self, rank: int) -> None:
        self.at.finished.add(rank)
        if len(self.at.finished) == self.at.world:
            step = max((point.step for point in self.durable.commits), default=None)
            self.at.tell("job.finished", "all ranks reached their last step", step=step)

    # -- training

    def _take_training(
        self,
        fact: CutMade | CutMissed | SlotAsked | Boundaries | RankArrived | DurableAsked,
    ) -> None:
        if isinstance(fact, Boundaries):
            self._boundaries(fact)
            return
        if fact.rank not in self.at.table.home:
            return
        match fact:
            case CutMade():
                self.cuts.cut_made(fact)
                self.replay.passed(fact.rank, fact.step)
            case CutMissed():
                self.cuts.cut_missed(fact)
            case SlotAsked():
                self.cuts.slot_asked(fact)
            case DurableAsked():
                self.durable.durable_asked(fact)
            case RankArrived():
                self.stop.rank_arrived(fact.rank, fact.step)

    def _boundaries(self, fact: Boundaries) -> None:
        known = [b for b in fact.ranks if b.rank in self.at.table.home]
        self.cuts.boundaries_seen(Boundaries(tuple(known), fact.drained))
        for boundary in known:
            self.replay.passed(boundary.rank, boundary.step)
        if known:
            self.election.training_seen({boundary.rank for boundary in known})

    def _stopping(self) -> None:
        self.cuts.stopping = True
        self.cuts.drop("all ranks are to stop", level="debug")

    def _stop_failed(self) -> None:
        self.cuts.hopeless = self.stop.step == 0
        self.durable.want_newest()

    # -- restore

    def _take_restore(
        self,
        fact: StoreRead | OfferAsked | Voted | MemoryChecked | BranchWritten | ElectionKnown,
    ) -> None:
        match fact:
            case StoreRead():
                for candidate in reversed(fact.candidates):
                    self.durable.commits.setdefault(candidate.point, None)
                self.election.store_read(fact)
            case OfferAsked():
                if fact.rank in self.at.table.home:
                    self.election.offer_asked(fact)
            case Voted():
                if fact.rank in self.at.table.home:
                    self.election.voted(fact)
            case MemoryChecked():
                self.election.memory_checked(fact)
            case BranchWritten():
                self.election.branch_written(fact)
            case ElectionKnown():
                self.election.elections_known((fact.went_on,))

    def _elected(self, choice: Choice) -> None:
        """What lies beyond the recovery point is no state of this job any more (S6)."""
        at = self.at
        self.cuts.last_cut = at.start
        if choice.source == "store":
            self.durable.last_began = at.now
        if choice.point is None and choice.source != "fresh":
            return
        self.durable.off_lineage()
        for key, entry in list(at.table.entries.items()):
            if entry.point is not None and at.beyond(entry.point):
                at.forget(key)
        self.cuts.settle()  # the first cut is published before a rank can run past it

    # -- background work

    def _take_work(self, fact: AnyFact) -> None:
        match fact:
            case Digested():
                self.at.release(Key(fact.node, fact.rank, fact.index), "digest")
            case RankPersisted():
                self.durable.persisted(fact)
            case PersistFailed():
                self.durable.persist_failed(fact)
            case Committed():
                self.durable.committed(fact)
                self.stop.committed(fact.point)
            case CommitFailed():
                self.durable.commit_failed(fact)
            case Fenced():
                self.durable.fence(fact.what)
            case PreemptAsked():
                self.stop.preempt(fact.grace)
            case Left():
                self.durable.desert()
            case WorkersOver():
                for rank, node in self.at.table.home.items():
                    if node == fact.node:
                        self.at.table.resolve(rank)
            case RankEnded():
                self.election.rank_ended(fact.rank, fact.why)
            case Tick():
                pass
            case _:
                raise AssertionError(f"no part takes {type(fact).__name__}")
