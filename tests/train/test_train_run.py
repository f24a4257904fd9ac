"""What a user does with a run: loops, checkpoints, stops, ends. Real processes, a real keeper."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_bodies as bodies
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from train_bodies import BATCHES, LAST, Training, undisturbed
from train_jobs import RARE, Jobs, fault, keeper_pid, wait_for

import everstep
from everstep.core import exits
from everstep.errors import UsageError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """``whole(until, accumulate)``: the training that nothing disturbs, without everstep."""
    jobs = Jobs(tmp_path_factory.mktemp("whole"), {})
    known: dict[tuple[int, int], dict[str, Any]] = {}

    def of(until: int, accumulate: int = 1) -> dict[str, Any]:
        key = until, accumulate
        if key not in known:
            known[key] = jobs.run(undisturbed, until=until, accumulate=accumulate)
        return known[key]

    return of


def agree(jobs: Jobs, digest: object, expected: dict[str, Any]) -> None:
    assert jobs.losses() == {step: {loss} for step, loss in enumerate(expected["losses"], 1)}
    assert digest == expected["digest"]


# -- the end of a job


def test_a_finished_job_says_so_and_a_larger_until_continues_it(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    first = jobs.start(bodies.train, until=7)
    assert first.wait() == 0
    assert first.said().splitlines()[-1] == "everstep: the job finished: step 7 is committed"
    again = jobs.start(bodies.train, until=7)
    assert again.wait() == exits.FINISHED
    assert again.result() == whole(7)["digest"], "a finished job has its final state"
    assert (
        "nothing is left to do: job job has done 7 steps, `until` is 7. To continue it, give it a "
        "larger `until` under the same name (EVERSTEP_JOB=job)"
    ) in again.said()
    assert again.said().count("\n") == 2, "the line before says what it went on from"
    digest = jobs.run(bodies.train, until=LAST)
    agree(jobs, digest, whole(LAST))


def train_by_epochs(fails_at: int = -1) -> str:
    training = Training()
    run = everstep.attach(**training.objects())
    for epoch in range(3):
        for batch in run.steps(until=(epoch + 1) * BATCHES):
            training.step(batch)
            if run.step == fails_at:
                raise RuntimeError("the user's")
    return training.digest()


def test_a_loop_over_epochs_ends_with_the_last(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    """A job that fails in a later loop has not finished, and each end is said once."""
    said = jobs.fails(train_by_epochs, fails_at=7)
    assert "finished" not in said
    assert not jobs.events("job.finished")
    second = jobs.start(train_by_epochs)
    assert second.wait() == 0
    assert second.said().count("the job finished: step 15 is committed") == 1
    assert "nothing is left" not in second.said()
    assert second.result() == whole(15)["digest"]
    third = jobs.start(train_by_epochs)
    assert third.wait() == 0
    assert third.said().count("nothing is left to do") == 1


def test_accumulate_counts_optimizer_steps_and_carries_an_epochs_rest_over(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    """Epochs of 5 batches, steps of 3: step 2 takes the last two batches and the first of the
    next epoch. The kill is in the middle of such a step."""
    assert BATCHES % 3
    until, at = 7, (2, 4)
    killed = jobs.start(
        bodies.train_accumulating, until=until, accumulate=3, at=at,
        env={"EVERSTEP_FAULTS": fault("train.cut.begun", after=1)},
    )  # fmt: skip
    assert killed.wait() == -signal.SIGKILL
    digest = jobs.run(bodies.train_accumulating, until=until, accumulate=3)
    assert [step for step, _ in jobs.restored()] == [2]
    agree(jobs, digest, whole(until, 3))


def test_without_a_loader_steps_are_numbers(jobs: Jobs, tmp_path: Path) -> None:
    store = str(tmp_path / "named-by-the-script")
    assert jobs.run(bodies.count_steps, until=4, store=store) == [0, 1, 2, 3]
    assert jobs.run(bodies.count_steps, until=6, store=store) == [4, 5]
    assert os.path.isdir(store)


def test_own_loop_with_restore_step_end_and_checkpoint(
    jobs: Jobs, end_keepers: Callable[[], list[int]]
) -> None:
    first = jobs.run(bodies.own_loop, until=5, at=(3,))
    assert first["began"] == 0
    assert first["answers"] == {"3": True, "5": True}
    assert end_keepers()
    second = jobs.run(bodies.own_loop, until=9)
    assert second["began"] == 5
    other = Jobs(jobs.folder / "other", jobs.environment, name="whole")
    other.folder.mkdir()
    assert second["digest"] == other.run(bodies.own_loop, until=9)["digest"]


# -- SIGTERM


def test_sigterm_stops_after_a_cut_and_the_job_goes_on_exactly(
    jobs: Jobs, whole: Callable[..., dict[str, Any]], end_keepers: Callable[[], list[int]]
) -> None:
    until = 40
    told = str(jobs.folder / "told")
    stopped = jobs.start(bodies.train_and_be_terminated, until=until, at=4, told=told)
    assert stopped.wait() == exits.PREEMPTED, stopped.said()
    assert os.path.exists(told), "the user's handler was there before and is called as well"
    assert "it is committed" in stopped.said()
    step = jobs.events("job.preempted")[0].step
    assert step is not None
    assert 4 < step < until
    assert end_keepers()
    digest = jobs.run(bodies.train, until=until)
    assert jobs.restored() == [(step, "store")]
    agree(jobs, digest, whole(until))


def restore_alone() -> None:
    """A rank of two; the other one never comes."""
    run = everstep.attach(**Training().objects())
    link: Any = run._connection.link
    ask = link.ask_offer

    def asking(**timeout: float) -> object:
        Path("asking").touch()
        return ask(**timeout)

    link.ask_offer = asking
    run.restore()


def test_sigterm_in_the_wait_for_other_ranks_is_obeyed_at_once(jobs: Jobs) -> None:
    waits = jobs.start(restore_alone, env=_rank(0))
    wait_for((jobs.folder / "asking").exists, "it waits for the other rank")
    waits.kill(signal.SIGTERM)
    assert waits.wait() == exits.PREEMPTED, waits.said()
    assert "stopped before the first step" in waits.said()


# -- the keeper dies


def test_a_keeper_killed_in_mid_run_is_replaced_by_the_worker(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    until, kill_at, at = LAST, 4, (3, 8)
    digest = jobs.run(bodies.train_and_kill_keeper, until=until, kill_at=kill_at, at=at)
    agree(jobs, digest, whole(until))
    completed = {e.step for e in jobs.events("snapshot.complete")}
    assert {8, until} <= completed, "snapshots go on under the new keeper"
    assert jobs.events("checkpoint.committed")[-1].step == until


def test_the_slots_of_a_dead_keeper_are_adopted_by_the_next(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    """The worker dies too, in its first cut under the new keeper, which then holds what the dead
    one held."""
    killed = jobs.start(
        bodies.train_and_kill_keeper, until=LAST, kill_at=4, at=(3, 8),
        env={"EVERSTEP_FAULTS": fault("train.cut.begun", after=1)},
    )  # fmt: skip
    assert killed.wait() == -signal.SIGKILL
    digest = jobs.run(bodies.train)
    assert jobs.restored() == [(3, "memory")]
    agree(jobs, digest, whole(LAST))


def test_the_keeper_outlives_the_worker_and_serves_the_next(jobs: Jobs) -> None:
    store = {"EVERSTEP_STORE": str(jobs.folder / "everstep-store")}
    keepers = set()
    for cuts_before in (1, 0):
        faults = fault("train.cut.before", after=cuts_before)
        killed = jobs.start(bodies.train, at=(3, 6), env={"EVERSTEP_FAULTS": faults})
        assert killed.wait() == -signal.SIGKILL
        keepers.add(keeper_pid(store))
    assert jobs.restored() == [(3, "memory")]
    assert len(keepers) == 1


# -- ends that are none


def raise_in_the_body(error: str) -> None:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=1000):
        training.step(batch)
        if run.step == 3:
            run.checkpoint()
        if run.step == 5:
            raise {"error": RuntimeError("the user's"), "interrupt": KeyboardInterrupt()}[error]


@pytest.mark.parametrize(("error", "code"), [("error", 1), ("interrupt", 130)])
def test_an_exception_in_the_body_ends_the_process_and_the_keeper_keeps_its_snapshots(
    jobs: Jobs, error: str, code: int
) -> None:
    said = jobs.fails(raise_in_the_body, code=code, error=error)
    assert "EVS-" not in said
    assert said.count("Traceback") == 1, said
    assert "left at" not in said
    jobs.run(bodies.train)
    assert jobs.restored() == [(4, "memory")]


def test_a_script_that_raises_ends_by_itself(jobs: Jobs) -> None:
    """With a real interpreter's end, whose threads and handlers could hang."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_train_run; test_train_run.raise_in_the_body('error')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], cwd=jobs.folder,
        env=jobs.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert "RuntimeError: the user's" in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert "left at" not in ended.stderr, "nothing is saved on the way of an exception"


