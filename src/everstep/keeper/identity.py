"""Which process is which: a pid alone is reused.

Owns: reading a process's identity and CPU time out of /proc, and ending exactly that process.
Called by: the keeper, where it tells one life of a rank from the next or claims a job because no
agent runs; the agent, which sees whether its keeper moves.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.store import OwnerIdentity

_FIRST_PID_NAMESPACE = 0xEFFFFFFC


class Process(NamedTuple):
    """``started`` is in clock ticks since boot; None where the process cannot be seen from here:
    it is dead, or (pid 0) in another pid namespace."""

    pid: int
    started: int | None


def process_of(pid: int) -> Process:
    return Process(pid, started_at(pid) if pid > 0 else None)


def may_run(process: Process) -> bool:
    """Whether that process runs, or whether it does cannot be known."""
    if process.pid <= 0:
        return True
    return process.started is not None and started_at(process.pid) == process.started


def end_processes(processes: Iterable[Process], seconds: float) -> set[Process]:
    """SIGKILL and wait; those of which it is not proved after ``seconds`` that they have ended."""
    wanted = [process for process in processes if may_run(process)]
    held = {process: fd for process in wanted if (fd := _hold(process)) is not None}
    left = {process for process in wanted if process.pid <= 0}
    deadline = time.monotonic() + seconds
    for fd in held.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    for process, fd in held.items():
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            left.add(process)
        os.close(fd)
    return left


def identity_of(pid: int, agent: str) -> OwnerIdentity:
    """The process ``pid`` of this machine as the owner of a job, under the id ``agent``.

    Raises ProcessLookupError where it is dead.
    """
    started = started_at(pid)
    if started is None:
        raise ProcessLookupError(f"process {pid} is dead")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return OwnerIdentity(agent, host_name(), boot, pid, started)


def is_alive(other: OwnerIdentity) -> bool:
    """Whether that process of this host and boot still runs."""
    return started_at(other.pid) == other.started


def host_name() -> str:
    """The host, and the pid namespace where it is not the machine's first: pids mean nothing in
    another one, even where two containers share a host name."""
    space = os.stat("/proc/self/ns/pid").st_ino
    name = socket.gethostname()
    return name if space == _FIRST_PID_NAMESPACE else f"{name}#{space}"


def started_at(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None where it is dead."""
    state, *rest = _stat(pid) or ("X",)
    return None if state in "ZX" else int(rest[18])


def cpu_ticks(pid: int) -> int:
    """CPU time that the process took so far, in clock ticks; 0 where it is dead."""
    stat = _stat(pid)
    return int(stat[11]) + int(stat[12]) if stat else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name may hold blanks and parentheses: fields count from the last one that closes.
    return text.rpartition(")")[2].split()


def _hold(process: Process) -> int | None:
    """A pidfd of it, or None where it has ended. The identity is read after the pidfd was opened:
    the pid cannot be given to another process in between without being seen."""
    if process.pid <= 0:
        return None
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if started_at(process.pid) != process.started:
        os.close(fd)
        return None
    return fd
