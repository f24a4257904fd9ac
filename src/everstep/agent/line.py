"""The agent's line to torch's rendezvous store: a thread that asks, so that the agent never hangs.

Owns: that thread, and for how long a store that does not answer is waited for. Never does: know
what is asked. Called by: rendezvous, and supervise, which asks without waiting.

The store stands in one of the agents. Where that one hangs (its host is stopped), torch's client
waits for it in C++ with no limit, and whoever asks hangs with it, deaf to signals. So only this
thread asks. While nobody waits for an answer a silent store costs nothing: healthy workers train
on. It is given up where an answer is needed, to tell a failure or to end an attempt, and has been
missing for the limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from everstep.agent.aside import answer
from everstep.errors import RendezvousLost

SILENT_SECONDS = 12.0
"""Without an answer of the store, or a sign of life of an agent, until it counts as lost."""
TURN_SECONDS = 1.0
"""Every answer is waited for this long: where this agent itself was stopped, one has come already
that its thread has yet to read. No wait is longer without a look around: a signal that the kernel
hands to another thread does not end it."""

T = TypeVar("T")
Clock = Callable[[], float]


class StoreSilent(RendezvousLost):
    """The rendezvous' store does not answer: the agent that holds it hangs, or its host does."""


class Keys(Protocol):
    """What is used of a store of torch's."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


def patience(waiting_since: float | None, now: float, limit: float) -> float:
    """Seconds for which an answer that is needed at ``now`` is still waited for; 0 or less: the
    store is given up. ``waiting_since`` is when the store was asked what it has not yet answered,
    None where it has answered everything."""
    return limit - (0.0 if waiting_since is None else now - waiting_since)


class Line:
    """Asks one thing after the other, in the order in which they were handed in.

    ``where`` names the store in errors; ``limit`` is in seconds, ``SILENT_SECONDS`` where it is
    not given. :meth:`fileno` is readable when an answer came since the last :meth:`heard`.
    """

    def __init__(
        self, where: str, *, limit: float | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._where = where
        self._limit = SILENT_SECONDS if limit is None else limit
        self._clock = clock
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="everstep-line", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._event

    def heard(self) -> None:
        """Make :meth:`fileno` wait for the next answer."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return  # none came since

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` ask the store; nothing is waited for."""
        found: Future[T] = Future()
        self._calls.put(partial(answer, call, found))
        return found

    def ask(self, call: Callable[[], T]) -> T:
        """What ``call`` gives, or raises. Raises :class:`StoreSilent` where the store has not
        answered for the limit. A handler of a signal may raise out of it."""
        if threading.current_thread() is self._thread:
            return call()
        asked = self.submit(call)
        while True:
            try:
                return asked.result(TURN_SECONDS)
            except TimeoutError:
                if asked.done():
                    return asked.result()  # it came just now, or the error is the call's own
            left = patience(self._since, self._clock(), self._limit)
            if left <= 0.0:
                raise self._silent(self._limit - left)

    def keys(self, store: Keys) -> Keys:
        """``store``, asked through this line."""
        return _Asked(self, store)

    def close(self) -> None:
        """Ask nothing more. A call that hangs is left behind."""
        self._calls.put(None)

    def _silent(self, seconds: float) -> StoreSilent:
        return StoreSilent(
            f"the rendezvous' store at {self._where}, which the leader's agent holds, has not "
            f"answered for {seconds:.0f} s.",
            hint="That agent hangs, or its host does: end it, and start it again on that node, or "
            "another one in its place; the others go on with it.",
        )

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._since = self._clock()
            call()
            self._since = None
            os.eventfd_write(self._event, 1)
        os.close(self._event)  # here, where no answer can come after it


class _Asked:
    """A store behind a line."""

    def __init__(self, line: Line, store: Keys) -> None:
        self._line = line
        self._store = store

    def check(self, keys: list[str], /) -> bool:
        return self._line.ask(lambda: bool(self._store.check(keys)))

    def get(self, key: str, /) -> bytes:
        return self._line.ask(lambda: self._store.get(key))

    def set(self, key: str, value: str, /) -> None:
        self._line.ask(lambda: self._store.set(key, value))
