"""A branch that the store did not take before its keeper died is written by the next one (S6)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_fakes import DEADLINE, Agent, Keeper, Place, Worker, closing, train
from test_keeper_decisions import Story, _empty, _held

from everstep.core.ids import Point
from everstep.core.settings import Settings
from everstep.errors import CommitRefused, StoreNotWritable
from everstep.keeper import commands, facts
from everstep.keeper.branches import Branches
from everstep.keeper.commands import Command
from everstep.keeper.control import KEPT_ELECTIONS, ControlPage, create_page
from everstep.keeper.owed import bridged, missing_link
from everstep.keeper.situation import Situation
from everstep.keeper.storing import Storing
from everstep.keeper.wire import WentOn
from everstep.store import Branch, Job, open_store
from everstep.store.lineage import limits
from everstep.testing.faulty import BackendFault


class AwayPlace(Place):
    """Its store takes no branch while the file ``away`` exists."""

    def settings(self, node: int = 0) -> Settings:
        plan = self.folder / "plan.json"
        fault = BackendFault("fail", "create", "/branch", times=0, during=str(self.away))
        if not plan.exists():  # a keeper may be reading it
            plan.write_bytes(msgspec.json.encode([fault]))
        url = f"faulty+file://{quote(str(self.folder / 'store'))}?plan={quote(str(plan))}"
        return dataclasses.replace(super().settings(node), store=url)

    @property
    def away(self) -> Path:
        return self.folder / "away"


@pytest.fixture
def place(tmp_path: Path, end_keepers: Callable[[], list[int]]) -> Iterator[AwayPlace]:
    place = AwayPlace(tmp_path)
    place.away.touch()
    yield place
    end_keepers()


def job_of(place: Place) -> Job:
    return open_store(str(place.folder / "store")).job(place.job)


def newest(place: Place) -> int:
    return max((e.step or 0 for e in place.events("snapshot.complete")), default=0)


# -- real keepers


def test_branch_that_died_with_keeper_and_workers_is_written_by_the_next_attempt(
    place: AwayPlace,
) -> None:
    """S6: the agent's descriptors of memory and page are all that is left of the first attempt."""
    first = Keeper(place)
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1)
    with closing(agent, first):
        worker.restore()
        place.await_event("branch.owed")
        worker.open()
        train([worker], lambda: newest(place), "a snapshot")
        agent.pump()
        first.kill()
        place.away.unlink()
        worker.link.close()
        second = Keeper(place)
        with closing(second):
            agent.hand_over()
            agent.begin(2, ((0,),), expected=True)
            again = Worker(place, attempt=2)
            elected = again.restore()
            assert elected.source == "memory"
            again.open()
            train([again], lambda: place.events("checkpoint.committed"), "a checkpoint")
            again.link.close()
    assert dict(job_of(place).branches()) == {
        1: Branch(None, "fresh", "no recovery point exists", 1, {}),
        2: Branch(elected.point, "memory", "", 1, {}),
    }


def test_branch_that_died_with_the_keeper_is_known_to_the_worker(place: AwayPlace) -> None:
    """S6 where no agent runs: nobody but the worker holds anything of the dead keeper."""
    keepers = [Keeper(place)]
    worker = Worker(place, launch="plain", restart=lambda: keepers.append(Keeper(place)))
    try:
        worker.restore()
        place.await_event("branch.owed")
        worker.open()
        train([worker], lambda: newest(place), "a snapshot")
        keepers[0].kill()
        place.away.unlink()
        train([worker], lambda: place.events("checkpoint.committed"), "a checkpoint")
        assert job_of(place).branches()[1].restored is None
        assert not place.events("restore.unknown")
        worker.checkpoint()
        assert worker.link.await_durable(worker.step, timeout=DEADLINE).durable
    finally:
        worker.link.close()
        for keeper in keepers:
            keeper.kill()


# -- what is noted


