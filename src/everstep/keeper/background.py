"""Work beside the keeper's loop: few threads, results brought back to the loop.

Owns: the threads and the way back. Never does: touch what the loop owns. Called by: server, node.

A lane is one thread with a queue: what is in one lane runs one after another, a lane that is
stuck in a dead file system holds up nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from everstep.errors import EverstepError

Result = TypeVar("Result")
Done = Callable[[], None]


class Background:
    """:meth:`fileno` becomes readable when results wait for :meth:`deliver`."""

    def __init__(self) -> None:
        self._lanes: dict[str, SimpleQueue[Callable[[], None]]] = {}
        self._results: SimpleQueue[Done] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.running = 0

    def fileno(self) -> int:
        return self._wake

    def submit(
        self,
        lane: str,
        work: Callable[[], Result],
        done: Callable[[Result], None],
        failed: Callable[[EverstepError], None],
    ) -> None:
        """Run ``work`` in the lane; then, on the loop, ``done`` with its result or ``failed``.

        An OSError arrives as an :class:`EverstepError`. Anything else is our own bug and is
        raised on the loop.
        """

        def run() -> None:
            self._results.put(_outcome(work, done, failed))
            self.wake()

        self.running += 1
        self._lane(lane).put(run)

    def wake(self) -> None:
        """Make the loop look, from any thread or signal handler."""
        os.eventfd_write(self._wake, 1)

    def deliver(self) -> None:
        """Hand out the results that are there; on the loop."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while True:
            try:
                done = self._results.get_nowait()
            except Empty:
                return
            self.running -= 1
            done()

    def _lane(self, name: str) -> SimpleQueue[Callable[[], None]]:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = SimpleQueue()
            # Daemons: a thread that hangs in a dead file system must not keep the process alive.
            threading.Thread(target=_serve, args=(lane,), name=name, daemon=True).start()
        return lane


def _serve(lane: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        lane.get()()


def _outcome(
    work: Callable[[], Result],
    done: Callable[[Result], None],
    failed: Callable[[EverstepError], None],
) -> Done:
    try:
        result = work()
    except EverstepError as error:
        return _bound(failed, error)
    except OSError as error:
        return _bound(failed, EverstepError(f"{type(error).__name__}: {error}."))
    except BaseException as bug:  # noqa: BLE001 - raised again where the loop sees it
        return _raising(bug)
    return _bound(done, result)


def _bound(call: Callable[[Result], None], value: Result) -> Done:
    return lambda: call(value)


def _raising(bug: BaseException) -> Done:
    def again() -> None:
        raise bug

    return again
