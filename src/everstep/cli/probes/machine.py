"""Measures memory, clock, signals and kernel features of this process's surroundings.

Owns: reading /proc and trying system calls; memory limits are read as the keeper reads them. Never
does: judge. Called by: cli.doctor.
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

from everstep.keeper.memory import read_limits

_TIME_ERROR = 5
_TIMEX_BYTES = 512
"""More than the kernel's struct timex has on any architecture."""


class MemoryMeasured(msgspec.Struct, frozen=True):
    """Bytes. ``free`` of ``total`` is what the tightest limit leaves, ``whose`` names it; ``shm``
    is the size of /dev/shm, None where there is none."""

    free: int
    total: int
    whose: str
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
    """The limit that a keeper would meet first, read below ``root``."""
    tightest = min(read_limits(root), key=lambda limit: limit.free)
    return MemoryMeasured(tightest.free, tightest.total, tightest.whose, _shm(root / "dev/shm"))


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