def test_page_keeps_what_attempts_went_on_from() -> None:
    page = ControlPage(create_page())
    noted = [WentOn(1, "fresh", None, 2), WentOn(2, "memory", Point(7, 1), 2)]
    for election in noted:
        page.note_election(election)
    assert page.elections() == tuple(noted)
    page.forget_election(1)
    assert page.elections() == (noted[1],)
    many = [WentOn(n, "store", Point(n, n - 1), 2) for n in range(2, KEPT_ELECTIONS + 5)]
    page.note_elections(many)
    assert page.elections() == tuple(many[-KEPT_ELECTIONS:])
    page.close()


def test_page_whose_writing_a_death_has_torn_keeps_what_it_had() -> None:
    fd = create_page()
    page = ControlPage(fd)
    before = (WentOn(1, "rooted", None, 1), WentOn(2, "memory", Point(7, 1), 1))
    page.note_elections(before)
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    page.note_elections([WentOn(3, "memory", Point(9, 2), 1)])
    now = os.pread(fd, len(whole), 0)
    changed = [at for at in range(len(whole)) if whole[at] != now[at]]
    for at in changed[:-1]:
        os.pwrite(fd, now[: at + 1] + whole[at + 1 :], 0)
        assert page.elections() == before, f"torn after byte {at}"
    page.close()


# -- what the coordinator makes of it


def _joined(story: Story, attempt: int, *told: WentOn, held: Point | None = None) -> None:
    slots = _held(0, held) if held is not None else ()
    story.tell(
        facts.Begun(attempt, ((0,),), "auto", False, story.policy),
        facts.NodeJoined(0, slots, told),
    )


def test_missing_branches_are_written_oldest_first_before_the_attempts_own() -> None:
    """S6: a branch whose ancestor has none would be refused for good."""
    story = Story()
    told = (WentOn(1, "fresh", None, 1), WentOn(2, "memory", Point(5, 1), 1))
    _joined(story, 3, *told, held=Point(9, 2))
    story.tell(facts.StoreRead(3), facts.Registered(0), facts.OfferAsked(0, 1))
    story._check()
    story.tell(facts.Voted(0, True, ""))
    assert story.coordinator.at.origin == Point(9, 2)
    for attempt in (1, 2, 3):
        story.tell(facts.BranchWritten(attempt))
    written = [(c.attempt, c.point) for c in story.said if isinstance(c, commands.WriteBranch)]
    assert list(dict.fromkeys(written)) == [(1, None), (2, Point(5, 1)), (3, Point(9, 2))]
    assert story.coordinator.at.branches == {1: None, 2: Point(5, 1), 3: Point(9, 2)}


@pytest.mark.parametrize("by_page", [True, False])
def test_election_that_a_dead_keeper_held_stands(by_page: bool) -> None:
    """R6: one attempt is elected once, also where the store knows nothing of it."""
    story = Story()
    mine = WentOn(1, "fresh", None, 1)
    _joined(story, 1, *((mine,) if by_page else ()))
    if not by_page:
        story.tell(facts.ElectionKnown(mine))
    story.tell(facts.Registered(0), facts.StoreRead(1))
    assert story.coordinator.at.elected
    assert isinstance(story.newest(commands.WriteBranch), commands.WriteBranch)
    story.tell(facts.BranchWritten(1))
    assert story.coordinator.at.branches == {1: None}
    assert not story.events("restore.unknown")


def test_snapshot_is_stored_though_its_branch_was_owed_and_nobody_comes() -> None:
    """S6: the keeper, the workers and the agent died; the next agent stops the job at once."""
    story = Story()
    _joined(story, 2, WentOn(1, "fresh", None, 1), held=Point(5, 1))
    story.tell(facts.StoreRead(2), facts.Left())
    story.tell(facts.BranchWritten(1))
    story.store()
    assert Point(5, 1) in story.coordinator.durable.commits


def test_memory_whose_origin_nobody_knows_gives_way_to_the_store() -> None:
    """Nothing is stuck: a branch that names it would be refused at every try."""
    story = Story()
    _joined(story, 3, held=Point(9, 2))
    store = facts.StoreRead(
        3, (facts.Candidate(Point(4, 1), 1),), expected=True, branches={1: None}
    )
    story.tell(store, facts.Registered(0), facts.OfferAsked(0, 1))
    offered = story.newest(commands.OfferTo)
    assert isinstance(offered, commands.OfferTo)
    assert (offered.source, offered.point) == ("store", Point(4, 1))


