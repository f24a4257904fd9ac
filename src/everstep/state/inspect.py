"""The attached objects, read at a step boundary into flat named tensors and a small record.

Owns: how each object is treated, all names, ties, and what is replicated. Never does: step,
create or change anything in the user's objects (R1), any collective (R2). Called by: train.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from everstep.core.layout import SHARED, Box, RankState, TensorRef
from everstep.errors import UnsavableObject, UsageError
from everstep.state import sharding
from everstep.state.encode import encode
from everstep.state.memory import OPAQUE, Fingerprint, check_plain, dtype_name, fingerprint
from everstep.state.modules import Sharing, Site, descends, flags_of, walk
from everstep.state.objects import (
    EntryRecord,
    GroupRecord,
    ModuleRecord,
    Objects,
    OptimizerRecord,
    Treatment,
    encode_objects,
)

EXTRA = "@run"
"""Prefix of the names of tensors that train adds; no keyword can be called so."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
"""Types whose memory may be asked for without a look at what else they are."""


class Held(msgspec.Struct, frozen=True):
    """A tensor of this rank and who else has it.

    ``holders`` are the ranks with the same box, the first of which persists it. ``split`` says that
    all ranks hold equal bytes and share the work by pieces. ``facts`` is what else the ranks must
    agree on.
    """

    ref: TensorRef
    holders: tuple[int, ...]
    split: bool = False
    facts: str = ""


@dataclass(frozen=True)
class LiveState:
    """The state of one boundary, still in the user's memory. ``tensors`` (local parts),
    ``fingerprints`` and ``held`` are parallel."""

    step: int
    held: tuple[Held, ...]
    tensors: tuple[torch.Tensor, ...]
    fingerprints: tuple[Fingerprint, ...]
    aliases: dict[str, str]
    objects: bytes

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return tuple(held.ref for held in self.held)

    def rank_state(self) -> RankState:
        """What goes beside the payload."""
        return RankState(self.step, self.refs, self.aliases, self.objects)


class Attached:
    """The user's objects by keyword.

    ``replicated`` names keywords whose tensors the user declares equal on all ranks. Raises
    :class:`UsageError` for objects without ``state_dict``/``load_state_dict``.
    """

    def __init__(
        self,
        objects: Mapping[str, object],
        *,
        replicated: Collection[str] = (),
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.objects: dict[str, Any] = dict(objects)
        self.rank = rank
        self.world = world
        self.treated = {keyword: _treatment(keyword, held) for keyword, held in objects.items()}
        self.replicated = frozenset(replicated)
        self._demoted: frozenset[str] = frozenset()
        self._memo: dict[str, tuple[Fingerprint, Sharing, object, Held]] = {}
        unknown = sorted(self.replicated - set(objects))
        if unknown:
            raise UsageError(f"replicated={unknown} names no attached object.")

    @property
    def demoted(self) -> frozenset[str]:
        """Names of tensors that are kept per rank because their replicas differed (R8)."""
        return self._demoted

    def demote(self, names: Collection[str]) -> None:
        """Keep these tensors per rank from now on. All ranks must call it with the same names."""
        self._demoted |= frozenset(names)
        self._memo.clear()

    def check(self) -> None:
        """Read everything once. Raises :class:`UnsavableObject` naming path and type of the first
        thing that no checkpoint can hold (S8)."""
        self.resolve(0, {})

    def resolve(self, step: int, extra: Mapping[str, object] | None = None) -> LiveState:
        """The state now. Nothing is copied yet, and nothing is changed.

        ``extra`` is kept beside the objects; it may hold tensors. Raises ``UnsavableObject``.
        """
        reading = _Reading(self)
        objects = reading.objects(dict(extra or {}))
        return LiveState(
            step,
            tuple(reading.held),
            tuple(reading.tensors),
            tuple(reading.fingerprints),
            reading.aliases,
            encode_objects(objects),
        )

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        """The attached modules, which come first in every order."""
        return ((k, self.objects[k]) for k, how in self.treated.items() if how == "module")

    def optimizers(self) -> Iterable[tuple[str, torch.optim.Optimizer]]:
        return ((k, self.objects[k]) for k, how in self.treated.items() if how == "optimizer")

    def others(self) -> Iterable[tuple[str, Any]]:
        return ((k, self.objects[k]) for k, how in self.treated.items() if how == "other")

    def parameter_names(self) -> dict[int, str]:
        """Full name of each attached module's parameter, by identity; tied ones by their first."""
        names: dict[int, str] = {}
        for keyword, module in self.modules():
            for site in walk(module, name=keyword, world=self.world).sites:
                if not site.is_buffer:
                    names.setdefault(id(site.tensor), f"{keyword}.{site.fqn}")
        return names


def group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of an optimizer's parameters; by position for those of no attached module."""
    return [
        [
            names.get(id(parameter)) or f"param_groups.{g}.{i}"
            for i, parameter in enumerate(group["params"])
        ]
        for g, group in enumerate(optimizer.param_groups)
    ]


def type_name(held: object) -> str:
    """The class as errors and records name it, without wrappers and module paths."""
    return type(held).__qualname__


def _treatment(keyword: str, held: Any) -> Treatment:
    if not keyword.isidentifier():
        raise UsageError(f"{keyword!r} is no keyword: names of tensors are built from it.")
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(held, method, None)):
            raise UsageError(
                f"{keyword} ({type_name(held)}) has no {method}().",
                hint="Attach objects with state_dict and load_state_dict.",
            )
    if isinstance(held, nn.Module) and _inherits(held, nn.Module):
        return "module"
    if descends(type(held), "ZeroRedundancyOptimizer"):
        raise UnsavableObject(
            f"{keyword} is a ZeroRedundancyOptimizer, whose state_dict needs collectives.",
            hint="Use fully_shard (FSDP2), which shards the optimizer state as well.",
        )
    if isinstance(held, torch.optim.Optimizer) and _inherits(held, torch.optim.Optimizer):
        return "optimizer"
    return "other"


