"""The operating system's calls that the local backend makes, and no others.

Owns: one thin object around them, so that a test can put a simulated disk in its place and drop
what was not synced. Never does: decisions, retries, error translation. Called by: backends.local.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

LOCK_SECONDS = 10.0
"""For a lock that another holds."""


class FileInfo(NamedTuple):
    """Length in bytes, modification time in seconds, and whether it is a folder."""

    size: int
    modified: float
    folder: bool


class Os(Protocol):
    """Calls raise ``OSError`` as the kernel would. Descriptors are opaque integers."""

    def open_new(self, path: str) -> int:
        """A new file for writing; ``EEXIST`` where there is one."""
        ...

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int: ...

    def set_direct(self, fd: int, on: bool) -> None:
        """Write past the page cache, or through it again; ``EINVAL`` where that cannot be."""
        ...

    def fsync(self, fd: int) -> None: ...

    def open_read(self, path: str) -> int: ...

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int: ...

    def size(self, fd: int) -> int: ...

    def close(self, fd: int) -> None: ...

    def fsync_folder(self, path: str) -> None: ...

    def link(self, source: str, target: str) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def stat(self, path: str) -> FileInfo: ...

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """Names in a folder, each with whether it is a folder itself."""
        ...

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock, between threads and processes, while the context is open;
        ``ETIMEDOUT`` where another keeps it."""
        ...


class PosixOs:
    """The real calls."""

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def set_direct(self, fd: int, on: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def open_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def close(self, fd: int) -> None:
        os.close(fd)

    def fsync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o755)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def stat(self, path: str) -> FileInfo:
        found = os.stat(path)
        folder = (found.st_mode & 0o170000) == 0o040000
        return FileInfo(found.st_size, found.st_mtime, folder)

    def entries(self, path: str) -> list[tuple[str, bool]]:
        with os.scandir(path) as found:
            return [(entry.name, entry.is_dir()) for entry in found]

    @contextmanager
    def lock(self, path: str) -> Iterator[None]:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            _take_lock(fd)
            yield
        finally:
            os.close(fd)


def _take_lock(fd: int) -> None:
    # flock belongs to the open file, so it also keeps threads of one process apart. It is held for
    # milliseconds; a holder that was stopped in between would keep everybody waiting for ever.
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
        time.sleep(0.005)
    whose = _holder(os.fstat(fd).st_ino)
    raise TimeoutError(errno.ETIMEDOUT, f"its lock has been held for {LOCK_SECONDS:g} s by {whose}")


def _holder(inode: int) -> str:
    """Who holds a lock on the file, as far as this machine knows."""
    with contextlib.suppress(OSError), open("/proc/locks") as table:
        for line in table:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                return f"process {fields[4]}, which may be stopped"
    return "another process, on this host or another"
