"""Geometry against the plain definition, element by element."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.layout import Box
from everstep.store import boxes

SHAPE = (4, 3, 5)


@st.composite
def some_box(draw: st.DrawFn) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPE]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def elements(box: Box) -> list[tuple[int, ...]]:
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return list(itertools.product(*ranges))


@given(some_box(), some_box())
def test_intersection_is_the_common_elements(a: Box, b: Box) -> None:
    found = boxes.intersect(a, b)
    assert set(elements(found) if found else []) == set(elements(a)) & set(elements(b))


@given(some_box(), some_box(), st.sampled_from([1, 4]))
def test_runs_name_every_common_byte_once_and_in_order(a: Box, b: Box, itemsize: int) -> None:
    source = {e: i * itemsize for i, e in enumerate(elements(a))}
    target = {e: i * itemsize for i, e in enumerate(elements(b))}
    common = [e for e in elements(a) if e in target]
    wanted = [(source[e] + k, target[e] + k) for e in common for k in range(itemsize)]
    runs = list(boxes.runs(a, b, itemsize))
    assert [(r.source + k, r.target + k) for r in runs for k in range(r.length)] == wanted


def test_whole_tensors_are_one_run() -> None:
    whole = Box((0, 0, 0), SHAPE)
    assert list(boxes.runs(Box((1, 0, 0), (2, 3, 5)), whole, 2)) == [(0, 30, 60)]
    assert list(boxes.runs(Box((), ()), Box((), ()), 4)) == [(0, 0, 4)]


@given(st.lists(some_box(), max_size=4))
def test_overlaps_are_found_iff_an_element_is_in_two(many: list[Box]) -> None:
    counted = [e for box in many for e in elements(box)]
    assert (boxes.overlapping(many) is not None) == (len(counted) != len(set(counted)))


def test_two_0d_boxes_overlap() -> None:
    assert boxes.overlapping([Box((), ()), Box((), ())]) is not None
    assert boxes.overlapping([Box((), ())]) is None


@given(some_box(), st.integers(0, 4))
def test_covered_counts_the_elements_that_parts_hold(box: Box, cut: int) -> None:
    parts = [Box((0, 0, 0), (cut, 3, 5)), Box((cut, 0, 0), (max(0, 3 - cut), 3, 5))]
    held = {e for part in parts for e in elements(part)}
    assert boxes.covered(box, parts) == len(held & set(elements(box)))


def test_boxes_outside_their_tensor_are_seen() -> None:
    assert boxes.inside(Box((0, 0, 0), SHAPE), SHAPE)
    for offsets, sizes in (((0, 0), (1, 1)), ((-1, 0, 0), (1, 1, 1)), ((4, 0, 0), (1, 1, 1))):
        assert not boxes.inside(Box(offsets, sizes), SHAPE)
