"""The records of the store and their frames (spec section 5).

Owns: the record types, encoding, and the checks that a reader owes before it believes one. Never
does: I/O. Called by: every module of the store.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple, TypeVar

import msgspec

from everstep.core.health import Health
from everstep.core.history import Kind as HistoryKind
from everstep.core.ids import Point
from everstep.errors import CorruptObject, NewerFormat
from everstep.store.digests import digest

MAGIC = b"everstep"
HEADER_BYTES = 40
TRAILER_BYTES = 48
TRAILER_MAGIC = b"evstrail"
PACK_VERSION = 1

_HEAD = struct.Struct("<8s4sIQ")
_TRAILER = struct.Struct("<8sIIQQ")

Source = Literal["store", "memory", "fresh"]
Proof = Literal["structure", "bytes", "damaged"]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the framed records."""


class ExtentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A persisted extent of an index. ``rank`` is ``core.layout.SHARED`` for the job's tensors."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    payload_offset: int


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a chunk's bytes are and what they must digest to. ``pack`` counts in ``packs``."""

    digest: bytes
    raw_length: int
    codec: str
    pack: int
    offset: int
    stored_length: int
    base: bytes | None


class RefEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor part that a rank has to load."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int


class PackEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pack's key, relative to the job, and its length in bytes."""

    key: str
    length: int


class Claim(Record, frozen=True):
    job: str
    attempt: int
    agent: str
    host: str
    boot: str
    pid: int
    started: int
    nonce: str


class BranchRecord(Record, frozen=True):
    job: str
    attempt: int
    restored: Point | None
    source: Source
    fresh_reason: str
    world: int
    environment: dict[str, str]


class Index(Record, frozen=True, omit_defaults=True):
    """``health`` stands in version 2 alone; without it the bytes are those of version 1."""

    job: str
    point: Point
    layout: str
    world: int
    rank: int
    facts: dict[str, str]
    chunk_bytes: int
    packs: tuple[PackEntry, ...]
    extents: tuple[ExtentEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    state_chunks: tuple[ChunkEntry, ...]
    state_bytes: int
    refs: tuple[RefEntry, ...]
    health: Health | None = None


class RankEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's index as the manifest names it: key, length, digest (the store's algorithm)."""

    key: str
    length: int
    digest: bytes


class Manifest(Record, frozen=True, omit_defaults=True):
    """``health`` as in :class:`Index`: the worst of each rank's."""

    job: str
    point: Point
    layout: str
    world: int
    digest: str
    chunk_bytes: int
    bytes: int
    facts: dict[str, str]
    ranks: tuple[RankEntry, ...]
    health: Health | None = None


class Tombstone(Record, frozen=True):
    job: str
    point: Point
    reason: str


class Swept(Record, frozen=True):
    job: str
    point: Point


class FooterChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: bytes
    offset: int
    stored_length: int


class Footer(Record, frozen=True):
    job: str
    point: Point
    layout: str
    world: int
    rank: int
    payload_bytes: int
    state_bytes: int
    chunks: tuple[FooterChunk, ...]
    state_chunks: tuple[FooterChunk, ...]


class OwnerRecord(Record, frozen=True):
    job: str
    attempt: int
    agent: str
    host: str
    boot: str
    pid: int
    started: int
    renewed: float
    released: bool


class Newest(Record, frozen=True):
    point: Point


class Verified(Record, frozen=True):
    """What was proved of which point (by the point's text), no more."""

    proofs: dict[str, Proof]


class ClockProbe(Record, frozen=True):
    nonce: str


class HistoryRecord(Record, frozen=True):
    """One record of the job's history (spec section 12). The store does not know what ``body``
    says."""

    job: str
    kind: HistoryKind
    attempt: int
    sequence: int
    format: int
    body: bytes


class Kind(NamedTuple):
    code: bytes
    version: int
    """The newest that this everstep reads."""
    bound: int
    """Bytes that an object of this kind may have at most."""


