"""Whether a keeper moves: it may be stopped, or stuck, without being dead.

Owns: when a silent process counts as stopped, and as dead. Pure. Called by: the agent, and where
none runs local rank 0, which both tend the keeper that they started.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal

LOOK_SECONDS = 1.0
"""Between two looks."""
ROUSE_SECONDS = 10.0
"""Without a move, after which it is told to go on. It moves by itself every 5 s at the latest."""
END_SECONDS = 30.0
"""Without a move, after which it is ended and replaced."""
HURRY_ROUSE_SECONDS = 1.0
HURRY_END_SECONDS = 6.0
"""The same where a grace period runs and its next wake-up is due at once."""

Need = Literal["nothing", "rouse", "end"]


class Pulse:
    """For how long one process has shown no sign of life, :attr:`silent`. Time in which nobody
    looked, because the one that looks stood still too, does not count."""

    def __init__(self) -> None:
        self._rouse_after, self._end_after = ROUSE_SECONDS, END_SECONDS
        self._sign: Hashable = None
        self._seen = -math.inf
        self._roused = False
        self.due = 0.0
        self.silent = 0.0

    def hurry(self) -> None:
        """Something is needed of it now."""
        self._rouse_after, self._end_after = HURRY_ROUSE_SECONDS, HURRY_END_SECONDS

    def feel(self, now: float, sign: Hashable) -> Need:
        """What the process needs, from a look at ``sign``, which changes while it moves; a look
        is due at :attr:`due`."""
        passed = min(now - self._seen, 2 * LOOK_SECONDS)
        self.silent = self.silent + passed if sign == self._sign else 0.0
        self._sign, self._seen, self.due = sign, now, now + LOOK_SECONDS
        if self.silent >= self._end_after:
            self._sign, self._roused = None, False  # the next one begins anew
            return "end"
        roused, self._roused = self._roused, self.silent >= self._rouse_after
        return "rouse" if self._roused and not roused else "nothing"


def told(pid: int, need: Need, silent: float) -> str:
    """What is said of it."""
    what_next = (
        "it is ended, and another takes over its memory"
        if need == "end"
        else "it may be stopped and is told to go on"
    )
    return (
        f"the keeper (pid {pid}) has not moved for {silent:.0f} s, training goes on and nothing is "
        f"saved: {what_next}"
    )
