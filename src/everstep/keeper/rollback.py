"""What a rollback may go on from, best first (R5, S6).

Pure. Called by: elect.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.ids import Point
from everstep.keeper.facts import Candidate


def rollback_order(candidates: Iterable[Candidate], target: Point) -> tuple[Candidate, ...]:
    """What a rollback to ``target`` may go on from, best first: the target itself (who named it
    knows why), then older ones, the newest first, those known to be sound before those of which
    nothing is known. Never a newer one, nor one that is known to be unsound."""
    found = sorted((c for c in candidates if c.point <= target), key=_newest_first)
    named = tuple(c for c in found if c.point == target)
    older = [c for c in found if c.point != target]
    sound = tuple(c for c in older if c.sound)
    return (*named, *sound, *(c for c in older if c.sound is None))


def _newest_first(candidate: Candidate) -> tuple[int, int]:
    return -candidate.point.step, -candidate.point.attempt