_SMALL = 1 << 20
KINDS: dict[type[Record], Kind] = {
    Claim: Kind(b"clai", 1, _SMALL),
    BranchRecord: Kind(b"bran", 1, _SMALL),
    Index: Kind(b"indx", 2, 1 << 30),
    Manifest: Kind(b"mani", 2, 64 << 20),
    Tombstone: Kind(b"tomb", 1, _SMALL),
    Swept: Kind(b"swep", 1, _SMALL),
    Footer: Kind(b"foot", 1, 1 << 30),
    HistoryRecord: Kind(b"hist", 1, _SMALL),
    OwnerRecord: Kind(b"ownr", 1, _SMALL),
    Newest: Kind(b"newe", 1, _SMALL),
    Verified: Kind(b"veri", 1, _SMALL),
    ClockProbe: Kind(b"cloc", 1, _SMALL),
}

R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """The framed bytes of a record; equal records give equal bytes."""
    kind = KINDS[type(record)]
    body = msgspec.msgpack.encode(record, order="deterministic")
    head = _HEAD.pack(MAGIC, kind.code, _version(record, kind), len(body))
    return head + digest(head + body) + body


def _version(record: Record, kind: Kind) -> int:
    """The oldest version that has all members: who reads only that one can read this."""
    if isinstance(record, Index | Manifest) and record.health is None:
        return 1
    return kind.version


def decode(data: bytes, record: type[R], key: str) -> R:
    """The record that ``data``, the whole object under ``key``, holds.

    Raises ``CorruptObject`` for anything that was damaged, cut or is of another kind, and
    ``NewerFormat`` for a sound frame of a later version.
    """
    kind = KINDS[record]
    code, version, body = _open_frame(data, kind.bound, key)
    if code != kind.code:
        raise _corrupt(key, f"is a record of kind {code!r} where {kind.code!r} belongs")
    if version > kind.version:
        raise NewerFormat(
            f"{key} has version {version} of its format; this everstep knows {kind.version}.",
            hint="Upgrade everstep to the version that wrote it, or later.",
        )
    try:
        return msgspec.msgpack.decode(body, type=record)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _corrupt(key, f"does not decode as {record.__name__}: {error}") from error


def encode_trailer(footer_offset: int, footer_length: int) -> bytes:
    """The fixed last bytes of a pack: where its footer is."""
    front = _TRAILER.pack(TRAILER_MAGIC, PACK_VERSION, 0, footer_offset, footer_length)
    return front + digest(front)


def decode_trailer(data: bytes, pack_length: int, key: str) -> tuple[int, int]:
    """(offset, length) of the footer, both inside the pack."""
    front, checksum = data[: _TRAILER.size], data[_TRAILER.size :]
    if len(data) != TRAILER_BYTES or digest(front) != checksum:
        raise _corrupt(key, "has a damaged trailer")
    magic, version, zero, offset, length = _TRAILER.unpack(front)
    if magic != TRAILER_MAGIC or zero != 0:
        raise _corrupt(key, "is not a pack")
    if version > PACK_VERSION:
        raise NewerFormat(
            f"{key} is a pack of version {version}; this everstep knows {PACK_VERSION}.",
            hint="Upgrade everstep to the version that wrote it, or later.",
        )
    if offset + length + TRAILER_BYTES != pack_length:
        raise _corrupt(key, "has a footer that does not lie before its trailer")
    return offset, length


def _open_frame(data: bytes, bound: int, key: str) -> tuple[bytes, int, memoryview]:
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise _corrupt(key, "is not a record of everstep")
    _, code, version, length = _HEAD.unpack_from(data)
    if len(data) != HEADER_BYTES + length or len(data) > bound:
        raise _corrupt(key, f"has {len(data)} bytes; its header tells of {HEADER_BYTES + length}")
    if digest(data[: _HEAD.size] + data[HEADER_BYTES:]) != data[_HEAD.size : HEADER_BYTES]:
        raise _corrupt(key, "does not match its checksum")
    return code, version, memoryview(data)[HEADER_BYTES:]


def _corrupt(key: str, what: str) -> CorruptObject:
    return CorruptObject(f"{key} {what}.", hint="It is kept; another one has to be used.")