def test_branch_that_the_store_has_already_is_not_owed() -> None:
    story = Story()
    _joined(story, 1, WentOn(1, "fresh", None, 1))
    story.tell(
        facts.StoreRead(1, branched=True, branch_source="fresh", branches={1: None}),
        facts.Registered(0),
    )
    assert story.coordinator.election.branches.owed == []
    assert story.coordinator.at.elected


def test_branch_of_another_environment_is_the_same_branch(tmp_path: Path) -> None:
    """The keeper that wrote it died before it could say so; the next has other facts."""
    storing = Storing(str(tmp_path), "job")
    storing.write_branch(1, None, "fresh", 2, {"torch": "2.13"})
    storing.write_branch(1, None, "fresh", 2, {})
    with pytest.raises(CommitRefused, match="another branch already"):
        storing.write_branch(1, None, "fresh", 3, {})


def test_store_that_hangs_does_not_keep_a_snapshot_in_memory_from_the_ranks() -> None:
    """S6: what it says when it answers at last is taken all the same."""
    story = Story()
    _joined(story, 2, WentOn(1, "fresh", None, 1), held=Point(5, 1))
    story.tell(facts.Registered(0), facts.OfferAsked(0, 1), facts.Tick())
    assert not any(isinstance(c, commands.CheckMemory) for c in story.said)
    story.tell(facts.Tick(), seconds=20.0)
    story._check()
    story.tell(facts.Voted(0, True, ""))
    assert story.coordinator.at.origin == Point(5, 1)
    story.tell(facts.StoreRead(2, branches={1: None}))
    story.tell(facts.BranchWritten(2))
    assert story.coordinator.at.branches == {1: None, 2: Point(5, 1)}


def test_branch_is_written_though_the_store_was_read_while_an_earlier_one_was_tried() -> None:
    """The new keeper tries the oldest first, and then reads that it is there already."""
    story = Story()
    _joined(story, 2, WentOn(1, "fresh", None, 1), WentOn(2, "memory", Point(5, 1), 1))
    story.tell(facts.StoreRead(2, branches={1: None}), facts.BranchWritten(1), facts.Tick())
    newest = story.newest(commands.WriteBranch)
    assert isinstance(newest, commands.WriteBranch)
    assert newest.attempt == 2


# -- a store that is away for many restarts


@dataclasses.dataclass
class Shelf:
    """A store of branches that answers what it is asked, and refuses what the real one refuses.
    ``readable``: it can be read while it is away for writing."""

    branches: dict[int, Point | None] = dataclasses.field(default_factory=dict)
    candidates: tuple[facts.Candidate, ...] = ()
    away: bool = True
    readable: bool = False
    refused: list[int] = dataclasses.field(default_factory=list)

    def serve(self, story: Story, said: list[Command]) -> None:
        """Answer ``said``, and what the answers lead to."""
        while said:
            command = said.pop(0)
            if isinstance(command, commands.ReadStore):
                said += story.tell(self._read(command.attempt))
            elif isinstance(command, commands.WriteBranch):
                said += story.tell(self._write(command))

    def _read(self, attempt: int) -> facts.StoreRead:
        if self.away and not self.readable:
            return facts.StoreRead(attempt, error="away", error_code="EVS-200")
        expected = bool(self.candidates)
        there = dict(self.branches)
        return facts.StoreRead(attempt, self.candidates, expected=expected, branches=there)

    def _write(self, command: commands.WriteBranch) -> facts.BranchWritten:
        if self.away:
            return facts.BranchWritten(command.attempt, "away", "EVS-200", retryable=True)
        if command.point is not None and command.point.attempt not in self.branches:
            self.refused.append(command.attempt)
            return facts.BranchWritten(command.attempt, "no branch", CommitRefused.code)
        there = self.branches.setdefault(command.attempt, command.point)
        assert there == command.point, "a second branch with other bytes"
        return facts.BranchWritten(command.attempt)


