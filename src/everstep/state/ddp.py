"""The order in which DDP sums gradients, made the same in every attempt.

Owns: the one private interface of DDP's reducer that this needs. Never does: act after attach.
Called by: train, right after attach.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

_METHODS = ("_push_all_rebuilt_params", "_rebuild_buckets")


def rebuild_buckets_now(model: DistributedDataParallel) -> bool:
    """Rebuild the gradient buckets before the first iteration instead of after it.

    DDP does it after the first iteration of a process, which changes the order of floating-point
    sums: with more than 2 ranks a resumed run would differ from an undisturbed one in the last
    bits. All ranks must call it at the same place, before the first forward (it is a collective).
    True where the order is now the same in every attempt; False where this torch does not offer
    it or the model has already run, and exactness is promised for 2 ranks only.
    """
    if model.find_unused_parameters and not model.static_graph:
        return True  # such a reducer never rebuilds
    reducer: Any = model.reducer
    if not all(hasattr(reducer, method) for method in _METHODS) or _has_run(model):
        return False
    reducer._push_all_rebuilt_params()
    return bool(reducer._rebuild_buckets())


def _has_run(model: DistributedDataParallel) -> bool:
    """After a backward the reducer has begun its own list, which must not be filled twice."""
    return bool(getattr(model, "_has_rebuilt_buckets", False)) or any(
        parameter.grad is not None for parameter in model.parameters()
    )
