"""What a forked child inherits of a run: nothing that acts in the parent's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.core.events import decode_line
from everstep.train.stop import TermFlag


def _in_child(act: Callable[[], object]) -> int:
    """The wait status of a forked child that runs ``act`` and then exits with 7."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def _plain_sigterm() -> Iterator[None]:
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.usefixtures("_plain_sigterm")
def test_sigterm_ends_a_forked_child_as_before_attach() -> None:
    """``Pool.terminate`` and ``Process.terminate`` after attach."""
    flag = TermFlag()
    try:
        status = _in_child(lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not flag.raised
    finally:
        flag.close()


@pytest.mark.usefixtures("_plain_sigterm")
def test_sigterm_in_a_forked_child_reaches_the_handler_that_was_there() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    flag = TermFlag()
    status = _in_child(lambda: os.kill(os.getpid(), signal.SIGTERM))
    flag.close()
    assert os.waitstatus_to_exitcode(status) == 3


def test_forked_child_that_exits_does_not_part_from_the_keeper(
    job_environment: dict[str, str], tmp_path: Path
) -> None:
    """A child's ``sys.exit`` runs the parent's exit handlers: the parent goes on being cut."""
    script = """
import os, sys, torch, everstep
model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=6):
    if step == 2:
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    run.checkpoint(wait=True, timeout=60)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=job_environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [decode_line(x) for x in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert [e.step for e in events if e.kind == "checkpoint.committed"] == [1, 2, 3, 4, 5, 6]
    gone = [e for e in events if "is gone" in e.text and (e.step or 0) < 6]
    assert not gone