def _inherits(held: Any, base: type) -> bool:
    """Whether the class keeps torch's own state_dict. One that has its own says by it what its
    state is, so it is asked like any other object."""
    own = type(held)
    return bool(
        own.state_dict is base.state_dict  # type: ignore[attr-defined]
        and own.load_state_dict is base.load_state_dict  # type: ignore[attr-defined]
    )


@dataclass
class _Reading:
    """One walk over everything."""

    attached: Attached
    held: list[Held] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names: set[str] = set()
        self._seen: dict[int, int] = {}
        self._views: dict[Fingerprint, int] = {}
        self._parameters: dict[int, tuple[str, Sharing]] = {}
        self._everywhere = tuple(range(self.attached.world))
        self._alone = (self.attached.rank,)

    def objects(self, extra: dict[str, object]) -> Objects:
        attached = self.attached
        modules = {keyword: self._module(keyword, held) for keyword, held in attached.modules()}
        optimizers = {k: self._optimizer(k, held) for k, held in attached.optimizers()}
        others = {k: self._other(k, held) for k, held in attached.others()}
        return Objects(
            treated=attached.treated,
            types={keyword: type_name(held) for keyword, held in attached.objects.items()},
            modules=modules,
            optimizers=optimizers,
            others=others,
            extra=self._encode(extra, EXTRA, "own"),
        )

    def _module(self, keyword: str, module: nn.Module) -> ModuleRecord:
        found = walk(module, name=keyword, world=self.attached.world)
        quantized = {}
        for site in found.sites:
            if site.tensor is not None:
                sharing = self._sharing(keyword, site)
                name = f"{keyword}.{site.fqn}"
                if site.tensor.is_quantized:
                    quantized[site.fqn] = self._encode(site.tensor, name, sharing, unique=True)
                    continue
                self._add(name, site.tensor, sharing, unique=True)
                if not site.is_buffer:
                    self._parameters.setdefault(id(site.tensor), (name, sharing))
        return ModuleRecord(
            absent=tuple(site.fqn for site in found.sites if site.tensor is None),
            volatile=tuple(site.fqn for site in found.sites if site.volatile),
            extra={
                name: self._encode(holder.get_extra_state(), f"{keyword}.{name}", "own")
                for name, holder in found.extras.items()
            },
            flags=flags_of(found),
            quantized=quantized,
        )

    def _sharing(self, keyword: str, site: Site) -> Sharing:
        # A single rank's module is the job's module.
        if keyword in self.attached.replicated or self.attached.world == 1:
            return "replicated"
        return site.sharing

    def _optimizer(self, keyword: str, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        names = group_names(optimizer, {key: name for key, (name, _) in self._parameters.items()})
        groups, entries, known = [], {}, set()
        for g, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            sharing = self._group_sharing(keyword, group["params"])
            prefix = f"{keyword}.param_groups.{g}"
            groups.append(GroupRecord(tuple(names[g]), self._encode(options, prefix, sharing)))
            for parameter, name in zip(group["params"], names[g], strict=True):
                known.add(parameter)
                # `in` first: optimizer.state is a defaultdict, and reading must not fill it.
                if parameter in optimizer.state:
                    entries[name] = self._entry(keyword, name, parameter, optimizer)
        loose = {key: value for key, value in optimizer.state.items() if key not in known}
        encoded = self._encode(loose, f"{keyword}.state", "own") if loose else b""
        return OptimizerRecord(tuple(groups), entries, encoded)

    def _group_sharing(self, keyword: str, parameters: list[torch.Tensor]) -> Sharing:
        if all(self._parameter_sharing(keyword, p) == "replicated" for p in parameters):
            return "replicated" if parameters else "own"
        return "own"

    def _parameter_sharing(self, keyword: str, parameter: torch.Tensor) -> Sharing:
        if keyword in self.attached.replicated:
            return "replicated"
        return self._parameters.get(id(parameter), ("", "own"))[1]

    def _entry(
        self, keyword: str, name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> EntryRecord:
        state = optimizer.state[parameter]
        prefix = f"{keyword}.state.{name}"
        if not isinstance(state, dict) or not all(type(key) is str for key in state):
            raise UnsavableObject(f"{prefix} ({type(state).__name__}) is no dict with text keys.")
        sharing = self._parameter_sharing(keyword, parameter)
        tensors, rest, dtypes, sharded = {}, {}, {}, []
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.is_quantized:
                rest[key] = value
                continue
            tensors[key] = self._add(f"{prefix}.{key}", value, sharing)
            if value.dtype in OPAQUE:
                dtypes[key] = str(value.dtype).removeprefix("torch.")
            if type(value) is not torch.Tensor and sharding.is_dtensor(value):
                sharded.append(key)
        packed = self._encode(rest, prefix, sharing) if rest else b""
        order = tuple(state) if rest and tensors else ()
        return EntryRecord(tensors, packed, order, dtypes, tuple(sharded))

    def _other(self, keyword: str, held: Any) -> bytes:
        sharing: Sharing = "replicated" if keyword in self.attached.replicated else "own"
        return self._encode(held.state_dict(), keyword, sharing)

    def _encode(self, value: object, path: str, sharing: Sharing, *, unique: bool = False) -> bytes:
        def add(tensor: torch.Tensor, name: str) -> int:
            return self._add(name, tensor, sharing, unique=unique)

        return encode(value, path, add)

    def _add(
        self, name: str, tensor: torch.Tensor, sharing: Sharing, *, unique: bool = False
    ) -> int:
        """The index of ``tensor`` among the refs: a new one, or that of the tensor it is tied to.

        Only tensors that have to be there under their own name (``unique``) are aliases; a value
        that is met a second time needs just the index.
        """
        if name in self._names:
            name = self._free(name)
        self._names.add(name)
        part = sharding.local(tensor)
        plain = type(part) in _PLAIN and part.layout is torch.strided
        if not plain or part.is_meta or part.is_nested:
            check_plain(part, name)
        mark, held = self._held(name, tensor, part, sharing)
        first = self._seen.get(mark[0])
        if first is not None and self.fingerprints[first] != mark:
            first = self._views.get(mark)
        if first is not None and part.numel():
            if unique:
                self.aliases[name] = self.held[first].ref.fqn
            return first
        index = len(self.held)
        self.held.append(held)
        self.tensors.append(part)
        self.fingerprints.append(mark)
        if self._seen.setdefault(mark[0], index) != index:
            self._views.setdefault(mark, index)
        return index

    def _free(self, name: str) -> str:
        """A numbered form of a name that keys with dots gave before."""
        return next(n for c in itertools.count(2) if (n := f"{name}~{c}") not in self._names)

    def _held(
        self, name: str, tensor: torch.Tensor, part: torch.Tensor, sharing: Sharing
    ) -> tuple[Fingerprint, Held]:
        """The tensor's fingerprint and description; those of the last reading where they hold."""
        mark = fingerprint(part)
        wrapper = None if part is tensor else _layout_key(tensor)
        known = self.attached._memo.get(name)
        if known is not None and known[1] == sharing and known[2] == wrapper:
            if known[0] == mark:
                return known[0], known[3]
            if known[0][1] == mark[1] and known[0][3:5] == mark[3:5]:
                self.attached._memo[name] = (mark, sharing, wrapper, known[3])
                return mark, known[3]
        check_plain(part, name)
        held = self._describe(name, tensor, part, sharing)
        self.attached._memo[name] = (mark, sharing, wrapper, held)
        return mark, held

    def _describe(
        self, name: str, tensor: torch.Tensor, part: torch.Tensor, sharing: Sharing
    ) -> Held:
        dtype, device = dtype_name(part.dtype), _device_name(part.device)
        if dtype is None:
            raise AssertionError(f"{name}: check_plain lets no {part.dtype} through")
        shape = tuple(part.shape)
        box = Box((0,) * len(shape), shape)
        own = Held(TensorRef(name, dtype, shape, box, self.attached.rank, device), self._alone)
        if name in self.attached.demoted:
            return own
        if sharding.is_dtensor(tensor):
            place = sharding.locate(tensor, self.attached.world)
            if place is None:
                return own
            ref = TensorRef(name, dtype, place.shape, place.box, SHARED, device)
            return Held(ref, place.holders, False, place.facts)
        if sharing == "own":
            return own
        shared = TensorRef(name, dtype, shape, box, SHARED, device)
        return Held(shared, self._everywhere, sharing == "replicated", sharing)


def _layout_key(tensor: Any) -> object:
    return (tensor.shape, tensor.placements, id(tensor.device_mesh))


def _device_name(device: torch.device) -> str:
    """``cuda`` for the current device of its type, since the next attempt's may have another
    number; ``cuda:1`` for one that a rank addresses besides its own."""
    if device.type == "cpu":
        return device.type
    current = torch.get_device_module(device.type).current_device()
    return device.type if device.index == current else str(device)
