"""The events of this rank: to the keeper, which journals them and tells the agent.

Owns: making events and where they go while there is no keeper. Never does: decide anything, hold
a step up. Called by: every module of this room that has something to say.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

from everstep.core.clock import SystemClock
from everstep.core.events import Event, Level
from everstep.core.settings import Settings, variable
from everstep.core.shown import shown
from everstep.errors import UsageError
from everstep.keeper.client import WorkerLink
from everstep.keeper.journal import Journal
from everstep.train.place import Place


class Voice:
    """Says what happens on one rank. ``link`` and ``attempt`` come with the connection."""

    def __init__(self, settings: Settings, place: Place) -> None:
        self._settings = settings
        self._place = place
        self.link: WorkerLink | None = None
        self.attempt = settings.attempt
        self._journal = Journal(
            settings.events, source="worker", job=settings.job, clock=SystemClock(), listen=_nobody
        )

    def say(
        self,
        kind: str,
        text: str,
        *,
        step: int | None = None,
        level: Level = "info",
        loud: bool = False,
        **facts: object,
    ) -> None:
        """One event. ``loud`` prints it here on rank 0 where no agent would."""
        event = self._event(kind, text, step, level, facts)
        if self.link is None or not self.link.report(event):
            self._journal.append(event)
        if loud and self._place.rank == 0 and not self._settings.attempt:
            print(shown(f"everstep: {text}"), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self.say("train.warning", text, level="warning", loud=True)

    def report_replay(self, done: int, total: int) -> None:
        """Progress of batches that are fetched again to reach the data position."""
        if done == total or done % max(total // 10, 1) == 0:
            self.say("data.replay", f"replayed {done} of {total} batches", done=done, total=total)

    def log_values(self, step: int, values: dict[str, Any]) -> None:
        """What ``run.log`` was given: a line of the journal, where there is one."""
        if self._journal.kept:
            figures = {name: _figure(value) for name, value in values.items()}
            self._journal.append(self._event("train.log", "", step, "debug", figures))

    def close(self) -> None:
        self.link = None
        self._journal.close()

    def _event(
        self, kind: str, text: str, step: int | None, level: Level, facts: dict[str, object]
    ) -> Event:
        return Event(
            wall=time.time(),
            mono=time.monotonic(),
            source="worker",
            kind=kind,
            text=text,
            level=level,
            job=self._settings.job,
            attempt=self.attempt,
            rank=self._place.rank,
            node=self._place.node,
            step=step,
            facts=facts,
        )


def how_to_start_afresh(settings: Settings) -> str:
    """In the words of whoever started this process: the agent's flags, or variables."""
    if settings.attempt:
        return "--resume never, or another --job"
    return f"{variable('resume')}=never, or another {variable('job')}"


def _nobody(_: Event) -> None: ...


def check_figures(values: Mapping[str, Any]) -> None:
    """Raises :class:`UsageError` for what is no figure. Reads no tensor."""
    for name, value in values.items():
        if not _is_figure(value):
            shape = tuple(getattr(value, "shape", ()))
            what = f" of shape {shape}" if shape else f" {value!r:.60}"
            raise UsageError(
                f"run.log({name}=...) was given {type(value).__name__}{what}; allowed are numbers "
                "and tensors of one number without dimensions (0-d).",
                hint=f"Say which number of it: {name}.mean(), or {name}[0]." if shape else "",
            )


def _is_figure(value: Any) -> bool:
    if isinstance(value, Real):
        return True
    dtype = str(getattr(value, "dtype", ""))
    numeric = any(kind in dtype for kind in ("float", "int", "bool"))
    return numeric and getattr(value, "ndim", None) == 0


def _figure(value: Any) -> object:
    if isinstance(value, bool | int | float):
        return value
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach())
