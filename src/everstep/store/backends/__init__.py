"""What a place for objects must offer, and which URL schemes name one.

Owns: the :class:`Backend` protocol, its value types and the registry of schemes. Never does: I/O
itself. Called by: the store's rooms above it; tests hold every backend to one conformance suite.

A backend named by a scheme of :data:`SCHEMES` is imported only when a URL asks for it, so that the
fault-injecting one of ``everstep.testing`` costs nothing and is never imported by a real run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from everstep.core.clock import Clock
from everstep.errors import BadStoreUrl

Buffer = bytes | bytearray | memoryview
Version = str
Condition = Version | Literal["absent"] | None
"""What :meth:`Backend.put` demands: a version, absence, or nothing."""

SCHEMES: dict[str, str] = {
    "file": "everstep.store.backends.local:open_url",
    "memory": "everstep.store.backends.memory:open_url",
    "faulty+file": "everstep.testing.faulty:open_url",
    "faulty+memory": "everstep.testing.faulty:open_url",
}
"""Scheme to ``module:function`` of ``(url, create, clock) -> Backend``."""


class ObjectInfo(msgspec.Struct, frozen=True, order=True):
    """An object's key, length in bytes, and modification time (seconds, the store's own clock)."""

    key: str
    size: int
    modified: float


class Backend(Protocol):
    """Objects under keys such as ``jobs/a/steps/x/manifest``. Safe for threads and processes.

    Failures are :class:`everstep.errors.StoreError` or its subclasses and name the key.
    """

    url: str

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from ``offset``; all that follow, or exactly ``length``.

        Raises ``ObjectMissing``; ``CorruptObject`` where the object is shorter than asked for.
        """
        ...

    def read_into(self, key: str, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (writable, contiguous bytes) exactly, or raise as :meth:`get` does."""
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Raises ``ObjectMissing``."""
        ...

    def create(self, key: str, parts: Buffer | Iterable[Buffer]) -> None:
        """Write a new object, atomically and durably (S2, S9).

        Raises ``ObjectExists`` and leaves what is there; ``StoreFull``, ``StoreNotWritable``.
        """
        ...

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """A ref's bytes and the version to pass to :meth:`put`. Raises ``ObjectMissing``."""
        ...

    def put(self, key: str, data: bytes, if_version: Condition = None) -> Version:
        """Replace a ref whole and durably. Raises ``StaleVersion`` where the condition fails."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, sorted by key."""
        ...

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Names directly below ``prefix`` (it ends with ``/``) that have objects below them."""
        ...

    def delete(self, key: str) -> None:
        """Remove durably; success where nothing is there."""
        ...

    def sweep_temporaries(self, older_than: float) -> int:
        """Remove what unfinished creates left before ``older_than`` (store time); how many."""
        ...


def parts_of(parts: Buffer | Iterable[Buffer]) -> Iterable[Buffer]:
    """``parts`` of a create as an iterable, whether it is one buffer or many."""
    return (parts,) if isinstance(parts, bytes | bytearray | memoryview) else parts


def open_backend(url: str, *, create: bool, clock: Clock) -> Backend:
    """The backend that ``url`` names. A text without a scheme is a path of the local machine."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    try:
        target = SCHEMES[scheme]
    except KeyError:
        raise BadStoreUrl(
            f"store URL {url!r} has the scheme {scheme!r}, which no backend serves.",
            hint="Use a path, or file:///absolute/path.",
        ) from None
    module, _, name = target.partition(":")
    opener: Callable[[str, bool, Clock], Backend] = getattr(importlib.import_module(module), name)
    return opener(url, create, clock)
