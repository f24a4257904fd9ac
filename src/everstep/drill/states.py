"""Compares the last checkpoints of two runs bit by bit.

Owns: reading both whole and naming what differs. Never does: trust a digest in place of the
bytes. Called by: the drill.

Tensors, optimizer state, generators, data position, step and user objects are all compared. What
describes the run and not the state (attempt, times, host) stands in the records of the store and
is not looked at. One thing may differ: Python and NumPy seed their global generators from the
operating system, so where a script neither seeds nor uses one, any two runs differ in it. Such a
generator is compared with the same run's first checkpoint instead: a new process has another, so
an unchanged one was carried through every restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest

import msgspec

from everstep.core.layout import ITEMSIZE, SHARED, Box
from everstep.errors import DrillError
from everstep.store import Checkpoint, ReadRequest, open_store
from everstep.store.records import ExtentEntry

BLOCK_BYTES = 64 << 20
"""A larger tensor is compared in blocks of rows of about this size, so that memory stays small."""
MOST_DIFFERENCES = 10

_MISSING = object()

GENERATORS = {"python": "Python's random", "numpy": "NumPy's random"}
"""Global generators that the operating system seeds; torch's begins the same in every process."""

Name = tuple[str, int]
"""(FQN, rank scope)."""


class StateReport(msgspec.Struct, frozen=True):
    """``tensors`` and ``bytes`` compared, and ``ranks`` whose objects were; ``differences`` names
    the first few and is empty iff the two states are equal in every bit. ``idle`` are generators
    that the script neither seeds nor uses, and that were carried unchanged through the run."""

    step: int
    tensors: int
    bytes: int
    ranks: int
    differences: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return not self.differences


class Final(msgspec.Struct, frozen=True):
    """A run's last checkpoint, and the first that is still there (None: no other one is)."""

    last: Checkpoint
    first: Checkpoint | None = None


def final_of(store: str, job: str) -> Final:
    """What the comparison needs of a finished run. Raises :class:`DrillError` where nothing is
    committed."""
    opened = open_store(store).job(job)
    candidates = opened.candidates()
    if not candidates:
        raise DrillError(f"job {job} in {store} has no committed checkpoint.")
    last = candidates[0]
    sound = [info.point for info in opened.checkpoints() if info.sound]
    earlier = [point for point in sound if point.step < last.step]
    first = min(earlier, key=lambda point: (point.attempt, point.step), default=None)
    return Final(
        opened.open_checkpoint(last), None if first is None else opened.open_checkpoint(first)
    )


def compare_states(undisturbed: Final, drilled: Final) -> StateReport:
    """Compare every tensor and every rank's objects of two runs' last checkpoints.

    Raises ``CorruptObject`` where one of them does not verify.
    """
    left, right = undisturbed.last, drilled.last
    found = list(_shape_differences(left, right))
    idle: list[str] = []
    tensors = nbytes = 0
    if not found:
        for name, extents in sorted(_tensors(left).items()):
            tensors += 1
            nbytes += sum(_bytes(extent) for extent in extents)
            found += _tensor_differences(left, right, name, extents)
        for rank in range(left.world):
            found += _object_differences(undisturbed, drilled, rank, idle)
    return StateReport(
        step=left.point.step,
        tensors=tensors,
        bytes=nbytes,
        ranks=left.world,
        differences=tuple(found[:MOST_DIFFERENCES]),
        idle=tuple(idle),
    )


def _shape_differences(reference: Checkpoint, drilled: Checkpoint) -> Iterator[str]:
    if reference.point.step != drilled.point.step:
        yield (
            f"the last checkpoint is of step {drilled.point.step}, undisturbed "
            f"{reference.point.step}"
        )
    if reference.world != drilled.world:
        yield f"the world has {drilled.world} ranks, undisturbed {reference.world}"
    left, right = _tensors(reference), _tensors(drilled)
    for fqn, rank in sorted(set(left) ^ set(right)):
        where = "undisturbed" if (fqn, rank) in left else "drilled"
        yield f"{_named(fqn, rank)} is in the {where} run's checkpoint alone"
    for name in sorted(set(left) & set(right)):
        if _form(left[name]) != _form(right[name]):
            yield f"{_named(*name)} has another shape, dtype or split"


def _tensor_differences(
    reference: Checkpoint, drilled: Checkpoint, name: Name, extents: list[ExtentEntry]
) -> Iterator[str]:
    fqn, scope = name
    for extent in extents:
        for box in blocks(extent):
            size = box.numel * ITEMSIZE[extent.dtype]
            left, right = bytearray(size), bytearray(size)
            reference.load([ReadRequest(fqn, scope, box, memoryview(left))])
            drilled.load([ReadRequest(fqn, scope, box, memoryview(right))])
            if left != right:
                at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
                element = at // ITEMSIZE[extent.dtype]
                yield f"{_named(fqn, scope)} differs first at element {element} of {_said(box)}"
                return


