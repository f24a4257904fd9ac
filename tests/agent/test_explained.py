"""What real agents record is what the commands tell, and a person's word lets them start again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forked import Start

from everstep.cli import main
from everstep.core import exits
from everstep.faults.tell import PHASES

# Workers forked from an agent that has imported torch's compiler with its first optimizer.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

FORKED = ("--run-path", "--start-method", "fork", "--job", "toy")
FAILS_UNTIL_IT_IS_FIXED = """
import os
if not os.path.exists("fixed"):
    raise ZeroDivisionError("division by zero")
"""

KILLED_ONCE = """
import os, signal, torch, everstep
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=8):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 2:
        run.checkpoint(wait=True)
    if step == 4 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``told("status")``: the command's JSON, about the job that runs in the test's folder."""
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EVERSTEP_STORE", str(tmp_path / "everstep-store"))

    def call(*arguments: str) -> Any:
        return json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)

    return call


def test_a_job_that_was_stopped_for_good_is_explained_and_starts_after_a_word(
    start: Start, told: Any, tmp_path: Path
) -> None:
    """F3."""
    agent = start(*FORKED, script=FAILS_UNTIL_IT_IS_FIXED)
    code = agent.wait()
    assert code in (exits.REPEATED, exits.NO_PROGRESS), agent.said()
    status = told("status")["standing"]
    assert (status["state"], status["final"]) == ("stopped", True)
    assert status["next"].startswith("everstep retry --reset-budget ")
    found = told("explain")["explanation"]
    assert found["headline"][1].startswith(f"decided: stop with exit code {code}, because ")
    assert found["outcome"]["ending"] in ("stopped", "failed")
    attempts = len(agent.events("attempt.started"))
    assert len(told("incidents")["incidents"]) == attempts

    (tmp_path / "fixed").touch()
    assert told("retry", "--reset-budget", "caught it")["recorded"]
    last = start(*FORKED, script=FAILS_UNTIL_IT_IS_FIXED)
    assert last.wait() == exits.FINISHED, last.said()
    assert told("status")["standing"]["state"] == "finished"
    assert not told("incidents")["figures"]["recovered"], "a person had helped"


def test_a_worker_that_was_killed_is_recovered_from_with_times(start: Start, told: Any) -> None:
    """F7: and how it ended stands behind all that the attempt which proved it had recorded."""
    agent = start(*FORKED, script=KILLED_ONCE)
    assert agent.wait() == exits.FINISHED, agent.said()
    found = told("explain")["explanation"]
    assert found["outcome"]["ending"] == "recovered", found["outcome"]
    assert found["headline"][2].startswith("recovered: step ")
    what, decided, ended = found["headline"]
    (judged,) = agent.events("incident.judged")
    assert f"{judged.text.partition(': ')[2]}, attempt 1" == what
    assert decided in [event.text for event in agent.events("decision.made")]
    (end,) = agent.events("incident.ended")
    assert end.text == f"incident {found['incident']}: {ended}"
    said = [line.split(" ", 2)[2] for line in agent.said().splitlines() if "everstep " in line]
    assert said.count(f"warning: {judged.text}") == said.count(decided) == 1
    assert not [line for line in said if line.startswith(("attempt 1 ended", end.text))]
    (result,) = found["results"]
    assert all(result[phase] is not None for phase in PHASES), result
    assert found["outcome"]["resumed_in"] > 0
    assert result["attempt"] == 2
    assert result["sequence"] > 0
    assert told("status")["standing"]["figures"]["rate"] == 1.0
