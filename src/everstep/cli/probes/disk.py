"""Measures the disk under a folder.

Owns: :func:`measure_disk`. Never does: leave a file behind: each is unlinked as soon as it is
open. Called by: cli.doctor.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import time
from pathlib import Path

import msgspec

BLOCK = 8 << 20
MOST_BYTES = 64 << 20
MOST_SECONDS = 2.0
FSYNCS = 20


class DiskMeasured(msgspec.Struct, frozen=True):
    """Bytes, seconds, bytes a second. ``direct``: O_DIRECT works from anonymous memory there."""

    folder: str
    fstype: str
    free: int
    total: int
    inodes_free: int
    inodes_total: int
    fsync_median: float
    fsync_worst: float
    write_speed: float
    direct: bool


class PlaceFound(msgspec.Struct, frozen=True):
    """Where a store would be made: ``folder`` is the nearest that exists, at or above it; ``there``
    whether it is the place itself. ``file`` is what stands in the way and is no folder, else
    empty; ``writable`` whether this user may make something in the folder."""

    folder: str
    there: bool
    file: str
    writable: bool


def look_at_place(path: Path) -> PlaceFound:
    """What there is at ``path``; touches nothing."""
    path = path.absolute()
    above = [path, *path.parents]
    file = next((str(one) for one in above if os.path.lexists(one) and not one.is_dir()), "")
    folder = nearest_existing(path)
    return PlaceFound(str(folder), folder == path, file, os.access(folder, os.W_OK | os.X_OK))


def measure_disk(folder: Path) -> DiskMeasured:
    """Figures of the nearest folder at or above ``folder`` that exists.

    Raises OSError where nothing can be written there.
    """
    folder = nearest_existing(folder)
    room = os.statvfs(folder)
    fsyncs = _fsync_seconds(folder)
    speed, direct = _write_speed(folder, most=min(MOST_BYTES, room.f_bavail * room.f_frsize // 4))
    return DiskMeasured(
        folder=str(folder),
        fstype=fstype_of(folder, Path("/proc/self/mountinfo").read_text()),
        free=room.f_bavail * room.f_frsize,
        total=room.f_blocks * room.f_frsize,
        inodes_free=room.f_favail,
        inodes_total=room.f_files,
        fsync_median=statistics.median(fsyncs),
        fsync_worst=max(fsyncs),
        write_speed=speed,
        direct=direct,
    )


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or its nearest parent that exists: where it would be made."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def fstype_of(folder: Path, mountinfo: str) -> str:
    """The file system's type, from the mount that lies deepest above ``folder``."""
    best, found = -1, ""
    for line in mountinfo.splitlines():
        front, _, back = line.partition(" - ")
        fields = front.split()
        if len(fields) < 5 or not back:
            continue
        mount = Path(fields[4].encode().decode("unicode_escape"))
        # A later mount hides an earlier one at the same place.
        if (folder == mount or mount in folder.parents) and len(mount.parts) >= best:
            best, found = len(mount.parts), back.split()[0]
    return found


def _open_unlinked(folder: Path, flags: int) -> int:
    path = folder / f".everstep-doctor-{os.getpid()}-{os.urandom(6).hex()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    os.unlink(path)
    return fd


def _fsync_seconds(folder: Path) -> list[float]:
    fd = _open_unlinked(folder, 0)
    try:
        taken: list[float] = []
        while len(taken) < FSYNCS and sum(taken) < MOST_SECONDS:
            os.pwrite(fd, os.urandom(4096), 4096 * len(taken))
            start = time.perf_counter()
            os.fsync(fd)
            taken.append(time.perf_counter() - start)
        return taken
    finally:
        os.close(fd)


def _write_speed(folder: Path, *, most: int) -> tuple[float, bool]:
    block = mmap.mmap(-1, BLOCK)
    block[:] = os.urandom(1 << 16) * (BLOCK >> 16)  # compressing file systems get no zeros
    try:
        fd, direct = _open_direct(folder, block)
        try:
            start = time.perf_counter()
            written = 0
            while written < most and time.perf_counter() - start < MOST_SECONDS:
                written += os.pwrite(fd, block, written)
            os.fsync(fd)
            return max(written, 1) / (time.perf_counter() - start), direct
        finally:
            os.close(fd)
    finally:
        block.close()


def _open_direct(folder: Path, block: mmap.mmap) -> tuple[int, bool]:
    """A file opened with O_DIRECT where one block could be written so, else without."""
    try:
        fd = _open_unlinked(folder, os.O_DIRECT)
    except OSError as refused:
        if refused.errno != errno.EINVAL:
            raise
        return _open_unlinked(folder, 0), False
    try:
        os.pwrite(fd, memoryview(block)[: mmap.PAGESIZE], 0)
    except OSError as refused:
        os.close(fd)
        if refused.errno != errno.EINVAL:
            raise
        return _open_unlinked(folder, 0), False
    return fd, True
