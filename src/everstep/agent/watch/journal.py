"""The kernel's messages from the journal, where the device may not be read.

Owns: the call of journalctl and what it prints. Never does: leave a process behind. Called by:
:mod:`everstep.agent.watch.kernel`.

It is asked anew every few seconds instead of followed: a follower outlives an agent that is killed
until the kernel's next message, which may be days away.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

import msgspec

from everstep.agent.watch.source import Blind, Source
from everstep.core.clock import Clock
from everstep.faults.records import Signal

EVERY = 5.0
DEADLINE = 30.0
"""Seconds for one answer: a journal of many gigabytes on a slow disk is slow to open."""
MOST_LINES = 4096
DEBUG = "7"

_HIDDEN = ("not seeing messages", "insufficient permissions", "No journal files")
"""What journalctl says where it shows this user nothing and still succeeds."""


class _Entry(msgspec.Struct):
    text: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    cursor: str = msgspec.field(name="__CURSOR", default="")
    usec: str = msgspec.field(name="__MONOTONIC_TIMESTAMP", default="")
    level: str = msgspec.field(name="PRIORITY", default="")


class Journal(Source):
    """New kernel messages of this boot by ``program`` (journalctl)."""

    name, every = "kernel", EVERY

    def __init__(self, program: str, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._cursor = ""

    def look(self) -> Iterable[Signal]:
        if not self._cursor:
            self._begin()
            return []
        entries = self._ask("--after-cursor", self._cursor, "--lines", f"{MOST_LINES}")
        found = [self._signal(entry) for entry in entries if entry.level != DEBUG]
        if entries:
            self._cursor = entries[-1].cursor
        return [signal for signal in found if signal.text]

    def _begin(self) -> None:
        entries = self._ask("--lines", "1")
        if not entries:
            raise Blind("the journal shows this user no message of the kernel")
        self._cursor = entries[-1].cursor

    def _ask(self, *more: str) -> list[_Entry]:
        command = [self._program, "--dmesg", "--all", "--no-pager", "--output", "json", *more]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False,
                timeout=DEADLINE,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise Blind(f"journalctl did not answer within {DEADLINE:.0f} seconds") from late
        said = done.stderr.decode("utf-8", "replace")
        if any(hint in said for hint in _HIDDEN):
            raise Blind("the journal hides the kernel's messages from this user")
        if done.returncode:
            raise Blind(f"journalctl ended with code {done.returncode}")
        try:
            return [msgspec.json.decode(line, type=_Entry) for line in done.stdout.splitlines()]
        except msgspec.DecodeError as error:
            raise Blind("journalctl does not print JSON") from error

    def _signal(self, entry: _Entry) -> Signal:
        text = entry.text or ""
        said = bytes(text).decode("utf-8", "replace") if isinstance(text, list) else text
        mono = int(entry.usec) / 1e6 if entry.usec.isdigit() else self._clock.mono()
        return Signal("kernel", said, mono=min(mono, self._clock.mono()))
