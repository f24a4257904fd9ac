"""Who copies and who persists which bytes. Pure: the same facts give the same split on all ranks.

Owns: the layout and its digest. Never does: look at a live tensor, talk to anyone. Called by:
train, when the layout of the state has changed.

Replicated tensors stand on one line of bytes, sorted by name. The line is cut into one block a
node, in proportion to its ranks; a node's ranks share its block (which they persist) and, apart
from it, the rest of the line (which they only copy), so both kinds of work are balanced and what a
rank persists is among what it copies.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from everstep.core.layout import ITEMSIZE, SHARED, Box, RankLayout, TensorRef, place
from everstep.state.inspect import Held

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk where the store says nothing else."""

Piece = tuple[TensorRef, Box, bool]


def plan_layout(
    held: Sequence[Held],
    *,
    world: int,
    rank: int,
    node_of_rank: tuple[int, ...],
    chunk_bytes: int = CHUNK_BYTES,
) -> RankLayout:
    """The extents of ``rank``. ``node_of_rank[r]`` is the node of rank r.

    Every byte of a shared tensor gets one persist owner in the job and one snapshot owner on each
    node that holds it; cuts lie on chunk edges. Tensors without elements have no extents.
    """
    if len(node_of_rank) != world:
        raise AssertionError(f"{len(node_of_rank)} nodes named for {world} ranks")
    split = sorted((h for h in held if h.split and h.ref.nbytes), key=lambda h: h.ref.fqn)
    pieces = _whole(held, rank, node_of_rank)
    pieces += _shares([h.ref for h in split], rank, node_of_rank, chunk_bytes)
    return place(
        pieces, layout=_digest(held, world, node_of_rank, chunk_bytes), world=world, rank=rank
    )


def _digest(
    held: Sequence[Held], world: int, node_of_rank: tuple[int, ...], chunk_bytes: int
) -> str:
    shared = sorted(
        (h.ref.fqn, h.ref.dtype, h.ref.shape, h.split, h.facts)
        for h in held
        if h.ref.rank == SHARED
    )
    return xxhash.xxh3_128_hexdigest(
        msgspec.msgpack.encode([shared, world, node_of_rank, chunk_bytes])
    )


def _whole(held: Iterable[Held], rank: int, node_of_rank: tuple[int, ...]) -> list[Piece]:
    """Tensors that one holder persists, and the first holder on each node copies."""
    pieces = []
    for item in held:
        if item.split or item.ref.nbytes == 0:
            continue
        node = node_of_rank[rank]
        if next(r for r in item.holders if node_of_rank[r] == node) == rank:
            pieces.append((item.ref, item.ref.box, item.holders[0] == rank))
    return pieces


class _Cut(NamedTuple):
    """A place on the line: before this row of this tensor. Ordered along the line."""

    tensor: int
    row: int


def _shares(
    refs: list[TensorRef], rank: int, node_of_rank: tuple[int, ...], chunk_bytes: int
) -> list[Piece]:
    line = _Line(refs, chunk_bytes)
    begin, end = _node_block(node_of_rank, rank, line.total)
    mine = [r for r, node in enumerate(node_of_rank) if node == node_of_rank[rank]]
    seat, seats = mine.index(rank), len(mine)
    pieces = line.span(*_share(begin, end, seat, seats), persist=True)
    # The rest of the line has a gap where the node's block stands.
    low, high = _share(0, line.total - (end - begin), seat, seats)
    gap = end - begin
    pieces += line.span(low, min(high, begin), persist=False)
    pieces += line.span(max(low, begin) + gap, high + gap, persist=False)
    return pieces


def _node_block(node_of_rank: tuple[int, ...], rank: int, total: int) -> tuple[int, int]:
    order = list(dict.fromkeys(node_of_rank))
    counts = [node_of_rank.count(node) for node in order]
    ends = list(itertools.accumulate(counts))
    at = order.index(node_of_rank[rank])
    world = len(node_of_rank)
    return total * (ends[at] - counts[at]) // world, total * ends[at] // world


def _share(begin: int, end: int, seat: int, seats: int) -> tuple[int, int]:
    size = max(0, end - begin)
    return begin + size * seat // seats, begin + size * (seat + 1) // seats


class _Line:
    """Tensors one after another, cut only at chunk edges."""

    def __init__(self, refs: list[TensorRef], chunk_bytes: int) -> None:
        self._refs = refs
        self._chunk_bytes = chunk_bytes
        self._starts = [0, *itertools.accumulate(ref.nbytes for ref in refs)]
        self.total = self._starts[-1]

    def span(self, begin: int, end: int, *, persist: bool) -> list[Piece]:
        """The whole chunks between two byte positions, each rounded to the nearest edge."""
        if begin >= end:
            return []
        first, last = self._cut(begin), self._cut(end)
        pieces = []
        for index in range(first.tensor, min(last.tensor + 1, len(self._refs))):
            ref = self._refs[index]
            low = first.row if index == first.tensor else 0
            high = last.row if index == last.tensor else _rows(ref)
            if low < high:
                pieces.append((ref, _row_box(ref, low, high), persist))
        return pieces

    def _cut(self, position: int) -> _Cut:
        index = bisect.bisect_right(self._starts, position) - 1
        if index >= len(self._refs):
            return _Cut(len(self._refs), 0)
        ref = self._refs[index]
        rows, unit = _rows(ref), _unit(ref, self._chunk_bytes)
        at = position - self._starts[index]
        row = round(at * rows / (ref.nbytes * unit)) * unit
        return _Cut(index, row) if row < rows else _Cut(index + 1, 0)


def _rows(ref: TensorRef) -> int:
    return ref.shape[0] if ref.shape else 1


def _unit(ref: TensorRef, chunk_bytes: int) -> int:
    """Rows between two chunk edges."""
    row_bytes = math.prod(ref.shape[1:]) * ITEMSIZE[ref.dtype]
    return max(1, chunk_bytes // row_bytes)


def _row_box(ref: TensorRef, low: int, high: int) -> Box:
    if not ref.shape:
        return ref.box
    zeros = (0,) * (len(ref.shape) - 1)
    return Box((low, *zeros), (high - low, *ref.shape[1:]))
