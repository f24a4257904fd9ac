"""What stands between a saved state and the attached objects, told in full before anything loads.

Pure over the two. Never does: change either. Called by: train, before a restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from everstep.core.layout import RankState, TensorRef
from everstep.errors import StateMismatch
from everstep.state import quantized, sharding
from everstep.state.inspect import Attached, group_names, type_name
from everstep.state.memory import dtype_name
from everstep.state.modules import Site
from everstep.state.objects import Objects
from everstep.state.restore import live_sites

_SHOWN = 20
"""Lines told of one kind; a renamed layer of a large model has hundreds."""


def check(attached: Attached, state: RankState, tree: Objects) -> None:
    """Raises :class:`StateMismatch` where the state does not fit the attached objects."""
    found = difference(attached, state, tree)
    if found:
        raise StateMismatch(
            f"the saved state of step {state.step} does not fit the attached objects:\n{found}\n",
            hint="Attach what the checkpoint was made from, or start afresh: --resume never, or "
            "EVERSTEP_RESUME=never without `everstep run`.",
        )


def difference(attached: Attached, state: RankState, tree: Objects) -> str:
    """One line for each difference, empty where there is none: objects and names that are missing
    or new, shapes, dtypes and ties that changed, parameters that moved in an optimizer."""
    lines = list(_objects(attached, tree))
    if not lines:
        lines = [*_names(attached, state, tree), *_optimizers(attached, tree)]
    shown = lines[:_SHOWN]
    if len(lines) > _SHOWN:
        shown.append(f"and {len(lines) - _SHOWN} more")
    return "\n".join(f"  {line}" for line in shown)


def _objects(attached: Attached, tree: Objects) -> Iterator[str]:
    for keyword in tree.types:
        if keyword not in attached.objects:
            yield f"missing: {keyword} ({tree.types[keyword]}) is in the state, but not attached"
    for keyword, held in attached.objects.items():
        kind = type_name(held)
        if keyword not in tree.types:
            yield f"new: {keyword} ({kind}) is attached, but not in the state"
        elif tree.treated[keyword] != attached.treated[keyword] or (
            attached.treated[keyword] != "module" and tree.types[keyword] != kind
        ):
            yield f"changed: {keyword} was a {tree.types[keyword]} and is a {kind}"


def _names(attached: Attached, state: RankState, tree: Objects) -> Iterator[str]:
    sites = live_sites(attached)
    saved = {ref.fqn: ref for ref in state.refs}
    volatile = {f"{k}.{n}" for k, record in tree.modules.items() for n in record.volatile}
    as_integers = {f"{k}.{n}" for k, record in tree.modules.items() for n in record.quantized}
    absent = {f"{k}.{n}" for k, record in tree.modules.items() for n in record.absent}
    modules = tuple(f"{keyword}." for keyword in tree.modules)
    extras = tuple(f"{k}.{n}" for k, record in tree.modules.items() for n in record.extra)
    held = [
        name
        for name in (*saved, *state.aliases)
        if name.startswith(modules) and not name.startswith(extras)
    ]
    for name in held:
        if name not in sites and name not in volatile:
            yield f"missing: {name} is in the state, but the module has no such tensor"
    known = {*held, *absent}
    for name, site in sites.items():
        if name not in known and site.tensor is not None and not site.volatile:
            yield f"new: {name} is in the module, but not in the state"
        elif name in known and not site.volatile:
            ref = saved.get(state.aliases.get(name, name))
            yield from _changed(name, site, ref, was_quantized=name in as_integers)
    yield from _ties(sites, held, state.aliases)


def _changed(name: str, site: Site, ref: TensorRef | None, *, was_quantized: bool) -> Iterator[str]:
    if ref is None or site.tensor is None:
        if (ref is None) != (site.tensor is None) and not site.is_buffer:
            yield f"changed: {name} is {'new' if ref is None else 'gone'}"
        return
    tensor, is_quantized = site.tensor, site.tensor.is_quantized
    if is_quantized != was_quantized:
        yield f"changed: {name} is {'' if is_quantized else 'not '}quantized now"
        return
    if is_quantized:
        tensor = quantized.raw(tensor, name)
    part = sharding.local(tensor)
    if tuple(tensor.shape) != ref.shape:
        yield f"changed: {name} had shape {ref.shape} and has {tuple(tensor.shape)}"
    elif dtype_name(part.dtype) != ref.dtype:
        yield f"changed: {name} had dtype {ref.dtype} and has {dtype_name(part.dtype)}"
    elif tuple(part.shape) != ref.box.sizes:
        yield (
            f"changed: this rank held {ref.box.sizes} of {name} and holds {tuple(part.shape)} now"
        )


def _ties(sites: dict[str, Site], held: Iterable[str], aliases: dict[str, str]) -> Iterator[str]:
    """Names that share memory must be the same names as before: loading in place would else give
    one tensor two contents, or leave a tied one behind."""
    first: dict[object, str] = {}
    wanted = set(held)
    for name, site in sites.items():  # in the modules' order: the first of tied ones is canonical
        if name not in wanted or site.tensor is None or not sharding.local(site.tensor).numel():
            continue
        part = sharding.local(site.tensor)
        key = (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device)
        canonical = first.setdefault(key, name)
        now = canonical if canonical != name else None
        before = aliases.get(name)
        if site.volatile or now == before:
            continue
        if before is None:
            yield f"changed: {name} is tied to {now} and was not"
        elif now is None:
            yield f"changed: {name} was tied to {before} and is not"


def _optimizers(attached: Attached, tree: Objects) -> Iterator[str]:
    names = attached.parameter_names()
    for keyword, optimizer in attached.optimizers():
        now = group_names(optimizer, names)
        before = [list(group.params) for group in tree.optimizers[keyword].groups]
        if len(now) != len(before):
            yield f"changed: {keyword} had {len(before)} param_groups and has {len(now)}"
            continue
        for g, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                yield f"changed: {keyword}.param_groups.{g} {_moved(old, new)}"


def _moved(old: list[str], new: list[str]) -> str:
    lost = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    if not lost and not added:
        return "holds its parameters in another order"
    parts = [f"lost {', '.join(lost[:3])}"] if lost else []
    parts += [f"gained {', '.join(added[:3])}"] if added else []
    return " and ".join(parts)
