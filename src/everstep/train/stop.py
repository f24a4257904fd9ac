"""SIGTERM on the training side: remembered, chained, and obeyed at the next step boundary.

Owns: the handler. Never does: stop anything by itself (a Python handler does not run inside a C++
wait, so the boundary asks). Called by: :mod:`everstep.train.boundary`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class TermFlag:
    """``raised`` becomes true when SIGTERM comes. A handler that was there is called as well."""

    def __init__(self) -> None:
        self.raised = False
        self._before: object = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Put the former handler back, unless somebody has replaced this one since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            # None: the former handler was not installed from Python and cannot be put back.
            before = self._before if self._before is not None else signal.SIG_DFL
            signal.signal(signal.SIGTERM, before)  # type: ignore[arg-type]
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        if callable(self._before):
            self._before(number, frame)
