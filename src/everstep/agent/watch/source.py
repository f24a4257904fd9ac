"""What a source of signals is.

Owns: the contract that :class:`~everstep.agent.watch.node.NodeWatch` asks sources by. Never does:
threads, judge. Called by: every source. A new one is a file in this folder with a class of this
kind, and its line in :mod:`everstep.agent.watch.registry`.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterable

from everstep.faults.records import Signal


class Blind(Exception):
    """A source cannot be read: it is not there, not for this user, or went away. ``reason`` is a
    clause for people. It is asked again at its next turn."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Source(ABC):
    """Something on this node that gives signals.

    ``name`` is unique on the node; ``every`` is the time between two looks, in seconds. All methods
    are called from one thread that is the source's own, so :meth:`look` may hang: that holds up
    nobody, and becomes a signal by itself (F5). Node, ``mono`` and ``wall`` of a signal are filled
    in where the source leaves them out.
    """

    name: str
    every: float

    @abstractmethod
    def look(self) -> Iterable[Signal]:
        """What is new since the last look. Raises :class:`Blind`, and an OSError counts as one;
        what was given before that is kept."""

    def standing(self) -> Iterable[Signal]:
        """What still holds from earlier looks; asked for, after a look, where evidence of an
        incident is gathered."""
        return ()

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Give back what is held. Nothing is asked afterwards."""


class Standing:
    """Conditions that last, each under a key: told when they begin and when they change."""

    def __init__(self) -> None:
        self._holds: dict[str, str] = {}

    def changed(self, now: dict[str, str]) -> list[str]:
        """The texts of conditions that began or became another one; ``now`` gives the text of each
        that holds."""
        new = [text for key, text in now.items() if self._kind(key) != _without_figures(text)]
        self._holds = dict(now)
        return new

    def over(self, now: dict[str, str]) -> list[str]:
        """The keys of those that ended. Ask before :meth:`changed`."""
        return [key for key in self._holds if key not in now]

    @property
    def texts(self) -> tuple[str, ...]:
        """Those that hold."""
        return tuple(self._holds.values())

    def _kind(self, key: str) -> str | None:
        held = self._holds.get(key)
        return None if held is None else _without_figures(held)


def reason_of(error: OSError, path: object = "") -> str:
    """An error of the system in words that no signature of a failure takes for one, so without its
    name: that something cannot be looked at is no fault of the job."""
    at = f"{path or error.filename or ''}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not read {at or 'it'}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV):
        return f"{at or 'it'} is not there"
    return f"{at or 'it'} cannot be read (number {error.errno} of errno)"


def _without_figures(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit())
