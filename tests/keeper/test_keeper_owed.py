"""A branch that the store did not take before its keeper died is written by the next one (S6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from keeper_fakes import DEADLINE, Agent, Keeper, Place, Worker, closing, train
from test_keeper_decisions import Story, _held

from everstep.core.ids import Point
from everstep.core.settings import Settings
from everstep.errors import CommitRefused
from everstep.keeper import commands, facts
from everstep.keeper.control import ControlPage, create_page
from everstep.keeper.storing import Storing
from everstep.keeper.wire import WentOn
from everstep.store import Branch, Job, open_store
from everstep.testing.faulty import BackendFault


class AwayPlace(Place):
    """Its store takes no branch while the file ``away`` exists."""

    def settings(self, node: int = 0) -> Settings:
        plan = self.folder / "plan.json"
        fault = BackendFault("fail", "create", "/branch", times=0, during=str(self.away))
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
    for attempt in range(3, 40):
        page.note_election(WentOn(attempt, "store", Point(attempt, attempt - 1), 2))
    assert [election.attempt for election in page.elections()] == list(range(24, 40))
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
    assert story.coordinator.election.owed == []
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