def use_as_context() -> dict[str, Any]:
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    training = Training()
    hooks = len(training.optimizer._optimizer_step_post_hooks)
    with everstep.attach(**training.objects()) as run:
        during = len(training.optimizer._optimizer_step_post_hooks)
        for batch in run.steps(until=3):
            training.step(batch)
    refused = ""
    try:
        run.checkpoint()
    except UsageError as error:
        refused = str(error)
    run.close()
    return {
        "hooks": [hooks, during, len(training.optimizer._optimizer_step_post_hooks)],
        "handler": signal.getsignal(signal.SIGTERM) is before,
        "refused": refused,
        "descriptors": sorted(_descriptors()),
        "exits": atexit._ncallbacks(),
    }


def _descriptors() -> set[str]:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    found = {os.readlink(link) for link in links if os.path.lexists(link)}
    return {name for name in found if "everstep" in name or "events" in name}


def test_close_takes_everything_away(jobs: Jobs) -> None:
    found = jobs.run(use_as_context)
    assert found["hooks"] == [0, 2, 0]
    assert found["handler"], "the former handler of SIGTERM is back"
    assert "EVS-100: this run is closed." in found["refused"]
    assert found["descriptors"] == []


def attach_twice() -> dict[str, Any]:
    training = Training()
    run = everstep.attach(**training.objects())
    refused = ""
    try:
        everstep.attach(**Training().objects())
    except UsageError as error:
        refused = str(error)
    for batch in run.steps(until=4):
        training.step(batch)
    run.close()
    second = Training()
    with everstep.attach(**second.objects()) as later:
        steps = [later.step for batch in later.steps(until=6) if second.step(batch) is not None]
    return {"refused": refused, "steps": steps, "digest": second.digest()}


