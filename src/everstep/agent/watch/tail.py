"""Files into which workers' output goes because the user wants it so: read as they grow.

Owns: a thread that looks at them. Never does: write, or touch what is no regular file. Called by:
:mod:`everstep.agent.output`.

The thread is of its own because the files may lie on a mount that hangs: then these streams are
silent, and nothing else waits.
"""

from __future__ import annotations

import os
import stat
import threading
import time

from everstep.agent.watch.logs import RING, Memory

LOOK_SECONDS = 0.25


class Tail:
    """One file, which may not be there yet. ``memory`` is written to under the owner's lock."""

    def __init__(self, path: str, memory: Memory) -> None:
        self.path = path
        self.memory = memory
        self._offset = 0

    def look(self, lock: threading.Lock) -> None:
        """Read what was added. Of more than the memory takes, the end."""
        try:
            about = os.stat(self.path)
            if not stat.S_ISREG(about.st_mode) or about.st_size == self._offset:
                return
            skipped, piece = self._added(about.st_size)
        except OSError:
            return  # not there (yet): the next look finds it
        with lock:
            self.memory.unsearched += skipped
            if piece:
                self.memory.remember(piece, time.monotonic())

    def _added(self, size: int) -> tuple[int, bytes]:
        """How many new bytes were passed over, and those behind them."""
        start = 0 if size < self._offset else self._offset  # cut short: begun anew
        skipped = max(0, size - start - 2 * RING)
        start += skipped
        with open(self.path, "rb", buffering=0) as file:
            piece = os.pread(file.fileno(), size - start, start)
        self._offset = start + len(piece)
        return skipped, piece


class Tailing:
    """Looks at all files four times a second, and at once when asked."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._tails: list[Tail] = []
        self._changed = threading.Condition()
        self._wanted = self._looked = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, tails: list[Tail]) -> None:
        with self._changed:
            self._tails = [*self._tails, *tails]
        if tails and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-tail", daemon=True)
            self._thread.start()

    def remove(self, tails: list[Tail]) -> None:
        with self._changed:
            self._tails = [tail for tail in self._tails if tail not in tails]

    def look(self, seconds: float) -> None:
        """Wait until all files were looked at once more, for at most so long."""
        if self._thread is None:
            return
        with self._changed:
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looked >= wanted, max(0.0, seconds))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                wanted, tails = self._wanted, self._tails
            for tail in tails:
                tail.look(self._lock)
            with self._changed:
                self._looked = wanted
                self._changed.notify_all()
                if self._wanted == wanted and not self._closed:
                    self._changed.wait(LOOK_SECONDS)
