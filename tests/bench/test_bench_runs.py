"""The benchmarks end to end at sizes that say nothing about speed: they run, and tell the truth."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from everstep.bench import memory, processes, recover, save
from everstep.bench.child import Child
from everstep.bench.limits import Limits
from everstep.bench.main import main
from everstep.bench.phases import PHASES
from everstep.bench.result import Result
from everstep.bench.rounds import Job, Method
from everstep.bench.workload import Workload, shape_of
from everstep.errors import BenchError

pytestmark = pytest.mark.bench

TINY = recover.RecoverSetup(pairs=1, every=4, width=32, layers=1, batch=2)


@pytest.mark.soak
def test_recover_measures_every_phase_of_a_real_kill_under_everstep(tmp_path: Path) -> None:
    found = recover.one_recovery(TINY, "everstep", 0, 0.5, tmp_path / "run", 0.2)
    assert tuple(found.phases) == PHASES
    assert sum(found.phases.values()) == pytest.approx(found.total)
    assert found.repeated >= 0
    assert found.between_saves > 0
    assert found.caught_up >= found.total


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_recover_runs_both_systems_and_the_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--pairs", "2", "--every", "4", "--width", "32", "--layers", "1", "--batch", "2"]
    assert main(["recover", "--json", "--folder", str(tmp_path), *sizes]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert {name: len(rows) for name, rows in result.samples.items()} == {
        "everstep": 2, "torchrun": 2, "floor": 2,
    }  # fmt: skip
    assert len(result.goals) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_save_measures_every_method_beside_the_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rounds", "1", "--state-mb", "2", "--batch", "4", "--threads", "1"]
    assert main(["save", "--json", "--folder", str(tmp_path), *sizes]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Result)
    _check_save(result, save.SaveSetup().methods)
    assert list(tmp_path.iterdir()) == []


def test_save_measures_everstep_beside_peers_and_limits(tmp_path: Path) -> None:
    peers: tuple[Method, ...] = ("dcp-thread", "torch-save")
    setup = save.SaveSetup(1, 2_000_000, 0.3, 4, 1, tmp_path, peers)
    said: list[str] = []
    _check_save(save.measure(setup, said.append), setup.methods)
    assert said[-1].startswith("round 1/1: everstep blocked")
    assert list(tmp_path.iterdir()) == []


def _check_save(result: Result, methods: tuple[Method, ...]) -> None:
    assert {name: len(rows) for name, rows in result.samples.items()} == dict.fromkeys(methods, 1)
    for name in methods[1:]:
        (row,) = result.samples[name]
        blocked, durable = row["blocked"], row["durable"]
        assert blocked is not None
        assert durable is not None
        assert blocked > 0
        assert durable > 0
    assert len(result.goals) == 4


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_everstep_adds_two_slots_and_little_more_and_200_saves_leak_nothing(
    tmp_path: Path,
) -> None:
    setup = memory.MemorySetup()
    size = memory.added(setup, tmp_path)
    assert size.state >= 0.95 * setup.state_bytes
    assert size.growth <= size.allowance
    assert memory.leaked(setup, tmp_path).found == []


def test_a_training_process_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")  # where everstep's store would be
    job = Job("everstep", str(tmp_path), 10**6, 0.5, 2, 1)
    with (
        processes.marked() as mark,
        Child(job, mark) as child,
        pytest.raises(BenchError, match=r"'everstep' ended at 'open'[\s\S]*EVS-204"),
    ):
        child.ask("open")


@pytest.mark.parametrize(("state", "trained"), [(3_000_000, 0.5), (40_000_000, 0.5)])
def test_the_workload_has_the_state_it_was_asked_for(state: int, trained: float) -> None:
    workload = Workload(state, trained, 2, 0)
    workload.step()
    assert sum(t.nbytes for t in workload.tensors()) == pytest.approx(state, rel=0.05)
    width, layers = shape_of(int(state * trained))
    assert 12 * width * width * layers == pytest.approx(state * trained, rel=0.2)


def test_every_step_changes_the_trained_part_and_nothing_else() -> None:
    workload = Workload(2_000_000, 0.5, 2, 0)
    workload.step()
    before = [tensor.clone() for tensor in workload.tensors()]
    workload.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, workload.tensors(), strict=True)]
    frozen = {id(p) for p in workload.model.frozen}
    trained = [id(p) not in frozen for p in workload.model.parameters()]
    assert changed[: len(trained)] == trained
    assert all(changed[len(trained) :])


def test_the_limits_copy_and_write_every_byte_and_leave_no_file(tmp_path: Path) -> None:
    tensors = [torch.arange(1000), torch.randn(37, 5), torch.tensor(3.0), torch.empty(0)]
    limits = Limits(tensors, tmp_path)
    found = limits.measure()
    assert all(
        torch.equal(copy, tensor) for copy, tensor in zip(limits.copies, tensors, strict=True)
    )
    assert found.copy > 0
    assert found.buffered > 0
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_is_told_to_end_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    folder = str(tmp_path)
    bench = subprocess.Popen(
        [sys.executable, "-m", "everstep.bench", "memory", "--state-mb", "2", "--folder", folder],
        env=processes.clean(os.environ),
    )
    deadline = time.monotonic() + 60
    while not _in(tmp_path) and bench.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _in(tmp_path)
    bench.terminate()
    assert bench.wait(30) == 128 + signal.SIGTERM
    assert _in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _in(folder: Path) -> list[int]:
    """Processes that work below the folder."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd").startswith(str(folder)):
                found.append(pid)
    return found


@pytest.mark.parametrize(
    "arguments",
    [["save", "--trained", "0"], ["save", "--rounds", "0"], ["recover", "--pairs", "0"],
     ["memory", "--saves", "5"], ["save", "--folder", "no-such-folder"]],
)  # fmt: skip
def test_bad_arguments_end_with_2_and_say_what_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "EVS-100" in capsys.readouterr().err
