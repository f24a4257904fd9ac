"""How sure a verdict is: four steps, by what it rests on.

Owns: the steps. Never does: I/O, choose. Called by: :mod:`everstep.faults.judge`.

More of the verdicts with a higher step are right, also where evidence is lost; a test holds it.
"""

from __future__ import annotations

from everstep.faults.candidates import (
    DEGRADED,
    NODE,
    NOTICE,
    OUTLIER,
    PEER,
    PROGRAM,
    WATCHDOG,
    Candidate,
)

TOLD, WEAK, EFFECTS, NONE = 0.95, 0.6, 0.3, 0.0


def confidence(chosen: Candidate) -> float:
    """The step of a verdict: a fact that names the fault; something that often comes with other
    faults; effects alone, whose cause may lie elsewhere."""
    if chosen.fault == "SIGTERM_EXTERNAL" or _shows_effects(chosen):
        return EFFECTS
    own = chosen.level in (NODE, PROGRAM, OUTLIER, NOTICE)
    return TOLD if own or WATCHDOG <= chosen.level < PEER else WEAK


def _shows_effects(chosen: Candidate) -> bool:
    """Whether all that was seen is that others are gone, by a vote or without one."""
    victims = all(fact.meaning.role == "victim" for fact in chosen.facts)
    return PEER <= chosen.level < DEGRADED and victims
