"""Tells when an iterable draws from an RNG stream that the training code draws from too.

Such an iterable can be replayed, but what it remembers of its draws (a shuffle buffer) comes out
differently when the training code's draws in between are missing. Owns: the observation alone.
Never does: draw. Called by: ``feed``, for iterables that run in this process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Marks = tuple[int, int, int]
STREAMS = ("random", "numpy.random", "torch")


class Watch:
    """Compares the process's streams before and after each batch."""

    def __init__(self) -> None:
        self._inside: set[str] = set()
        self._outside: set[str] = set()
        self._left: Marks | None = None

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """``next(iterator)``, observed. The first batch of an epoch may draw: a replay does too."""
        before = _marks()
        batch = next(iterator)
        after = _marks()
        if self._left is not None:
            self._outside |= _changed(self._left, before)
            self._inside |= _changed(before, after)
        self._left = after
        return batch

    def epoch_begins(self) -> None:
        self._left = None

    @property
    def shared(self) -> list[str]:
        """Streams drawn from inside the iterable as well as outside of it."""
        return sorted(self._inside & self._outside)


def _marks() -> Marks:
    # A NumPy seed sequence is hashed as its key and position: the cached normal cannot change
    # without them.
    numpy_state: Any = np.random.get_state()
    return (
        hash(random.getstate()),
        hash((numpy_state[1].tobytes(), numpy_state[2], numpy_state[3])),
        hash(torch.default_generator.get_state().numpy().tobytes()),
    )


def _changed(one: Marks, two: Marks) -> set[str]:
    return {name for name, a, b in zip(STREAMS, one, two, strict=True) if a != b}
