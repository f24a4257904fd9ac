"""The kernel's messages, from now on.

Owns: /dev/kmsg and its format; which of the device, the journal and a file are read. Never does:
know what a message means. Called by: the watch.

A line of the kernel's is the best evidence there is (a device that fell off the bus, a process
killed for memory), and whether it may be read differs from one machine to the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from everstep.agent.watch.follow import Follower
from everstep.agent.watch.journal import Journal
from everstep.agent.watch.source import Blind, Source, reason_of
from everstep.core.clock import Clock
from everstep.faults.records import Signal

KMSG = Path("/dev/kmsg")
EVERY = 0.5
BLIND_EVERY = 10.0
RECORD = 8192
"""Bytes of the largest record that the device gives; a smaller buffer is refused (EINVAL)."""
MOST_RECORDS = 4096
"""In one look: a storm must not keep its thread from answering."""
DEBUG = 7
"""Level of messages that tell nothing of failures."""
NEAR_SECONDS = 1.0
"""The kernel's stamps and CLOCK_MONOTONIC begin together at boot and run apart where a machine was
suspended or moved: within this they count as one clock."""

_HEAD = re.compile(r"^(?P<prio>\d+),\d+,(?P<usec>\d+),[^;]*;(?P<text>.*)$", re.S)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


def kernel(file: str, clock: Clock) -> Source:
    """The kernel's messages: of ``file`` where one is named, else the best that there is."""
    if file:
        return KernelFile(Path(file), clock)
    program = shutil.which("journalctl")
    journal = [Journal(program, clock)] if program else []
    return Kernel([Kmsg(KMSG, clock), *journal])


class Kernel(Source):
    """The first of ``ways`` that can be read. That shows only when it is tried: the device may be
    opened by whom its rights allow it to, and refused by the kernel all the same."""

    name = "kernel"

    def __init__(self, ways: Sequence[Source]) -> None:
        self._ways = ways
        self._chosen: Source | None = None
        self.every = EVERY

    def look(self) -> Iterable[Signal]:
        reasons = []
        for way in [self._chosen] if self._chosen else self._ways:
            try:
                yield from way.look()
            except Blind as blind:
                reasons.append(blind.reason)
            else:
                self._chosen, self.every = way, way.every
                return
        self._chosen, self.every = None, BLIND_EVERY
        raise Blind("; ".join(reasons))

    def close(self) -> None:
        for way in self._ways:
            way.close()


class Stamps:
    """The kernel's microseconds since boot as CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._apart = float("inf")

    def mono(self, usec: int, now: float) -> float:
        """``now`` is when the record was read. The least time that ever passed from a record's
        stamp to its reading is how far the two clocks are apart, where it is much."""
        self._apart = min(self._apart, now - usec / 1e6)
        apart = self._apart if abs(self._apart) > NEAR_SECONDS else 0.0
        return min(now, usec / 1e6 + apart)


def message(line: str, now: float, stamps: Stamps) -> Signal | None:
    """A line of the device, or of a file in its format or any other, as a signal; None where it is
    a record's second line, of level debug, or empty."""
    if line.startswith(" ") or not line.strip():
        return None
    head = _HEAD.match(line)
    if head is None:
        return Signal("kernel", line.rstrip())
    if int(head["prio"]) & 7 >= DEBUG:
        return None
    raw = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), head["text"].encode())
    text = raw.decode("utf-8", "replace").strip()
    return Signal("kernel", text, mono=stamps.mono(int(head["usec"]), now)) if text else None


class Kmsg(Source):
    """The kernel's ring buffer (``/dev/kmsg``): each read gives one record, and none waits."""

    name, every = "kernel", EVERY

    def __init__(self, device: Path, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._stamps = Stamps()
        self._fd = -1
        self._rest = b""

    def look(self) -> Iterable[Signal]:
        if self._fd < 0:
            self._open()
        for text in self._lines():
            signal = message(text, self._clock.mono(), self._stamps)
            if signal is not None:
                yield signal

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        try:
            fd = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Blind(reason_of(error, self._device)) from error
        with contextlib.suppress(OSError):  # a pipe has no end to go to: what is in it is new
            os.lseek(fd, 0, os.SEEK_END)
        self._fd = fd

    def _lines(self) -> Iterator[str]:
        for _ in range(MOST_RECORDS):
            try:
                piece = os.read(self._fd, RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                yield "everstep: records of the kernel were overwritten before they were read"
                continue
            except OSError as error:
                self.close()
                raise Blind(reason_of(error, self._device)) from error
            if not piece:
                return
            *whole, self._rest = (self._rest + piece).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
            if len(self._rest) > RECORD:
                self._rest = b""  # no record is so long: this is no device of that kind


class KernelFile(Source):
    """A file with the kernel's messages, as syslog writes one: plain lines, or the device's."""

    name, every = "kernel", EVERY

    def __init__(self, path: Path, clock: Clock) -> None:
        self._file = Follower(path)
        self._clock = clock
        self._stamps = Stamps()

    def look(self) -> Iterable[Signal]:
        for line in self._file.lines():
            signal = message(line, self._clock.mono(), self._stamps)
            if signal is not None:
                yield signal

    def close(self) -> None:
        self._file.close()
