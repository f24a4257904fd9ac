"""Room on the file systems that a job writes to.

Owns: the figures of statvfs, and below which of them something is said. Never does: write, free
anything. Called by: the watch. Each place is a source of its own: one whose server is gone hangs,
and must not hide the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.watch.source import Source, Standing
from everstep.faults.records import Signal

EVERY = 5.0
FULL_BYTES = 1 << 20
"""Less than this is no room: what programs write at once is larger."""
LOW_SHARE, LOW_BYTES = 0.05, 10 << 30
"""Room is low where it is less than both: 4 % of 20 TB are enough for a checkpoint."""
LOW_INODES = 1000
SHM = Path("/dev/shm")

Stat = Callable[[Path], os.statvfs_result]


@dataclass(frozen=True)
class Room:
    """Of one file system; ``inodes`` None where it has no fixed number of them."""

    free: int
    total: int
    inodes: int | None


class Disk(Source):
    """Room at ``path``, which is ``what`` to the job (``the store``, ``the temporary folder``)."""

    every = EVERY

    def __init__(self, what: str, path: Path, statvfs: Stat = os.statvfs) -> None:
        self.name = f"disk of {what}"
        self._what = what
        self._path = path
        self._statvfs = statvfs
        self._low = Standing()

    def look(self) -> Iterable[Signal]:
        text = said(self._what, self._path, room_of(self._statvfs(_there(self._path))))
        now = {"room": text} if text else {}
        ended = bool(self._low.over(now))
        told = self._low.changed(now)
        if ended:
            told.append(f"disk watch: {self._what} at {self._path}: there is room again")
        return [Signal("agent", one) for one in told]

    def standing(self) -> Iterable[Signal]:
        return [Signal("agent", text) for text in self._low.texts]


def room_of(found: os.statvfs_result) -> Room:
    """What an ordinary user may still take."""
    inodes = found.f_favail if found.f_files else None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, inodes)


def said(what: str, path: Path, room: Room) -> str:
    """What there is to say of the room, as the catalogue knows it; empty where there is enough.
    /dev/shm is told in the words by which a bus error is weighed."""
    if path == SHM:
        used = size(room.total - room.free)
        where = f"disk watch: {path}: size {size(room.total)} used {used}"
    else:
        where = f"disk watch: {what} at {path}: {size(room.free)} of {size(room.total)} free"
    if room.total and room.free < FULL_BYTES:
        return f"{where}: No space left on device"
    if room.inodes == 0:
        return f"{where}, but 0 inodes are: No space left on device"
    if room.free < min(LOW_SHARE * room.total, LOW_BYTES):
        return f"{where}: space is low"
    if room.inodes is not None and room.inodes < LOW_INODES:
        return f"{where}, but {room.inodes} inodes are: inodes are low"
    return ""


def size(count: float) -> str:
    """Bytes as ``64.0M``."""
    for unit in ("K", "M", "G"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f}{unit}"
    return f"{count / 1024:.1f}T"


def _there(path: Path) -> Path:
    """The nearest folder at or above ``path`` that exists: a first attempt makes its store."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))
