"""Only what bears the run's mark is killed; all of it is."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from everstep.drill import processes
from everstep.errors import DrillError

_SLEEP = [sys.executable, "-c", "import sys, time; print('up', flush=True); time.sleep(60)"]


@pytest.fixture
def mark() -> Iterator[str]:
    made = secrets.token_hex(8)
    yield made
    processes.kill_all(made, timeout=10)


def _start(mark: str | None, command: list[str] = _SLEEP) -> subprocess.Popen[bytes]:
    env = dict(os.environ) | ({} if mark is None else {processes.VARIABLE: mark})
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_a_marked_process_is_held_and_killed(mark: str) -> None:
    process = _start(mark)
    with processes.held(process.pid, mark) as fd:
        processes.strike(fd)
        assert processes.wait_end(fd, 10)
    assert process.wait(10) == -9


def test_a_stranger_is_refused_and_lives(mark: str) -> None:
    process = _start(None)
    try:
        with (
            pytest.raises(DrillError, match="not of this drill's run"),
            processes.held(process.pid, mark),
        ):
            pass
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)


def test_a_process_that_is_gone_is_told_from_a_stranger(mark: str) -> None:
    process = _start(mark)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie has no environment
    with pytest.raises(processes.Gone), processes.held(process.pid, mark):
        pass
    process.wait(10)
    with pytest.raises(processes.Gone), processes.held(process.pid, mark):
        pass


def test_kill_all_reaches_children_in_sessions_of_their_own(mark: str) -> None:
    nest = (
        "import subprocess, sys\n"
        f"inner = subprocess.Popen({_SLEEP!r}, start_new_session=True)\n"
        "inner.wait()"
    )
    process = _start(mark, [sys.executable, "-c", nest])
    assert len(processes.all_marked(mark)) == 2
    assert processes.kill_all(mark, timeout=10) == 2
    assert processes.all_marked(mark) == []
    assert process.wait(10) == -9
