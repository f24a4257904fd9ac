"""Steps that give no numbers in real jobs: never a recovery point, replayed bit for bit, left out.

The test is the agent: it begins attempts at a real keeper as a decision would have them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from train_bodies import Training, _batch, _endless
from train_jobs import Jobs, Started, wait_for

import everstep
from everstep.agent.keeper import NodeKeeper
from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.core.settings import Settings
from everstep.keeper.wire import BeginAttempt
from everstep.store import open_store

LAST = 8
BAD = 6
"""The step that fails; the checkpoint to go back to is of step 3."""
TARGET = Point(3, 1)


class Agent:
    """Attempts of a job of ``world`` ranks on one node."""

    def __init__(self, jobs: Jobs, world: int = 1) -> None:
        self.jobs, self.world = jobs, world
        self.settings = Settings(
            store=str(jobs.folder / "store"), job=jobs.name, events=str(jobs.journal),
            state_dir=jobs.environment["EVERSTEP_STATE_DIR"],
        )  # fmt: skip
        self.keeper = NodeKeeper(self.settings, 0, lambda _: None, listening=False)
        self.keeper.launch()
        self.keeper.attach()

    def begin(self, attempt: int, work: Any, /, *, every: int = 1, **asked: Any) -> list[Started]:
        """The workers of an attempt, of which ``asked`` is asked. A snapshot each ``every`` steps;
        checkpoints only where the script asks for them."""
        body, expected = asked.pop("body", {}), asked.pop("expected", attempt > 1)
        ranks = tuple(range(self.world))
        self.keeper.begin(
            BeginAttempt(
                f"attempt-{attempt}", attempt, 0, (ranks,), agent="test",
                expected=expected, policy=Policy(every, 1e6), **asked,
            )
        )  # fmt: skip
        return [self._worker(attempt, rank, every, work, body) for rank in ranks]

    def _worker(self, attempt: int, rank: int, every: int, work: Any, body: Any) -> Started:
        place = {
            "STORE": self.settings.store, "KEEPER": self.keeper.name, "ATTEMPT": str(attempt),
            "RANKS": f"0-{self.world - 1}", "AGENT_PID": str(os.getpid()),
            "SNAPSHOT_EVERY": str(every), "CHECKPOINT_EVERY": "1000000",
        }  # fmt: skip
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world)}
        env = {**{f"EVERSTEP_{name}": value for name, value in place.items()}, **own}
        return self.jobs.start(work, env=env, **body)

    def ended(self, attempt: int) -> None:
        self.keeper.workers_ended(attempt)

    def run(self, attempt: int, work: Any, /, *, code: int = 0, **asked: Any) -> Any:
        """One rank to its end; what it gave back, or what it said."""
        (worker,) = self.begin(attempt, work, **asked)
        assert worker.wait() == code, worker.said()
        self.ended(attempt)
        return worker.said() if code else worker.result()


@pytest.fixture
def agents(jobs: Jobs) -> Iterator[Any]:
    with contextlib.ExitStack() as undo:

        def make(world: int = 1) -> Agent:
            agent = Agent(jobs, world)
            undo.callback(agent.keeper.close)
            return agent

        yield make


def left_out(until: int, skip: int) -> str:
    """The same training without everstep, and without the batch of one step."""
    training = Training()
    for step, batch in zip(range(1, until + 1), _endless(training.loader), strict=False):
        if step != skip:
            training.step(batch)
    return training.digest()


def poisoned(loss: torch.Tensor, step: int, once: str = "") -> torch.Tensor:
    """A loss that is no number at step BAD: always, or once in the job's life."""
    if step != BAD:
        return loss
    if once:
        try:
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return loss
    return loss * math.nan


def step_of(training: Training, batch: Any, step: int, once: str = "") -> torch.Tensor:
    training.optimizer.zero_grad()
    loss = poisoned(torch.nn.functional.mse_loss(training.model(batch[0]), batch[1]), step, once)
    loss.backward()
    training.end()
    return loss


# -- a device that was wrong once


def train_two(meet: str, once: str) -> dict[str, Any]:
    """Two ranks whose gradients one rank spoils once; and the same without everstep."""
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    found = {}
    for name in ("undisturbed", "protected"):
        training = Training()
        torch.manual_seed(10 + rank)
        training.model = DistributedDataParallel(training.model)
        if name == "undisturbed":
            batches = _endless(training.loader)
            for _ in range(LAST):
                training.step(next(batches))
        else:
            run = everstep.attach(**training.objects())
            for batch in run.steps(until=LAST):
                bad = once if rank == 1 else os.devnull  # which exists: never spoilt
                run.log(loss=step_of(training, batch, run.step + 1, bad))
                if run.step + 1 == TARGET.step:
                    run.checkpoint(wait=True)
        found[name] = training.digest()
    distributed.destroy_process_group()
    return found


