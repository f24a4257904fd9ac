"""What the agent says of a job before and after: new, going on, finished, or not readable."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from forked import Start

from everstep.core import exits

TRAINS = """
import everstep, torch
model = torch.nn.Linear(2, 2)
run = everstep.attach(model=model)
for step in run.steps(until=4):
    pass
"""


def test_a_new_job_and_a_finished_one_are_named_as_such(start: Start) -> None:
    first = start("--nproc-per-node", "2", script=TRAINS)
    assert first.wait() == exits.FINISHED, first.said()
    assert ": a new job in a new store." in first.said()
    assert "is finished" not in first.said()
    assert len(re.findall("checkpoint of step [0-9]+ is committed", first.said())) == 1
    again = start("--nproc-per-node", "2", script=TRAINS)
    assert again.wait() == exits.FINISHED, again.said()
    assert "new job" not in again.said()
    assert "It goes on from its newest state; to start afresh: --resume never" in again.said()
    assert again.said().count("has done 4 steps, `until` is 4. To continue it") == 1
    assert "to start afresh: --resume never, or another --job" in again.said()


def test_a_store_that_is_not_there_is_said_before_it_is_made(start: Start) -> None:
    """R5: what is not mounted looks like a first start."""
    agent = start("--resume", "require", script="raise SystemExit(0)")
    assert agent.wait() == exits.NO_RECOVERY_POINT, agent.said()
    assert ": a new job" not in agent.said()
    agent = start(script="raise SystemExit(0)")
    assert agent.wait() == exits.FINISHED
    assert ": a new job in a new store. Started again" in agent.said()


def test_a_store_that_cannot_be_read_is_not_called_new(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "everstep-store"
    store.mkdir()
    (store / "everstep.json").write_text("damaged")
    agent = start(script="raise SystemExit(0)")
    assert agent.wait() == exits.NO_STORE, agent.said()
    assert "EVS-206" in agent.said()
    assert "a new job" not in agent.said()
    assert "Traceback" not in agent.said()


def test_resume_never_says_so_and_an_unknown_variable_is_warned_of(start: Start) -> None:
    agent = start("--resume", "never", script="raise SystemExit(0)", EVERSTEP_KEPE_LAST="1")
    assert agent.wait() == exits.FINISHED
    assert agent.said().count("EVERSTEP_KEPE_LAST (did you mean EVERSTEP_KEEP_LAST?)") == 1
    assert "starts afresh (--resume never)" in agent.said()


WAITS = """
import everstep, torch, time
model = torch.nn.Linear(2, 2)
run = everstep.attach(model=model, optimizer=torch.optim.SGD(model.parameters()))
for step in run.steps(until=100000):
    time.sleep(0.005)
    if step == 5:
        print("up", flush=True)
"""


def test_a_preemption_is_told_once_and_is_no_warning(start: Start) -> None:
    agent = start("--nproc-per-node", "2", script=WAITS)
    agent.until(lambda: agent.out.read_text().count("up") == 2)
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    assert "warning" not in agent.said()
    assert "error" not in agent.said()
    assert agent.said().count("stopped at step") == 1, agent.said()


def test_ctrl_c_shows_nothing_of_everstep(start: Start) -> None:
    agent = start("--nproc-per-node", "2", script=WAITS)
    agent.until(lambda: agent.out.read_text().count("up") == 2)
    agent.kill(signal.SIGINT)
    assert agent.wait() == exits.SIGNALLED + signal.SIGINT, agent.said()
    assert "/everstep/" not in agent.said().replace("everstep-store", "")
    assert "Root Cause" not in agent.said()
