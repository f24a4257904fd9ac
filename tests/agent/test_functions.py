"""Workers that are functions: how they are let go, and that nobody sends them a signal (F2)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from started import DEADLINE, started, wait

from everstep.agent import workers

FORKED = ("--run-path", "--start-method", "fork")
ONE_FAILS = """
import os, pathlib, signal, time
here = pathlib.Path("{folder}")
if os.environ["RANK"] == "10":
    while not (here / "ready").exists():
        time.sleep(0.005)
    os._exit(3)
signal.signal(signal.SIGTERM, lambda *_: (here / "termed").touch())
(here / "ready").touch()
while not (here / "go").exists():
    time.sleep(0.005)
"""


def test_a_failure_that_nobody_has_seen_yet_sends_the_others_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's context sends SIGTERM, by which a training job cuts and ends: it is asked only once
    all have come back."""
    with started(tmp_path, ONE_FAILS.format(folder=tmp_path), *FORKED, count=2) as (group, _):
        failing, other = group.pids[10], group.pids[11]
        ended = os.waitid(os.P_PID, failing, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        with monkeypatch.context() as patched:
            patched.setattr(workers, "_exit_code", lambda _: None)  # it looked just before
            assert group.collect() == []
        assert [(end.rank, end.code, end.by_everstep) for end in group.collect()] == [
            (10, 3, False)
        ]
        (tmp_path / "go").touch()
        os.kill(other, 0)
        assert not (tmp_path / "termed").exists()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_functions_are_let_go_once_all_have_come_back(tmp_path: Path, method: str) -> None:
    script = f"""
import os, pathlib, time
here = pathlib.Path("{tmp_path}")
while os.environ["RANK"] == "11" and not (here / "go").exists():
    time.sleep(0.005)
(here / os.environ["RANK"]).touch()
"""
    flags = ("--run-path", "--start-method", method)
    with started(tmp_path, script, *flags, count=2) as (group, _):
        deadline = time.monotonic() + DEADLINE
        while not (tmp_path / "10").exists():
            assert time.monotonic() < deadline
            assert group.collect() == []
        (tmp_path / "go").touch()
        wait(group)
        assert [(end.rank, end.code) for end in group.ended] == [(10, 0), (11, 0)]
        assert not any(end.by_everstep for end in group.ended)


def test_one_that_is_killed_while_it_waits_for_the_others_is_the_only_failure(
    tmp_path: Path,
) -> None:
    script = f"""
import os, pathlib, time
(pathlib.Path("{tmp_path}") / os.environ["RANK"]).touch()
while os.environ["RANK"] == "11":
    time.sleep(0.005)
"""
    with started(tmp_path, script, *FORKED, count=2) as (group, _):
        deadline = time.monotonic() + DEADLINE
        while not (tmp_path / "11").exists() or not (tmp_path / "10").exists():
            assert time.monotonic() < deadline
            assert group.collect() == []
        os.kill(group.pids[10], signal.SIGKILL)
        while not group.ended:
            assert time.monotonic() < deadline
            group.collect()
        assert [(end.rank, end.code, end.by_everstep) for end in group.ended] == [(10, -9, False)]
