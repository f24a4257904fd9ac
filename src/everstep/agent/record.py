"""What the agent says: one event, appended to the job's journal and told to people on stderr.

Owns: the agent's lines, and which of the others' a person is shown. Never does: decide. Called
by: everything in the agent.
"""

from __future__ import annotations

import sys
import time
from typing import BinaryIO, TextIO

from everstep.core.clock import Clock, SystemClock
from everstep.core.events import Event, Level, encode_line
from everstep.core.shown import shown
from everstep.keeper.journal import Journal

_SHOWN_KINDS = frozenset(
    {
        "restore.elected",
        "job.preempting",
        "job.preempted",
        "train.nothing_to_do",
        "train.stopped_early",
    }
)
"""Kinds of the keeper's and the workers' events that a person is told, besides warnings."""

_TOLD_AT_THE_END = frozenset({"job.fatal", "restore.refused"})
"""Kinds of errors that a worker ends with: shown then, once, with the worker's own words."""


class Recorder:
    """``path`` is the file of ``--events`` (empty: none). ``attempt`` and ``node`` are written
    into every event; ``stream`` is stderr unless given. ``lines`` gets every event of this node
    as a line of JSON, for programs."""

    def __init__(
        self,
        job: str,
        path: str = "",
        *,
        clock: Clock | None = None,
        stream: TextIO | None = None,
        lines: BinaryIO | None = None,
    ) -> None:
        self._stream = stream
        self._lines = lines
        self._committed = 0
        self._once: set[str] = set()
        self._journal = Journal(
            path, source="agent", job=job, clock=clock or SystemClock(), listen=self._show_own
        )

    @property
    def attempt(self) -> int:
        return self._journal.attempt

    @attempt.setter
    def attempt(self, attempt: int) -> None:
        self._journal.attempt = attempt

    def at_node(self, node: int) -> None:
        """Say from now on which node this is."""
        self._journal.node = node

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
        self._journal.say(kind, text, level=level, rank=rank, step=step, facts=facts)

    def lost(self, kind: str, text: str) -> None:
        """Warn of what is not seen or written any more (F5), once in this run."""
        if text not in self._once:
            self._once.add(text)
            self.say(kind, text, level="warning")

    def relay(self, event: Event) -> None:
        """Show an event that the keeper has recorded already, where people want to know it."""
        self._write(event)
        told = event.kind in _SHOWN_KINDS and not event.rank  # of what all ranks say, rank 0's
        wrong = event.level in ("warning", "error") and event.kind not in _TOLD_AT_THE_END
        if told or wrong or self._is_first_commit(event):
            self._show(event)

    def close(self) -> None:
        self._journal.close()

    def _is_first_commit(self, event: Event) -> bool:
        """Of each attempt: so that people see that saving works, and no line a minute after it."""
        if event.kind != "checkpoint.committed" or self._committed == self.attempt:
            return False
        self._committed = self.attempt
        return True

    def _show_own(self, event: Event) -> None:
        self._write(event)
        if event.level != "debug":
            self._show(event)

    def _write(self, event: Event) -> None:
        if self._lines is None:
            return
        try:
            self._lines.write(encode_line(event))
            self._lines.flush()
        except OSError as gone:
            # Whoever read them has ended; the job goes on without (R3).
            self._lines = None
            self.say("events.lost", f"nobody reads standard output: {gone}", level="warning")

    def _show(self, event: Event) -> None:
        mark = "" if event.level == "info" else f"{event.level}: "
        at = time.strftime("%H:%M:%S", time.localtime(event.wall))
        text = shown(f"everstep {at} {mark}{event.text}")
        print(text, file=self._stream or sys.stderr, flush=True)
