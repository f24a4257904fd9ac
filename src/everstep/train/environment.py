"""What else than the state decides the bits of a continuation (R4).

Owns: which facts of this process are kept beside the state, and how a change is told. Called by:
session (records and compares) and restore (warns) of this room.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Facts = Mapping[str, str]


def observe(world: int) -> dict[str, str]:
    """The facts of this process: torch's version, its threads, the vector extensions in use."""
    return {
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "vector extensions": torch.backends.cpu.get_cpu_capability(),
        "world": str(world),
    }


def changes(before: Facts, now: Facts) -> list[str]:
    """One text for each fact that is another one now."""
    return [
        f"{name} was {before[name]} and is {now.get(name)}"
        for name in before
        if before[name] != now.get(name)
    ]
