"""The keeper while an attempt runs: heard, roused where it is stopped, replaced where it is dead.

Owns: when a silent keeper counts as stopped, and as dead. Never does: anything to workers: training
goes on without a keeper. Called by: watch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from everstep.agent.keeper import NodeKeeper
from everstep.agent.record import Recorder
from everstep.errors import KeeperError

TRY_SECONDS = 5.0
"""Between two tries to bring a keeper back."""
PULSE_SECONDS = 1.0
"""Between two looks at whether it moves."""
ROUSE_SECONDS = 10.0
"""Without a move, after which it is told to go on. It moves by itself every 5 s at the latest."""
END_SECONDS = 30.0
"""Without a move, after which it is ended and replaced."""


class Pulse:
    """For how long a process has shown no sign of life. Time in which nobody looked, because this
    process stood still too, does not count."""

    def __init__(self) -> None:
        self._sign: Hashable = None
        self._seen = -math.inf
        self._silent = 0.0

    def feel(self, now: float, sign: Hashable) -> float:
        """Seconds for which ``sign`` has been the same in looks at most twice
        :data:`PULSE_SECONDS` apart."""
        passed = min(now - self._seen, 2 * PULSE_SECONDS)
        self._silent = self._silent + passed if sign == self._sign else 0.0
        self._sign, self._seen = sign, now
        return self._silent


class Tending:
    """Looks after ``keeper``; what it finds is said to ``record``."""

    def __init__(self, keeper: NodeKeeper, record: Recorder) -> None:
        self._keeper = keeper
        self._record = record
        self._pulse = Pulse()
        self._next_pulse = 0.0
        self._next_try = math.inf
        self._roused = False
        self._told = False

    @property
    def due(self) -> float:
        """When :meth:`look` has something to do though the keeper said nothing."""
        return self._next_pulse if self._keeper.attached else self._next_try

    def look(self, now: float) -> None:
        """Hear it, and do what its state asks for."""
        try:
            self._keeper.pump()
        except KeeperError as lost:
            self._record.say("keeper.lost", f"the keeper was lost: {lost.what}", level="warning")
            self._keeper.lost()
            self._next_try = now
        if self._keeper.attached:
            self._feel(now)
        elif now >= self._next_try:
            self._bring_back(now)

    def _feel(self, now: float) -> None:
        if now < self._next_pulse:
            return
        self._next_pulse = now + PULSE_SECONDS
        silent = self._pulse.feel(now, self._keeper.signs())
        if silent >= END_SECONDS:
            self._say_silent(silent, "it is ended, and another takes over its memory")
            self._keeper.end()
            self._pulse = Pulse()
        elif silent >= ROUSE_SECONDS and not self._roused:
            self._say_silent(silent, "it may be stopped and is told to go on")
            self._keeper.rouse()
        self._roused = silent >= ROUSE_SECONDS

    def _say_silent(self, silent: float, what_next: str) -> None:
        pid = self._keeper.pid
        self._record.say(
            "keeper.silent",
            f"the keeper (pid {pid}) has not moved for {silent:.0f} s, training goes on and "
            f"nothing is saved: {what_next}",
            level="warning", pid=pid, seconds=silent,
        )  # fmt: skip

    def _bring_back(self, now: float) -> None:
        if self._keeper.recover():
            self._next_try = math.inf
            self._told = False
            self._record.say(
                "keeper.started", f"a new keeper (pid {self._keeper.pid}) took over its memory",
                pid=self._keeper.pid, adopted=False,
            )  # fmt: skip
            return
        self._next_try = now + TRY_SECONDS
        if not self._told:
            self._told = True
            self._record.say(
                "keeper.unreachable",
                f"no keeper could be started: training goes on, nothing is saved. It is tried "
                f"again every {TRY_SECONDS:g} s; see {self._keeper.log}",
                level="error",
            )
