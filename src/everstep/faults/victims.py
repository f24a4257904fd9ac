"""Ranks that only show the effects of a failure (F2).

Owns: what counts as an effect. Never does: I/O, choose the root. Called by:
:mod:`everstep.faults.judge`.
"""

from __future__ import annotations

from everstep.faults.candidates import NOTICE, PROGRAM, Candidate, Found
from everstep.faults.series import waiting_in


def victims(found: Found, chosen: Candidate | None) -> tuple[int, ...]:
    """Ranks with errors of peers, timeouts, our signals, or that wait; none where nobody is set
    apart from the others, and none of what training survived."""
    if chosen is None:
        return _undecided(found)
    if chosen.level <= NOTICE + 1 or (chosen.action == "continue" and not chosen.ranks):
        return ()
    scene = found.scene
    told = {fact.rank for fact in chosen.facts if fact.rank is not None}
    ranks = {fact.rank for fact in found.facts if fact.kind in ("peer", "watchdog", "signal")}
    ranks |= scene.ours | {end.rank for end in scene.ends.values() if end.code < 0}
    ranks |= _waiting(found)
    if _are_effects(told, chosen, found):
        ranks |= told
    else:
        ranks -= told
    return _sorted(ranks, chosen.ranks)


def _are_effects(told: set[int], chosen: Candidate, found: Found) -> bool:
    """Whether the ranks that told of the root are its victims, and not all alike a part of it."""
    if chosen.ranks or chosen.place == "switch":
        return True
    return chosen.level < PROGRAM and chosen.place != "job" and len(told) < found.scene.world


def _undecided(found: Found) -> tuple[int, ...]:
    """Of an unknown root: who waits or lost a peer, unless that is everybody."""
    ranks = {fact.rank for fact in found.facts if fact.kind in ("peer", "watchdog")}
    ranks |= found.scene.ours
    known = _sorted(ranks, frozenset())
    return () if len(known) >= found.scene.world else known


def _waiting(found: Found) -> set[int]:
    """Ranks whose stack, heartbeat or step time says that they wait for another one."""
    waits = {stack.rank for stack in found.stacks if stack.waits}
    return waits | waiting_in(found.scene.beats, found.scene.index.about("compute"))


def _sorted(ranks: set[int | None] | set[int], roots: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank in ranks if rank is not None and rank not in roots))
