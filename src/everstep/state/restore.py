"""Putting a state back: where each tensor's bytes go, and what is told to the objects afterwards.

Owns: destinations, the comparison of a saved state with the attached objects, and the order of
putting back. Never does: read from a tier, step an optimizer. Called by: train.

Order (R6): :func:`check`, :func:`targets`, bytes into the tensors, the vote, then :func:`apply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from everstep.core.layout import RankState, TensorRef
from everstep.errors import CorruptObject, RestoreError
from everstep.state import sharding
from everstep.state.encode import decode as decode_tree
from everstep.state.inspect import Attached, group_names
from everstep.state.memory import Bytes, dtype_name, dtype_of
from everstep.state.modules import Site, walk
from everstep.state.objects import EntryRecord, Objects, OptimizerRecord, decode_objects

Targets = list[tuple[TensorRef, torch.Tensor]]


def decode(state: RankState) -> Objects:
    """The record beside the tensors. Raises :class:`CorruptObject` where it is none."""
    try:
        return decode_objects(state.objects)
    except msgspec.DecodeError as bad:
        raise CorruptObject(f"the state record of step {state.step} is damaged: {bad}.") from bad


def targets(attached: Attached, state: RankState, tree: Objects) -> Targets:
    """For each of ``state.refs``, in order, the tensor that its bytes go into.

    Module tensors, and optimizer state that is there with the same shape and dtype, are loaded in
    place; all else is newly allocated and belongs to nobody until :func:`apply`. DTensors stand
    for themselves by their local tensor. Nothing is changed yet.
    """
    live = _live_tensors(attached)
    homes = _parameter_devices(attached, tree)
    sites = live_sites(attached)
    used: set[int] = set()
    found = []
    for ref in state.refs:
        tensor = live.get(ref.fqn)
        if tensor is not None and ref.fqn not in sites and tensor.data_ptr() in used:
            # One tensor where there were two, such as a learning rate that two groups share now.
            tensor = None
        found.append((ref, _target(ref, tensor, homes.get(ref.fqn))))
        if tensor is not None and tensor.numel():
            used.add(tensor.data_ptr())
    return found


class Destination:
    """``view``: writable row-major bytes of a target; ``finish``: have them in the tensor."""

    def __init__(self, ref: TensorRef, tensor: torch.Tensor) -> None:
        self.ref = ref
        self._bytes = Bytes(tensor)
        self.view = self._bytes.view

    def finish(self) -> None:
        """Call it once, when ``view`` holds the tensor's bytes."""
        self._bytes.finish()


def apply(
    attached: Attached, state: RankState, tree: Objects, tensors: Sequence[torch.Tensor]
) -> None:
    """Put all back that is not in place yet, after the vote (R6). ``tensors`` are those of
    :func:`targets`, loaded.

    Optimizer state that was missing is missing again. Raises :class:`RestoreError` naming the
    object whose own ``load_state_dict`` fails.
    """
    putting = _Putting(attached, state, tree, tuple(tensors))
    for keyword, module in attached.modules():
        putting.module(keyword, module)
    names = attached.parameter_names()
    for keyword, optimizer in attached.optimizers():
        putting.optimizer(optimizer, tree.optimizers[keyword], names)
    for keyword, held in attached.others():
        putting.other(keyword, held)


def extra(
    attached: Attached, state: RankState, tree: Objects, tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """What ``resolve`` was given beside the objects."""
    found: dict[str, Any] = _Putting(attached, state, tree, tuple(tensors)).decode(tree.extra)
    return found


def live_sites(attached: Attached) -> dict[str, Site]:
    """Every tensor place of the attached modules by full name."""
    return {
        f"{keyword}.{site.fqn}": site
        for keyword, module in attached.modules()
        for site in walk(module, name=keyword, world=attached.world).sites
    }


def _live_tensors(attached: Attached) -> dict[str, torch.Tensor]:
    found = {
        name: sharding.local(site.tensor)
        for name, site in live_sites(attached).items()
        if site.tensor is not None
    }
    names = attached.parameter_names()
    for keyword, optimizer in attached.optimizers():
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    found[f"{keyword}.param_groups.{g}.{key}"] = sharding.local(value)
        for parameter, name in _named(optimizer, names):
            if parameter in optimizer.state:
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, torch.Tensor):
                        found[f"{keyword}.state.{name}.{key}"] = sharding.local(value)
    return found


def _parameter_devices(attached: Attached, tree: Objects) -> dict[str, torch.device]:
    """The device of the parameter that an optimizer's tensor belongs to, by the tensor's name."""
    found = {}
    names = attached.parameter_names()
    for keyword, optimizer in attached.optimizers():
        record = tree.optimizers[keyword]
        for parameter, name in _named(optimizer, names):
            for key in record.entries.get(name, EntryRecord()).tensors:
                found[f"{keyword}.state.{name}.{key}"] = sharding.local(parameter).device
    return found


