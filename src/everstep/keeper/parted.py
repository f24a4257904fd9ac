"""Workers whose connections have ended: which of their processes have ended as well.

Owns: the list, and looking at /proc. Never does: decide what a death means. Called by: attempt.

A connection ends a moment before its process does, and a process that lives may connect again.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.clock import Clock
from everstep.keeper.connection import Connection
from everstep.keeper.identity import Process, may_run

LOOK_SECONDS = 0.1
FORGET_SECONDS = 60.0
"""After which the ranks that might have waited for a worker have given up by themselves."""


@dataclass(frozen=True)
class PartedWorker:
    """``launch`` is the start of the workers that it belonged to."""

    launch: str
    rank: int
    process: Process
    at: float


class Parted:
    """Workers that parted, until :meth:`ended` has told of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[tuple[str, int], PartedWorker] = {}

    def add(self, connection: Connection) -> None:
        """The connection has ended; nothing else than a worker's is kept."""
        hello = connection.hello
        if hello is not None and hello.role == "worker":
            self._workers[hello.launch, hello.rank] = PartedWorker(
                hello.launch, hello.rank, connection.process, self._clock.mono()
            )

    def back(self, connection: Connection) -> None:
        """The rank is there again, in whichever process."""
        if connection.hello is not None:
            self._workers.pop((connection.hello.launch, connection.hello.rank), None)

    def ended(self, launch: str) -> list[PartedWorker]:
        """The workers of that launch whose processes have ended, each of them once."""
        now = self._clock.mono()
        for key, worker in list(self._workers.items()):
            if now - worker.at > FORGET_SECONDS:
                del self._workers[key]
        found = [
            worker
            for worker in self._workers.values()
            if worker.launch == launch and not may_run(worker.process)
        ]
        for worker in found:
            del self._workers[worker.launch, worker.rank]
        return found

    def wait(self) -> float:
        """Seconds until the next look is due."""
        return LOOK_SECONDS if self._workers else 3600.0
