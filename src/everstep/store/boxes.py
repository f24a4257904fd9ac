"""Geometry of boxes: intersection, coverage, and the byte runs that two boxes share.

Pure. Owns: nothing else. Called by: check (coverage at commit and at open) and read (what to copy).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from everstep.core.layout import Box


class Run(NamedTuple):
    """Bytes that are contiguous in two boxes: where they begin in each, and how many."""

    source: int
    target: int
    length: int


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both, or None where there are none."""
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = tuple(
        min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is one of a tensor of ``shape``: same rank, nothing negative, within bounds."""
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        min(offset, size) >= 0 and offset + size <= length
        for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
    )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of ``boxes`` that share an element, or None.

    Sweeps along the dimension that separates most, so that the usual splits (rows, or columns)
    cost little more than a sort.
    """
    solid = [box for box in boxes if box.numel > 0]
    if len(solid) < 2:
        return None
    dim = _separating(solid)
    if dim is None:
        return solid[0], solid[1]  # 0-d boxes, or all at one place
    active: list[Box] = []
    for box in sorted(solid, key=lambda b: b.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > box.offsets[dim]]
        for other in active:
            if intersect(other, box) is not None:
                return other, box
        active.append(box)
    return None


def _separating(boxes: Sequence[Box]) -> int | None:
    spread = [len({box.offsets[d] for box in boxes}) for d in range(len(boxes[0].offsets))]
    return max(range(len(spread)), key=spread.__getitem__) if max(spread, default=0) > 1 else None


def covered(box: Box, boxes: Sequence[Box]) -> int:
    """How many elements of ``box`` lie in ``boxes``, which must not overlap."""
    if not box.sizes:
        return min(1, len(boxes))
    return sum(part.numel for other in boxes if (part := intersect(box, other)) is not None)


def runs(source: Box, target: Box, itemsize: int) -> Iterator[Run]:
    """The contiguous byte runs shared by two boxes, in ascending order of the source's bytes."""
    part = intersect(source, target)
    if part is None:
        return
    outer = _outer_dims(source, target, part)
    length = math.prod(part.sizes[max(0, outer) :]) * itemsize
    source_strides, target_strides = _strides(source, itemsize), _strides(target, itemsize)
    at_source = _start(part, source, source_strides)
    at_target = _start(part, target, target_strides)
    for index in itertools.product(*(range(n) for n in part.sizes[:outer])):
        yield Run(
            at_source + sum(i * s for i, s in zip(index, source_strides, strict=False)),
            at_target + sum(i * s for i, s in zip(index, target_strides, strict=False)),
            length,
        )


def _outer_dims(source: Box, target: Box, part: Box) -> int:
    """How many leading dimensions have to be walked; the rest is one run."""
    dims = len(part.sizes)
    inner = dims
    while inner > 0 and part.sizes[inner - 1] == source.sizes[inner - 1] == target.sizes[inner - 1]:
        inner -= 1
    return max(0, inner - 1)


def _strides(box: Box, itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(box.sizes[d + 1 :]) * itemsize for d in range(len(box.sizes)))


def _start(part: Box, whole: Box, strides: tuple[int, ...]) -> int:
    return sum(
        (a - b) * stride for a, b, stride in zip(part.offsets, whole.offsets, strides, strict=True)
    )
