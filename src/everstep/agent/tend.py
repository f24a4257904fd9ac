"""The keeper while it is needed: heard, roused where it is stopped, replaced where it is dead.

Owns: what is said of it. Never does: anything to workers: training goes on without a keeper.
Called by: supervise while workers run, the loop while an attempt begins.
"""

from __future__ import annotations

import math

from everstep.agent.keeper import NodeKeeper
from everstep.agent.record import Recorder
from everstep.errors import KeeperError
from everstep.keeper.pulse import Pulse, told

TRY_SECONDS = 1.0
"""Between two tries to bring a keeper back."""
TELL_SECONDS = 10.0
"""Without a keeper, after which that is said: one may take seconds to come up."""


class Tending:
    """Looks after ``keeper``; what it finds is said to ``record``."""

    def __init__(self, keeper: NodeKeeper, record: Recorder) -> None:
        self._keeper = keeper
        self._record = record
        self._pulse = Pulse()
        self._next_try = self._away_since = math.inf
        self._told = False

    @property
    def due(self) -> float:
        """When :meth:`look` has something to do though the keeper said nothing."""
        return self._pulse.due if self._keeper.attached else self._next_try

    def look(self, now: float) -> None:
        """Hear it, and do what its state asks for."""
        try:
            self._keeper.pump()
        except KeeperError as lost:
            self.lost(lost)
            self._next_try = self._away_since = now
        if self._keeper.attached:
            self.feel(now)
        elif now >= self._next_try:
            self._bring_back(now)

    def feel(self, now: float) -> None:
        """See whether it moves, and help where it does not."""
        if now < self._pulse.due or not self._keeper.attached:
            return
        need = self._pulse.feel(now, self._keeper.signs())
        if need == "nothing":
            return
        pid, seconds = self._keeper.pid, self._pulse.silent
        self._record.say(
            "keeper.silent", told(pid, need, seconds), level="warning", pid=pid, seconds=seconds
        )
        if need == "rouse":
            self._keeper.rouse()
        else:
            self._keeper.end()

    def hurry(self) -> None:
        """It is needed now: a grace period runs."""
        self._pulse.hurry()

    def lost(self, lost: KeeperError) -> None:
        """Let go of it."""
        self._record.say("keeper.lost", f"the keeper was lost: {lost.what}", level="warning")
        self._keeper.lost()

    def recover(self) -> bool:
        """Bring another one up with its memory, and say so. False where that was not possible."""
        if not self._keeper.recover():
            return False
        self._told = False
        self._record.say(
            "keeper.started", f"a new keeper (pid {self._keeper.pid}) took over its memory",
            pid=self._keeper.pid, adopted=False,
        )  # fmt: skip
        return True

    def _bring_back(self, now: float) -> None:
        if self.recover():
            self._next_try = math.inf
            return
        self._next_try = now + TRY_SECONDS
        if not self._told and now - self._away_since >= TELL_SECONDS:
            self._told = True
            self._record.say(
                "keeper.unreachable",
                f"no keeper could be started: training goes on, nothing is saved. It is tried "
                f"again and again; see {self._keeper.log}",
                level="error",
            )
