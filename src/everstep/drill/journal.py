"""The journal of a drilled run: every event of the job and of the drill, one line each.

Owns: following the file while others append to it, and appending the drill's own events. Never
does: judge. Called by: the drill's loop, tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.core.events import Event, decode_line, encode_line


class Journal:
    """A follower of ``path``, which need not exist yet.

    A last line without its newline is still being written and is kept for the next call. A line
    that is torn (its writer was killed) is counted in :attr:`torn` and left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0
        self._at = 0
        self._rest = b""

    def read_new(self) -> list[Event]:
        """Events whose lines were completed since the last call, in the order of the file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if line and (event := self._decode(line)) is not None]

    def append(self, event: Event) -> None:
        """Add a line in one write, so that it does not mix with those of other processes."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, encode_line(event))
        finally:
            os.close(fd)

    def _decode(self, line: bytes) -> Event | None:
        try:
            return decode_line(line)
        except msgspec.DecodeError:
            self.torn += 1
            return None
