"""Moments that a benchmark's training script tells of itself, the same for every launcher.

Owns: the record, the pipe it travels through. Called by: the recovery benchmark's script (writes)
and its watcher (reads). Without torch.

The way is a FIFO: a line costs the script microseconds and the reader sleeps in between; polling a
file would take a share of the two cores that are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

VARIABLE = "EVERSTEP_BENCH_MARKS"

Name = Literal["began", "imported", "joined", "built", "restored", "step"]


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """``at`` is CLOCK_MONOTONIC. ``step`` is the step restored or finished, else -1."""

    at: float
    pid: int
    rank: int
    name: Name
    step: int = -1


class MarkWriter:
    """One process's end of the pipe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Without O_NONBLOCK a job whose benchmark was killed would wait here for ever.
        self._fd = os.open(environment[VARIABLE], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._fd, True)
        self._rank = int(environment.get("RANK", "0"))

    def write(self, name: Name, *, step: int = -1, at: float | None = None) -> None:
        """Tell of a moment: now, or ``at``."""
        mark = Mark(time.monotonic() if at is None else at, os.getpid(), self._rank, name, step)
        # Less than PIPE_BUF, so the lines of two processes never mix.
        os.write(self._fd, msgspec.json.encode(mark) + b"\n")


class MarkReader:
    """The benchmark's end. ``path`` is made."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Open for writing as well, or the pipe would end whenever no script has it open.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[Mark]:
        """Marks that arrived since the last call; never waits."""
        marks: list[Mark] = []
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return marks
            *lines, self._rest = (self._rest + data).split(b"\n")
            marks += [msgspec.json.decode(line, type=Mark) for line in lines]

    def close(self) -> None:
        os.close(self._fd)