def test_a_job_is_attached_once_at_a_time_in_a_process(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    """And again after the first run is closed: then it goes on from there."""
    found = jobs.run(attach_twice)
    assert "EVS-100: job job is attached in this process already." in found["refused"]
    assert found["steps"] == [4, 5]
    assert found["digest"] == whole(6)["digest"]
    assert [e.attempt for e in jobs.events("restore.elected")] == [1, 2]


class Shuffled:
    """An object whose state_dict draws random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": torch.rand(3).tolist()}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        torch.rand(7)


def train_with_a_drawing_object(until: int, at: tuple[int, ...]) -> str:
    training = Training()
    run = everstep.attach(**training.objects(), shuffled=Shuffled())
    for batch in run.steps(until=until):
        run.log(loss=training.step(batch))
        if run.step + 1 in at:
            run.checkpoint(wait=True)
    return training.digest()


def test_random_numbers_drawn_by_state_dict_are_put_back(
    jobs: Jobs, whole: Callable[..., dict[str, Any]]
) -> None:
    """R1: taking a cut changes nothing, so a run with cuts equals one without."""
    killed = jobs.start(
        train_with_a_drawing_object, until=LAST, at=(3, 6),
        env={"EVERSTEP_FAULTS": fault("train.cut.begun", after=1)},
    )  # fmt: skip
    assert killed.wait() == -signal.SIGKILL
    agree(jobs, jobs.run(train_with_a_drawing_object, until=LAST, at=(6,)), whole(LAST))


def log_figures() -> None:
    training = Training()
    with everstep.attach(**training.objects()) as run:
        for batch in run.steps(until=2):
            loss = training.step(batch)
            run.log(loss=loss, lr=0.5, count=run.step)


def test_log_writes_figures_of_the_step_in_hand(jobs: Jobs) -> None:
    jobs.run(log_figures)
    events = jobs.events("train.log")
    assert [e.step for e in events] == [1, 2]
    assert events[0].facts["lr"] == 0.5
    assert events[1].facts == {**events[1].facts, "count": 1}
    assert all(isinstance(e.facts["loss"], float) for e in events)


def test_without_a_journal_log_reads_no_tensor(jobs: Jobs) -> None:
    """Reading one makes a device wait."""
    jobs.run(log_unreadable, env={"EVERSTEP_EVENTS": ""})


def log_unreadable() -> None:
    with everstep.attach(**Training().objects()) as run:
        run.log(loss=torch.empty((), device="meta"))


# -- torchrun

TORCHRUN = """
import sys
sys.path.insert(0, sys.argv[1])
import test_train_run
test_train_run.train_ddp(int(sys.argv[2]))
"""


def train_ddp(until: int, meet: str | None = None) -> None:
    """Writes the digest of each rank beside the store."""
    training = Training()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    torch.manual_seed(10 + rank)
    training.model = DistributedDataParallel(training.model)
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=until):
        run.log(loss=training.step(batch))
        if (run.step + 1) % 3 == 0:
            run.checkpoint(wait=True)
    distributed.destroy_process_group()
    Path(f"digest-{rank}").write_text(training.digest())


def test_under_torchrun_its_own_restart_goes_on_exactly(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 1 is killed in its second cut; torchrun starts both again."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    once = str(tmp_path / "once")
    environment = {
        **jobs.environment, "EVERSTEP_JOB": "job", "EVERSTEP_SNAPSHOT_EVERY": RARE,
        "EVERSTEP_FAULTS": fault("train.cut.copied", after=1, rank=1, once=once),
        # pytorch#167288: else a restarted rank may read the dead one's address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*line, "--max-restarts", "1", script, Path(__file__).parent, str(LAST)], cwd=tmp_path,
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert os.path.exists(once)
    assert jobs.restored() == [(3, "memory")] * 2

    (tmp_path / "whole").mkdir()
    whole = Jobs(tmp_path / "whole", jobs.environment, name="whole")
    meet = f"file://{tmp_path}/meet"
    ranks = [whole.start(train_ddp, until=LAST, meet=meet, env=_rank(rank)) for rank in range(2)]
    assert [started.wait() for started in ranks] == [0, 0], [started.said() for started in ranks]
    for rank in range(2):
        assert jobs.losses(rank) == whole.losses(rank)
        assert sorted(jobs.losses(rank)) == list(range(1, LAST + 1))
        digests = [(folder / f"digest-{rank}").read_text() for folder in (tmp_path, whole.folder)]
        assert digests[0] == digests[1]


def _rank(rank: int) -> dict[str, str]:
    return {"WORLD_SIZE": "2", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
