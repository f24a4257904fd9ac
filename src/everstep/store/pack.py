"""How a pack is laid out, and the parts that make one up (spec section 6).

Owns: offsets, the gaps' zeros, footer and trailer. Never does: create the object. Called by:
write, verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from everstep.core.ids import Point
from everstep.core.layout import RankLayout, Snapshot
from everstep.errors import CorruptObject, UsageError
from everstep.store import chunks, codecs, records
from everstep.store.digests import Digest
from everstep.store.records import TRAILER_BYTES, ChunkEntry, Footer, FooterChunk

BODY_ALIGN = 4096
FOOTER_ALIGN = 64
SLICE_BYTES = 8 << 20
"""Bytes handed to the backend at a time, and so the grain of progress."""

Progress = Callable[[int], None]
"""Called with the bytes handed over since the last call."""

Digests = Callable[[], Sequence[bytes] | None]
"""The digests of the payload's chunks in the order of ``chunks.chunk_extents``, or None where
they must be taken from the payload. May wait for whoever takes them."""

Entries = tuple[tuple[ChunkEntry, ...], tuple[ChunkEntry, ...]]
"""The records of the payload's and of the state's chunks."""


class Places(NamedTuple):
    """Offsets in a pack, in bytes."""

    payload_bytes: int
    state_at: int
    state_bytes: int
    footer_at: int


def places(layout: RankLayout, state_bytes: int) -> Places:
    state_at = _up(layout.persist_bytes, BODY_ALIGN)
    footer_at = _up(state_at + state_bytes, FOOTER_ALIGN)
    return Places(layout.persist_bytes, state_at, state_bytes, footer_at)


def entries(
    snapshot: Snapshot, chunk_bytes: int, digest: Digest, known: Sequence[bytes] | None
) -> Entries:
    """The records of the payload's and the state's chunks, all in pack 0.

    ``known`` are digests of the payload's chunks in the order of ``chunks.chunk_extents``; there
    may be more than the persisted ones.
    """
    ranges = chunks.chunk_extents(snapshot.layout, chunk_bytes, persisted_only=True)
    if known is not None and len(known) < len(ranges):
        raise UsageError(f"{len(known)} digests were passed for {len(ranges)} chunks.")
    payload = tuple(
        _entry(
            known[i] if known is not None else digest(snapshot.payload[at : at + length]),
            at,
            length,
        )
        for i, (_, at, length) in enumerate(ranges)
    )
    base = places(snapshot.layout, len(snapshot.state)).state_at
    state = tuple(
        _entry(digest(snapshot.state[start:end]), base + start, end - start)
        for start, end in chunks.split(len(snapshot.state), chunk_bytes)
    )
    return payload, state


def footer_of(job: str, snapshot: Snapshot, parts: Entries) -> Footer:
    layout = snapshot.layout
    return Footer(
        job,
        point_of(snapshot),
        layout.layout,
        layout.world,
        layout.rank,
        layout.persist_bytes,
        len(snapshot.state),
        *(
            tuple(FooterChunk(c.digest, c.offset, c.stored_length) for c in group)
            for group in parts
        ),
    )


def length_of(at: Places, footer: bytes) -> int:
    return at.footer_at + len(footer) + TRAILER_BYTES


def stream(
    snapshot: Snapshot, footer: Callable[[], bytes], progress: Progress
) -> Iterator[memoryview]:
    """The pack's bytes in order, in slices of at most :data:`SLICE_BYTES`.

    ``footer`` is asked for when all before it was handed over.
    """
    for part in _parts(snapshot, footer):
        for start in range(0, len(part), SLICE_BYTES):
            piece = part[start : start + SLICE_BYTES]
            yield piece
            progress(len(piece))


def _parts(snapshot: Snapshot, footer: Callable[[], bytes]) -> Iterator[memoryview]:
    at = places(snapshot.layout, len(snapshot.state))
    yield snapshot.payload[: at.payload_bytes]
    yield memoryview(bytes(at.state_at - at.payload_bytes))
    yield snapshot.state
    yield memoryview(bytes(at.footer_at - at.state_at - at.state_bytes))
    end = footer()
    yield memoryview(end)
    yield memoryview(records.encode_trailer(at.footer_at, len(end)))


def check_gaps(snapshot: Snapshot) -> None:
    """Bytes of the payload between extents must be zero, or no reader could prove the pack."""
    for start, end in _gaps(snapshot.layout):
        if snapshot.payload[start:end].tobytes().strip(b"\0"):
            raise CorruptObject(
                f"the snapshot of step {snapshot.step} of rank {snapshot.layout.rank} has bytes "
                f"between its extents at {start} to {end}, which must be zero.",
                hint="Its memory was overwritten: drop this snapshot and take a new one.",
            )


def _gaps(layout: RankLayout) -> Iterator[tuple[int, int]]:
    at = 0
    for extent in layout.extents:
        if extent.persist:
            if extent.payload_offset > at:
                yield at, extent.payload_offset
            at = extent.payload_offset + extent.nbytes
    if layout.persist_bytes > at:
        yield at, layout.persist_bytes


def point_of(snapshot: Snapshot) -> Point:
    return Point(snapshot.step, snapshot.attempt)


def _entry(digest: bytes, offset: int, length: int) -> ChunkEntry:
    return ChunkEntry(digest, length, codecs.RAW, 0, offset, length, None)


def _up(n: int, align: int) -> int:
    return -(-n // align) * align
