"""What the script chose reaches the keeper by rank 0's hello, and goes before the agent's word."""

from __future__ import annotations

import os

from keeper_fakes import Agent, Keeper, Place, Worker, closing, train

from everstep.cadence.policy import Policy

RARELY = Policy(snapshot_every=1000, checkpoint_every=1000.0)
OFTEN = Policy(snapshot_every=3, checkpoint_every=1000.0)


def snapshots(place: Place) -> list[int | None]:
    return [event.step for event in place.events("snapshot.complete")]


def test_rank_0_says_the_cadence_and_says_it_again_to_the_next_keeper(place: Place) -> None:
    """R2: the keeper decides alone, by the policy that it was told before the first cut."""
    place.policy = RARELY
    keeper, second = Keeper(place), None
    agent = Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1, policy=OFTEN)
    with closing(keeper, agent, worker):
        worker.restore()
        worker.open()
        train([worker], lambda: len(snapshots(place)) >= 2, "two snapshots")
        agent.pump()
        keeper.kill()
        seen = len(snapshots(place))
        second = Keeper(place)
        with closing(second):
            agent.hand_over()
            agent.begin(1, ((0,),))
            train([worker], lambda: len(snapshots(place)) >= seen + 2, "two more")
    assert all(step is not None and step % 3 == 0 for step in snapshots(place)), snapshots(place)


def test_rank_0_says_how_many_checkpoints_are_kept(place: Place) -> None:
    """The agent's word would keep three (S7 holds: the newest stays)."""
    place.policy = RARELY
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1, policy=OFTEN, keep_last=1)
    with closing(keeper, agent, worker):
        worker.restore()
        worker.open()
        train([worker], lambda: place.events("checkpoint.committed"), "the first is committed")
        for path in (place.folder / "store").rglob("*"):
            os.utime(path, (1000.0, 1000.0))  # beyond the grace period
        worker.step += 1
        worker.checkpoint()
        removed = place.await_event("checkpoint.removed")
    assert removed.facts["checkpoints"] == 1
    assert len(place.events("checkpoint.committed")) == 2


def test_a_script_without_choices_leaves_the_agents_word(place: Place) -> None:
    place.policy = OFTEN
    keeper, agent = Keeper(place), Agent(place)
    agent.begin(1, ((0,),))
    worker = Worker(place, attempt=1)
    with closing(keeper, agent, worker):
        worker.restore()
        worker.open()
        train([worker], lambda: snapshots(place), "a snapshot")
    assert all(step is not None and step % 3 == 0 for step in snapshots(place)), snapshots(place)
