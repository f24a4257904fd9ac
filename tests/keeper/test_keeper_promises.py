"""The owner goes on from memory while the store is away, writes nothing before a claim (S6)."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_fakes import DEADLINE, Agent, Keeper, Place, Worker, closing, train

from everstep.agent import owner as agent_owner
from everstep.agent.owner import Owner
from everstep.agent.record import Recorder
from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.errors import JobOwned, ObjectMissing, StoreError
from everstep.keeper.identity import identity_of
from everstep.keeper.storing import Storing
from everstep.store import Job, OwnerIdentity, open_store

AGENT = "agent-of-the-test"


def job_of(place: Place) -> Job:
    return open_store(str(place.folder / "store"), create=True).job(place.job)


def newest(place: Place) -> int:
    return max((e.step or 0 for e in place.events("snapshot.complete")), default=0)


def unmount(place: Place) -> None:
    """An unmounted file system leaves an empty folder."""
    (place.folder / "store").rename(place.folder / "elsewhere")
    (place.folder / "store").mkdir()


def mount(place: Place) -> None:
    shutil.rmtree(place.folder / "store")
    (place.folder / "elsewhere").rename(place.folder / "store")


def live_away(place: Place, keep: list[object], faults: str = "") -> Worker:
    """Attempt 2 of an agent that has promised it: its state came out of memory."""
    # One checkpoint at first, then none: no write is on its way when the store goes.
    place.policy = Policy(snapshot_every=1, checkpoint_every=1e9)
    job_of(place).claim(identity_of(os.getpid(), AGENT))
    keeper, agent = Keeper(place, faults=faults), Agent(place)
    keep.extend([agent, keeper])
    agent.begin(1, ((0,),))
    first = Worker(place, attempt=1)
    first.restore()
    first.open()
    train([first], lambda: place.events("checkpoint.committed"), "a checkpoint")
    unmount(place)
    first.link.close()
    agent.begin(2, ((0,),), expected=True, claimed=False)
    second = Worker(place, attempt=2)
    keep.insert(0, second)
    assert second.restore().source == "memory"
    second.open()
    kept = newest(place)
    train([second], lambda: newest(place) > kept, "snapshots go on")
    return second


@pytest.fixture
def away(place: Place) -> Iterator[Worker]:
    made: list[object] = []
    try:
        yield live_away(place, made)
    finally:
        with closing(*made):
            pass


def test_promised_attempt_is_claimed_before_anything_of_it_is_written(
    place: Place, away: Worker
) -> None:
    # Retention may have asked the time of a store that was still there a moment ago.
    assert not list((place.folder / "store").glob("jobs/*/[!r]*"))
    mount(place)
    job = job_of(place)
    train([away], lambda: 2 in job.branches(), "the branch")
    assert job.highest_claim() == 2
    job.check_claim(1, agents=(AGENT,))  # by whom it was promised
    away.checkpoint()
    assert away.link.await_durable(away.step, timeout=DEADLINE).durable
    assert Point(away.step, 2) in list(job.candidates())


def test_keeper_that_dies_before_the_claim_leaves_the_promise_to_the_next(place: Place) -> None:
    faults = json.dumps([{"point": "keeper.promise.before_claim", "action": "kill"}])
    made: list[object] = []
    worker = live_away(place, made, faults)
    agent, keeper = made[1], made[2]
    assert isinstance(agent, Agent)
    assert isinstance(keeper, Keeper)
    agent.pump()
    mount(place)
    with closing(*made):
        train([worker], lambda: keeper.process.poll() is not None, "the keeper's death")
        with closing(Keeper(place)):
            agent.hand_over()
            agent.begin(2, ((0,),), expected=True, claimed=False)
            train([worker], lambda: 2 in job_of(place).branches(), "the branch")
            job_of(place).check_claim(1, agents=(AGENT,))
            worker.link.close()


def test_promised_attempt_that_a_stranger_has_claimed_writes_nothing(
    place: Place, away: Worker
) -> None:
    """Two lives of one number would be one in the store (R6)."""
    mount(place)
    job = job_of(place)
    assert job.claim(identity_of(os.getppid(), "stranger")) == 2
    train([away], lambda: place.events("branch.refused"), "the refusal")
    assert 2 not in job.branches()
    assert not any(point.attempt == 2 for point in job.candidates())


def _live_and_wait(folder: Path, ready: object) -> None:
    live_away(Place(folder), [])
    ready.set()  # type: ignore[attr-defined]  # multiprocessing's Event
    threading.Event().wait(60.0)


def test_next_agent_that_is_given_a_promised_number_takes_the_next(place: Place) -> None:
    """The agent died before its keeper could claim: the state that it made is not lost."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=_live_and_wait, args=(place.folder, ready), daemon=True)
    process.start()
    assert ready.wait(60.0)
    process.kill()
    process.join()
    place.await_event("agent.lost")
    kept = newest(place)
    agent = Agent(place)
    with closing(agent), pytest.raises(AssertionError, match="lived through already"):
        agent.begin(2, ((0,),))
    mount(place)
    agent = Agent(place)
    agent.begin(3, ((0,),), expected=True)
    worker = Worker(place, attempt=3)
    with closing(agent, worker):
        elected = worker.restore()
        assert elected.source == "memory"
        assert elected.point is not None
        assert (elected.point.attempt, elected.point.step >= kept) == (2, True)
        worker.open()
        job = job_of(place)
        train([worker], lambda: {1, 2, 3} <= set(job.branches()), "all branches")


def test_store_that_is_not_mounted_is_not_made_anew(place: Place) -> None:
    """R5: a new keeper of a job that has been there before."""
    (place.folder / "store").mkdir()
    storing = Storing(str(place.folder / "store"), place.job)
    storing.exists = True
    with pytest.raises(StoreError, match="has gone") as caught:
        storing.read(2)
    assert caught.value.retryable
    assert not isinstance(caught.value, ObjectMissing)
    assert list((place.folder / "store").iterdir()) == []


# -- the agent's side


@pytest.fixture
def owner(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(agent_owner, "PROMISE_SECONDS", 0.0)
    made = Owner(place.settings(), Recorder(place.job, str(place.folder / "events.jsonl")))
    yield made
    made.close()


def test_owner_promises_the_next_numbers_and_claims_beyond_them(place: Place, owner: Owner) -> None:
    assert (owner.claim(promise=True), owner.claimed) == (1, True)
    unmount(place)
    assert (owner.claim(promise=True), owner.claimed) == (2, False)
    assert (owner.claim(promise=True), owner.claimed) == (3, False)
    mount(place)
    assert (owner.claim(promise=True), owner.claimed) == (4, True)
    job = job_of(place)
    assert job.highest_claim() == 4
    job.check_claim(0, agents=(owner.id,))


def test_owner_whose_promise_a_stranger_has_claimed_has_lost_the_job(
    place: Place, owner: Owner
) -> None:
    owner.claim()
    unmount(place)
    owner.claim(promise=True)
    mount(place)
    job_of(place).claim(OwnerIdentity("stranger", "elsewhere", "boot", 1, 1))
    with pytest.raises(JobOwned, match="stranger"):
        owner.claim(promise=True)


def test_empty_folder_in_the_stores_place_is_no_new_job(place: Place) -> None:
    """R5: also where the store was open before."""
    storing = Storing(str(place.folder / "store"), place.job)
    assert storing.read(1).branches == {}
    storing.exists = True
    unmount(place)
    with pytest.raises(StoreError, match="has gone"):
        storing.read(2)
