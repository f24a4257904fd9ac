"""Branches that the store does not have yet: which of them must be written, and what they name.

Pure: elections in, elections out. Called by: branches.

An attempt whose branch was never written has nothing in the store, and never will. Where memory
holds nothing of it either, the attempts that went on from it may name what it went on from: readers
find the same lineage with the same limits. So what is owed stays as short as what is held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from everstep.core.ids import Point
from everstep.keeper.wire import WentOn


def bridged(owed: Sequence[WentOn], needed: Collection[int]) -> list[WentOn]:
    """``owed`` (oldest first) without the attempts that are not ``needed``. The oldest stays, since
    it may have been tried, and the newest."""
    stay = {*needed, *(one.attempt for one in (*owed[:1], *owed[-1:]))}
    left_out = {one.attempt: one for one in owed if one.attempt not in stay}
    return [_over(one, left_out) for one in owed if one.attempt in stay]


def _over(one: WentOn, left_out: Mapping[int, WentOn]) -> WentOn:
    source, point = one.source, one.point
    while point is not None and point.attempt in left_out:
        before = left_out[point.attempt]
        source = before.source
        # The lowest step at which the lineage left the attempt is the one that limits it.
        point = before.point and Point(min(point.step, before.point.step), before.point.attempt)
    return WentOn(one.attempt, source, point, one.world)


def missing_link(
    attempt: int, said: Mapping[int, Point | None], stored: Collection[int]
) -> int | None:
    """The attempt at which the chain from ``attempt`` back to a branch of the store, or to a root,
    is broken: the store has no branch of it, and ``said`` does not name what it went on from. None
    where it is whole."""
    while attempt not in stored:
        if attempt not in said:
            return attempt
        point = said[attempt]
        if point is None:
            return None
        if point.attempt >= attempt:
            return attempt  # no chain: the store refuses such a branch
        attempt = point.attempt
    return None
