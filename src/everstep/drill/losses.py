"""Compares what two runs logged, step by step and bit by bit.

Owns: the comparison of logged figures. Never does: I/O. Called by: the drill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from everstep.core.events import Event
from everstep.drill import kinds

Key = tuple[int, int, str]
"""(step, rank, name)."""
Figures = Mapping[Key, list[object]]
"""Every value logged under a key, in the order of logging: more than one where steps repeat."""

MOST_DIFFERENCES = 10


class LossReport(msgspec.Struct, frozen=True):
    """``compared`` values at ``steps`` steps were compared, ``repeated`` of them more than once.

    ``differences`` names the first few; it is empty iff all were identical.
    """

    names: tuple[str, ...]
    steps: int
    compared: int
    repeated: int
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not self.differences


def figures(events: Iterable[Event], names: tuple[str, ...] = ()) -> dict[Key, list[object]]:
    """What ``run.log`` was given, for ``names``, or for every name with "loss" in it.

    Figures such as tokens per second differ between any two runs, so not every name counts.
    """
    found: dict[Key, list[object]] = {}
    for event in sorted(events, key=lambda e: e.mono):
        if event.kind != kinds.LOGGED or event.step is None:
            continue
        for name, value in event.facts.items():
            if name in names if names else "loss" in name.lower():
                found.setdefault((event.step, event.rank or 0, name), []).append(value)
    return found


def compare(reference: Figures, drilled: Figures) -> LossReport:
    """Compare every value of the drilled run, repeated ones too, with the undisturbed run's.

    Values are equal iff their bits are (JSON keeps every float exactly; NaN stands as null).
    """
    keys = sorted(set(reference) | set(drilled))
    found = [text for key in keys if (text := _difference(key, reference, drilled))]
    return LossReport(
        names=tuple(sorted({name for _, _, name in keys})),
        steps=len({step for step, _, _ in keys}),
        compared=sum(len(drilled.get(key, ())) for key in keys),
        repeated=sum(len(drilled.get(key, ())) > 1 for key in keys),
        differences=tuple(found[:MOST_DIFFERENCES]),
    )


def _difference(key: Key, reference: Figures, drilled: Figures) -> str:
    step, rank, name = key
    where = f"{name} of rank {rank} at step {step}"
    if key not in drilled:
        return f"{where} was never logged in the drilled run"
    if key not in reference:
        return f"{where} was never logged in the undisturbed run"
    right = reference[key][-1]
    for value in drilled[key]:
        if _bits(value) != _bits(right):
            return f"{where} is {value!r}, undisturbed {right!r}"
    return ""


def _bits(value: object) -> object:
    # 0.0 == -0.0 and True == 1; their texts differ, and repr of a float is exact.
    return value.hex() if isinstance(value, float) else repr(value)
