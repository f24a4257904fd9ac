"""The coordinator against a model of ranks, slots, readers and a store, in any order of events.

The model knows what is really in each slot and who really reads it. Whatever the order in which
messages arrive and ranks die, the coordinator must never hand out a slot that is read or that
holds the newest complete snapshot (R7), never elect two things in one attempt (R6), never wait for
training (R2, R3: each step is always possible here).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.keeper import commands, facts
from everstep.keeper.commands import Command
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.facts import AnyFact, Boundary, Held
from everstep.keeper.wire import SlotName

RANKS = st.integers(0, 2)


@dataclass
class Rank:
    """What one worker knows and does. ``writing`` is the slot it is in the middle of."""

    step: int = 0
    restored: bool = False
    writing: tuple[int, int] | None = None
    sequence: int = 0
    waiting: str = ""
    outbox: deque[AnyFact] = field(default_factory=deque)
    voted: bool | None = None


class Jobs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator()
        self.now = 0.0
        self.world = 0
        self.attempt = 0
        self.ranks: list[Rank] = []
        self.slots: dict[tuple[int, int], Point | None] = {}
        self.tries: dict[tuple[int, int], int] = {}
        self.readers: dict[tuple[int, int], int] = {}
        self.work: list[Command] = []
        self.cut: tuple[int, int, dict[int, int]] | None = None
        self.store: list[Point] = []
        self.stored: dict[tuple[Point, int], set[int]] = {}
        self.indexes: set[tuple[Point, int]] = set()
        self.branches: dict[int, Point | None] = {}
        self.offer: tuple[str, Point | None] | None = None
        self.elected: dict[int, set[tuple[str, Point | None]]] = {}
        self.lost_forever: set[Point] = set()

    # -- the world begins

    @initialize(world=st.integers(1, 3), every=st.integers(1, 4), seconds=st.sampled_from([0, 5]))
    def begin(self, world: int, every: int, seconds: int) -> None:
        self.world = world
        self.policy = Policy(every, float(seconds))
        self.slots = {(r, i): None for r in range(world) for i in range(2)}
        self._new_attempt()

    def _new_attempt(self) -> None:
        self.attempt += 1
        self.cut, self.offer = None, None
        self.ranks = [Rank() for _ in range(self.world)]
        nodes = (tuple(range(self.world)),)
        self._tell(facts.Begun(self.attempt, nodes, "auto", False, self.policy))
        self._tell(facts.NodeJoined(0, tuple(h for r in range(self.world) for h in self._held(r))))
        for r, rank in enumerate(self.ranks):
            rank.waiting = "offer"
            rank.outbox.extend(
                [
                    facts.SlotsSeen(0, r, self._held(r)),
                    facts.Registered(r),
                    facts.OfferAsked(r, self.world),
                ]
            )

    # -- what ranks do

    @rule(r=RANKS)
    def finish_a_step(self, r: int) -> None:
        """A step, as far as the process group lets it: nobody is two steps ahead."""
        rank = self._rank(r)
        if rank is None or not rank.restored or rank.waiting or rank.writing:
            return
        if rank.step > min(other.step for other in self.ranks):
            return
        rank.step += 1
        if self.cut is not None and self.cut[1] == rank.step:
            self._start_writing(r, self.cut[2][r], self.cut[0])

    @rule(r=RANKS)
    def finish_writing(self, r: int) -> None:
        rank = self._rank(r)
        if rank is None or rank.writing is None:
            return
        self.slots[rank.writing] = Point(rank.step, self.attempt)
        self.tries[rank.writing] = rank.sequence
        index, rank.writing = rank.writing[1], None
        rank.outbox.append(
            facts.CutMade(r, rank.step, index, "l", 0.001, 1, {}, False, rank.sequence)
        )

    @rule(r=RANKS)
    def fail_to_write(self, r: int) -> None:
        rank = self._rank(r)
        if rank is None or rank.writing is None:
            return
        rank.writing = None
        rank.outbox.append(facts.CutMissed(r, rank.step, "the copy failed", rank.sequence))

    @rule(r=RANKS, timeout=st.sampled_from([0.0, 3.0, 1e6]))
    def ask_for_a_slot(self, r: int, timeout: float) -> None:
        rank = self._rank(r)
        if rank is None or not rank.restored or rank.waiting or rank.writing:
            return
        rank.waiting = "slot"
        rank.outbox.append(facts.SlotAsked(r, rank.step, timeout))

    @rule(r=RANKS, ok=st.booleans())
    def vote(self, r: int, ok: bool) -> None:
        rank = self._rank(r)
        if rank is None or rank.waiting != "vote":
            return
        rank.waiting, rank.voted = "answer", ok
        rank.outbox.append(facts.Voted(r, ok, "" if ok else "the test says no"))

    # -- shortcuts to where it gets interesting

    @rule(
        refusals=st.integers(0, 2),
        silent=st.sampled_from([None, 0, 1, 2]),
        leave=st.sampled_from([(), ("Persist",), ("Persist", "Digest")]),
    )
    def restore(self, refusals: int, silent: int | None, leave: tuple[str, ...]) -> None:
        """All ranks vote but one ``silent``; the first candidates are refused by the last rank;
        what is named in ``leave`` goes on in the background meanwhile."""
        for _ in range(12):
            self._deliver_all()
            for command in [c for c in self.work if type(c).__name__ not in leave]:
                self.work.remove(command)
                self._finish(command, True)
            asked = [rank.waiting == "vote" for rank in self.ranks]
            for r in range(self.world):
                if r != silent:
                    self.vote(r, r < self.world - 1 or not refusals)
            refusals -= bool(refusals and all(asked))

    @rule(steps=st.integers(1, 8), drained=st.booleans())
    def train_together(self, steps: int, drained: bool) -> None:
        for _ in range(steps):
            for r in range(self.world):
                self.finish_writing(r)
                self.finish_a_step(r)
            self._look(drained=False)
            if drained:
                self.deliver_everything_and_look_at_the_page()

    # -- the way of messages

    @rule(r=RANKS)
    def deliver(self, r: int) -> None:
        rank = self._rank(r)
        if rank is not None and rank.outbox:
            self._tell(rank.outbox.popleft())

    @rule()
    def deliver_everything_and_look_at_the_page(self) -> None:
        seen = self._seen()
        self._deliver_all()
        self._tell(facts.Boundaries(seen, drained=True))

    @rule()
    def look_at_the_page(self) -> None:
        self._look(drained=False)

    def _look(self, *, drained: bool) -> None:
        self._tell(facts.Boundaries(self._seen(), drained))

    def _seen(self) -> tuple[Boundary, ...]:
        return tuple(
            Boundary(r, rank.step, 0.01) for r, rank in enumerate(self.ranks) if rank.restored
        )

    def _deliver_all(self) -> None:
        while any(rank.outbox for rank in self.ranks):
            for rank in list(self.ranks):
                if rank.outbox:
                    self._tell(rank.outbox.popleft())

    @rule(seconds=st.sampled_from([0.05, 1.0, 40.0, 200.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self._tell(facts.Tick())

    # -- threads and the store

    @precondition(lambda self: self.work)
    @rule(which=st.integers(0, 7), ok=st.booleans())
    def finish_some_work(self, which: int, ok: bool) -> None:
        self._finish(self.work.pop(which % len(self.work)), ok)

    def _finish(self, command: Command, ok: bool) -> None:
        match command:
            case commands.Digest():
                self._read_over(command.rank, command.index)
                self._tell(facts.Digested(0, command.rank, command.index))
            case commands.Persist():
                self._finish_persist(command, ok)
            case commands.Commit():
                self._finish_commit(command, ok)
            case commands.CheckMemory():
                for name in command.slots:
                    self._read_over(name.rank, name.index)
                bad = () if ok else (command.slots[0].rank,)
                self._tell(facts.MemoryChecked(0, command.point, bad, "flipped"))
            case commands.ReadStore():
                self._finish_read(command)
            case commands.WriteBranch():
                self._finish_branch(command, ok)

    def _finish_persist(self, command: commands.Persist, ok: bool) -> None:
        assert self.slots[command.rank, command.index] == command.point, "read while written"
        if ok:
            self.stored.setdefault((command.point, command.rank), set()).add(
                self.tries[command.rank, command.index]
            )
        self._read_over(command.rank, command.index)
        if ok:
            self.indexes.add((command.point, command.rank))
            done: AnyFact = facts.RankPersisted(0, command.rank, command.index, command.point)
        else:
            done = facts.PersistFailed(
                0, command.rank, command.index, command.point, "EVS-205", "full"
            )
        self._tell(done)

    def _finish_commit(self, command: commands.Commit, ok: bool) -> None:
        whole = all((command.point, r) in self.indexes for r in range(self.world))
        assert whole, "a commit before all parts are stored"
        tries = [self.stored[command.point, r] for r in range(self.world)]
        assert set.intersection(*tries), "parts of two tries are committed as one (S2)"
        if ok:
            self.store.append(command.point)
            self._tell(facts.Committed(command.point))
        else:
            self._tell(facts.CommitFailed(command.point, "EVS-200", "away"))

    def _finish_read(self, command: commands.ReadStore) -> None:
        lineage = [p for p in sorted(self.store, reverse=True) if p not in self.lost_forever]
        self._tell(
            facts.StoreRead(
                command.attempt,
                tuple(facts.Candidate(p, self.world) for p in lineage),
                expected=bool(lineage),
                branches=dict(self.branches),
            )
        )

    def _finish_branch(self, command: commands.WriteBranch, ok: bool) -> None:
        if ok:
            self.branches[command.attempt] = command.point
            self._tell(facts.BranchWritten(command.attempt))
        else:
            self._tell(facts.BranchWritten(command.attempt, "away", "EVS-200", retryable=True))

    # -- death

    @rule(order=st.permutations(range(3)), said=st.booleans())
    def all_ranks_die(self, order: list[int], said: bool) -> None:
        """The agent ends the others when one dies. What was said but not read yet is read first,
        or the connections break before."""
        for r in [r for r in order if r < self.world]:
            rank = self.ranks[r]
            if said:
                while rank.outbox:
                    self._tell(rank.outbox.popleft())
            rank.outbox.clear()
            rank.writing = None
            self._tell(facts.RankGone(0, r, self._held(r), finished=False))
        self._tell(facts.WorkersOver(0))
        self._new_attempt()

    # -- the model's side of commands

    def _tell(self, fact: AnyFact) -> None:
        for command in self.coordinator.handle(fact, self.now):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case commands.PublishCut():
                given = dict(command.slots)
                assert set(given) == set(range(self.world))
                self.cut = (command.sequence, command.step, given)
            case commands.ClearCut():
                self.cut = None
            case commands.Forget():
                assert not self.readers.get((command.rank, command.index)), "forgotten while read"
                self.slots[command.rank, command.index] = None
            case commands.Digest() | commands.Persist():
                self._read(command.rank, command.index)
                self.work.append(command)
            case commands.CheckMemory():
                for name in command.slots:
                    self._read(name.rank, name.index)
                self.work.append(command)
            case commands.Commit() | commands.ReadStore() | commands.WriteBranch():
                self.work.append(command)
            case _:
                self._answer(command)

    def _answer(self, command: Command) -> None:
        match command:
            case commands.GrantSlot():
                rank = self.ranks[command.rank]
                if rank.waiting == "slot":
                    rank.waiting = ""
                    if command.index >= 0:
                        self._start_writing(command.rank, command.index, command.sequence)
            case commands.OfferTo():
                self._offered(command)
            case commands.ElectTo():
                self._elected(command)
            case _:
                assert isinstance(
                    command,
                    commands.Tell | commands.RefuseTo | commands.AnswerDurable,
                ), command

    def _offered(self, command: commands.OfferTo) -> None:
        rank = self.ranks[command.rank]
        rank.waiting, rank.voted = "vote", None
        self.offer = (command.source, command.point)
        if command.source == "memory":
            assert command.slots, "memory offered without slots"
            assert command.point not in self.lost_forever, "offered off the lineage (S6)"
            for name in command.slots:
                assert self.slots[name.rank, name.index] == command.point
            tries = {self.tries[name.rank, name.index] for name in command.slots}
            assert len(tries) == 1, "two tries are offered as one snapshot (S2)"

    def _elected(self, command: commands.ElectTo) -> None:
        choice = (command.source, command.point)
        self.elected.setdefault(self.attempt, set()).add(choice)
        assert len(self.elected[self.attempt]) == 1, "two elections in one attempt (R6)"
        assert choice == self.offer
        assert all(rank.voted for rank in self.ranks), "elected without everybody's vote (R6)"
        rank = self.ranks[command.rank]
        rank.waiting, rank.restored = "", True
        rank.step = command.point.step if command.point else 0
        if command.rank == self.world - 1:
            known = {*self.store, *(p for p in self.slots.values() if p is not None)}
            self.lost_forever |= {
                p for p in known if p.step > rank.step and p.attempt < self.attempt
            }

    def _start_writing(self, r: int, index: int, sequence: int) -> None:
        assert not self.readers.get((r, index)), "a slot that is read was handed out (R7)"
        newest = self._newest_complete()
        held = self.slots[r, index]
        assert held is None or held != newest, "the newest complete snapshot was given (R7)"
        self.slots[r, index] = None
        self.ranks[r].writing, self.ranks[r].sequence = (r, index), sequence

    def _newest_complete(self) -> Point | None:
        return max(self._whole(), default=None)

    def _whole(self) -> set[Point]:
        """Points that all ranks hold of one try."""
        ranks: dict[tuple[Point, int], set[int]] = {}
        for (r, i), point in self.slots.items():
            if point is not None:
                ranks.setdefault((point, self.tries[r, i]), set()).add(r)
        return {point for (point, _), holders in ranks.items() if len(holders) == self.world}

    def _read(self, r: int, index: int) -> None:
        self.readers[r, index] = self.readers.get((r, index), 0) + 1

    def _read_over(self, r: int, index: int) -> None:
        self.readers[r, index] -= 1

    def _held(self, r: int) -> tuple[Held, ...]:
        return tuple(
            Held(
                r, i, self.slots[r, i], "l" if self.slots[r, i] else "", self.world,
                busy=bool(self.readers.get((r, i))), sequence=self.tries.get((r, i), 0),
            )
            for i in range(2)
        )  # fmt: skip

    def _rank(self, r: int) -> Rank | None:
        return self.ranks[r] if r < self.world else None

    @invariant()
    def waits_are_bounded(self) -> None:
        if self.world:
            assert 0 < self.coordinator.wait() <= 5.0


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=70, deadline=None)


def test_slot_names_of_an_offer_are_the_nodes_own() -> None:
    """R6: each node is offered its own slots of the point, and nothing else."""
    coordinator = Coordinator()
    coordinator.handle(facts.Begun(2, ((0,), (1,)), "auto", False, Policy()), 0.0)
    for node in range(2):
        held = (Held(node, 0, Point(5, 1), "l", 2), Held(node, 1, None, "", 0))
        coordinator.handle(facts.NodeJoined(node, held), 0.0)
    coordinator.handle(facts.StoreRead(2, branches={1: None}), 0.0)
    checks: list[Command] = []
    for rank in range(2):
        coordinator.handle(facts.Registered(rank), 0.0)
        checks += coordinator.handle(facts.OfferAsked(rank, 2), 0.0)
    assert [c.node for c in checks if isinstance(c, commands.CheckMemory)] == [0, 1]
    coordinator.handle(facts.MemoryChecked(0, Point(5, 1), ()), 0.0)
    out = coordinator.handle(facts.MemoryChecked(1, Point(5, 1), ()), 0.0)
    offers = {c.rank: c.slots for c in out if isinstance(c, commands.OfferTo)}
    assert offers == {0: (SlotName(0, 0),), 1: (SlotName(1, 0),)}


def _training(world: int = 1, *, every: int = 1) -> tuple[Coordinator, list[Command]]:
    """A coordinator whose ranks have restored nothing and opened their slots."""
    coordinator = Coordinator()
    out: list[Command] = []
    story: list[AnyFact] = [
        facts.Begun(1, (tuple(range(world)),), "auto", False, Policy(every, 1e9)),
        facts.NodeJoined(0, ()),
        facts.StoreRead(1),
    ]
    for rank in range(world):
        held = (Held(rank, 0, None, "", 0), Held(rank, 1, None, "", 0))
        story += [facts.SlotsSeen(0, rank, held), facts.Registered(rank)]
        story.append(facts.OfferAsked(rank, world))
    story += [facts.Voted(rank, True, "") for rank in range(world)]
    story.append(facts.BranchWritten(1))
    for fact in story:
        out = coordinator.handle(fact, 0.0)
    return coordinator, out


def _made(
    rank: int, step: int, index: int, sequence: int, *, persist: bool = False
) -> facts.CutMade:
    return facts.CutMade(rank, step, index, "l", 0.0, 1, {}, persist, sequence)


def _published(out: list[Command]) -> commands.PublishCut:
    (cut,) = (c for c in out if isinstance(c, commands.PublishCut))
    return cut


def test_slot_of_a_dropped_cut_stays_reserved_until_its_rank_has_spoken() -> None:
    """R7: the rank may have read the page just before the cut was taken back."""
    coordinator, out = _training(2)
    cut = _published(out)
    out = coordinator.handle(facts.CutMissed(0, cut.step, "late"), 1.0)
    assert any(isinstance(c, commands.ClearCut) for c in out)
    before = facts.Boundaries((Boundary(1, cut.step, 0.1),), drained=True)
    assert not any(isinstance(c, commands.GrantSlot) for c in coordinator.handle(before, 2.0))
    slot = next(e for k, e in coordinator.at.table.of_rank(1) if k.index == dict(cut.slots)[1])
    assert slot.reserved == cut.step
    coordinator.handle(facts.Boundaries((Boundary(1, cut.step + 1, 0.1),), drained=True), 4.0)
    assert slot.reserved != cut.step


def test_snapshot_off_the_lineage_is_forgotten_only_when_its_reader_is_done() -> None:
    coordinator, out = _training()
    cut = _published(out)
    (index,) = dict(cut.slots).values()
    coordinator.handle(_made(0, cut.step, index, cut.sequence, persist=True), 1.0)
    coordinator.handle(facts.Digested(0, 0, index), 1.0)
    held = (
        Held(0, index, Point(cut.step, 1), "l", 1, sequence=cut.sequence),
        Held(0, 1 - index, None, "", 0),
    )
    coordinator.handle(facts.RankGone(0, 0, held, False), 2.0)
    coordinator.handle(facts.Begun(2, ((0,),), "never", False, Policy(1, 1e9)), 3.0)
    coordinator.handle(facts.NodeJoined(0, held), 3.0)
    for fact in (
        facts.StoreRead(2), facts.Registered(0), facts.OfferAsked(0, 1), facts.Voted(0, True, ""),
    ):  # fmt: skip
        coordinator.handle(fact, 3.0)
    out = coordinator.handle(facts.BranchWritten(2), 3.0)
    assert any(isinstance(c, commands.ElectTo) for c in out)
    assert not any(isinstance(c, commands.Forget) for c in out)
    out = coordinator.handle(facts.RankPersisted(0, 0, index, Point(cut.step, 1)), 4.0)
    assert commands.Forget(0, 0, index) in out
    assert not any(isinstance(c, commands.Commit) for c in out), "committed off the lineage"


def test_failing_checkpoint_gives_way_to_a_newer_snapshot() -> None:
    """R3: it is retried, it never keeps a slot between the tries, and it is superseded."""
    coordinator, out = _training()
    cut = _published(out)
    first = Point(cut.step, 1)
    index = dict(cut.slots)[0]
    out = coordinator.handle(_made(0, cut.step, index, cut.sequence, persist=True), 1.0)
    coordinator.handle(facts.Digested(0, 0, index), 1.0)
    assert commands.Persist(0, 0, index, first) in out
    out += coordinator.handle(facts.PersistFailed(0, 0, index, first, "EVS-205", "full"), 2.0)
    second = _published(out)
    other = dict(second.slots)[0]
    coordinator.handle(_made(0, second.step, other, second.sequence), 2.5)
    coordinator.handle(facts.Digested(0, 0, other), 2.5)
    out = coordinator.handle(facts.Tick(), 60.0)
    assert [c.point for c in out if isinstance(c, commands.Persist)] in (
        [],
        [Point(second.step, 1)],
    )
    assert coordinator.durable.current is not None
    assert coordinator.durable.current.point == Point(second.step, 1)


def test_higher_claim_stops_all_writing_until_it_is_served() -> None:
    """S6: a zombie commits nothing; adopted by the newer attempt, it makes durable what it has."""
    coordinator, out = _training()
    cut = _published(out)
    index = dict(cut.slots)[0]
    coordinator.handle(_made(0, cut.step, index, cut.sequence, persist=True), 1.0)
    coordinator.handle(facts.Digested(0, 0, index), 1.0)
    point = Point(cut.step, 1)
    coordinator.handle(
        facts.PersistFailed(0, 0, index, point, "EVS-208", "claimed", superseded=True), 2.0
    )
    assert not coordinator.pending
    out = coordinator.handle(facts.Tick(), 100.0)
    assert not any(isinstance(c, commands.Persist | commands.Commit) for c in out)
    coordinator.handle(facts.Begun(2, ((0,),), "auto", True, Policy(1, 1e9)), 101.0)
    assert coordinator.pending


def test_rank_that_asks_before_the_branch_is_read_is_served_when_it_is() -> None:
    """R6: a keeper that died after the branch was written; its heir learns of the election from
    the store, after the rank has asked again."""
    coordinator = Coordinator()
    coordinator.handle(facts.Begun(1, ((0,),), "auto", False, Policy()), 0.0)
    coordinator.handle(facts.NodeJoined(0, ()), 0.0)
    coordinator.handle(facts.Registered(0), 0.0)
    coordinator.handle(facts.OfferAsked(0, 1), 0.0)
    read = facts.StoreRead(1, branched=True, branch=None, branch_source="fresh")
    out = coordinator.handle(read, 0.0)
    assert [c.source for c in out if isinstance(c, commands.OfferTo)] == ["fresh"]
    out = coordinator.handle(facts.Voted(0, True, ""), 0.0)
    assert [c.source for c in out if isinstance(c, commands.ElectTo)] == ["fresh"]


@pytest.mark.parametrize("complete", [True, False])
def test_only_a_snapshot_that_was_complete_is_expected(complete: bool) -> None:
    """R5: the first attempt may end while some ranks alone have made their first cut; where all
    had, and one of them lost it, nothing may begin from scratch."""
    coordinator, out = _training(2)
    cut = _published(out)
    slots = dict(cut.slots)
    made = [0, 1] if complete else [0]
    for rank in made:
        coordinator.handle(_made(rank, cut.step, slots[rank], cut.sequence), 1.0)
    point = Point(cut.step, 1)
    held = [
        (
            Held(0, slots[0], point, "l", 2, sequence=cut.sequence),
            Held(0, 1 - slots[0], None, "", 0),
        ),
        (Held(1, 0, None, "", 0), Held(1, 1, None, "", 0)),
    ]
    for rank in (0, 1):
        coordinator.handle(facts.RankGone(0, rank, held[rank], False), 2.0)
    coordinator.handle(facts.Begun(2, ((0, 1),), "auto", False, Policy(1, 1e9)), 3.0)
    coordinator.handle(facts.NodeJoined(0, held[0] + held[1]), 3.0)
    out = coordinator.handle(facts.StoreRead(2), 3.0)
    for rank in (0, 1):
        out += coordinator.handle(facts.Registered(rank), 3.0)
        out += coordinator.handle(facts.OfferAsked(rank, 2), 3.0)
    refused = [c for c in out if isinstance(c, commands.RefuseTo)]
    assert bool(refused) == complete, out
