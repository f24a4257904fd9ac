"""SIGTERM on the training side: remembered, chained, and obeyed at the next step boundary.

Owns: the handler. Never does: stop a step (a Python handler does not run inside a C++ wait, so the
boundary asks). Called by: :mod:`everstep.train.boundary`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM came where nothing has to be saved. Not an ``Exception``: nobody may go on."""


class TermFlag:
    """``raised`` becomes true when SIGTERM comes. A handler that was there is called as well."""

    def __init__(self) -> None:
        self.raised = False
        self._pid = os.getpid()
        self._at_once = False
        self._before: object = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise :class:`Terminated` where SIGTERM comes in here, or has come before: for waits
        before the first step, which may be long and have no boundary."""
        self._at_once = True
        try:
            if self.raised:
                raise Terminated
            yield
        finally:
            self._at_once = False

    def close(self) -> None:
        """Put the former handler back, unless somebody has replaced this one since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            # None: the former handler was not installed from Python and cannot be put back.
            before = self._before if self._before is not None else signal.SIG_DFL
            signal.signal(signal.SIGTERM, before)  # type: ignore[arg-type]
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._hand_back(number)
            return
        self.raised = True
        if callable(self._before):
            self._before(number, frame)
        if self._at_once:
            raise Terminated

    def _hand_back(self, number: int) -> None:
        """In a forked child (a pool's or a loader's worker): it has no boundary at which it would
        stop, so the signal means what it meant before attach."""
        before = self._before if self._before is not None else signal.SIG_DFL
        signal.signal(number, before)  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
