"""DTensors: the local part, its box in the global tensor, and which ranks hold the same box.

Owns: every use of torch.distributed.tensor. Never does: a collective. Called by: inspect, encode,
restore.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, NamedTuple

import torch

from everstep.core.layout import Box


class Shard(NamedTuple):
    """Where a rank's local tensor stands. ``holders`` are the ranks with the same box, the first
    of which persists; ``facts`` is what all ranks agree on."""

    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]
    facts: str


def _module() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Cheap where no DTensor can exist because nothing imported their module."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = _module()
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: the tensor itself, or a DTensor's local tensor (its own memory)."""
    if not is_dtensor(tensor):
        return tensor
    held: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return held


def locate(tensor: Any, world: int) -> Shard | None:
    """The box of a DTensor on this rank, or None where its parts are no boxes of one tensor that
    all ranks share (partial sums, strided shards, a mesh without some ranks): then each rank keeps
    its own local tensor under its own name."""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None or mesh.size() != world or not is_regular(tensor):
        return None
    shape, offsets = _box(tensor)
    box = Box(offsets, shape)
    facts = f"{tuple(mesh.shape)} {mesh.mesh.flatten().tolist()} {tensor.placements}"
    return Shard(tuple(tensor.shape), box, _holders(tensor), facts)


def is_regular(tensor: Any) -> bool:
    """Whether a DTensor is only sharded and replicated, so that its parts are boxes of it."""
    module = _module()
    return all(type(p) in (module.Shard, module.Replicate) for p in tensor.placements)


def _box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(shape) != tuple(tensor._local_tensor.shape):
        raise AssertionError(f"local shape {tuple(tensor._local_tensor.shape)}, expected {shape}")
    return tuple(map(int, shape)), tuple(map(int, offsets))


def _holders(tensor: Any) -> tuple[int, ...]:
    """Ranks found by moving along the replicate dimensions of the mesh, in the mesh's order."""
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    axes = [
        range(size) if placement.is_replicate() else (here,)
        for size, placement, here in zip(mesh.shape, tensor.placements, at, strict=True)
    ]
    return tuple(int(mesh.mesh[place]) for place in itertools.product(*axes))


def describe(tensor: Any) -> list[Any]:
    """What :func:`wrap` needs besides a mesh: mesh shape, placements, global shape and stride.
    Only of a tensor that :func:`is_regular`."""
    placements = [["S", p.dim] if p.is_shard() else ["R"] for p in tensor.placements]
    return [list(tensor.device_mesh.shape), placements, list(tensor.shape), list(tensor.stride())]


def wrap_like(part: torch.Tensor, like: Any) -> torch.Tensor:
    """``part`` as the local tensor of a DTensor that is laid out as ``like``."""
    return _from_local(part, like.device_mesh, like.placements, like.shape, like.stride())


def wrap(part: torch.Tensor, spec: list[Any], mesh: Any) -> torch.Tensor:
    """``part`` as the local tensor of the DTensor that :func:`describe` saw, on ``mesh``."""
    tensor = _module()
    placements = [tensor.Shard(p[1]) if p[0] == "S" else tensor.Replicate() for p in spec[1]]
    return _from_local(part, mesh, placements, torch.Size(spec[2]), tuple(spec[3]))


def _from_local(
    part: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any
) -> torch.Tensor:
    wrapped: torch.Tensor = _module().DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return wrapped
