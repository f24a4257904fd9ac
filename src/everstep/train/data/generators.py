"""Generators that the user keeps in a loader, its samplers and its dataset.

Owns: finding them and their state, in values that ``everstep.state.encode`` holds. Never does:
draw from one, or touch the process's own streams (those are ``everstep.state.rng``). Called by:
``feed``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from everstep.errors import InexactData

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_INWARD = ("sampler", "batch_sampler", "dataset", "datasets", "transform", "collate_fn")


def find(loader: Any) -> dict[str, Any]:
    """Every private generator by its path, such as ``sampler.generator``; a shared one once.

    Looked for among the attributes of the loader and of its samplers, datasets, ``transform``
    and ``collate_fn``: ``torch.Generator``, ``random.Random``, NumPy ``Generator`` and
    ``RandomState``.
    """
    found: dict[str, Any] = {}
    known = {id(torch.default_generator), id(np.random.mtrand._rand)}
    for path, value in _attributes(loader, "", set()):
        if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
            if id(value) not in known:
                found[path] = value
            known.add(id(value))
    return found


def _attributes(owner: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    inward = []
    for name, value in getattr(owner, "__dict__", {}).items():
        yield f"{prefix}{name}", value
        if name in _INWARD:
            inward.append((f"{prefix}{name}", value))
    for path, value in inward:
        if isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from _attributes(item, f"{path}.{number}.", seen)
        else:
            yield from _attributes(value, f"{path}.", seen)


def capture(found: dict[str, Any]) -> dict[str, Any]:
    """Path to state: bytes for torch, what Python and NumPy themselves give for theirs."""
    return {path: _state(generator) for path, generator in found.items()}


def restore(found: dict[str, Any], states: dict[str, Any], name: str) -> None:
    """Put ``states`` back. Raises InexactData if the generators are not those captured."""
    if set(found) != set(states):
        raise InexactData(
            f"loader {name!r} keeps generators at {sorted(found)}, but its saved position has "
            f"{sorted(states)}; the order of the data would differ.",
            hint="Build the loader, samplers and dataset as the interrupted run did.",
        )
    for path, generator in found.items():
        _put(generator, states[path])


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _put(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
