"""What an agent does about a keeper that does not come back, and about one that does not move."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from forked import Start

from everstep.agent.keeper import NodeKeeper, hold_index
from everstep.agent.record import Recorder
from everstep.agent.tend import TELL_SECONDS, Tending
from everstep.core.settings import Settings
from everstep.errors import KeeperError
from everstep.keeper import pulse
from everstep.keeper.pulse import END_SECONDS, LOOK_SECONDS, ROUSE_SECONDS

SCRIPT = """
import time
import torch
import everstep
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=1000000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    print(step)
    time.sleep(0.01)
"""


class Keepers(SimpleNamespace):
    """A keeper; ``comes`` says whether another can be started, ``done`` what was done to it."""

    attached, comes, dead, pid, log, tries = False, False, False, 1, "/var/log/keeper-0.log", 0

    def pump(self) -> None:
        if self.attached and self.dead:
            raise KeeperError("it is gone.")

    def lost(self) -> None:
        self.attached = self.dead = False

    def recover(self) -> bool:
        self.tries += 1
        self.attached = self.comes
        return self.comes

    def signs(self) -> Any:
        return self.sign

    def rouse(self) -> None:
        self.done.append("roused")

    def end(self) -> None:
        self.done.append("ended")


def tending(keeper: Keepers) -> tuple[Tending, io.StringIO]:
    said = io.StringIO()
    return Tending(cast(NodeKeeper, keeper), Recorder("job", stream=said)), said


def test_that_no_keeper_can_be_started_is_said_once() -> None:
    keeper = Keepers(sign=0, done=[])
    one, said = tending(keeper)
    keeper.attached, keeper.dead = True, True
    for turn in range(4):
        one.look(turn * TELL_SECONDS)
    assert keeper.tries == 4
    assert said.getvalue().count("no keeper could be started") == 1
    assert keeper.log in said.getvalue()
    keeper.comes = True
    one.look(4 * TELL_SECONDS)
    keeper.dead, keeper.comes = True, False
    one.look(5 * TELL_SECONDS)
    assert said.getvalue().count("no keeper could be started") == 1, "it may be coming up"
    one.look(6 * TELL_SECONDS)
    assert said.getvalue().count("no keeper could be started") == 2, "another one was lost"


def looks(one: Tending, start: float, seconds: float) -> float:
    now = start
    while now < start + seconds:
        one.look(now)
        assert now < one.due <= now + LOOK_SECONDS
        now = one.due
    return now


def test_a_keeper_that_does_not_move_is_roused_once_and_then_ended() -> None:
    keeper = Keepers(sign=0, done=[], attached=True)
    one, said = tending(keeper)
    now = looks(one, 0.0, ROUSE_SECONDS - 1)
    assert keeper.done == []
    now = looks(one, now, END_SECONDS - ROUSE_SECONDS - 1)
    assert keeper.done == ["roused"]
    looks(one, now, 3)
    assert keeper.done == ["roused", "ended"]
    assert said.getvalue().count("has not moved") == 2


def test_a_keeper_that_moves_is_left_alone_and_one_that_stops_again_is_roused_again() -> None:
    keeper = Keepers(sign=0, done=[], attached=True)
    one, _ = tending(keeper)
    now = 0.0
    for turn in range(100):
        keeper.sign = turn
        now = looks(one, now, 1)
    assert keeper.done == []
    for sign in (1, 2):
        keeper.sign = sign
        now = looks(one, now, ROUSE_SECONDS + 3)
    assert keeper.done == ["roused", "roused"]


def test_time_in_which_the_agent_itself_stood_still_is_not_the_keepers() -> None:
    keeper = Keepers(sign=0, done=[], attached=True)
    one, _ = tending(keeper)
    for now in (0.0, 1.0, 3600.0, 3601.0, 7200.0):
        one.look(now)
    assert keeper.done == []


@pytest.mark.parametrize("remedy", ["roused", "replaced"])
def test_a_stopped_keeper_saves_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, remedy: str
) -> None:
    """Agents are forked from this process, with what is patched here."""
    monkeypatch.setattr(pulse, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(pulse, "ROUSE_SECONDS", 1.0 if remedy == "roused" else 1e9)
    monkeypatch.setattr(pulse, "END_SECONDS", 1e9 if remedy == "roused" else 1.0)
    agent = start("--run-path", "--start-method", "fork", "--snapshot-every", "2", script=SCRIPT)
    agent.until(lambda: agent.events("snapshot.complete"))
    keeper = int(str(agent.events("keeper.started")[-1].facts["pid"]))
    os.kill(keeper, signal.SIGSTOP)
    agent.until(lambda: agent.events("keeper.silent"))
    silent = agent.events("keeper.silent")[-1].mono
    agent.until(lambda: any(e.mono > silent for e in agent.events("snapshot.complete")))
    assert len(agent.events("keeper.started")) == (1 if remedy == "roused" else 2)
    assert len(agent.events("attempt.started")) == 1, "training never noticed"


def test_forked_child_does_not_keep_its_agents_number(tmp_path: Path) -> None:
    settings = Settings(store=str(tmp_path), job="job")
    lock = hold_index(settings, 0)
    assert lock is not None
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"!")
        signal.pause()
        os._exit(0)
    os.read(begun, 1)
    lock.close()
    again = hold_index(settings, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for fd in (begun, begins):
        os.close(fd)
    assert again is not None
    again.close()
