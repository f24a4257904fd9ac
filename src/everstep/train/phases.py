"""What this rank is doing, so that what takes long by right is not taken for a hang.

Owns: the phases that are open, the longest step of the recent window, the hook into torch's
compiler. Never does: decide what is a hang (:mod:`everstep.faults.hang` does). Called by: run,
boundary and connect of this room. A step costs a few additions and two stores.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Post = Callable[[str, int, int], None]
"""Publishes a phase: its name, when it began and for how long it may last, in nanoseconds."""

STARTING, RESTORE, FIRST_STEP, STEP, SAVE, COMPILE, ENDED = (
    "starting", "restore", "first_step", "step", "save", "compile", "ended",
)  # fmt: skip
OWN = frozenset({STARTING, RESTORE, FIRST_STEP, STEP, SAVE, COMPILE, ENDED})
"""Names that mean something here; a script's own are others."""

_WINDOW = 50
"""The longest step is that of the last 50 to 100."""
_COMPILER = "torch._dynamo.callback"


class Phase:
    """One that is open. ``began`` and ``limit`` in nanoseconds, ``limit`` 0 where none was said."""

    def __init__(self, name: str, began: int, limit: int = 0) -> None:
        self.name = name
        self.began = began
        self.limit = limit


class Phases:
    """The phases of one rank: one that it lives in, and what it does within that one for now.

    ``declared`` counts the nanoseconds since the last boundary that were declared as something
    else than the step. Phases may be entered and left by other threads than the script's: torch
    compiles backward passes in its own.
    """

    def __init__(self, post: Post, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._post = post
        self._clock = clock
        self._lock = threading.Lock()
        self._base = Phase(STARTING, clock())
        self._open: list[Phase] = []
        self.declared = 0
        self._outer_began = 0
        self._hook: _CompilerHook | None = None
        self.post()

    def become(self, name: str) -> None:
        """From now on this is what the rank does while nothing else is open."""
        with self._lock:
            self._base = Phase(name, self._clock())
            if not self._open:
                self.post()

    @contextmanager
    def within(self, name: str, limit: float = 0.0) -> Iterator[None]:
        """In here the rank does that, for at most ``limit`` s (0: unsaid)."""
        phase = self.enter(name, limit)
        try:
            yield
        finally:
            self.leave(phase)

    def enter(self, name: str, limit: float = 0.0) -> Phase:
        with self._lock:
            phase = Phase(name, self._clock(), int(limit * 1e9))
            if not self._open:
                self._outer_began = phase.began
            self._open.append(phase)
            self.post()
        return phase

    def leave(self, phase: Phase) -> None:
        with self._lock:
            now = self._clock()
            if phase not in self._open:
                return  # the run was closed within it
            self._open.remove(phase)
            if self._open:
                self.post()
                return
            self.declared += now - self._outer_began
            # What follows begins now: time in a phase is no time without a sign of life.
            self._base = Phase(self._base.name, now)
            self.post()

    def post(self) -> None:
        """Publish what holds: again after a keeper has given another page."""
        phase = self._open[-1] if self._open else self._base
        self._post(phase.name, phase.began, phase.limit)

    def take_declared(self) -> int:
        """The nanoseconds of ``declared``, counted from here on anew. Inside of a phase what has
        passed of it counts."""
        with self._lock:
            now, taken = self._clock(), self.declared
            if self._open:
                taken += now - self._outer_began
                self._outer_began = now
            self.declared = 0
            return taken

    # -- the compiler

    def watch_compiler(self) -> None:
        """Have torch's compilations known as such, where torch has loaded its compiler and tells of
        them; does nothing the second time. Loading it here would cost seconds."""
        module = sys.modules.get(_COMPILER)
        if self._hook is None and module is not None:
            handler = getattr(module, "callback_handler", None)
            if hasattr(handler, "register_start_callback"):
                self._hook = _CompilerHook(self, handler)

    def close(self) -> None:
        """The run has ended: what the script does now is its own."""
        if self._hook is not None:
            self._hook.close()
            self._hook = None
        with self._lock:
            self._open.clear()
        self.become(ENDED)


class Pace:
    """How many steps were done, and how long the longest of the recent ones took (nanoseconds)."""

    def __init__(self) -> None:
        self.steps = 0
        self._now = self._before = 0

    def pass_step(self, nanos: int) -> int:
        """Count a step; the longest one of the window. The first one says nothing of the others:
        it makes memory, finds algorithms and compiles."""
        self.steps += 1
        if self.steps == 1:
            return 0
        if self.steps % _WINDOW == 0:
            self._before, self._now = self._now, 0
        self._now = max(self._now, nanos)
        return max(self._now, self._before)


class _CompilerHook:
    """torch's compiler calls these around the outermost compilation, whatever thread it is in."""

    def __init__(self, phases: Phases, handler: Any) -> None:
        self._phases = phases
        self._handler = handler
        self._phase: Phase | None = None
        handler.register_start_callback(self._begin)
        handler.register_end_callback(self._end)

    def close(self) -> None:
        # A script may have cleared the list since.
        for callbacks, mine in (
            (self._handler.start_callbacks, self._begin), (self._handler.end_callbacks, self._end),
        ):  # fmt: skip
            if mine in callbacks:
                callbacks.remove(mine)

    def _begin(self, *_: object) -> None:
        if self._phase is None:
            self._phase = self._phases.enter(COMPILE)

    def _end(self, *_: object) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            self._phases.leave(phase)
