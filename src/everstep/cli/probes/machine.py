"""Measures memory, clock, signals and kernel features of this process's surroundings.

Owns: reading /proc and /sys (under a root that is handed in) and trying system calls. Never does:
judge. Called by: cli.doctor.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

_UNLIMITED_V1 = 1 << 60
"""cgroup v1 writes "no limit" as a huge page count."""
_TIME_ERROR = 5
_TIMEX_BYTES = 512
"""More than the kernel's struct timex has on any architecture."""


class MemoryMeasured(msgspec.Struct, frozen=True):
    """Bytes. ``limit`` is the tightest of this process's control groups, None for no limit, and
    ``used`` what counts against it; ``shm`` is the size of /dev/shm, None where there is none."""

    available: int
    limit: int | None
    used: int
    shm: int | None


class ClockMeasured(msgspec.Struct, frozen=True):
    """``jump``: seconds by which the wall clock moved against the monotonic one while watched;
    ``synchronized``: what the kernel was told by an NTP client, None where it cannot be asked."""

    jump: float
    watched: float
    synchronized: bool | None


class SignalMasks(msgspec.Struct, frozen=True):
    """Names of signals that this process inherited as ignored or blocked."""

    ignored: tuple[str, ...]
    blocked: tuple[str, ...]


class Features(msgspec.Struct, frozen=True):
    """Kernel parts that agent and keeper stand on; ``open_files`` is the soft limit."""

    pidfd: bool
    memfd: bool
    abstract_socket: bool
    open_files: int


def measure_memory(root: Path = Path("/")) -> MemoryMeasured:
    """Memory as the control groups, /proc/meminfo and /dev/shm below ``root`` say."""
    meminfo = (root / "proc/meminfo").read_text()
    cgroups = (root / "proc/self/cgroup").read_text()
    limit, used = _tightest(root, cgroups)
    return MemoryMeasured(_meminfo(meminfo, "MemAvailable"), limit, used, _shm(root / "dev/shm"))


def measure_clock(watch: float = 0.2) -> ClockMeasured:
    """Watch wall against monotonic clock for ``watch`` seconds."""
    wall, mono = time.time(), time.monotonic()
    time.sleep(watch)
    watched = time.monotonic() - mono
    return ClockMeasured(time.time() - wall - watched, watched, _synchronized())


def read_masks(status: str | None = None) -> SignalMasks:
    """The masks of ``status``, the text of /proc/self/status by default."""
    status = Path("/proc/self/status").read_text() if status is None else status
    masks = {
        name: int(value, 16)
        for line in status.splitlines()
        for name, _, value in [line.partition(":\t")]
        if name in ("SigIgn", "SigBlk")
    }
    return SignalMasks(_names(masks["SigIgn"]), _names(masks["SigBlk"]))


def try_features() -> Features:
    """Try each kernel feature once."""
    return Features(
        pidfd=_works(lambda: os.pidfd_open(os.getpid())),
        memfd=_works(lambda: os.memfd_create("everstep-doctor", os.MFD_CLOEXEC)),
        abstract_socket=_works(_abstract_socket),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _meminfo(text: str, name: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _tightest(root: Path, cgroups: str) -> tuple[int | None, int]:
    best: tuple[int | None, int] = (None, 0)
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current")
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        for group in _upwards(base, path):
            limit, used = (_number(group / name) for name in names)
            if limit is not None and (best[0] is None or limit - (used or 0) < best[0] - best[1]):
                best = limit, used or 0
    return best


def _upwards(base: Path, path: str) -> list[Path]:
    """The group's folder and all above it; in a container the path may lie outside the mount."""
    parts = Path(path.lstrip("/")).parts
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= _UNLIMITED_V1:
        return None
    return int(text)


def _shm(folder: Path) -> int | None:
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize


def _synchronized() -> bool | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        return None
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes == 0: only read
    return None if state < 0 else state != _TIME_ERROR


def _names(mask: int) -> tuple[str, ...]:
    return tuple(s.name for s in sorted(signal.Signals) if mask >> (s.value - 1) & 1)


def _works(attempt: Callable[[], int]) -> bool:
    try:
        os.close(attempt())
    except (OSError, AttributeError):
        return False
    return True


def _abstract_socket() -> int:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(f"\0everstep-doctor-{os.getpid()}-{os.urandom(6).hex()}")
    return made.detach()
