"""The processes of a drilled run: found by a mark in their environment, killed by pidfd.

Owns: the mark and the proof that a process bears it. Never does: signal a process without that
proof. Called by: the drill's loop.

Every process of a run inherits ``EVERSTEP_DRILL=<mark>`` from the agent that the drill starts. A
pidfd is opened first and the mark read after, so a number given again to a stranger is seen.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.errors import DrillError

VARIABLE = "EVERSTEP_DRILL"


class Gone(DrillError):
    """The process ended before it could be held."""


def bears_mark(pid: int, mark: str) -> bool:
    """Whether the process lives and was started with the mark."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{VARIABLE}={mark}".encode() in environment.split(b"\0")


def all_marked(mark: str) -> list[int]:
    """Process ids of everything that lives and bears the mark."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in numbers if pid != os.getpid() and bears_mark(pid, mark)]


@contextmanager
def held(pid: int, mark: str) -> Iterator[int]:
    """A pidfd of a process that bears the mark. Raises :class:`DrillError` where it does not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Gone(f"process {pid} is gone already.") from None
    try:
        if not bears_mark(pid, mark):
            if wait_end(fd, 0):
                raise Gone(f"process {pid} is gone already.")
            raise DrillError(
                f"process {pid} is not of this drill's run.",
                hint="Nothing was killed; the run's events name a wrong process.",
            )
        yield fd
    finally:
        os.close(fd)


def strike(fd: int) -> None:
    """SIGKILL to the process of a held pidfd. Raises :class:`Gone` where it has ended."""
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        raise Gone("the process has ended before it could be killed.") from None


def kill_all(mark: str, *, timeout: float) -> int:
    """SIGKILL to everything that bears the mark until nothing is left; how many were killed.

    Raises :class:`DrillError` where a process lives on after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    killed = 0
    while left := all_marked(mark):
        if time.monotonic() >= deadline:
            raise DrillError(f"processes {left} did not die of SIGKILL within {timeout:g} s.")
        fds = [fd for pid in left if (fd := _struck(pid, mark)) is not None]
        killed += len(fds)
        for fd in fds:
            wait_end(fd, max(0.0, deadline - time.monotonic()))
            os.close(fd)
    return killed


def wait_end(fd: int, timeout: float) -> bool:
    """Whether the process of the pidfd ends within ``timeout`` seconds."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(timeout, 0.0) * 1000))


def _struck(pid: int, mark: str) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if not bears_mark(pid, mark):
        os.close(fd)
        return None
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        os.close(fd)
        return None
    return fd
