"""Where events go: a file of JSON lines, and whoever listens.

Owns: appending whole lines that writers of several processes may mix, and that no secret is in
them. Never does: decide what is worth an event. Called by: keeper; agent and train may.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import msgspec

from everstep.core.clock import Clock
from everstep.core.events import Event, Level, Source, encode_line
from everstep.faults.redact import redact, redacted_facts


class Journal:
    """``path`` empty: no file. ``listen`` gets each event that this process makes or passes on.

    A file that cannot be written is a warning on stderr, once, and no failure of the job.
    """

    def __init__(
        self, path: str, *, source: Source, job: str, clock: Clock, listen: Callable[[Event], None]
    ) -> None:
        self._source = source
        self._job = job
        self._clock = clock
        self._listen = listen
        self._fd = _open(path) if path else None
        self._failed = False
        self.attempt = 0
        self.node = 0

    def say(
        self,
        kind: str,
        text: str,
        *,
        level: Level = "info",
        rank: int | None = None,
        step: int | None = None,
        facts: dict[str, object] | None = None,
    ) -> None:
        """Make an event of this process."""
        self.append(
            Event(
                wall=self._clock.wall(), mono=self._clock.mono(), source=self._source, kind=kind,
                text=text, level=level, job=self._job, attempt=self.attempt, rank=rank,
                node=self.node, step=step, facts=facts or {},
            )
        )  # fmt: skip

    def append(self, event: Event) -> None:
        """Write an event, whoever made it, and pass it on. Texts may be those of a user's error, of
        a store's address or of a person: secrets go out of them here, before anybody sees it."""
        event = _redacted(event)
        if self._fd is not None:
            self._write(self._fd, encode_line(event))
        self._listen(event)

    @property
    def kept(self) -> bool:
        """Whether there is a file."""
        return self._fd is not None

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a script may have closed all that it found open
                os.close(self._fd)
            self._fd = None

    def _write(self, fd: int, line: bytes) -> None:
        try:
            os.write(fd, line)  # one write: lines of several processes do not mix
        except OSError as error:
            if not self._failed:
                _tell(f"everstep: events are not written any more: {error}")
            self._failed = True
        else:
            self._failed = False


def _redacted(event: Event) -> Event:
    text, facts = redact(event.text), redacted_facts(event.facts)
    if text == event.text and facts is event.facts:
        return event
    return msgspec.structs.replace(event, text=text, facts=facts)


def _open(path: str) -> int | None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        _tell(f"everstep: events are not written to {path}: {error}")
        return None


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # a keeper's stderr is a file, on a disk that may be as full
        os.write(2, f"{text}\n".encode())
