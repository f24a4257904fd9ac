"""Statistics of a few paired measurements. Pure.

Owns: medians, spreads, ratios within a round, drag. Called by: the benchmarks, tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """The median of ``count`` samples, and the smallest and largest one."""

    median: float
    low: float
    high: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError for no samples, or for one that is not finite."""
    if not samples:
        raise ValueError("a spread needs at least one sample")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"not all samples are finite: {list(samples)}")
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours / theirs`` round by round, so that what slows a whole round cancels out.

    Raises ValueError where the lengths differ or a denominator is not positive.
    """
    _same_length(ours, theirs)
    if any(value <= 0 for value in theirs):
        raise ValueError(f"ratios need positive denominators: {list(theirs)}")
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def paired_differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours - theirs`` round by round. Raises ValueError where the lengths differ."""
    _same_length(ours, theirs)
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def drag(during: Sequence[float], undisturbed: Sequence[float]) -> float:
    """Seconds that the steps ``during`` a save took beyond as many undisturbed ones.

    Negative where they were faster by chance; hiding that would bias the median.
    """
    if not during:
        return 0.0
    return sum(during) - len(during) * statistics.median(undisturbed)


def spaced(count: int) -> list[float]:
    """``count`` points in (0, 1), spread evenly: 0.1, 0.3, 0.5, 0.7, 0.9 for five."""
    return [(index + 0.5) / count for index in range(count)]


def rotated(names: Sequence[T], by: int) -> list[T]:
    """The order of a round: every name comes at every place in turn, and follows another one."""
    at = by % len(names)
    order = [*names[at:], *names[:at]]
    return order if (by // len(names)) % 2 == 0 else order[::-1]


def _same_length(ours: Sequence[float], theirs: Sequence[float]) -> None:
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"cannot pair {len(ours)} samples with {len(theirs)}")
