"""The wall clock against the monotonic one.

Owns: what counts as a jump. Never does: set a clock. Called by: the watch.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from everstep.agent.watch.source import Source
from everstep.core.clock import Clock
from everstep.faults.records import Signal

EVERY = 1.0
JUMP = 1.0
"""Seconds between two looks: time synchronisation slews by less than a thousandth of that."""


class WallClock(Source):
    """Tells when the wall clock jumped, or the machine slept: CLOCK_MONOTONIC stands still then."""

    name, every = "clock", EVERY

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._apart: float | None = None

    def look(self) -> Iterable[Signal]:
        wall = self._clock.wall()
        apart = wall - self._clock.mono()
        before, self._apart = self._apart, apart
        if before is None or abs(apart - before) <= JUMP:
            return []
        by = apart - before
        return [
            Signal(
                "agent",
                f"clock watch: the wall clock jumped by {by:+.1f} s against the monotonic clock, "
                f"from {_shown(wall - by)} to {_shown(wall)}",
            )
        ]


def _shown(wall: float) -> str:
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{wall:.0f} s"
