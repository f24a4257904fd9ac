"""Snapshots without torch: what the store and the keeper carry, with bytes drawn from a seed.

Owns: small worlds with every kind of tensor the store must hold. Called by: tests and the drill.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from everstep.core.health import Health
from everstep.core.layout import (
    ITEMSIZE,
    SHARED,
    Box,
    RankLayout,
    RankState,
    Snapshot,
    TensorRef,
    place,
)
from everstep.store import Checkpoint, ReadRequest


@dataclass(frozen=True)
class Tensor:
    """A global tensor. ``split`` shares it among the ranks along dimension 0; else each rank
    owns one of its own under this name.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    split: bool = True

    @property
    def nbytes(self) -> int:
        return self.whole.numel * ITEMSIZE[self.dtype]

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)


TINY = (
    Tensor("w", "float32", (5, 3)),
    Tensor("b", "bfloat16", (3,)),
    Tensor("step", "int64", ()),
    Tensor("empty", "float32", (0, 4)),
    Tensor("rng", "uint8", (7,), split=False),
)
"""A few hundred bytes with rows, a 0-d, an empty and a rank-owned tensor."""


def value(tensor: Tensor, rank: int, step: int, seed: int = 0) -> bytes:
    """The row-major bytes of a tensor at a step; ``rank`` is SHARED for the job's."""
    text = f"{tensor.fqn}/{rank}/{step}/{seed}"
    return random.Random(text).randbytes(tensor.nbytes)


def snapshot(
    step: int,
    attempt: int,
    rank: int,
    world: int,
    *,
    tensors: tuple[Tensor, ...] = TINY,
    seed: int = 0,
    layout: str = "1a",
    health: Health | None = None,
) -> Snapshot:
    """One rank's snapshot: its part of the split tensors, all of its own ones."""
    pieces = []
    refs = []
    for tensor in tensors:
        owner = SHARED if tensor.split else rank
        box = _part(tensor, rank, world) if tensor.split else tensor.whole
        ref = TensorRef(tensor.fqn, tensor.dtype, tensor.shape, tensor.whole, owner)
        refs.append(ref)
        if box is not None:
            pieces.append((ref, box, True))
    placed = place(pieces, layout=layout, world=world, rank=rank)
    objects = f"objects of rank {rank}".encode()
    state = RankState(step, tuple(refs), {"tied": "w"}, objects, health)
    payload = _payload(placed, {t.fqn: t for t in tensors}, step, seed)
    return Snapshot(step, attempt, placed, payload, memoryview(msgspec.msgpack.encode(state)))


def world_of(step: int, attempt: int, world: int, **kwargs: object) -> list[Snapshot]:
    """The snapshots of all ranks; keywords as for :func:`snapshot`."""
    return [snapshot(step, attempt, rank, world, **kwargs) for rank in range(world)]  # type: ignore[arg-type]


def requests_of(
    tensors: tuple[Tensor, ...], rank: int
) -> tuple[list[ReadRequest], dict[str, memoryview]]:
    """Requests for all that a rank has to load, and the buffers that they fill, by name."""
    outs = {t.fqn: memoryview(bytearray(t.nbytes)) for t in tensors}
    requests = [
        ReadRequest(t.fqn, SHARED if t.split else rank, t.whole, outs[t.fqn]) for t in tensors
    ]
    return requests, outs


def loads_as(
    checkpoint: Checkpoint, step: int, *, tensors: tuple[Tensor, ...] = TINY, seed: int = 0
) -> bool:
    """Whether every rank's state and tensors load, and are those of ``step``, bit for bit."""
    for rank in range(checkpoint.world):
        requests, outs = requests_of(tensors, rank)
        checkpoint.load(requests, threads=1)
        state = checkpoint.rank_state(rank)
        if (state.step, state.objects) != (step, f"objects of rank {rank}".encode()):
            return False
        for tensor in tensors:
            owner = SHARED if tensor.split else rank
            if outs[tensor.fqn] != value(tensor, owner, step, seed):
                return False
    return True


def _part(tensor: Tensor, rank: int, world: int) -> Box | None:
    if not tensor.shape:
        return tensor.whole if rank == world - 1 else None
    rows = tensor.shape[0]
    start, end = rows * rank // world, rows * (rank + 1) // world
    inner = (0,) * (len(tensor.shape) - 1)
    return Box((start, *inner), (end - start, *tensor.shape[1:])) if end > start else None


def _payload(placed: RankLayout, tensors: dict[str, Tensor], step: int, seed: int) -> memoryview:
    payload = bytearray(placed.payload_bytes)
    for extent in placed.extents:
        tensor = tensors[extent.fqn]
        data = value(tensor, extent.rank, step, seed)
        row = len(data) // tensor.shape[0] if tensor.shape and tensor.shape[0] else len(data)
        start = extent.box.offsets[0] * row if tensor.shape else 0
        at = extent.payload_offset
        payload[at : at + extent.nbytes] = data[start : start + extent.nbytes]
    return memoryview(payload).toreadonly()
