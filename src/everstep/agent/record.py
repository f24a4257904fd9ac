"""What the agent says: one event, appended to the job's journal and told to people on stderr.

Owns: the agent's lines. Never does: decide. Called by: everything in the agent.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from everstep.core.clock import Clock, SystemClock
from everstep.core.events import Event, Level, encode_line

_SHOWN_KINDS = ("restore.elected", "job.finished")
"""Kinds of the keeper's and the workers' events that a person is told, besides warnings."""


@dataclass
class Recorder:
    """``path`` is the file of ``--events`` (empty: none). ``job``, ``attempt`` and ``node`` are
    written into every event."""

    job: str
    path: str = ""
    attempt: int = 0
    node: int = 0
    clock: Clock = SystemClock()  # noqa: RUF009 - it has no state
    stream: TextIO | None = None

    def say(
        self,
        kind: str,
        text: str,
        *,
        level: Level = "info",
        rank: int | None = None,
        step: int | None = None,
        **facts: object,
    ) -> None:
        """Record an event of the agent; those of level ``debug`` are not shown to people."""
        event = Event(
            wall=self.clock.wall(), mono=self.clock.mono(), source="agent", kind=kind, text=text,
            level=level, job=self.job, attempt=self.attempt, rank=rank, node=self.node, step=step,
            facts=facts,
        )  # fmt: skip
        self._append(event)
        if level != "debug":
            self._show(event)

    def relay(self, event: Event) -> None:
        """Show an event that the keeper has recorded already, where people want to know it."""
        if event.level in ("warning", "error") or event.kind in _SHOWN_KINDS:
            self._show(event)

    def _append(self, event: Event) -> None:
        if not self.path:
            return
        # One write of one line on O_APPEND: agents, keepers and the drill share the file.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, encode_line(event))
        finally:
            os.close(fd)

    def _show(self, event: Event) -> None:
        mark = "" if event.level == "info" else f"{event.level}: "
        at = time.strftime("%H:%M:%S", time.localtime(event.wall))
        print(f"everstep {at} {mark}{event.text}", file=self.stream or sys.stderr, flush=True)
