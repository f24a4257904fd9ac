"""A rendezvous store that hangs: nobody waits in vain, nor longer than the limit."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from everstep.agent import line as lines
from everstep.agent.line import Line, StoreSilent, patience

DEADLINE = 20.0


class Host:
    """What holds the store: it answers, or hangs until it is let go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = threading.Event()
        self.now = 0.0

    def hang(self) -> str:
        self.asked.set()
        assert self.goes_on.wait(DEADLINE)
        return "late"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(lines, "TURN_SECONDS", 0.01)
    host = Host()
    yield host
    host.goes_on.set()


def _line(host: Host, limit: float = 60.0) -> Line:
    return Line("localhost:1", limit=limit, clock=lambda: host.now)


@pytest.mark.parametrize(
    ("waiting_since", "now", "left"),
    [(None, 1000.0, 60.0), (1000.0, 1000.0, 60.0), (1000.0, 1059.0, 1.0), (1000.0, 1060.0, 0.0)],
)
def test_an_answer_is_waited_for_until_the_limit_after_the_question(
    waiting_since: float | None, now: float, left: float
) -> None:
    assert patience(waiting_since, now, 60.0) == left


def test_what_is_needed_of_a_store_that_was_silent_for_long_is_given_up_at_once(host: Host) -> None:
    line = _line(host)
    looking = line.submit(host.hang)
    assert host.asked.wait(DEADLINE)
    host.now = 600.0
    with pytest.raises(StoreSilent) as silent:
        line.ask(lambda: None)
    assert "localhost:1" in str(silent.value)
    assert "not answered for 600 s" in str(silent.value)
    assert not looking.done()
    line.close()


def test_a_store_that_answers_again_is_asked_on(host: Host) -> None:
    line, store = _line(host), HashStore()
    looking = line.submit(host.hang)
    assert host.asked.wait(DEADLINE)
    host.now = 600.0
    host.goes_on.set()
    assert looking.result(DEADLINE) == "late"
    line.keys(store).set("key", "value")
    assert line.keys(store).get("key") == b"value"
    assert line.keys(store).check(["key"])
    assert not line.keys(store).check(["other"])
    line.close()


def test_an_answer_wakes_whoever_polls(host: Host) -> None:
    line = _line(host)
    assert not select.select([line], [], [], 0)[0]
    line.submit(lambda: None)
    assert select.select([line], [], [], DEADLINE)[0]
    line.heard()
    assert not select.select([line], [], [], 0)[0]
    line.heard()
    line.close()


def test_a_dead_store_raises_what_torch_raises(host: Host) -> None:
    def broken() -> None:
        raise TimeoutError("Broken pipe")

    line = _line(host)
    with pytest.raises(TimeoutError, match="Broken pipe"):
        line.ask(broken)
    line.close()


def test_a_signal_interrupts_who_waits_for_an_answer(host: Host) -> None:
    class Signalled(Exception): ...

    def handler(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, handler)
    line = _line(host)

    def hang() -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return host.hang()

    try:
        with pytest.raises(Signalled):
            line.ask(hang)
    finally:
        signal.signal(signal.SIGUSR1, before)
        line.close()
