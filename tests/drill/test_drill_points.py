"""What a process can be told to do at a named point, in processes of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from everstep.core import points
from everstep.core.points import Fault
from everstep.drill import namespaces

_REACH = """
import sys
from everstep.core.points import reach
for step in range(1, int(sys.argv[1]) + 1):
    reach("train.step.before_boundary", step)
    print(step, flush=True)
"""


def _run(
    *faults: Fault, steps: int = 4, rank: str = "0", prefix: tuple[str, ...] = ()
) -> tuple[int, list[str], str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _REACH, str(steps)],
        capture_output=True, text=True, check=False, timeout=60,
        env={points.VARIABLE: msgspec.json.encode(list(faults)).decode(), "RANK": rank,
             "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )  # fmt: skip
    return done.returncode, done.stdout.split(), done.stderr


def _at(action: str, **more: object) -> Fault:
    return msgspec.convert(
        {"point": "train.step.before_boundary", "action": action, **more}, type=Fault
    )


@pytest.mark.parametrize(
    ("action", "code"),
    [("segv", -signal.SIGSEGV), ("kill", -signal.SIGKILL), ("exit:3", 3), ("error:ValueError", 1)],
)
def test_a_fault_strikes_at_its_step(action: str, code: int) -> None:
    ended, steps, said = _run(_at(action, step=3))
    assert (ended, steps) == (code, ["1", "2"])
    assert ("ValueError: injected at train.step.before_boundary" in said) is ("error" in action)


def test_a_full_shared_memory_is_a_bus_error() -> None:
    if why := namespaces.missing("mounts"):
        pytest.skip(why)
    ended, steps, _ = _run(_at("bus", step=2), prefix=namespaces.SMALL_SHARED_MEMORY)
    assert (ended, steps) == (-signal.SIGBUS, ["1"])


def test_other_ranks_and_steps_pass() -> None:
    assert _run(_at("segv", step=9), _at("segv", step=2, rank=1))[:2] == (0, ["1", "2", "3", "4"])


def test_once_is_once_in_a_run_and_each_time_is_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    fault = _at("exit:3", step=2, once=str(tmp_path / "once"), told=str(told))
    began = time.monotonic()
    assert [_run(fault)[0], _run(fault)[0]] == [3, 0]
    (line,) = told.read_text().splitlines()
    rank, mono, _ = line.split()
    assert rank == "0"
    assert began < float(mono) < time.monotonic()


def test_a_clock_is_wrong_while_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.core.clock import SystemClock

    during = tmp_path / "during"
    fault = Fault("core.clock.wall", "shift:-3600", during=str(during))
    monkeypatch.setattr(points, "_plan", points._load(msgspec.json.encode([fault]).decode()))
    assert abs(SystemClock().wall() - time.time()) < 60
    during.touch()
    for _ in range(2):
        assert abs(SystemClock().wall() + 3600 - time.time()) < 60
    during.unlink()
    assert abs(SystemClock().wall() - time.time()) < 60


def test_nothing_is_spoilt_where_nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "_plan", None)
    points.reach("train.step.before_boundary", 1)
    assert not points.armed("train.step.gradients")
    assert not points.spoils("train.step.gradients", 1)
    assert points.shift("core.clock.wall") == 0.0
