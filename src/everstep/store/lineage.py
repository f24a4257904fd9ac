"""Which checkpoints the job may go on from (S6), decided from immutable records alone.

Pure: branches and points in, an order out. Called by: job (candidates, expected), retention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.core.ids import Point

Branches = Mapping[int, Point | None]
"""Attempt to the point it restored, or None where it began from nothing (a root)."""


def chain(branches: Branches) -> list[int]:
    """The newest attempt with a branch, the attempt it restored, and so on to a root.

    It ends early where a branch is missing: nothing is known of what came before.
    """
    found: list[int] = []
    attempt = max(branches, default=None)
    while attempt is not None and attempt in branches:
        found.append(attempt)
        restored = branches[attempt]
        # A branch that names its own or a later attempt is refused at reading; stopping here as
        # well keeps the walk finite for any input.
        attempt = restored.attempt if restored is not None and restored.attempt < attempt else None
    return found


def limits(branches: Branches) -> dict[int, int | None]:
    """For each attempt of the chain the highest step that counts; None where all do."""
    found: dict[int, int | None] = {}
    limit: int | None = None
    for attempt in chain(branches):
        found[attempt] = limit
        restored = branches[attempt]
        if restored is not None:
            limit = restored.step if limit is None else min(limit, restored.step)
    return found


def on_lineage(branches: Branches, points: Iterable[Point]) -> list[Point]:
    """The points on the current lineage, newest first: highest step, then highest attempt."""
    limit_of = limits(branches)
    kept = [p for p in points if p.attempt in limit_of and _within(p.step, limit_of[p.attempt])]
    return sorted(kept, reverse=True)


def expected(branches: Branches, known: Iterable[Point]) -> bool:
    """Whether a recovery point must exist (R5), so that starting from nothing would lose work.

    ``known`` holds the points that have a manifest or a tombstone. Where no branch exists at all,
    any of them counts; a root (a deliberate fresh start) cuts off what came before it.
    """
    points = list(known)
    if not branches:
        return bool(points)
    restored_something = any(branches[attempt] is not None for attempt in chain(branches))
    return restored_something or bool(on_lineage(branches, points))


def _within(step: int, limit: int | None) -> bool:
    return limit is None or step <= limit
