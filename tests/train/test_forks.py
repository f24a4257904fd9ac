"""What a forked child inherits of a run: nothing that acts in the parent's name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from everstep.train.stop import TermFlag


def _in_child(act: Callable[[], object]) -> int:
    """The wait status of a forked child that runs ``act`` and then exits with 7."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(7)
    return os.waitpid(pid, 0)[1]


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


def test_sigterm_in_a_forked_child_reaches_the_handler_that_was_there(
    request: pytest.FixtureRequest,
) -> None:
    former = signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, former))
    flag = TermFlag()
    status = _in_child(lambda: os.kill(os.getpid(), signal.SIGTERM))
    flag.close()
    assert os.waitstatus_to_exitcode(status) == 3


def test_forked_child_that_exits_does_not_part_from_the_keeper(
    job_environment: dict[str, str], end_keepers: Callable[[], list[int]]
) -> None:
    """A child's ``sys.exit`` runs the parent's exit handlers: the parent goes on being cut."""
    import subprocess
    import sys

    script = """
import os, sys, torch, everstep
model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=6):
    if step == 2 and os.fork() == 0:
        sys.exit(0)
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    if step > 2:
        assert run._connection.link.connected
        assert run._connection.link.page.boundary(0)[0] is not None
sys.stdout.write(f"durable {run.checkpoint(wait=True, timeout=30)}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=job_environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "durable True"), done.stderr
    assert end_keepers()
