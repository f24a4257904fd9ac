"""What is allowed: the limits of the budgets.

Owns: their record, and which settings give it. Never does: count. Called by: budget, situation, the
records of decisions, the agent, the commands.
"""

from __future__ import annotations

import msgspec

from everstep.core.settings import Settings


class Limits(msgspec.Struct, frozen=True):
    """What is allowed. None: that budget has no end.

    ``per_fingerprint``: restarts after one fingerprint, until it is refilled. ``no_progress``:
    attempts in a row that got no further; ``unrestored``: that restored no later step, however far
    they came. ``window_restarts``: all restarts in any ``window_seconds``. ``useful_share``: of the
    time since the last refill, spent on new committed steps, that a refill takes. ``same_step`` and
    ``same_step_program``: at which failure with one fingerprint at one step the job is stopped
    (F4), the latter for user code, user data, and whatever the evidence says to stop for.
    ``setbacks``: how often the job may fall back to an earlier step and still have its way back
    counted as progress. ``max_restarts``: torchrun's flag, for the restarts of one agent."""

    per_fingerprint: int | None = 3
    no_progress: int | None = 3
    unrestored: int | None = 6
    window_restarts: int | None = 50
    window_seconds: float = 24 * 3600.0
    useful_share: float = 0.2
    same_step: int = 3
    same_step_program: int = 2
    setbacks: int = 3
    max_restarts: int | None = None


def limits_of(settings: Settings) -> Limits:
    """The limits that a job's settings ask for."""
    return Limits(
        per_fingerprint=settings.per_fingerprint or None,
        no_progress=settings.no_progress or None,
        window_restarts=settings.window_restarts or None,
        window_seconds=settings.window,
        useful_share=settings.useful_share,
    )
