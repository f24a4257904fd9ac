"""The agent's own signals, as something its loop can wait for.

Owns: the handlers of the process while the agent runs. Never does: decide what a signal means.
Called by: the loop.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Raised by a signal inside :meth:`Signals.interruptible`: a wait that has no descriptor."""


class Signals:
    """Handles the signals of that comma-separated list (torchrun's ``--signals-to-handle``).

    A signal makes :meth:`fileno` readable and stands in :meth:`take` until it is taken.
    """

    def __init__(self, names: str) -> None:
        self._numbers = [getattr(signal, name.strip()) for name in names.split(",") if name.strip()]
        self._heard: list[signal.Signals] = []
        self._raising = False
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals heard since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(64):
                pass
        heard, self._heard = self._heard, []
        return heard

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal inside the block, or one that waits already, raises :class:`Interrupted`."""
        self._raising = True
        try:
            if self._heard:
                raise Interrupted
            yield
        finally:
            self._raising = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._heard.append(signal.Signals(number))
        if self._raising:
            self._raising = False
            raise Interrupted