@dataclasses.dataclass
class Life:
    """A job on one node: its keeper, which may die, its page and its memory, which stay."""

    shelf: Shelf = dataclasses.field(default_factory=Shelf)
    page: ControlPage = dataclasses.field(default_factory=lambda: ControlPage(create_page()))
    story: Story = dataclasses.field(default_factory=Story)
    held: tuple[facts.Held, ...] = _empty(0)

    def keeper_dies(self) -> None:
        self.story = Story(now=self.story.now)

    def begin(self, attempt: int) -> Point | None:
        """The next attempt until its election; what it went on from."""
        story, shelf = self.story, self.shelf
        begun = facts.Begun(attempt, ((0,),), "auto", False, story.policy)
        said = story.tell(begun, facts.NodeJoined(0, self.held, self.page.elections()))
        said += story.tell(facts.Registered(0), facts.OfferAsked(0, 1))
        shelf.serve(story, said)
        for _ in range(20):
            self.tick(1)
            if story.coordinator.at.elected:
                break
            story._check()
            shelf.serve(story, story.tell(facts.Voted(0, True, "")))
        elect = story.newest(commands.ElectTo)
        assert isinstance(elect, commands.ElectTo)
        mine = WentOn(attempt, elect.source, elect.point, 1)
        self.page.note_elections((*elect.before, mine))
        return elect.point

    def cut(self, step: int) -> None:
        """The attempt makes a snapshot and ends."""
        at = self.story.coordinator.at
        self.held = _held(0, Point(step, at.attempt))
        self.story.tell(facts.RankGone(0, 0, self.held, False))

    def tick(self, times: int, seconds: float = 2.0) -> None:
        for _ in range(times):
            self.shelf.serve(self.story, self.story.tell(facts.Tick(), seconds=seconds))

    def stored(self) -> list[Point]:
        """What is made durable once the job is left."""
        self.story.tell(facts.Left())
        self.story.store()
        return list(self.story.coordinator.durable.commits)


@pytest.mark.parametrize("deaths", [(), (9,), (3, 9, 15)])
def test_twenty_restarts_without_the_store_and_then_a_new_keeper(deaths: tuple[int, ...]) -> None:
    """S6: the newest snapshot is elected and stored, on the lineage of what the store has."""
    life = Life(Shelf({1: None, 2: Point(3, 1)}, (facts.Candidate(Point(3, 1), 1),)))
    life.held = _held(0, Point(5, 2))
    for attempt in range(3, 25):
        if attempt in deaths:
            life.keeper_dies()
        assert life.begin(attempt) == life.held[0].point
        assert len(life.story.coordinator.election.branches.owed) <= 3 + 3 * len(deaths)
        life.cut(10 * attempt)
    life.keeper_dies()
    life.shelf.away = False
    assert life.begin(25) == Point(240, 24)
    life.tick(3)
    assert life.shelf.refused == []
    branches = life.shelf.branches
    assert branches[25] == Point(240, 24)
    assert {25, 24, 2, 1} <= limits(branches).keys(), "off the lineage"
    assert (limits(branches)[2], limits(branches)[1]) == (5, 3)
    assert Point(240, 24) in life.stored()


def test_snapshot_that_many_attempts_go_on_from_keeps_its_link() -> None:
    """S6: attempt 2 is restored by attempt 19 still; those between made no snapshot."""
    life = Life(Shelf(readable=True))
    life.begin(1)
    life.cut(10)
    life.shelf.readable = False
    life.begin(2)
    life.cut(20)
    for attempt in range(3, 19):
        assert life.begin(attempt) == Point(20, 2)
    life.keeper_dies()
    assert life.begin(19) == Point(20, 2)
    life.keeper_dies()
    life.shelf.away = False
    assert life.begin(20) == Point(20, 2)
    life.tick(3)
    assert life.shelf.refused == []
    assert life.shelf.branches[2] == Point(10, 1)
    assert life.shelf.branches[20] == Point(20, 2)
    assert Point(20, 2) in life.stored()


