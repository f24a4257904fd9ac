"""Which process is which: a pid alone is reused.

Owns: reading a process's identity out of /proc. Called by: the keeper, where it claims a job
itself because no agent runs.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from everstep.store import OwnerIdentity

_FIRST_PID_NAMESPACE = 0xEFFFFFFC


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
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name may hold blanks and parentheses: fields count from the last one that closes.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
