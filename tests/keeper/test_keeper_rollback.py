"""What a decision asks of the next attempt: another state than the newest, a first batch that
waits, and word of a step that is computed once more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keeper_fakes import DEADLINE, Agent, Keeper, Worker, closing, until
from keeper_fakes import Place as Folder
from test_keeper_decisions import Story, _held

from everstep.core.health import Health
from everstep.core.ids import Point
from everstep.core.settings import Settings
from everstep.errors import NewerFormat, NoRecoveryPoint, StoreError
from everstep.keeper import commands, facts
from everstep.keeper.facts import Boundary, Candidate, Held
from everstep.keeper.rollback import rollback_order
from everstep.keeper.storing import Storing
from everstep.keeper.wire import Release
from everstep.store import Branch, OwnerIdentity, digest, open_store
from everstep.testing.snapshots import world_of
from everstep.train.connect import Connection
from everstep.train.place import Place
from everstep.train.voice import Voice

TARGET = Point(10, 1)
NEWEST = Point(20, 1)
SOUND = Health("finite", "all", "agreed")
STORED = (Candidate(TARGET, 1, True), Candidate(Point(5, 1), 1, True))


def rolled_back(
    story: Story, *held: Held, target: Point = TARGET, attempt: int = 2, **begun: object
) -> None:
    """An attempt begins as a rollback."""
    ranks = (tuple(range(story.world)),)
    story.tell(
        facts.Begun(attempt, ranks, "auto", False, story.policy, recover=target, **begun),  # type: ignore[arg-type]
        facts.NodeJoined(0, held),
    )


def restored(story: Story, *rejected: str, **store: object) -> None:
    known: dict[str, object] = {"candidates": STORED, "expected": True, "branches": {1: None}}
    story.restore(2, *rejected, **(known | store))


# -- which state (R5, R6, S6)


def test_a_rollback_goes_on_from_its_target_and_leaves_newer_memory_behind() -> None:
    """S6, R6."""
    story = Story()
    rolled_back(story, *_held(0, NEWEST))
    restored(story)
    assert story.coordinator.at.origin == TARGET
    offer = story.newest(commands.OfferTo)
    assert (offer.source, offer.point) == ("store", TARGET)  # type: ignore[attr-defined]
    branch = story.newest(commands.WriteBranch)
    assert (branch.attempt, branch.point) == (2, TARGET)  # type: ignore[attr-defined]
    assert commands.Forget(0, 0, 0) in story.said
    # The store is asked for nothing newer either.
    assert story.said[0] == commands.ReadStore(0, 2, TARGET)


def test_the_attempt_after_a_rollback_does_not_see_what_was_left_behind() -> None:
    """S6: the tail was committed in the meantime; a newer keeper still holds it in memory."""
    story = Story()
    story.begin(3, *_held(0, NEWEST))
    story.restore(
        3, candidates=(Candidate(TARGET, 1),), expected=True, branches={1: None, 2: TARGET}
    )
    assert story.coordinator.at.origin == TARGET


def test_the_target_itself_is_taken_from_memory_where_it_is_still_there() -> None:
    story = Story()
    rolled_back(story, *_held(0, TARGET))
    restored(story)
    assert story.newest(commands.OfferTo).source == "memory"  # type: ignore[attr-defined]
    assert story.coordinator.at.origin == TARGET


def test_a_damaged_target_gives_way_to_the_next_older_sound_one() -> None:
    """Never to a newer one, and not to one that is known to be unsound."""
    story = Story()
    rolled_back(story, *_held(0, NEWEST))
    stored = (
        Candidate(TARGET, 1, True), Candidate(Point(9, 1), 1), Candidate(Point(8, 1), 1, False),
        Candidate(Point(5, 1), 1, True),
    )  # fmt: skip
    restored(story, "a chunk is damaged", candidates=stored)
    assert story.coordinator.at.origin == Point(5, 1)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_rollback_never_begins_anew(resume: str) -> None:
    """R5."""
    story = Story()
    story.tell(
        facts.Begun(2, ((0,),), resume, False, story.policy, recover=TARGET),
        facts.NodeJoined(0, _held(0, NEWEST)),
        facts.StoreRead(2, branches={1: None}),
        facts.Registered(0),
        facts.OfferAsked(0, 1),
    )
    assert story.newest(commands.RefuseTo).code == NoRecoveryPoint.code  # type: ignore[attr-defined]


def test_a_rollback_does_not_take_what_is_in_memory_for_want_of_a_store() -> None:
    story = Story()
    rolled_back(story, *_held(0, NEWEST))
    story.tell(facts.Registered(0), facts.OfferAsked(0, 1))
    for _ in range(9):
        story.tell(facts.StoreRead(2, error="away", error_code=StoreError.code), seconds=20.0)
    assert story.newest(commands.RefuseTo).code == StoreError.code  # type: ignore[attr-defined]


def test_a_target_in_memory_does_not_wait_for_a_store_that_is_away() -> None:
    story = Story()
    rolled_back(story, *_held(0, TARGET))
    story.tell(facts.Registered(0), facts.OfferAsked(0, 1))
    story.tell(facts.Tick(), seconds=20.0)
    story._check()
    story.tell(facts.Voted(0, True, ""))
    story.tell(facts.BranchWritten(2))
    assert story.coordinator.at.origin == TARGET


points = st.builds(Point, st.integers(0, 12), st.integers(1, 3))
candidates = st.lists(
    st.builds(Candidate, points, st.just(1), st.sampled_from([None, True, False])),
    unique_by=lambda candidate: candidate.point,
)


@given(candidates, points)
def test_the_order_of_a_rollback(found: list[Candidate], target: Point) -> None:
    order = rollback_order(found, target)
    wanted = [c for c in found if c.point == target or (c.point < target and c.sound is not False)]
    assert sorted(c.point for c in order) == sorted(c.point for c in wanted)
    assert all(c.point == target for c in order[:1] if target in {c.point for c in found})
    older = [c for c in order if c.point != target]
    assert older == sorted(older, key=lambda c: (not c.sound, -c.point.step, -c.point.attempt))


@given(candidates, points, points, st.integers(0, 8))
def test_whatever_fails_a_rollback_ends_at_its_target_or_before(
    found: list[Candidate], target: Point, memory: Point, failures: int
) -> None:
    """R5, R6: nothing newer, nothing unsound but the target, never from nothing."""
    story = Story()
    rolled_back(story, *_held(0, memory), target=target, attempt=4)
    branches = dict.fromkeys((1, 2, 3))
    story.tell(facts.StoreRead(4, tuple(found), expected=True, branches=branches))
    story.tell(facts.Registered(0), facts.OfferAsked(0, 1))
    for _ in range(failures):
        story._check()
        story.tell(facts.Voted(0, False, "damaged"))
    story._check()
    story.tell(facts.Voted(0, True, ""))
    story.tell(facts.BranchWritten(4))
    origin = story.coordinator.at.origin
    if story.coordinator.election.elected is None:
        assert story.newest(commands.RefuseTo).code == NoRecoveryPoint.code  # type: ignore[attr-defined]
        return
    assert origin is not None
    assert origin <= target
    unsound = {c.point for c in found if c.sound is False}
    assert origin == target or origin not in unsound


def test_what_the_store_has_up_to_the_target(tmp_path: Path) -> None:
    """The real store: newer ones are not read, damaged ones are named, health is told; one of a
    newer format is not skipped."""
    job = open_store(str(tmp_path / "store"), create=True).job("job")
    job.claim(OwnerIdentity("a", "h", "b", 1, 1))
    job.write_branch(1, Branch(None, "fresh", "first start", 1))
    healths = {2: None, 4: Health("bad", "all", "agreed"), 6: None, 8: SOUND, 9: SOUND}
    for step, health in healths.items():
        for part in world_of(step, 1, 1, health=health):
            job.write_rank(part, facts={}, unique=f"u{step}")
        job.try_commit(Point(step, 1), 1)

    def manifest(step: int) -> Path:
        return next((tmp_path / "store").glob(f"jobs/job/steps/{step:012}-*/manifest"))

    manifest(9).write_bytes(b"newer than the target, and damaged")
    manifest(6).write_bytes(b"damaged")
    storing = Storing(str(tmp_path / "store"), "job")
    read = storing.read(2, Point(8, 1))
    assert [(c.point.step, c.sound) for c in read.candidates] == [(8, True), (4, False), (2, None)]
    assert len(read.damaged) == 1
    assert "step 6" in read.damaged[0]
    assert read.expected

    data = bytearray(manifest(8).read_bytes())
    data[12] = 3
    data[24:40] = digest(bytes(data[:24] + data[40:]))
    manifest(8).write_bytes(data)
    with pytest.raises(NewerFormat):
        storing.read(2, Point(8, 1))


# -- a replay


def replayed(story: Story, until_step: int = 12) -> None:
    rolled_back(story, replay_until=until_step)
    restored(story, candidates=(Candidate(TARGET, story.world, True),))


def stand(story: Story, *steps: int) -> None:
    at = tuple(Boundary(rank, step, 0.01) for rank, step in enumerate(steps))
    story.tell(facts.Boundaries(at, drained=False))


def test_a_step_that_all_ranks_pass_in_a_replay_is_told_once() -> None:
    story = Story(world=2)
    replayed(story)
    stand(story, 12, 11)
    assert not story.events("replay.differed")
    stand(story, 13, 12)
    stand(story, 14, 13)
    assert [e.step for e in story.events("replay.differed")] == [12]


def test_a_step_that_one_rank_does_not_pass_again_is_not_told() -> None:
    story = Story(world=2)
    replayed(story)
    stand(story, 12, 11)
    story.tell(facts.RankGone(0, 1, (), False))
    stand(story, 13)
    assert not story.events("replay.differed")


def test_an_attempt_that_is_no_replay_tells_nothing() -> None:
    story = Story()
    rolled_back(story)
    restored(story)
    stand(story, 50)
    assert not story.events("replay.differed")


# -- a first batch that waits


HELD = Place(0, 1, 0, 0, ((0,),), "attempt-1")


def waiting(worker: Worker) -> Connection:
    settings = Settings(store="s", job="job", attempt=1)
    return Connection(worker.link, HELD, Voice(settings, HELD))


def test_a_held_worker_goes_on_when_it_is_released(place: Folder) -> None:
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),), hold=60.0)
    worker = Worker(place, attempt=1)
    with closing(keeper, agent, worker), ThreadPoolExecutor(1) as pool:
        held = pool.submit(waiting(worker).await_release)
        until(lambda: worker.link.page.held_until() > time.monotonic_ns(), "it is held")
        agent.link.send(Release(7))  # of another attempt
        agent.link.send(Release(1))
        assert held.result(DEADLINE) < DEADLINE
        assert worker.link.page.held_until() == 0


def test_a_held_worker_goes_on_at_the_deadline_and_not_before(place: Folder) -> None:
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),), hold=0.3)
    worker = Worker(place, attempt=1)
    with closing(keeper, agent, worker):
        deadline = worker.link.page.held_until()
        waiting(worker).await_release()
        assert deadline <= time.monotonic_ns() < deadline + DEADLINE * 1e9
        assert waiting(worker).await_release() < 0.1  # and never again


def test_a_keeper_that_dies_holds_nobody(place: Folder) -> None:
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),), hold=600.0)
    worker = Worker(place, attempt=1)
    with closing(agent, worker), ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def wait() -> float:
            began.set()
            return waiting(worker).await_release()

        held = pool.submit(wait)
        assert began.wait(DEADLINE)
        keeper.kill()
        assert held.result(DEADLINE) < DEADLINE


def test_what_is_asked_of_an_attempt_reaches_its_workers_and_not_those_of_the_next(
    place: Folder,
) -> None:
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),), skip=(7, 9), replay_until=6, hold=60.0)
    worker = Worker(place, attempt=1)
    with closing(keeper, agent, worker):
        assert worker.link.skip == {7, 9}
        assert worker.link.replay_until == 6
        worker.link.close()
        agent.begin(2, ((0,),))
        after = Worker(place, attempt=2)
        with closing(after):
            assert (after.link.skip, after.link.replay_until) == (frozenset(), None)
            assert after.link.page.held_until() == 0
