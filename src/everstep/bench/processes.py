"""The processes of a benchmark: started with a mark in their environment, and ended by it.

Owns: the mark, the clean environment, the proof that nothing is left. Never does: signal a process
that does not bear the mark. Called by: the benchmarks.

Keepers and DCP's writer processes outlive the process that started them, so a tree of parents does
not find them; the environment does. A pidfd is opened before the mark is read, so that a process id
given again to a stranger is noticed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.errors import BenchError

VARIABLE = "EVERSTEP_BENCH_MARK"

_INHERITED = ("EVERSTEP_", "PET_", "TORCHELASTIC_", "MASTER_", "OMP_", "MKL_")
_RANKS = frozenset(
    (
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
    )
)  # fmt: skip


def clean(parent: Mapping[str, str]) -> dict[str, str]:
    """``parent`` without what would make a job another one: ranks, settings, thread counts."""
    return {
        name: value
        for name, value in parent.items()
        if not name.startswith(_INHERITED) and name not in _RANKS
    }


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """A fresh mark; everything that bears it at the end is killed."""
    mark = secrets.token_hex(16)
    try:
        yield mark
    finally:
        end_all(mark)


def bears(pid: int, mark: str) -> bool:
    """Whether the process lives and was started with the mark."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{VARIABLE}={mark}".encode() in environment.split(b"\0")


def bearers(mark: str) -> list[int]:
    """Process ids of all that live and bear the mark."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in numbers if bears(pid, mark)]


def kill(pid: int, mark: str) -> float:
    """SIGKILL to one process that bears the mark; CLOCK_MONOTONIC just before it.

    Raises :class:`BenchError` where it has ended or is another's.
    """
    fd = _hold(pid, mark)
    if fd is None:
        raise BenchError(f"process {pid} ended before it could be killed.")
    try:
        now = time.monotonic()
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        raise BenchError(f"process {pid} ended before it could be killed.") from None
    finally:
        os.close(fd)
    return now


def end_all(mark: str, *, timeout: float = 20.0) -> None:
    """SIGKILL until nothing bears the mark. Raises :class:`BenchError` after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while left := bearers(mark):
        if time.monotonic() >= deadline:
            raise BenchError(f"processes {left} did not die of SIGKILL within {timeout:g} s.")
        for fd in [fd for pid in left if (fd := _hold(pid, mark)) is not None]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            _wait_end(fd, deadline - time.monotonic())
            os.close(fd)


def began_at(pid: int) -> float:
    """When the process was started, on CLOCK_MONOTONIC; exact to a kernel tick (10 ms)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[19])
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep


def _hold(pid: int, mark: str) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if bears(pid, mark):
        return fd
    os.close(fd)
    return None


def _wait_end(fd: int, timeout: float) -> None:
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    waiting.poll(max(timeout, 0.0) * 1000)
