"""A job without an agent that another owner takes over: its workers hear it and end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from keeper_fakes import DEADLINE, Keeper, Place, Worker, closing, until

from everstep.core.clock import SystemClock
from everstep.errors import JobOwned
from everstep.keeper.identity import identity_of
from everstep.keeper.server import Options, Server
from everstep.store import open_store


class JumpingClock(SystemClock):
    """The machine's clock, and what was added to it."""

    ahead = 0.0

    def mono(self) -> float:
        return super().mono() + self.ahead


@contextmanager
def serving(place: Place, clock: JumpingClock) -> Iterator[Server]:
    """A keeper's loop in a thread of this process."""
    settings = place.settings()
    server = Server(Options(settings.store, settings.job, 0, settings.events), clock=clock)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.turn()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        thread.join(DEADLINE)
        server.close()


def take_over(place: Place) -> None:
    """What an agent does that finds the owner dead, or stale after the store was away."""
    job = open_store(place.settings().store).job(place.job)
    stranger = identity_of(os.getppid(), "stranger")
    job.acquire_owner(stranger, is_alive=lambda _: False)
    job.claim(stranger)


def _refused(worker: Worker) -> Callable[[], bool]:
    def look() -> bool:
        worker.finish_step()
        return isinstance(worker.link.refused, JobOwned)

    return look


def test_worker_hears_from_its_keeper_that_the_job_is_another_ones(place: Place) -> None:
    clock = JumpingClock()
    with serving(place, clock):
        worker = Worker(place, launch="plain")
        with closing(worker):
            worker.restore()
            worker.open()
            take_over(place)
            clock.ahead = 11.0  # the owner is renewed every 10 s
            until(_refused(worker), "the worker is told")
            assert worker.link.refused is not None
            assert "stranger" in worker.link.refused.what
            assert not worker.link.reconnect_if_needed(0.0)
            place.await_event("job.taken_over")
            with pytest.raises(JobOwned, match="stranger"):
                worker.ask()


def test_worker_whose_keeper_died_hears_it_from_the_next_one(place: Place) -> None:
    keepers = [Keeper(place)]
    worker = Worker(place, launch="plain", restart=lambda: keepers.append(Keeper(place)))
    try:
        worker.restore()
        worker.open()
        take_over(place)
        keepers[0].kill()
        until(_refused(worker), "the worker is refused")
    finally:
        worker.link.close()
        for keeper in keepers:
            keeper.kill()
