"""One job under a launcher, as seen from outside: marks, what the launcher says, who ended when.

Owns: starting the launcher, stamping everything on CLOCK_MONOTONIC as it arrives. Never does:
make figures of it. Called by: the recovery benchmark.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from everstep.bench import marks, processes
from everstep.bench.marks import Mark, MarkReader
from everstep.errors import BenchError


class WatchedJob:
    """``folder`` must exist and be empty; ``environment`` is added to the cleaned parent's."""

    def __init__(
        self, name: str, command: list[str], folder: Path, environment: Mapping[str, str], mark: str
    ) -> None:
        self.name = name
        self.mark = mark
        self.marks: list[Mark] = []
        self.said: list[tuple[float, str]] = []
        self.ended: dict[int, float] = {}
        self._pidfds: dict[int, int] = {}
        self._rest = b""
        self._pipe = MarkReader(folder / "marks")
        self._poll = select.poll()
        environment = {
            **processes.clean(os.environ), "OMP_NUM_THREADS": "1", **environment,
            marks.VARIABLE: str(folder / "marks"), processes.VARIABLE: mark,
        }  # fmt: skip
        self.started = time.monotonic()
        self._launcher = subprocess.Popen(
            command, env=environment, cwd=folder, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._launcher.stdout is not None, "asked for above"
        self._output = self._launcher.stdout.fileno()
        os.set_blocking(self._output, False)
        self._over = False
        self._launcher_fd = os.pidfd_open(self._launcher.pid)
        for fd in (self._pipe.fileno(), self._output, self._launcher_fd):
            self._poll.register(fd, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        processes.end_all(self.mark)
        self._launcher.wait(20)
        self._pipe.close()
        for fd in (self._launcher_fd, *self._pidfds.values()):
            os.close(fd)
        if self._launcher.stdout is not None:
            self._launcher.stdout.close()

    def wait_until(self, done: Callable[[], bool], what: str, timeout: float) -> None:
        """Take in what happens until ``done``. Raises :class:`BenchError` where it never is."""
        deadline = time.monotonic() + timeout
        while not done():
            left = deadline - time.monotonic()
            # What an ended launcher has left in the pipes is still taken in.
            if not self._take_in(0.0 if self._over else max(left, 0.0)) and (
                self._over or left <= 0
            ):
                raise BenchError(
                    f"{self.name}: no {what} within {timeout:g} s"
                    f" (launcher's exit code: {self._launcher.poll()}).",
                    hint="It said last:\n" + "\n".join(line for _, line in self.said[-30:]),
                )

    def wait_for_seconds(self, seconds: float) -> None:
        """Take in what happens for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._take_in(left)

    def of(self, name: marks.Name) -> list[Mark]:
        """The marks of one name, in the order of their arrival."""
        return [mark for mark in self.marks if mark.name == name]

    def _take_in(self, timeout: float) -> bool:
        ready = self._poll.poll(timeout * 1000)
        for fd, _ in ready:
            if fd == self._pipe.fileno():
                self._hear(self._pipe.read())
            elif fd == self._output:
                self._listen()
            elif fd == self._launcher_fd:
                self._over = True
                self._poll.unregister(fd)
            else:
                self._note_end(fd)
        return bool(ready)

    def _hear(self, new: list[Mark]) -> None:
        self.marks += new
        for mark in new:
            if mark.pid not in self._pidfds and mark.pid not in self.ended:
                self._follow(mark.pid)

    def _follow(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended[pid] = time.monotonic()
            return
        self._pidfds[pid] = fd
        self._poll.register(fd, select.POLLIN)

    def _note_end(self, fd: int) -> None:
        pid = next(pid for pid, its in self._pidfds.items() if its == fd)
        self.ended[pid] = time.monotonic()
        self._poll.unregister(fd)
        os.close(self._pidfds.pop(pid))

    def _listen(self) -> None:
        now = time.monotonic()
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 16)
            if not data:
                self._poll.unregister(self._output)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [(now, line.decode(errors="replace")) for line in lines]
