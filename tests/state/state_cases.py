"""A cut and its way back through plain memory, as train does them over slots, for one rank."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from everstep.core.layout import RankLayout, RankState
from everstep.state import difference, plan, restore
from everstep.state.capture import Capture
from everstep.state.inspect import Attached


@dataclass(frozen=True)
class Cut:
    """A payload and the record beside it, both as bytes."""

    layout: RankLayout
    payload: bytes
    state: bytes


def cut(attached: Attached, step: int = 0, extra: dict[str, object] | None = None) -> Cut:
    live = attached.resolve(step, extra)
    layout = plan.plan_layout(live.held, world=1, rank=0, node_of_rank=(0,))
    memory = mmap.mmap(-1, max(1, layout.payload_bytes))
    capture = Capture(live, layout)
    capture.copy_into(memoryview(memory), live)
    capture.release()
    return Cut(layout, bytes(memory), msgspec.msgpack.encode(live.rank_state()))


def put_back(attached: Attached, saved: Cut) -> dict[str, Any]:
    """Restore, checking every byte's place; gives what was kept beside the objects."""
    state = msgspec.msgpack.decode(saved.state, type=RankState)
    tree = restore.decode(state)
    difference.check(attached, state, tree)
    targets = restore.targets(attached, state, tree)
    extents = {extent.fqn: extent for extent in saved.layout.extents}
    for ref, tensor in targets:
        destination = restore.Destination(ref, tensor)
        assert destination.view.nbytes == ref.nbytes
        if ref.nbytes:
            extent = extents[ref.fqn]
            end = extent.payload_offset + extent.nbytes
            destination.view[:] = saved.payload[extent.payload_offset : end]
        destination.finish()
    tensors = [tensor for _, tensor in targets]
    restore.apply(attached, state, tree, tensors)
    return restore.extra(attached, state, tree, tensors)


def content(value: Any) -> Any:
    """A deep copy in which tensors are their bytes and facts, so that == is bit-exact."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        return [str(value.dtype), tuple(value.shape), content(value.int_repr()), *_scales(value)]
    if isinstance(value, torch.Tensor):
        facts = (str(value.dtype), tuple(value.shape), str(value.device))
        plain = value.detach().resolve_conj().resolve_neg()
        if value.element_size() == 1:
            plain = plain.view(torch.uint8)  # sub-byte integers cannot be copied
        plain = plain.contiguous()
        return (*facts, bytes(plain.reshape(-1).view(torch.uint8).tolist()))
    if isinstance(value, dict):
        return {key: content(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [content(held) for held in value]
    return copy.deepcopy(value)


def _scales(value: torch.Tensor) -> list[Any]:
    if value.qscheme() == torch.per_tensor_affine:
        return [value.qscheme(), value.q_scale(), value.q_zero_point()]
    scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return [value.qscheme(), content(scales), content(zeros), value.q_per_channel_axis()]


def optimizer_content(optimizer: torch.optim.Optimizer) -> Any:
    """All of an optimizer by position, without going through its state_dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = [
        content(dict(optimizer.state[p])) if p in optimizer.state else None for p in parameters
    ]
    return [content(groups), state, len(optimizer.state)]


Train = Callable[[int], None]
"""Trains so many steps, drawing its data from torch's generator."""