def test_store_that_comes_back_to_the_same_keeper_gets_no_branch_that_nobody_needs() -> None:
    life = Life(Shelf({1: None}))
    life.held = _held(0, Point(5, 1))
    for attempt in range(2, 25):
        life.begin(attempt)
        life.cut(10 * attempt)
    life.shelf.away = False
    assert life.begin(25) == Point(240, 24)
    life.tick(3)
    assert life.shelf.refused == []
    assert {1, 24, 25} <= limits(life.shelf.branches).keys()
    assert len(life.shelf.branches) <= 5


def test_branch_that_an_earlier_keeper_may_have_written_is_never_left_out() -> None:
    """S6: it wrote that of attempt 4 and a checkpoint with it, and the next cannot know."""
    life = Life(Shelf({1: None}))
    life.held = _held(0, Point(5, 1))
    for attempt in range(2, 5):
        life.begin(attempt)
        life.cut(10 * attempt)
    life.shelf.away = False
    life.tick(10)
    assert 4 in life.shelf.branches
    life.shelf.away = True
    life.keeper_dies()
    for attempt in range(5, 12):
        life.begin(attempt)
        life.cut(10 * attempt)
    life.shelf.away = False
    life.tick(10)
    assert life.shelf.refused == []
    assert {1, 4, 11} <= limits(life.shelf.branches).keys()


def test_owed_branches_of_a_life_that_gave_way_to_the_store_are_owed_no_more() -> None:
    """Attempt 6 went on from a broken chain blindly, and ended before the store was back."""
    life = Life(Shelf({1: None}, (facts.Candidate(Point(3, 1), 1),)))
    life.page.note_elections([WentOn(5, "memory", Point(60, 4), 1)])
    life.held = _held(0, Point(90, 5))
    assert life.begin(6) == Point(90, 5)
    life.cut(95)
    life.shelf.away = False
    assert life.begin(7) == Point(3, 1)
    life.tick(20)
    assert life.shelf.branches == {1: None, 7: Point(3, 1)}
    assert life.story.coordinator.election.branches.owed == []


def test_chain_that_is_broken_gives_way_to_the_store() -> None:
    """S6: the point's own attempt is known, but not the one before it."""
    life = Life(Shelf({1: None}, (facts.Candidate(Point(3, 1), 1),), away=False))
    life.page.note_elections([WentOn(5, "memory", Point(60, 4), 1)])
    life.held = _held(0, Point(90, 5))
    assert life.begin(6) == Point(3, 1)
    assert life.shelf.branches == {1: None, 6: Point(3, 1)}
    assert life.shelf.refused == []
    assert [event.step for event in life.story.events("restore.rejected")] == [90]


def test_chain_that_is_broken_gets_a_root_where_there_is_nothing_else() -> None:
    """S6, R5: what is in memory alone is not lost, and it is stored."""
    life = Life(Shelf({1: None}, away=False))
    life.page.note_elections([WentOn(5, "memory", Point(60, 4), 1)])
    life.held = _held(0, Point(90, 5))
    assert life.begin(6) == Point(90, 5)
    life.tick(1)
    assert life.shelf.branches == {1: None, 4: None, 5: Point(60, 4), 6: Point(90, 5)}
    (event,) = life.story.events("branch.rooted")
    assert (event.level, event.facts["rooted"]) == ("error", 4)
    assert Point(90, 5) in life.stored()


def test_broken_chain_that_was_elected_blindly_is_mended_once_the_store_is_back() -> None:
    """S6: the refusal is said once, the store is read, and what is trained is stored."""
    life = Life(Shelf({1: None}, (facts.Candidate(Point(3, 1), 1),)))
    life.page.note_elections([WentOn(5, "memory", Point(60, 4), 1)])
    life.held = _held(0, Point(90, 5))
    assert life.begin(6) == Point(90, 5)
    life.shelf.away = False
    life.tick(20)
    assert life.shelf.refused == [5]
    assert len(life.story.events("branch.refused")) == 1
    assert life.shelf.branches == {1: None, 4: None, 5: Point(60, 4), 6: Point(90, 5)}
    assert Point(90, 5) in life.stored()


