"""Time as an argument.

Owns: the protocol that decisions take instead of calling ``time``. Called by: every room.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. ``wall`` since the epoch, ``mono`` of CLOCK_MONOTONIC."""

    def wall(self) -> float: ...

    def mono(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def mono(self) -> float:
        return time.monotonic()
