"""Objects in this process: for tests, examples and dry runs.

Owns: named dictionaries behind one lock each. Never does: survive the process. Called by: the
store through :class:`everstep.store.backends.Backend`; held to the same suite as the local one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from everstep.core.clock import Clock, SystemClock
from everstep.errors import BadStoreUrl, ObjectExists, StaleVersion
from everstep.store.backends import Buffer, Condition, ObjectInfo, Version, parts_of
from everstep.store.backends.failures import missing, short

_spaces: dict[str, MemoryBackend] = {}
_spaces_lock = threading.Lock()


class MemoryBackend:
    """A dictionary. ``objects`` is open to tests that damage or copy what is stored."""

    def __init__(self, name: str = "unnamed", *, clock: Clock | None = None) -> None:
        self.url = f"memory://{name}"
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self._versions: dict[str, int] = {}
        self._clock = clock if clock is not None else SystemClock()
        self._count = 0
        self._lock = threading.Lock()

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._find(key)
        end = len(data) if length is None else offset + length
        if end > len(data):
            raise short(key, offset, end - offset, len(data))
        return data[offset:end]

    def read_into(self, key: str, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.get(key, offset, len(buffer))

    def stat(self, key: str) -> ObjectInfo:
        with self._lock:
            if key in self.objects:
                return ObjectInfo(key, len(self.objects[key]), self.modified[key])
        raise missing(key)

    def create(self, key: str, parts: Buffer | Iterable[Buffer]) -> None:
        data = b"".join(parts_of(parts))
        with self._lock:
            if key in self.objects:
                raise ObjectExists(
                    f"{key} exists already in {self.url}.",
                    hint="Immutable objects are never replaced: read it, or use a new name.",
                )
            self._set(key, data)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        with self._lock:
            if key in self.objects:
                return self.objects[key], str(self._versions[key])
        raise missing(key)

    def put(self, key: str, data: bytes, if_version: Condition = None) -> Version:
        with self._lock:
            current = str(self._versions[key]) if key in self.objects else "absent"
            if if_version is not None and if_version != current:
                raise StaleVersion(
                    f"{key} was changed by another writer since it was read.",
                    hint="Read it again and decide anew.",
                )
            return self._set(key, bytes(data))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._lock:
            found = [
                ObjectInfo(key, len(data), self.modified[key])
                for key, data in self.objects.items()
                if key.startswith(prefix)
            ]
        return iter(sorted(found))

    def list_folders(self, prefix: str) -> Sequence[str]:
        with self._lock:
            rests = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        with self._lock:
            self.objects.pop(key, None)

    def sweep_temporaries(self, older_than: float) -> int:
        del older_than  # a create here leaves nothing behind
        return 0

    def _set(self, key: str, data: bytes) -> Version:
        self._count += 1
        self.objects[key] = data
        self.modified[key] = self._clock.wall()
        self._versions[key] = self._count
        return str(self._count)

    def _find(self, key: str) -> bytes:
        with self._lock:
            if key in self.objects:
                return self.objects[key]
        raise missing(key)


def open_url(url: str, create: bool, clock: Clock) -> MemoryBackend:
    """``memory://name``: the space of that name in this process, made at its first use."""
    del create
    name = urlsplit(url).netloc
    if not name:
        raise BadStoreUrl(f"store URL {url!r} names no space.", hint="Write memory://name.")
    with _spaces_lock:
        return _spaces.setdefault(name, MemoryBackend(name, clock=clock))
