"""Objects as files of one folder, with the write discipline of S9.

Owns: temporaries, fsync, link, rename, folder fsync, O_DIRECT.
Never does: records, checksums (its callers check what they read). Called by: the store through
:class:`everstep.store.backends.Backend`.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import xxhash

from everstep.core import points
from everstep.core.clock import Clock
from everstep.errors import BadName, BadStoreUrl, ObjectExists, ObjectMissing, StaleVersion
from everstep.store.backends import Buffer, Condition, ObjectInfo, Version, parts_of
from everstep.store.backends.failures import missing, short, translated
from everstep.store.backends.posix import FileInfo, Os, PosixOs

WRITE_BYTES = 8 << 20
"""Largest single write: long enough for full speed, short enough to keep the page cache small."""
DIRECT_ALIGN = 4096
"""O_DIRECT wants offset, length and address at multiples of the block; no disk has larger ones."""
DIRECT_MIN = 1 << 20
"""Bytes below which O_DIRECT gains nothing."""
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_TEMPORARY = ".tmp-"
_LOCK = ".lock-"


class LocalBackend:
    """A folder of this machine or of a mounted file system. ``system`` makes the calls."""

    def __init__(self, root: str, *, system: Os | None = None, create: bool = False) -> None:
        self.root = root.rstrip("/") or "/"
        self.url = f"file://{self.root}"
        self._os: Os = system if system is not None else PosixOs()
        self._lock = threading.Lock()
        self._written = {"direct_bytes": 0, "buffered_bytes": 0}
        self._direct_refused = ""
        if create:
            self._make_root()

    # reading

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._reading(key) as fd:
            size = self._os.size(fd)
            wanted = max(0, size - offset) if length is None else length
            if offset + wanted > size:
                raise short(key, offset, wanted, size)
            data = bytearray(wanted)
            self._fill(key, fd, memoryview(data), offset)
        return bytes(data)

    def read_into(self, key: str, buffer: memoryview, offset: int) -> None:
        with self._reading(key) as fd:
            self._fill(key, fd, buffer, offset)

    def stat(self, key: str) -> ObjectInfo:
        with translated(key, "look at"):
            found = self._os.stat(self._path(key))
        if found.folder:
            raise missing(key)
        return ObjectInfo(key, found.size, found.modified)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        data = self.get(key)
        return data, _version(data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        return iter(sorted(self._walk(folder, prefix)))

    def list_folders(self, prefix: str) -> Sequence[str]:
        folder = prefix.rstrip("/")
        names = [name for name, is_folder in self._entries(folder) if is_folder]
        return sorted(n for n in names if next(self._walk(f"{folder}/{n}".lstrip("/"), ""), None))

    def report(self) -> dict[str, int | str]:
        with self._lock:
            return {**self._written, "direct_refused": self._direct_refused}

    # writing

    def create(self, key: str, parts: Buffer | Iterable[Buffer]) -> None:
        path = self._path(key)
        with translated(key, "write"):
            temporary = self._write_temporary(path, parts_of(parts))
            try:
                points.reach("store.local.before_link")
                self._os.link(temporary, path)
                exists = False
            except FileExistsError:
                exists = True
            finally:
                self._os.unlink(temporary)
            # Also where it existed: whoever linked it may have died before it could sync.
            self._sync_folders(path)
        if exists:
            raise ObjectExists(
                f"{key} exists already in {self.url}.",
                hint="Immutable objects are never replaced: read it, or write under a new name.",
            )

    def put(self, key: str, data: bytes, if_version: Condition = None) -> Version:
        path = self._path(key)
        folder, name = os.path.split(path)
        with translated(key, "replace"):
            self._make_folders(folder)
            with self._os.lock(f"{folder}/{_LOCK}{name}"):
                self._check_version(key, if_version)
                temporary = self._write_temporary(path, (data,))
                points.reach("store.local.before_rename")
                self._os.rename(temporary, path)
                self._sync_folders(path)
        return _version(data)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translated(key, "delete"):
            try:
                self._os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            folder = os.path.dirname(path)
            self._os.fsync_folder(folder)
            self._remove_empty(folder)

    def sweep_temporaries(self, older_than: float) -> int:
        removed = 0
        for path, found in self._temporaries(self.root):
            if found.modified < older_than:
                with translated(path, "remove"):
                    self._os.unlink(path)
                removed += 1
        return removed

    # one file

    def _write_temporary(self, path: str, parts: Iterable[Buffer]) -> str:
        folder = os.path.dirname(path)
        temporary = f"{folder}/{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        fd = self._open_temporary(folder, temporary)
        try:
            self._write_parts(fd, parts)
            points.reach("store.local.before_fsync")
            # An fsync that fails may have thrown the pages away and would succeed if repeated:
            # the file is given up, and a caller who tries again writes a new one (S9).
            self._os.fsync(fd)
        except BaseException:
            self._os.close(fd)
            self._os.unlink(temporary)
            raise
        self._os.close(fd)
        return temporary

    def _open_temporary(self, folder: str, temporary: str) -> int:
        while True:
            try:
                self._make_folders(folder)
                return self._os.open_new(temporary)
            except FileNotFoundError:
                if not self._exists(self.root):
                    raise  # the store itself is gone; a folder that a sweep removed is made again

    def _write_parts(self, fd: int, parts: Iterable[Buffer]) -> None:
        at = 0
        for part in parts:
            view = memoryview(part).cast("B")
            done = self._write_direct(fd, view, at)
            self._write_buffered(fd, view[done:], at + done)
            at += len(view)

    def _write_direct(self, fd: int, view: memoryview, at: int) -> int:
        """How many bytes of ``view`` went past the page cache; 0 where that is not possible."""
        whole = len(view) // DIRECT_ALIGN * DIRECT_ALIGN
        if whole < DIRECT_MIN or at % DIRECT_ALIGN or not self._set_direct(fd, True):
            return 0
        done = 0
        try:
            while done < whole and done % DIRECT_ALIGN == 0:
                piece = view[done : min(done + WRITE_BYTES, whole)]
                done += self._os.pwrite(fd, piece, at + done)
        except OSError as error:
            # The memory's address may be what is refused: then the next part may do better.
            if error.errno not in _DIRECT_REFUSED:
                raise
            self._note_refusal(error)
        finally:
            self._set_direct(fd, False)
        self._count("direct_bytes", done)
        return done

    def _set_direct(self, fd: int, on: bool) -> bool:
        try:
            self._os.set_direct(fd, on)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            self._note_refusal(error)
            return False
        return True

    def _note_refusal(self, error: OSError) -> None:
        with self._lock:
            self._direct_refused = f"{os.strerror(error.errno or 0)}; wrote through the page cache"

    def _write_buffered(self, fd: int, view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            done += self._os.pwrite(fd, view[done : done + WRITE_BYTES], at + done)
        self._count("buffered_bytes", done)

    def _count(self, what: str, n: int) -> None:
        with self._lock:
            self._written[what] += n

    def _fill(self, key: str, fd: int, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            n = self._os.pread_into(fd, buffer[done:], offset + done)
            if n == 0:
                raise short(key, offset, len(buffer), offset + done)
            done += n

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        with translated(key, "read"):
            fd = self._os.open_read(self._path(key))
            try:
                yield fd
            finally:
                self._os.close(fd)

    def _check_version(self, key: str, condition: Condition) -> None:
        if condition is None:
            return
        try:
            current = self.get_versioned(key)[1]
        except ObjectMissing:
            current = "absent"
        if current != condition:
            raise StaleVersion(
                f"{key} was changed by another writer since it was read.",
                hint="Read it again and decide anew.",
            )

    # folders

    def _make_root(self) -> None:
        with translated(self.root, "make the store's folder"):
            missing = []
            path = self.root
            while not self._exists(path):
                missing.append(path)
                path = os.path.dirname(path)
            for path in reversed(missing):
                self._mkdir(path)
                self._os.fsync_folder(os.path.dirname(path))

    def _make_folders(self, folder: str) -> None:
        """Folders below the root; the root itself is only made by who was told to make a store."""
        if self._exists(folder):
            return
        if folder == self.root:
            raise FileNotFoundError(errno.ENOENT, "the store's folder is gone", self.root)
        self._make_folders(os.path.dirname(folder))
        self._mkdir(folder)

    def _mkdir(self, path: str) -> None:
        try:
            self._os.mkdir(path)
        except FileExistsError:
            return

    def _sync_folders(self, path: str) -> None:
        """Sync every folder from the file's up to the root, whoever made them (S9)."""
        folder = os.path.dirname(path)
        while True:
            self._os.fsync_folder(folder)
            if folder == self.root:
                return
            folder = os.path.dirname(folder)

    def _remove_empty(self, folder: str) -> None:
        while folder != self.root:
            try:
                self._os.rmdir(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return
            folder = os.path.dirname(folder)

    def _exists(self, path: str) -> bool:
        try:
            self._os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _entries(self, folder: str) -> Sequence[tuple[str, bool]]:
        with translated(folder or self.root, "list"):
            try:
                found = self._os.entries(self._path(folder) if folder else self.root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(entry for entry in found if not entry[0].startswith("."))

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        for name, is_folder in self._entries(folder):
            key = f"{folder}/{name}" if folder else name
            if is_folder and (key.startswith(prefix) or prefix.startswith(f"{key}/")):
                yield from self._walk(key, prefix)
            elif not is_folder and key.startswith(prefix):
                try:
                    yield self.stat(key)
                except ObjectMissing:
                    continue  # deleted between the listing and the look at it

    def _temporaries(self, folder: str) -> Iterator[tuple[str, FileInfo]]:
        try:
            entries = self._os.entries(folder)
        except FileNotFoundError:
            return
        for name, is_folder in entries:
            path = f"{folder}/{name}"
            if is_folder:
                yield from self._temporaries(path)
            elif name.startswith(_TEMPORARY):
                try:
                    yield path, self._os.stat(path)
                except FileNotFoundError:
                    continue  # its writer finished

    def _path(self, key: str) -> str:
        pieces = key.split("/")
        if any(not piece or piece.startswith(".") or "\0" in piece for piece in pieces):
            raise BadName(
                f"{key!r} is no key: an empty name, or one that begins with '.', could leave "
                "the store's folder.",
                hint="A record that holds such a key was not written by everstep.",
            )
        return f"{self.root}/{key}"


def open_url(url: str, create: bool, clock: Clock) -> LocalBackend:
    """A plain path, or ``file:///path``. ``clock`` is not needed: files have times of their own."""
    del clock
    return LocalBackend(path_of(url), create=create)


def path_of(url: str) -> str:
    """The absolute path that a local store's URL names. Raises ``BadStoreUrl``."""
    if "://" not in url:
        if not url:
            raise BadStoreUrl("the store's path is empty.", hint="Pass a folder.")
        return os.path.abspath(os.path.expanduser(url))
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise BadStoreUrl(
            f"store URL {url!r} names no path of this machine.",
            hint="Write file:///absolute/path (three slashes), or a plain path.",
        )
    return os.path.abspath(unquote(parts.path))


def _version(data: bytes) -> Version:
    return xxhash.xxh3_128_hexdigest(data)
