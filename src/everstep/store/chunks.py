"""Where chunks begin and end: a pure function of a tensor's shape, the extent's box and the size.

Owns: chunk edges (spec section 6). Never does: I/O, digests. Called by: write,
read, verify, and the keeper, which digests its own memory in the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from everstep.core.layout import ITEMSIZE, Box, RankLayout

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 8 << 20
CHUNK_ALIGN = 64
"""Bytes. Every element size divides it, so that no chunk ends inside an element."""


class ChunkRange(NamedTuple):
    """One chunk of a layout: which extent, where in the payload, how many bytes."""

    extent: int
    offset: int
    length: int


def chunk_extents(
    layout: RankLayout, chunk_bytes: int, *, persisted_only: bool = False
) -> list[ChunkRange]:
    """All chunks of a layout's extents in payload order; the persisted extents' come first."""
    return [
        ChunkRange(index, extent.payload_offset + start, end - start)
        for index, extent in enumerate(layout.extents)
        if extent.persist or not persisted_only
        for start, end in chunk_edges(extent.shape, extent.box, ITEMSIZE[extent.dtype], chunk_bytes)
    ]


def chunk_edges(
    shape: tuple[int, ...], box: Box, itemsize: int, chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """(start, end) of each chunk in the row-major bytes of ``box``, in order and without gaps.

    ``shape`` is the global tensor's. Edges lie at the same global rows whatever the sharding.
    Lazy, since a hostile record can tell of more chunks than memory holds.
    """
    total = math.prod(box.sizes) * itemsize
    if total == 0:
        return
    if not shape:
        yield 0, total
        return
    row = math.prod(box.sizes[1:]) * itemsize
    if row > chunk_bytes:
        yield from _inside_rows(box.sizes[0], row, chunk_bytes)
        return
    rows = max(1, chunk_bytes // (math.prod(shape[1:]) * itemsize))
    yield from _whole_rows(box.offsets[0], box.sizes[0], row, rows)


def _whole_rows(first: int, count: int, row: int, rows: int) -> Iterator[tuple[int, int]]:
    start, last = first, first + count
    while start < last:
        end = min((start // rows + 1) * rows, last)
        yield (start - first) * row, (end - first) * row
        start = end


def _inside_rows(count: int, row: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    for base in range(0, count * row, row):
        for start in range(0, row, chunk_bytes):
            yield base + start, base + min(start + chunk_bytes, row)


def split(length: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the chunks of a rank's state: plain multiples of the chunk."""
    for start in range(0, length, chunk_bytes):
        yield start, min(start + chunk_bytes, length)
