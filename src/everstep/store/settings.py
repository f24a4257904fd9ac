"""``everstep.json``: what a store is.

Owns: its text, checks and creation. Called by: store.
"""

from __future__ import annotations

import contextlib
import secrets

import msgspec

from everstep.errors import (
    CorruptObject,
    NewerFormat,
    ObjectExists,
    ObjectMissing,
    UsageError,
)
from everstep.store import digests, keys
from everstep.store.backends import Backend
from everstep.store.chunks import CHUNK_ALIGN, DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES

FORMAT = 1
_MARK = b',"checksum":"'
_BOUND = 64 << 10


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store's settings, fixed when it is made. ``chunk_bytes`` is a multiple of 64."""

    everstep: str
    format: int
    store_id: str
    digest: str
    chunk_bytes: int


class _Version(msgspec.Struct):
    everstep: str
    format: int


def make(
    *, digest: str = digests.DEFAULT, chunk_bytes: int = DEFAULT_CHUNK_BYTES, store_id: str = ""
) -> Settings:
    """Settings of a new store. Raises ``UsageError``."""
    digests.digester(digest)
    if not CHUNK_ALIGN <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % CHUNK_ALIGN:
        raise UsageError(
            f"chunk_bytes {chunk_bytes} is not usable.",
            hint=f"Use a multiple of {CHUNK_ALIGN} up to {MAX_CHUNK_BYTES}.",
        )
    return Settings("store", FORMAT, store_id or secrets.token_hex(16), digest, chunk_bytes)


def encode(settings: Settings) -> bytes:
    front = msgspec.json.encode(settings)[:-1]
    return front + _MARK + digests.digest(front).hex().encode() + b'"}\n'


def decode(data: bytes, url: str) -> Settings:
    """Raises ``CorruptObject`` (``NewerFormat`` for a sound file of a later format)."""
    front, mark, rest = data.rpartition(_MARK)
    if not mark or rest != digests.digest(front).hex().encode() + b'"}\n':
        raise _corrupt(url, "does not match its checksum")
    try:
        version = msgspec.json.decode(front + b"}", type=_Version)
        if version.everstep == "store" and version.format > FORMAT:
            raise NewerFormat(
                f"the store {url} has format {version.format}; this everstep knows {FORMAT}.",
                hint="Upgrade everstep, or pass another --store.",
            )
        found = msgspec.json.decode(front + b"}", type=Settings)
        return make(digest=found.digest, chunk_bytes=found.chunk_bytes, store_id=found.store_id)
    except msgspec.DecodeError as error:
        raise _corrupt(url, f"does not decode: {error}") from error


def read(backend: Backend) -> Settings:
    """Raises ``ObjectMissing`` where there is no store."""
    try:
        size = backend.stat(keys.SETTINGS).size
    except ObjectMissing:
        raise ObjectMissing(
            f"there is no everstep store at {backend.url} (no {keys.SETTINGS}).",
            hint="Check the path and that its file system is mounted; `everstep run` makes one.",
        ) from None
    if size > _BOUND:
        raise _corrupt(backend.url, f"has {size} bytes")
    return decode(backend.get(keys.SETTINGS, 0, size), backend.url)


def create(backend: Backend, wanted: Settings) -> Settings:
    """Make the store, or read what another made first."""
    try:
        return read(backend)
    except ObjectMissing:
        pass
    with contextlib.suppress(ObjectExists):
        backend.create(keys.SETTINGS, encode(wanted))
    return read(backend)


def _corrupt(url: str, what: str) -> CorruptObject:
    return CorruptObject(
        f"{keys.SETTINGS} of the store {url} {what}.",
        hint="Put the file back from a copy; the checkpoints themselves are untouched.",
    )
