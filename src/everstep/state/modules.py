"""Walking a module as torch names it: parameters, buffers, extra state, and what DDP says of them.

Owns: FQNs (wrappers leave no trace in them) and the sharded parameters of FSDP2. Never does:
change, unshard or reshard a module. Called by: inspect, restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import UnsavableObject

Sharing = Literal["own", "replicated", "broadcast"]
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class Site(NamedTuple):
    """One tensor of a module and where it hangs. ``tensor`` is None for a buffer registered so.

    ``sharing``: ``replicated`` for parameters that DDP keeps equal, ``broadcast`` for buffers that
    DDP overwrites with rank 0's, ``own`` for all else.
    """

    fqn: str
    tensor: torch.Tensor | None
    holder: dict[str, Any]
    key: str
    is_buffer: bool
    volatile: bool
    sharing: Sharing


class Walk(NamedTuple):
    """A module at one moment. ``extras`` are the modules that have extra state, ``wrappers`` the
    DDP wrappers, both by name."""

    sites: list[Site]
    extras: dict[str, nn.Module]
    wrappers: dict[str, DistributedDataParallel]


class _Context(NamedTuple):
    parameters: Sharing = "own"
    buffers: Sharing = "own"
    ignored: frozenset[int] = frozenset()


def walk(root: nn.Module, *, name: str, world: int) -> Walk:
    """Everything ``root`` (called ``name`` in errors) holds, in torch's order: a module's own
    tensors before its children's.

    A tensor that hangs in two places comes twice, under both names.
    """
    found = Walk([], {}, {})
    _Walker(found, name, world).visit(root, "", _Context())
    return found


def descends(kind: type, name: str) -> bool:
    """Whether a class has this name, or one that it is made from; without an import of that."""
    return any(base.__name__ == name for base in kind.__mro__)


class _Walker:
    def __init__(self, found: Walk, name: str, world: int) -> None:
        self._found = found
        self._name = name
        self._world = world
        self._sharded: dict[tuple[int, str], torch.Tensor] = {}

    def visit(self, module: nn.Module, prefix: str, context: _Context) -> None:
        if isinstance(module, DistributedDataParallel):
            self._found.wrappers[prefix.rstrip(".")] = module
            self.visit(module.module, prefix, _inside(module, self._world))
            return
        if hasattr(type(module), "_get_fsdp_state"):
            self._sharded.update(_sharded_parameters(module))
        elif descends(type(module), "FullyShardedDataParallel"):
            raise UnsavableObject(
                f"{f'{self._name}.{prefix}'.rstrip('.')} is wrapped in FullyShardedDataParallel "
                "(FSDP1), whose flat parameters have no names of their own.",
                hint="Use torch.distributed.fsdp.fully_shard.",
            )
        self._tensors(module, prefix, context)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._found.extras[prefix + "_extra_state"] = module
        for name, child in module._modules.items():
            if child is not None:
                below = prefix if name in _WRAPPED else f"{prefix}{name}."
                self.visit(child, below, context)

    def _tensors(self, module: nn.Module, prefix: str, context: _Context) -> None:
        sites = self._found.sites
        held = module._parameters
        for key, tensor in held.items():
            if tensor is not None:
                real = self._sharded.get((id(module), key), tensor) if self._sharded else tensor
                sharing: Sharing = "own" if id(real) in context.ignored else context.parameters
                sites.append(Site(prefix + key, real, held, key, False, False, sharing))
        buffers, passing = module._buffers, module._non_persistent_buffers_set
        for key, buffer in buffers.items():
            sharing = "own" if id(buffer) in context.ignored else context.buffers
            volatile = key in passing
            sites.append(Site(prefix + key, buffer, buffers, key, True, volatile, sharing))


def _inside(wrapper: DistributedDataParallel, world: int) -> _Context:
    if wrapper.process_group.size() != world:
        return _Context()
    ignored = frozenset[int]()
    if wrapper.parameters_to_ignore:
        named = [*wrapper.module.named_parameters(), *wrapper.module.named_buffers()]
        ignored = frozenset(id(t) for name, t in named if name in wrapper.parameters_to_ignore)
    # Without the broadcast ahead (after a forward without gradients) every rank goes on with its
    # own buffers, so its own have to be kept.
    syncs = wrapper.broadcast_buffers and getattr(wrapper, "require_forward_param_sync", True)
    return _Context("replicated", "broadcast" if syncs else "own", ignored)


def _sharded_parameters(module: Any) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """FSDP2's own record of a module's shards, which holds also while a module is unsharded."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    for group in groups:
        for held in group.fsdp_params:
            info = held._module_info
            yield (id(info.module), info.param_name), held.sharded_param
            for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield (id(shared), name), held.sharded_param


def flags_of(found: Walk) -> dict[str, bool]:
    """What a DDP wrapper remembers over a boundary: whether the next forward broadcasts buffers."""
    return {
        name: bool(wrapper.require_forward_param_sync)
        for name, wrapper in found.wrappers.items()
        if hasattr(wrapper, "require_forward_param_sync")
    }
