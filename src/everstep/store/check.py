"""What an index and a set of indexes must satisfy before anyone acts on them.

Pure. Owns: the checks of spec sections 7 and 10 that need no bytes of packs. Called by: write (its
own index), commit (refuses), read (a damaged checkpoint). Findings are :class:`Unsound`; each
caller turns them into the error that fits what it was doing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from everstep.core.layout import ITEMSIZE, SHARED, Box
from everstep.store import boxes, chunks, codecs, digests, keys
from everstep.store.records import TRAILER_BYTES, ChunkEntry, ExtentEntry, Index, RefEntry
from everstep.store.settings import Settings


class Unsound(ValueError):
    """A record that cannot be true, in words for the error's message."""


def check_index(index: Index, settings: Settings, key: str) -> None:
    """One index by itself: sizes, ranges, dtypes and the chunk edges. ``key`` is for messages.

    Raises :class:`Unsound`; ``NewerFormat`` for a codec of a later version.
    """
    _require(0 <= index.rank < index.world <= keys.MAX_WORLD, f"rank {index.rank} of {index.world}")
    _require(index.point.step >= 0 and index.point.attempt >= 1, f"point {index.point}")
    _require(index.chunk_bytes == settings.chunk_bytes, f"chunks of {index.chunk_bytes} bytes")
    for pack in index.packs:
        _require(keys.parse_pack(pack.key) is not None, f"the pack key {pack.key!r}")
        _require(pack.length >= TRAILER_BYTES, f"a pack of {pack.length} bytes")
    for extent in index.extents:
        _check_tensor(extent, index.rank)
        _require(extent.payload_offset >= 0, f"payload offset {extent.payload_offset}")
    for ref in index.refs:
        _check_tensor(ref, index.rank)
    _check_chunks(index.chunks, extent_lengths(index), index, settings, key)
    # A reader allocates this much at once, so it must be there.
    room = sum(pack.length for pack in index.packs)
    _require(0 <= index.state_bytes <= room, f"a state of {index.state_bytes} bytes")
    state = (end - start for start, end in chunks.split(index.state_bytes, index.chunk_bytes))
    _check_chunks(index.state_chunks, state, index, settings, key)


def check_together(indexes: Sequence[Index]) -> None:
    """All ranks of a step: one job, point, layout and world, whole coverage (S5).

    ``indexes`` stands in rank order. Raises :class:`Unsound` naming the rank or the tensor.
    """
    first = indexes[0]
    for rank, index in enumerate(indexes):
        _require(index.rank == rank, f"the index of rank {index.rank} in the place of {rank}")
        for name in ("job", "point", "layout", "world", "chunk_bytes"):
            ours, theirs = getattr(index, name), getattr(first, name)
            _require(ours == theirs, f"{name} {ours} on rank {rank} and {theirs} on rank 0")
    _require(first.world == len(indexes), f"{len(indexes)} ranks of a world of {first.world}")
    _check_coverage(indexes)


def extent_lengths(index: Index) -> Iterator[int]:
    """Bytes of each chunk that an index must list, in order. Lazy, see ``chunk_edges``."""
    for extent in index.extents:
        for start, end in edges_of(extent, index.chunk_bytes):
            yield end - start


def edges_of(extent: ExtentEntry, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    return chunks.chunk_edges(extent.shape, box_of(extent), ITEMSIZE[extent.dtype], chunk_bytes)


def box_of(entry: ExtentEntry | RefEntry) -> Box:
    return Box(entry.offsets, entry.sizes)


def _check_tensor(entry: ExtentEntry | RefEntry, rank: int) -> None:
    _require(entry.dtype in ITEMSIZE, f"{entry.fqn} with the dtype {entry.dtype!r}")
    _require(min(entry.shape, default=0) >= 0, f"{entry.fqn} with the shape {entry.shape}")
    box = box_of(entry)
    _require(boxes.inside(box, entry.shape), f"{entry.fqn} with {box} outside {entry.shape}")
    _require(entry.rank in (SHARED, rank), f"{entry.fqn} of rank {entry.rank} at rank {rank}")


def _check_chunks(
    found: Sequence[ChunkEntry], wanted: Iterable[int], index: Index, settings: Settings, key: str
) -> None:
    count = 0
    for count, length in enumerate(wanted, start=1):
        _require(count <= len(found), f"{len(found)} chunks where there must be more")
        _check_chunk(found[count - 1], length, index, settings, key)
    _require(count == len(found), f"{len(found)} chunks where there must be {count}")


def _check_chunk(
    chunk: ChunkEntry, length: int, index: Index, settings: Settings, key: str
) -> None:
    codecs.check_known(chunk.codec, chunk.base, key)
    _require(len(chunk.digest) == digests.SIZES[settings.digest], "a digest of another length")
    _require(chunk.raw_length == length, f"a chunk of {chunk.raw_length} bytes for {length}")
    _require(0 <= chunk.pack < len(index.packs), f"a chunk in pack {chunk.pack}")
    end = index.packs[chunk.pack].length - TRAILER_BYTES
    inside = chunk.offset >= 0 and 0 <= chunk.stored_length <= end - chunk.offset
    _require(inside, f"a chunk at {chunk.offset} outside its pack")
    _require(chunk.stored_length == length, f"a raw chunk of {chunk.stored_length} for {length}")


def _check_coverage(indexes: Sequence[Index]) -> None:
    groups: dict[tuple[str, int], list[ExtentEntry]] = defaultdict(list)
    for index in indexes:
        for extent in index.extents:
            groups[extent.fqn, extent.rank].append(extent)
    for (fqn, rank), extents in groups.items():
        _check_group(fqn, rank, extents)
    for index in indexes:
        for ref in index.refs:
            _check_ref(ref, groups.get((ref.fqn, ref.rank), []), index.rank)


def _check_group(fqn: str, rank: int, extents: Sequence[ExtentEntry]) -> None:
    first = extents[0]
    for extent in extents:
        same = (extent.dtype, extent.shape) == (first.dtype, first.shape)
        _require(same, f"{fqn} with two shapes or dtypes")
    found = boxes.overlapping([box_of(extent) for extent in extents])
    _require(found is None, f"{fqn} stored twice: {found}")
    if rank == SHARED:
        have = sum(math.prod(extent.sizes) for extent in extents)
        want = math.prod(first.shape)
        _require(have == want, f"{fqn} with {have} of its {want} elements")


def _check_ref(ref: RefEntry, extents: Sequence[ExtentEntry], rank: int) -> None:
    wanted = math.prod(ref.sizes)
    if wanted == 0:
        return
    what = f"{ref.fqn}, which rank {rank} has to load,"
    _require(bool(extents), f"{what} nowhere")
    same = (ref.dtype, ref.shape) == (extents[0].dtype, extents[0].shape)
    _require(same, f"{what} with another shape or dtype")
    if ref.rank != SHARED:  # a shared tensor is covered whole, so any box of it is
        have = boxes.covered(box_of(ref), [box_of(extent) for extent in extents])
        _require(have == wanted, f"{what} with {have} of its {wanted} elements")


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise Unsound(otherwise)