def test_refusal_that_reading_the_store_does_not_explain_is_not_tried_again() -> None:
    """A stranger has the number: every try would be refused."""
    life = Life(Shelf(readable=True))
    life.begin(1)
    election = life.story.coordinator.election
    refused = facts.BranchWritten(1, "a stranger has claimed it", CommitRefused.code)
    life.story.tell(facts.Tick(), seconds=10.0)
    assert isinstance(life.story.tell(refused)[-1], commands.ReadStore)
    out = life.story.tell(facts.StoreRead(1))
    assert any(isinstance(command, commands.WriteBranch) for command in out)
    out = life.story.tell(refused, *[facts.Tick()] * 30, seconds=10.0)
    assert not any(isinstance(c, commands.WriteBranch | commands.ReadStore) for c in out)
    assert len(life.story.events("branch.refused")) == 1
    assert [one.attempt for one in election.branches.owed] == [1]


def test_store_that_is_not_writable_is_tried_again_after_a_minute() -> None:
    """Somebody may repair it."""
    life = Life(Shelf(readable=True))
    life.begin(1)
    refused = facts.BranchWritten(1, "permission denied", StoreNotWritable.code)
    life.story.tell(refused)
    out = life.story.tell(*[facts.Tick()] * 5, seconds=10.0)
    assert not any(isinstance(command, commands.WriteBranch) for command in out)
    out = life.story.tell(*[facts.Tick()] * 2, seconds=10.0)
    assert any(isinstance(command, commands.WriteBranch) for command in out)


# -- which branches are owed


def _attempts(draw: st.DrawFn) -> list[WentOn]:
    steps = {0: 0}
    found = []
    for attempt in range(1, draw(st.integers(2, 12))):
        origin = draw(st.integers(0, attempt - 1))
        step = draw(st.integers(steps[origin], steps[origin] + 9))
        point = Point(step, origin) if origin else None
        steps[attempt] = step if origin else 0
        found.append(WentOn(attempt, "memory" if point else "fresh", point, 1))
    return found


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_bridged_chain_leaves_readers_the_same_lineage(data: st.DataObject) -> None:
    """S6: attempts of the chain that stay have the limits that they had."""
    owed = data.draw(st.composite(_attempts)())
    needed = data.draw(st.sets(st.sampled_from([one.attempt for one in owed])))
    kept = bridged(owed, needed)
    before = limits({one.attempt: one.point for one in owed})
    after = limits({one.attempt: one.point for one in kept})
    stay = {owed[0].attempt, owed[-1].attempt, *needed}
    assert {one.attempt for one in kept} == stay
    assert after == {attempt: limit for attempt, limit in before.items() if attempt in stay}
    assert all((one.source == "fresh") == (one.point is None) for one in kept)


@pytest.mark.parametrize(
    ("attempt", "missing"), [(1, None), (3, None), (4, None), (6, 5), (7, 5), (8, 8), (9, 9)]
)
def test_missing_link_is_where_the_chain_ends_early(attempt: int, missing: int | None) -> None:
    said = {
        2: None, 3: Point(4, 2), 4: Point(3, 1), 6: Point(8, 5), 7: Point(9, 6), 9: Point(9, 9)
    }  # fmt: skip
    assert missing_link(attempt, said, stored={1}) == missing


def test_root_that_is_made_for_lack_of_knowledge_says_so_in_the_store(tmp_path: Path) -> None:
    storing = Storing(str(tmp_path), "job")
    storing.write_branch(4, None, "rooted", 1, {})
    storing.write_branch(5, Point(60, 4), "memory", 1, {})
    root = storing.job().branches()[4]
    assert (root.source, root.restored) == ("fresh", None)
    assert "not known any more" in root.fresh_reason


def test_what_a_damaged_branch_named_may_be_known_in_memory() -> None:
    """S6: nodes that lived through the attempt say what it went on from; the store cannot."""
    at = Situation(attempt=4)
    branches = Branches(at)
    branches.learn((WentOn(3, "memory", Point(60, 2), 1),))
    branches.stored({1: None, 2: None, 3: None}, unreadable=(2, 3))
    assert branches.origins() == {1: None, 2: None, 3: Point(60, 2)}
    assert branches.on_lineage(Point(50, 2))
    assert not branches.on_lineage(Point(70, 2))
