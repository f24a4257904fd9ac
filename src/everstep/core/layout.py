"""What a rank holds: tensors as boxes of named global tensors, and where they stand in a payload.

Owns: the records that state plans, the keeper keeps in slots and the store writes into indexes.
Never does: I/O, torch. Called by: state, keeper, store, train.

Everything is in elements except what is called ``nbytes`` or ``payload``. A tensor's bytes are
row-major. ``rank == SHARED`` says that a tensor belongs to the job (it is replicated, or this is
its shard); any other value says that it belongs to that rank alone, under the same name.
"""

from __future__ import annotations

import math

import msgspec

from everstep.core.health import Health

SHARED = -1
EXTENT_ALIGN = 64
"""Bytes. Extents begin at multiples of this in a payload: one cache line, any dtype's alignment."""

ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name of the dtype without ``torch.``."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A rectangular part of a global tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class TensorRef(msgspec.Struct, frozen=True):
    """One tensor as one rank sees it: the part of a global tensor that the rank has to load."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    rank: int = SHARED
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


class Extent(msgspec.Struct, frozen=True):
    """A box of a tensor that this rank copies into its slot.

    ``persist`` says that this rank also writes it to the store: on each node one rank copies a
    replicated byte, in the whole job one rank writes it.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    rank: int
    persist: bool
    payload_offset: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


class RankLayout(msgspec.Struct, frozen=True):
    """All extents of one rank, in payload order: persisted extents first.

    ``layout`` is the hex digest of what all ranks must agree on (names, shapes, dtypes, split,
    world), ``payload_bytes`` the length of the payload with padding, ``persist_bytes`` the length
    of its persisted front part.
    """

    layout: str
    world: int
    rank: int
    extents: tuple[Extent, ...]
    payload_bytes: int
    persist_bytes: int


class RankState(msgspec.Struct, frozen=True):
    """What a rank needs besides tensor bytes to put itself back.

    ``refs`` are the tensors to load, in the order in which ``objects`` (encoded by
    :mod:`everstep.state.encode`) refers to them; ``aliases`` maps a tied name to the name whose
    bytes it shares. ``health`` is None where nothing was looked at.
    """

    step: int
    refs: tuple[TensorRef, ...]
    aliases: dict[str, str]
    objects: bytes
    health: Health | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """A rank's snapshot as bytes in memory. ``payload`` and ``state`` are read-only buffers.

    ``state`` is the msgpack form of a :class:`RankState`. ``payload`` begins on a page boundary.
    """

    step: int
    attempt: int
    layout: RankLayout
    payload: memoryview
    state: memoryview


def place(
    pieces: list[tuple[TensorRef, Box, bool]], *, layout: str, world: int, rank: int
) -> RankLayout:
    """Lay boxes one after another into a payload: the persisted ones first, each group in order.

    ``pieces`` holds (tensor, box of it in global coordinates, persist).
    """
    extents: list[Extent] = []
    at = persist_bytes = 0
    for wanted in (True, False):
        for ref, box, persist in pieces:
            if persist is wanted:
                extent = Extent(ref.fqn, ref.dtype, ref.shape, box, ref.rank, persist, at)
                extents.append(extent)
                at = _aligned(at + extent.nbytes)
        if wanted:
            persist_bytes = at
    return RankLayout(layout, world, rank, tuple(extents), at, persist_bytes)


def _aligned(n: int) -> int:
    return -(-n // EXTENT_ALIGN) * EXTENT_ALIGN