def test_a_step_that_a_device_spoilt_once_is_replayed_bit_for_bit(
    agents: Any, jobs: Jobs, tmp_path: Path
) -> None:
    """R4, F7: back to the checkpoint, though memory holds a newer state that is sound as well."""
    agent = agents(world=2)
    body = {"once": str(tmp_path / "once")}
    first = agent.begin(1, train_two, body={**body, "meet": str(tmp_path / "meet-1")})
    assert first[1].wait() == 1, first[1].said()
    with contextlib.suppress(ProcessLookupError):
        first[0].kill(9)  # it waits for rank 1, or has ended with what came of it
    first[0].wait()
    agent.ended(1)
    assert "NonFinite: EVS-900: rank 1: non-finite value at step 6: loss is nan" in first[1].said()
    (told,) = [e for e in jobs.events("train.nonfinite") if e.rank == 1]
    assert (told.step, told.level, told.facts["figure"]) == (BAD, "error", "loss")
    # Nothing of the step, or after it, was ever complete.
    complete = {e.step or 0 for e in jobs.events("snapshot.complete")}
    assert TARGET.step in complete
    assert max(complete) < BAD

    second = agent.begin(
        2, train_two, recover=TARGET, replay_until=BAD,
        body={**body, "meet": str(tmp_path / "meet-2")},
    )  # fmt: skip
    for worker in second:
        assert worker.wait() == 0, worker.said()
        digests = worker.result()
        assert digests["protected"] == digests["undisturbed"]
    assert [step for step, _ in jobs.restored()] == [TARGET.step] * 2
    wait_for(lambda: jobs.events("replay.differed"), "the replay is told of")
    assert [e.step for e in jobs.events("replay.differed")] == [BAD]
    job = open_store(agent.settings.store).job(jobs.name)
    assert job.branches()[2].restored == TARGET
    assert [p.healthy for p in job.recovery_points(detection_delay=0.0)] == [True, True]
    assert not any(p.healthy for p in job.recovery_points(detection_delay=1e6))


# -- a program or data that is wrong each time


def train_one() -> str:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=LAST):
        run.log(loss=step_of(training, batch, run.step + 1))
        if run.step + 1 == TARGET.step:
            run.checkpoint(wait=True)
    return training.digest()


def test_a_step_that_fails_each_time_fails_in_the_replay_and_can_be_left_out(
    agents: Any, jobs: Jobs
) -> None:
    agent = agents()
    said = agent.run(1, train_one, code=1)
    assert "step 6: loss is nan" in said
    said = agent.run(2, train_one, code=1, recover=TARGET, replay_until=BAD)
    assert "step 6: loss is nan" in said
    assert not jobs.events("replay.differed")

    digest = agent.run(3, train_one, recover=TARGET, skip=(BAD,))
    assert digest == left_out(LAST, skip=BAD)
    assert [e.step for e in jobs.events("train.step_skipped")] == [BAD]
    assert [step for step, _ in jobs.restored()] == [TARGET.step] * 2
    assert len(jobs.losses()[LAST]) == 1


# -- a verdict that is late


def train_and_tell() -> int:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=2):
        run.log(loss=training.step(batch))
    return run.step


def test_the_first_batch_waits_for_the_verdict_or_for_a_keeper_that_is_gone(
    agents: Any, jobs: Jobs
) -> None:
    """After the restore, before the user's code has anything to compute."""
    agent = agents()
    (worker,) = agent.begin(1, train_and_tell, hold=60.0)
    wait_for(lambda: jobs.events("train.holding"), "the worker waits")
    assert [e.kind for e in jobs.events("train.started")] == ["train.started"]
    assert not jobs.events("train.log")
    agent.keeper.release()
    assert worker.wait() == 0, worker.said()
    agent.ended(1)
    (held,) = jobs.events("train.held")
    assert float(held.facts["seconds"]) < 60.0  # type: ignore[arg-type]

    (worker,) = agent.begin(2, train_and_tell, hold=600.0)
    wait_for(lambda: len(jobs.events("train.holding")) == 2, "the worker waits")
    agent.keeper.end()
    agent.keeper.lost()
    wait_for(agent.keeper.recover, "another keeper")
    assert worker.wait() == 0, worker.said()


# -- loops of the user's own


def own_loop(asks: bool) -> list[int]:
    """Trains by hand and gives the steps whose batches it used."""
    training = Training()
    run = everstep.attach(model=training.model, optimizer=training.optimizer)
    run.restore()
    used = []
    while run.step < 4:
        if not (asks and run.skips(run.step + 1)):
            training.optimizer.zero_grad()
            training.backward(_batch(run.step))
            training.optimizer.step()
            used.append(run.step + 1)
        run.step_end()
    return used


def test_a_loop_of_ones_own_asks_what_to_leave_out_or_is_refused(agents: Any, jobs: Jobs) -> None:
    agent = agents()
    said = agent.run(1, own_loop, code=1, skip=(2,), body={"asks": False})
    assert "the batches of step 2 are to be left out, and this loop does not ask" in said
    used = agent.run(2, own_loop, skip=(2,), body={"asks": True}, expected=False)
    assert used == [1, 3, 4]
    assert [e.step for e in jobs.events("train.step_skipped")] == [2]


def accumulates() -> int:
    """Batches that the body sees of three steps of two."""
    training = Training()
    run = everstep.attach(**training.objects())
    seen = 0
    for batch in run.steps(until=3, accumulate=2):
        seen += 1
        training.backward(batch)
        if run.at_boundary:
            training.end()
            training.optimizer.zero_grad()
    return seen


def test_all_batches_of_a_step_are_left_out(agents: Any) -> None:
    assert agents().run(1, accumulates, skip=(2,)) == 4


def catches() -> str:
    """A script that catches what it should not, and ends in order."""
    training = Training()
    run = everstep.attach(**training.objects())
    with run, contextlib.suppress(everstep.EverstepError):
        for batch in run.steps(until=LAST):
            run.log(loss=step_of(training, batch, run.step + 1))
    return "ended"


def test_a_script_that_catches_the_error_saves_nothing_of_the_step(agents: Any, jobs: Jobs) -> None:
    assert agents().run(1, catches, every=100000) == "ended"
    assert not jobs.events("snapshot.complete")
    assert not jobs.events("checkpoint.committed")
