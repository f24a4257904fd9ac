"""A file that grows, is cut, and is replaced: its new lines.

Owns: the place up to which it was read. Never does: threads, meaning. Called by: sources.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from everstep.agent.watch.source import Blind, reason_of

PIECE = 64 << 10
MOST = 4 << 20
"""Bytes that one turn reads; the rest comes in the next."""
LONGEST = 64 << 10
"""Bytes of a line without an end that are waited for; then it is taken as it is."""


class Follower:
    """Gives the lines that come after the first look. What is there at the first look is old; a
    file that only comes later is new from its beginning.

    Rotation is seen by the file's number: the old file is read to its end first. Where it was cut
    it is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._key: tuple[int, int] | None = None
        self._at = 0
        self._rest = b""
        self._looked = False

    def lines(self) -> Iterator[str]:
        """New whole lines. Raises :class:`Blind` where the file is not there or not readable; what
        was written meanwhile is given once it is."""
        for _ in range(2):  # the file that was open, and the one in its place
            if self._fd < 0:
                self._open()
            yield from self._read()
            if not self._replaced():
                return
            if self._rest:  # its last line has no end, and gets none any more
                yield self._rest.decode("utf-8", "replace")
            self.close()

    def close(self) -> None:
        """Close the file; a later look opens it anew, from its beginning."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._rest, self._at = -1, b"", 0

    def _open(self) -> None:
        first, self._looked = not self._looked, True
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Blind(reason_of(error, self._path)) from error
        found = os.fstat(self._fd)
        self._key = (found.st_dev, found.st_ino)
        if first and stat.S_ISREG(found.st_mode):
            self._at = os.lseek(self._fd, 0, os.SEEK_END)

    def _read(self) -> Iterator[str]:
        found = os.fstat(self._fd)
        if stat.S_ISREG(found.st_mode) and found.st_size < self._at:
            self._at, self._rest = os.lseek(self._fd, 0, os.SEEK_SET), b""
        taken = 0
        while taken < MOST:
            try:
                piece = os.read(self._fd, PIECE)
            except BlockingIOError:
                return  # a pipe with nothing in it
            if not piece:
                return
            taken += len(piece)
            self._at += len(piece)
            *whole, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LONGEST:
                whole, self._rest = [*whole, self._rest], b""
            yield from (line.decode("utf-8", "replace") for line in whole)

    def _replaced(self) -> bool:
        """Whether another file stands at the path. None at all: between a rotation's two steps."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Blind(reason_of(error, self._path)) from error
        return (found.st_dev, found.st_ino) != self._key
