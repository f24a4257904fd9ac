"""Time as an argument.

Owns: the protocol that decisions take instead of calling ``time``. Called by: every room. A wall
clock that is wrong is injected here (``core.clock.wall``): a test never sets the machine's.
"""

from __future__ import annotations

import time
from typing import Protocol

from everstep.core import points


class Clock(Protocol):
    """Seconds. ``wall`` since the epoch, ``mono`` of CLOCK_MONOTONIC."""

    def wall(self) -> float: ...

    def mono(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time() + points.shift("core.clock.wall")

    def mono(self) -> float:
        return time.monotonic()
