"""Which agent a keeper obeys: the one whose attempt it serves, whoever else says hello."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from keeper_fakes import DEADLINE, Agent, Keeper, Place, Worker, closing, train

from everstep.agent.keeper import NodeKeeper
from everstep.errors import KeeperError
from everstep.keeper.wire import BeginAttempt

SPAWN = multiprocessing.get_context("spawn")


def _greet(folder: Path, ready: object) -> None:
    agent = Agent(Place(folder))
    ready.set()  # type: ignore[attr-defined]  # multiprocessing's Event
    threading.Event().wait(DEADLINE)
    agent.close()


def greet_and_die(place: Place) -> None:
    """An agent that says hello and is killed before it begins anything."""
    ready = SPAWN.Event()
    process = SPAWN.Process(target=_greet, args=(place.folder, ready), daemon=True)
    process.start()
    assert ready.wait(DEADLINE)
    process.kill()
    process.join(DEADLINE)


@contextmanager
def agent_with_worker(place: Place) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An agent's process that has begun attempt 1, and the pidfd of its worker."""
    script = Path(__file__).with_name("agent_that_dies.py")
    command = [sys.executable, str(script), str(place.folder)]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    pidfd = os.pidfd_open(int(agent.stdout.readline()))
    try:
        yield agent, pidfd
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
        if agent.stdin is not None:
            agent.stdin.close()
        if not _ended(pidfd, 0.0):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _turns(place: Place) -> None:
    """The keeper has gone through its loop: it has answered, and answered again."""
    for _ in range(3):
        Agent(place).close()


def test_agent_that_only_greeted_ends_no_workers(place: Place) -> None:
    with closing(Keeper(place)), agent_with_worker(place) as (agent, worker):
        greet_and_die(place)
        _turns(place)
        assert not _ended(worker, 0.0), "the death of a stranger has ended it"
        assert not place.events("agent.lost")
        agent.kill()
        assert _ended(worker, DEADLINE), "the worker lives on without its own agent"
        place.await_event("agent.lost")


def test_agent_that_only_greeted_ends_no_workers_of_a_plain_run(place: Place) -> None:
    with closing(Keeper(place)):
        worker = Worker(place, launch="plain")
        with closing(worker):
            worker.restore()
            worker.open()
            greet_and_die(place)
            _turns(place)
            # This process is the worker: it would be dead.
            assert not place.events("agent.lost")
            train([worker], lambda: place.events("snapshot.complete"), "a snapshot")


def _begin_second(folder: Path, answers: object) -> None:
    agent = Agent(Place(folder))
    before = len(agent.held)
    agent.begin(2, ((0,),))
    agent.pump()
    answers.send((before, len(agent.held)))  # type: ignore[attr-defined]  # multiprocessing's pipe
    agent.close()


def test_memory_goes_to_the_agent_whose_attempt_begins(place: Place) -> None:
    """Before its attempt an agent is a guest and holds nothing."""
    with closing(Keeper(place)), agent_with_worker(place):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_begin_second, args=(place.folder, theirs), daemon=True)
        process.start()
        assert ours.poll(DEADLINE)
        assert ours.recv() == (0, 1), "the control page, once its attempt is served"
        process.join(DEADLINE)


# -- the agent's own line to its keeper


def test_memory_is_handed_to_a_keeper_that_comes_between_two_attempts(place: Place) -> None:
    """The keeper died, and none could be started before the attempt had ended."""
    line = NodeKeeper(place.settings(), 0, lambda _: None, listening=False)
    keepers = [Keeper(place)]
    try:
        line.attach()
        line.begin(BeginAttempt("attempt-1", 1, 0, ((0,),), policy=place.policy))
        worker = Worker(place, attempt=1)
        worker.restore()
        worker.open()
        train([worker], lambda: place.events("snapshot.complete"), "a snapshot")
        line.pump()
        keepers[0].kill()
        worker.link.close()
        line.lost()
        keepers.append(Keeper(place))
        line.attach()
        line.begin(BeginAttempt("attempt-2", 2, 0, ((0,),), policy=place.policy))
        place.await_event("keeper.adopted")
        again = Worker(place, attempt=2)
        assert again.ask().source == "memory"
        again.link.close()
    finally:
        line.close()
        for keeper in keepers:
            keeper.kill()


def test_keeper_that_ends_at_its_start_is_named_with_its_log(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(
        "everstep.agent.keeper.start_keeper", lambda *_, **__: subprocess.Popen(command)
    )
    line = NodeKeeper(place.settings(), 0, lambda _: None, listening=False)
    line.launch()
    with pytest.raises(KeeperError, match="exit code 3") as caught:
        line.attach()
    assert line.log in str(caught.value)
    line.close()


def test_agent_that_left_while_the_keeper_was_busy_is_not_lost(place: Place) -> None:
    """Its last words and its end are seen in one turn."""
    keeper = Keeper(place)
    with closing(keeper), agent_with_worker(place) as (agent, _):
        os.kill(keeper.process.pid, signal.SIGSTOP)
        try:
            assert agent.stdin is not None
            agent.stdin.write(b"leave\n")
            agent.stdin.flush()
            assert agent.wait(DEADLINE) == 0
        finally:
            os.kill(keeper.process.pid, signal.SIGCONT)
        assert keeper.wait(10.0) == 0
        assert not place.events("agent.lost")
