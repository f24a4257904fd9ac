"""Verified reads of chunks into memory.

Owns: joining neighbouring chunks into long reads, bounce buffers, digest checks. Called by: read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.errors import CorruptObject
from everstep.store import codecs
from everstep.store.backends import Backend
from everstep.store.boxes import Run
from everstep.store.digests import Digest
from everstep.store.records import ChunkEntry

READ_BYTES = 8 << 20
"""Longest joined read."""


@dataclass(frozen=True)
class Piece:
    """A chunk and what of it goes where in ``out``. ``fqn`` is for messages."""

    pack: str
    chunk: ChunkEntry
    fqn: str
    out: memoryview
    copies: tuple[Run, ...]

    @property
    def direct(self) -> bool:
        """Whether the stored bytes are the wanted ones, whole and in one place."""
        whole = len(self.copies) == 1 and self.copies[0].length == self.chunk.raw_length
        return whole and self.chunk.codec == codecs.RAW


@dataclass(frozen=True)
class Fetch:
    """One read of a pack: chunks that follow each other there and in memory, or a single one."""

    pieces: tuple[Piece, ...]


def fetches(pieces: Sequence[Piece]) -> list[Fetch]:
    """Group pieces, in order, into reads of at most :data:`READ_BYTES` where they are joined."""
    return [Fetch(tuple(group)) for group in _groups(pieces)]


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (size + piece.chunk.raw_length > READ_BYTES or not _joins(group[-1], piece)):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.chunk.raw_length
    if group:
        yield group


def _joins(a: Piece, b: Piece) -> bool:
    return (
        a.direct
        and b.direct
        and a.out is b.out
        and a.pack == b.pack
        and a.chunk.offset + a.chunk.stored_length == b.chunk.offset
        and a.copies[0].target + a.copies[0].length == b.copies[0].target
    )


def run(fetch: Fetch, backend: Backend, digest: Digest) -> None:
    """Read, verify and place. Raises ``CorruptObject`` naming key, offset and tensor."""
    if fetch.pieces[0].direct:
        _run_direct(fetch, backend, digest)
    else:
        _run_bounced(fetch.pieces[0], backend, digest)


def _run_direct(fetch: Fetch, backend: Backend, digest: Digest) -> None:
    first, last = fetch.pieces[0], fetch.pieces[-1]
    start = first.copies[0].target
    end = last.copies[0].target + last.copies[0].length
    backend.read_into(first.pack, first.out[start:end], first.chunk.offset)
    for piece in fetch.pieces:
        target, length = piece.copies[0].target, piece.copies[0].length
        _verify(piece, piece.out[target : target + length], digest)


def _run_bounced(piece: Piece, backend: Backend, digest: Digest) -> None:
    stored = memoryview(bytearray(piece.chunk.stored_length))
    backend.read_into(piece.pack, stored, piece.chunk.offset)
    raw = codecs.decode(piece.chunk.codec, stored, piece.chunk.raw_length, key=piece.pack)
    _verify(piece, raw, digest)
    for copy in piece.copies:
        target = piece.out[copy.target : copy.target + copy.length]
        target[:] = raw[copy.source : copy.source + copy.length]


def _verify(piece: Piece, raw: memoryview, digest: Digest) -> None:
    if digest(raw) != piece.chunk.digest:
        raise CorruptObject(
            f"{piece.pack} at byte {piece.chunk.offset} ({piece.chunk.stored_length} bytes of "
            f"{piece.fqn}) does not match its digest.",
            hint="The checkpoint is kept; another one has to be used.",
        )