def _target(ref: TensorRef, live: torch.Tensor | None, home: torch.device | None) -> torch.Tensor:
    if live is not None and dtype_name(live.dtype) == ref.dtype and live.shape == ref.box.sizes:
        return live.detach()
    device = home if home is not None and home.type == ref.device else ref.device
    try:
        return torch.empty(ref.box.sizes, dtype=dtype_of(ref.dtype), device=device)
    except (RuntimeError, AssertionError) as bad:
        raise RestoreError(
            f"{ref.fqn} was on {ref.device}, where no tensor can be made now: {bad}.",
            hint="Start the job on machines with the same kinds of devices.",
        ) from bad


def _named(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> list[tuple[torch.Tensor, str]]:
    by_group = group_names(optimizer, names)
    return [
        pair
        for group, found in zip(optimizer.param_groups, by_group, strict=True)
        for pair in zip(group["params"], found, strict=True)
    ]


@dataclass(frozen=True)
class _Putting:
    attached: Attached
    state: RankState
    tree: Objects
    tensors: tuple[torch.Tensor, ...]

    def decode(self, data: bytes) -> Any:
        return decode_tree(data, self.tensors, self._mesh)

    def module(self, keyword: str, module: torch.nn.Module) -> None:
        record = self.tree.modules[keyword]
        found = walk(module, name=keyword, world=self.attached.world)
        by_name = {ref.fqn: at for at, ref in enumerate(self.state.refs)}
        made: dict[str, torch.Tensor] = {}
        for site in found.sites:
            name = f"{keyword}.{site.fqn}"
            if site.fqn in record.absent:
                site.holder[site.key] = None
            elif site.fqn in record.quantized:
                first = self.state.aliases.get(name, name)
                if first not in made:
                    made[first] = self.decode(record.quantized[site.fqn])
                site.holder[site.key] = made[first]
            elif site.is_buffer:
                self._buffer(site, by_name.get(self.state.aliases.get(name, name)))
        for name, holder in found.extras.items():
            if name in record.extra:
                holder.set_extra_state(self.decode(record.extra[name]))
        for name, wrapper in found.wrappers.items():
            if name in record.flags:
                wrapper.require_forward_param_sync = record.flags[name]

    def _buffer(self, site: Site, index: int | None) -> None:
        """A buffer whose shape changes over time gets the tensor that was loaded for it."""
        if index is None:
            return
        loaded = self.tensors[index]
        if site.tensor is None or sharding.local(site.tensor).data_ptr() != loaded.data_ptr():
            site.holder[site.key] = loaded

    def optimizer(
        self, optimizer: torch.optim.Optimizer, record: OptimizerRecord, names: dict[int, str]
    ) -> None:
        for parameter, name in _named(optimizer, names):
            entry = record.entries.get(name)
            if entry is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = self._entry(entry, parameter)
        known = {parameter for parameter, _ in _named(optimizer, names)}
        for key in [key for key in optimizer.state if key not in known]:
            del optimizer.state[key]
        if record.loose:
            optimizer.state.update(self.decode(record.loose))
        for group, saved in zip(optimizer.param_groups, record.groups, strict=True):
            group.update(self.decode(saved.options))

    def _entry(self, entry: EntryRecord, parameter: torch.Tensor) -> dict[str, Any]:
        values: dict[str, Any] = self.decode(entry.rest) if entry.rest else {}
        for key, index in entry.tensors.items():
            held = self.tensors[index]
            if key in entry.dtypes:
                held = held.view(dtype_of(entry.dtypes[key]))
            if key in entry.sharded:
                held = sharding.wrap_like(held, parameter)
            values[key] = held
        return {key: values[key] for key in entry.order} if entry.order else values

    def other(self, keyword: str, held: Any) -> None:
        saved = self.decode(self.tree.others[keyword])
        try:
            held.load_state_dict(saved)
        except Exception as bad:
            raise RestoreError(
                f"{keyword} ({type(held).__qualname__}) refused its saved state in "
                f"load_state_dict: {type(bad).__name__}: {bad}."
            ) from bad

    def _mesh(self, shape: Sequence[int]) -> Any:
        """The mesh of this shape that an attached module is on."""
        for site in live_sites(self.attached).values():
            if site.tensor is not None and sharding.is_dtensor(site.tensor):
                mesh: Any = site.tensor.device_mesh  # type: ignore[attr-defined]
                if tuple(mesh.shape) == tuple(shape):
                    return mesh
        raise RestoreError(
            f"the state holds a DTensor on a mesh of shape {tuple(shape)}, and no attached module "
            "is on such a mesh.",
            hint="Attach the module that the mesh belongs to.",
        )