def _object_differences(
    undisturbed: Final, drilled: Final, rank: int, idle: list[str]
) -> Iterator[str]:
    left, right = undisturbed.last.rank_state(rank), drilled.last.rank_state(rank)
    if (left.refs, left.aliases) != (right.refs, right.aliases):
        yield f"rank {rank} refers to other tensors"
    if left.objects == right.objects:
        return
    opened = _opened(left.objects), _opened(right.objects)
    unused = _unchanged(undisturbed, rank) & _unchanged(drilled, rank)
    pairs = {
        name: (_taken_out(opened[0], name), _taken_out(opened[1], name)) for name in sorted(unused)
    }
    differing = [name for name, pair in pairs.items() if first_difference(*pair) is not None]
    idle += [f"{GENERATORS[name]} of rank {rank}" for name in differing]
    where = first_difference(*opened)
    if where is not None or not differing:
        yield f"objects of rank {rank} differ at {where or 'their encoding'}"


def _unchanged(run: Final, rank: int) -> set[str]:
    """Generators that are the same in the run's first checkpoint and in its last."""
    if run.first is None:
        return set()
    first, last = (
        _generators(_opened(checkpoint.rank_state(rank).objects))
        for checkpoint in (run.first, run.last)
    )
    both = set(first) & set(last) & set(GENERATORS)
    return {name for name in both if first_difference(first[name], last[name]) is None}


def _opened(objects: bytes) -> object:
    """The objects decoded, with what train itself keeps (``extra``) decoded in its place."""
    decoded = _decoded(objects)
    if isinstance(decoded, dict) and isinstance(decoded.get("extra"), bytes):
        decoded["extra"] = _decoded(decoded["extra"])
    return decoded


def _taken_out(opened: object, name: str) -> object:
    """Take an unused generator out of the objects: the boundary's record of it, and the epoch
    start's where that is the same."""
    held = _generators(opened).pop(name)
    start = _at(opened, "extra", "data", "start", "rng")
    if name in start and first_difference(start[name], held) is None:
        del start[name]
    return held


def _at(opened: object, *keys: str) -> dict[str, object]:
    """The mapping at a path of keys, an empty one where there is none."""
    for key in keys:
        opened = opened.get(key) if isinstance(opened, dict) else None
    return opened if isinstance(opened, dict) else {}


def _generators(opened: object) -> dict[str, object]:
    return _at(opened, "extra", "rng")


def blocks(extent: ExtentEntry) -> Iterator[Box]:
    """The extent's box cut along its first dimension into blocks of about ``BLOCK_BYTES``."""
    if not extent.sizes or _bytes(extent) <= BLOCK_BYTES:
        yield Box(extent.offsets, extent.sizes)
        return
    row = _bytes(extent) // extent.sizes[0]
    rows = max(1, BLOCK_BYTES // row)
    for start in range(0, extent.sizes[0], rows):
        count = min(rows, extent.sizes[0] - start)
        offsets = (extent.offsets[0] + start, *extent.offsets[1:])
        yield Box(offsets, (count, *extent.sizes[1:]))


def first_difference(left: object, right: object, path: str = "") -> str | None:
    """The path of the first place at which two decoded objects differ, None where they do not."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = dict.fromkeys([*left, *right])
        pairs = [
            (f"{path}.{key}", left.get(key, _MISSING), right.get(key, _MISSING)) for key in keys
        ]
    elif isinstance(left, msgspec.msgpack.Ext) and isinstance(right, msgspec.msgpack.Ext):
        inner = _decoded(bytes(left.data)), _decoded(bytes(right.data))
        pairs = [(f"{path}.type", left.code, right.code), (path, *inner)]
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        joined = zip_longest(left, right, fillvalue=_MISSING)
        pairs = [(f"{path}[{n}]", a, b) for n, (a, b) in enumerate(joined)]
    else:
        same = type(left) is type(right) and repr(left) == repr(right)
        return None if same else path.lstrip(".") or "the top"
    return next((found for p, a, b in pairs if (found := first_difference(a, b, p))), None)


def _decoded(objects: bytes) -> object:
    try:
        return msgspec.msgpack.decode(objects)
    except msgspec.DecodeError:
        return objects


def _tensors(checkpoint: Checkpoint) -> dict[Name, list[ExtentEntry]]:
    found: dict[Name, list[ExtentEntry]] = {}
    for index in checkpoint.indexes:
        for extent in index.extents:
            found.setdefault((extent.fqn, extent.rank), []).append(extent)
    return found


def _form(extents: list[ExtentEntry]) -> list[tuple[object, ...]]:
    return sorted((e.dtype, e.shape, e.offsets, e.sizes) for e in extents)


def _bytes(extent: ExtentEntry) -> int:
    return math.prod(extent.sizes) * ITEMSIZE[extent.dtype]


def _named(fqn: str, rank: int) -> str:
    return fqn if rank == SHARED else f"{fqn} of rank {rank}"


def _said(box: Box) -> str:
    return f"offsets {list(box.offsets)} sizes {list(box.sizes)}"
