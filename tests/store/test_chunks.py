"""Chunk edges (spec section 6): whole, aligned, and the same for every sharding."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.layout import ITEMSIZE, Box, TensorRef, place
from everstep.store.chunks import chunk_edges, chunk_extents, split

dims = st.integers(0, 7)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
sizes = st.sampled_from([64, 128, 192])


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


@given(st.lists(dims, max_size=4).map(tuple), itemsizes, sizes, st.data())
def test_edges_cover_the_extent_in_order_within_the_limit(
    shape: tuple[int, ...], itemsize: int, chunk: int, data: st.DataObject
) -> None:
    box = data.draw(boxes_in(shape))
    edges = list(chunk_edges(shape, box, itemsize, chunk))
    total = box.numel * itemsize
    assert [a for a, _ in edges] == ([0, *[b for _, b in edges[:-1]]] if total else [])
    assert (edges[-1][1] if edges else 0) == total
    assert all(0 < b - a <= chunk and a % itemsize == b % itemsize == 0 for a, b in edges)


@given(st.integers(1, 40), st.integers(1, 6), itemsizes, sizes, st.data())
def test_edges_lie_at_the_same_global_rows_for_every_row_sharding(
    rows: int, columns: int, itemsize: int, chunk: int, data: st.DataObject
) -> None:
    shape, row = (rows, columns), columns * itemsize
    cut = data.draw(st.integers(0, rows))

    def edges(first: int, count: int) -> set[int]:
        found = chunk_edges(shape, Box((first, 0), (count, columns)), itemsize, chunk)
        return {first * row + edge for pair in found for edge in pair}

    assert edges(0, cut) | edges(cut, rows - cut) == edges(0, rows) | {cut * row}


@given(st.integers(1, 5), st.integers(1, 400), st.integers(0, 4))
def test_rows_longer_than_a_chunk_are_cut_inside_each_row(
    rows: int, columns: int, first: int
) -> None:
    box = Box((first, 0), (rows, columns))
    edges = list(chunk_edges((rows + first, columns), box, 1, 64))
    if columns > 64:
        assert edges == [
            (r * columns + a, r * columns + min(a + 64, columns))
            for r in range(rows)
            for a in range(0, columns, 64)
        ]


def test_edges_of_a_hostile_size_are_lazy() -> None:
    huge = 1 << 60
    edges = chunk_edges((huge, 2), Box((0, 0), (huge, 2)), 4, 1 << 20)
    assert next(edges) == (0, 1 << 20)


def test_a_layouts_chunks_stand_at_their_extents_and_persisted_ones_come_first() -> None:
    a = TensorRef("a", "float32", (40,), Box((0,), (40,)))
    b = TensorRef("b", "uint8", (), Box((), ()))
    layout = place([(b, b.box, False), (a, a.box, True)], layout="x", world=1, rank=0)
    every = chunk_extents(layout, 64)
    assert every == [(0, 0, 64), (0, 64, 64), (0, 128, 32), (1, 192, 1)]
    assert chunk_extents(layout, 64, persisted_only=True) == every[:3]


def test_a_state_is_cut_at_multiples() -> None:
    assert list(split(130, 64)) == [(0, 64), (64, 128), (128, 130)]
    assert list(split(0, 64)) == []


def test_every_element_size_divides_the_smallest_chunk() -> None:
    assert all(64 % size == 0 for size in ITEMSIZE.values())
    assert math.lcm(*ITEMSIZE.values()) <= 64
