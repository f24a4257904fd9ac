"""A disk that loses power: the local backend's calls, recorded, and any part of them forgotten.

Owns: a file system in memory in which a write is durable only once its file was synced, and a
name only once its folder was. ``crash`` gives the disk as it may be found after a power cut: any
subset of what was not synced is there. Called by: tests, through ``LocalBackend(system=...)``; held
to the real one by the same conformance suite.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from everstep.store.backends.posix import FileInfo

Hook = Callable[[str, str], None]
"""Called with (call, path) before each; raises ``OSError`` to fail it, or to stop the process."""

LOST, KEPT, TORN = 0, 1, 2
"""Fates of one unsynced change. A torn write is there in part; a torn name is a lost one."""


@dataclass
class _File:
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    modified: float = 0.0

    def content(self) -> bytes:
        return _applied(self.durable, self.pending)


@dataclass(frozen=True)
class _Rename:
    """Names of one folder that change together: removed, and set to a node."""

    removed: str | None
    name: str | None = None
    node: _File | _Folder | None = None


@dataclass
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[_Rename] = field(default_factory=list)
    modified: float = 0.0

    def entries(self) -> dict[str, _File | _Folder]:
        return _renamed(self.durable, self.pending)


class SimulatedDisk:
    """Implements ``everstep.store.backends.posix.Os``. Paths are absolute; ``/`` exists.

    Modification times are a counter, one second a call, unless ``clock`` gives them. O_DIRECT is
    refused, as on many file systems.
    """

    def __init__(
        self, *, hook: Hook | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.hook = hook
        self._clock = clock
        self._root = _Folder()
        self._open: dict[int, _File] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._mutex = threading.RLock()
        self._ticks = 0
        self._next_fd = 3

    def pending(self) -> int:
        """How many changes a power cut now could forget."""
        return sum(len(node.pending) for node in self._nodes())

    def crash(
        self, fates: Sequence[int], *, clock: Callable[[], float] | None = None
    ) -> SimulatedDisk:
        """The disk after a power cut: one of LOST, KEPT, TORN for each pending change, in order.

        Missing fates are LOST. The new disk has nothing pending and no hook, and goes by ``clock``
        where one is given.
        """
        rest = iter(fates)
        fate_of: dict[int, list[int]] = {
            id(node): [next(rest, LOST) for _ in node.pending] for node in self._nodes()
        }
        found = SimulatedDisk(clock=clock or self._clock)
        found._ticks = self._ticks
        copy = _survivor(self._root, fate_of, {})
        assert isinstance(copy, _Folder)
        found._root = copy
        return found

    def tree(self) -> dict[str, bytes]:
        """Every file's path and content as a running process sees it."""
        return dict(_walk("", self._root))

    # the calls

    def open_new(self, path: str) -> int:
        with self._call("open_new", path):
            folder, name = self._parent(path)
            if name in folder.entries():
                raise _error(errno.EEXIST, path)
            node = _File(modified=self._now())
            folder.pending.append(_Rename(None, name, node))
            return self._descriptor(node)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._call("pwrite", str(fd)):
            node = self._open[fd]
            node.pending.append((offset, bytes(data)))
            node.modified = self._now()
            return len(data)

    def set_direct(self, fd: int, on: bool) -> None:
        with self._call("set_direct", str(fd)):
            if on:
                raise _error(errno.EINVAL, str(fd))

    def fsync(self, fd: int) -> None:
        with self._call("fsync", str(fd)):
            node = self._open[fd]
            node.durable, node.pending = node.content(), []

    def open_read(self, path: str) -> int:
        with self._call("open_read", path):
            return self._descriptor(self._file(path))

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._call("pread_into", str(fd)):
            data = self._open[fd].content()[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    def size(self, fd: int) -> int:
        with self._call("size", str(fd)):
            return len(self._open[fd].content())

    def close(self, fd: int) -> None:
        with self._mutex:
            del self._open[fd]

    def fsync_folder(self, path: str) -> None:
        with self._call("fsync_folder", path):
            folder = self._folder(path)
            folder.durable, folder.pending = folder.entries(), []

    def link(self, source: str, target: str) -> None:
        with self._call("link", target):
            node = self._file(source)
            folder, name = self._parent(target)
            if name in folder.entries():
                raise _error(errno.EEXIST, target)
            folder.pending.append(_Rename(None, name, node))

    def rename(self, source: str, target: str) -> None:
        with self._call("rename", target):
            node = self._file(source)
            folder, name = self._parent(target)
            old_folder, old_name = self._parent(source)
            assert folder is old_folder, "the backend renames within one folder only"
            folder.pending.append(_Rename(old_name, name, node))

    def unlink(self, path: str) -> None:
        with self._call("unlink", path):
            self._file(path)
            folder, name = self._parent(path)
            folder.pending.append(_Rename(name))

    def mkdir(self, path: str) -> None:
        with self._call("mkdir", path):
            folder, name = self._parent(path)
            if name in folder.entries():
                raise _error(errno.EEXIST, path)
            folder.pending.append(_Rename(None, name, _Folder(modified=self._now())))

    def rmdir(self, path: str) -> None:
        with self._call("rmdir", path):
            if self._folder(path).entries():
                raise _error(errno.ENOTEMPTY, path)
            folder, name = self._parent(path)
            folder.pending.append(_Rename(name))

    def stat(self, path: str) -> FileInfo:
        with self._call("stat", path):
            node = self._find(path)
            if isinstance(node, _Folder):
                return FileInfo(0, node.modified, True)
            return FileInfo(len(node.content()), node.modified, False)

    def entries(self, path: str) -> list[tuple[str, bool]]:
        with self._call("entries", path):
            found = self._folder(path).entries()
            return [(name, isinstance(node, _Folder)) for name, node in found.items()]

    @contextmanager
    def lock(self, path: str) -> Iterator[None]:
        with self._call("lock", path):
            self._folder(os.path.dirname(path))
            lock = self._locks.setdefault(path, threading.Lock())
        with lock:
            yield

    # inside

    @contextmanager
    def _call(self, name: str, path: str) -> Iterator[None]:
        if self.hook is not None:
            self.hook(name, path)
        with self._mutex:
            yield

    def _now(self) -> float:
        self._ticks += 1
        return self._clock() if self._clock is not None else float(self._ticks)

    def _descriptor(self, node: _File) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = node
        return self._next_fd

    def _find(self, path: str) -> _File | _Folder:
        node: _File | _Folder = self._root
        for name in (part for part in path.split("/") if part):
            if not isinstance(node, _Folder):
                raise _error(errno.ENOTDIR, path)
            try:
                node = node.entries()[name]
            except KeyError:
                raise _error(errno.ENOENT, path) from None
        return node

    def _file(self, path: str) -> _File:
        node = self._find(path)
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._find(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, name = os.path.split(path)
        return self._folder(folder), name

    def _nodes(self) -> Iterator[_File | _Folder]:
        """Every node that is reachable now or would be, were some change forgotten; each once."""
        seen: dict[int, _File | _Folder] = {}
        rest: list[_File | _Folder] = [self._root]
        while rest:
            node = rest.pop(0)
            if id(node) in seen:
                continue
            seen[id(node)] = node
            if isinstance(node, _Folder):
                rest += node.durable.values()
                rest += [change.node for change in node.pending if change.node is not None]
        return iter(list(seen.values()))


def _survivor(
    node: _File | _Folder, fate_of: dict[int, list[int]], made: dict[int, _File | _Folder]
) -> _File | _Folder:
    if id(node) in made:
        return made[id(node)]
    fates = fate_of[id(node)]
    if isinstance(node, _File):
        kept = [
            (offset, data if fate == KEPT else data[: len(data) // 2])
            for (offset, data), fate in zip(node.pending, fates, strict=True)
            if fate != LOST
        ]
        made[id(node)] = _File(_applied(node.durable, kept), [], node.modified)
    else:
        changes = [c for c, fate in zip(node.pending, fates, strict=True) if fate == KEPT]
        names = _renamed(node.durable, changes)
        made[id(node)] = _Folder(
            {name: _survivor(child, fate_of, made) for name, child in names.items()},
            [],
            node.modified,
        )
    return made[id(node)]


def _applied(durable: bytes, writes: Sequence[tuple[int, bytes]]) -> bytes:
    if not writes:
        return durable
    content = bytearray(durable)
    for offset, data in writes:
        content.extend(bytes(max(0, offset + len(data) - len(content))))
        content[offset : offset + len(data)] = data
    return bytes(content)


def _renamed(
    durable: dict[str, _File | _Folder], changes: Sequence[_Rename]
) -> dict[str, _File | _Folder]:
    names = dict(durable)
    for change in changes:
        if change.removed is not None:
            names.pop(change.removed, None)
        if change.name is not None and change.node is not None:
            names[change.name] = change.node
    return names


def _walk(path: str, node: _File | _Folder) -> Iterator[tuple[str, bytes]]:
    if isinstance(node, _File):
        yield path, node.content()
        return
    for name, child in sorted(node.entries().items()):
        yield from _walk(f"{path}/{name}", child)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
