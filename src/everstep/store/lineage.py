"""Which checkpoints the job may go on from (S6), decided from immutable records alone.

Pure: branches and points in, an order out. Called by: job (candidates, expected), retention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from everstep.core.ids import Point

Branches = Mapping[int, Point | None]
"""Attempt to the point it restored, or None where it began from nothing (a root).

One whose branch cannot be read stands here as a root, too: what came before it is no candidate.
Where it matters that this is not known, such attempts are named beside (``unread``).
"""


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


def undecided(
    branches: Branches, points: Iterable[Point], unread: Collection[int] = ()
) -> list[Point]:
    """The points of which nobody can say whether they are on the current lineage: the chain ends
    at a branch that cannot be read, or names one that is not there, and they may lie before it.
    """
    links = limits(branches)
    if not links:
        return list(points)
    last, limit = list(links.items())[-1]
    restored = branches[last]
    if last in unread:
        below = last - 1
    elif restored is not None:
        below = restored.attempt
        limit = restored.step if limit is None else min(limit, restored.step)
    else:
        return []
    return [p for p in points if p.attempt <= below and _within(p.step, limit)]


def expected(branches: Branches, known: Iterable[Point], unread: Collection[int] = ()) -> bool:
    """Whether a recovery point must exist (R5), so that starting from nothing would lose work.

    ``known`` holds the points that have a manifest or a tombstone. Where no branch exists at all,
    any of them counts; a root (a deliberate fresh start) cuts off what came before it. An attempt
    whose branch cannot be read may have restored something where an earlier one has left any
    trace.
    """
    points = list(known)
    if not branches:
        return bool(points)
    links = chain(branches)
    restored_something = any(branches[attempt] is not None for attempt in links)
    may_have = links[-1] in unread and (min(branches) < links[-1] or bool(points))
    return restored_something or may_have or bool(on_lineage(branches, points))


def _within(step: int, limit: int | None) -> bool:
    return limit is None or step <= limit
