"""Progress as real workers make it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import CliRunner
from forked import Start

from everstep.cli import main
from everstep.core import exits

# Workers forked from an agent that has imported torch's compiler with its first optimizer.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

FORKED = ("--run-path", "--start-method", "fork")
FAILS_AT_THE_SAME_STEP = """
import everstep, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(everstep.Options(snapshot_every=2), model=model, optimizer=optimizer)
for step in run.steps(until=20):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 9:
        raise RuntimeError("always at 9")
    if step == 5:
        run.checkpoint(wait=True)
"""


def test_a_deterministic_error_of_the_script_stops_after_one_confirming_retry(
    start: Start,
) -> None:
    """F4, although the second attempt restores what the first had saved."""
    agent = start(*FORKED, script=FAILS_AT_THE_SAME_STEP)
    assert agent.wait() == exits.REPEATED, agent.said()
    assert len(agent.events("attempt.started")) == 2
    assert agent.events("restore.elected")[-1].facts["source"] == "memory"
    judged = agent.events("incident.judged")[-1]
    assert (judged.facts["class"], judged.step) == ("USER_EXCEPTION", 10)
    said = agent.said()
    assert "the same failure came 2 times at step 10 (EVS-504)" in said
    assert "script.py:11" in said
    assert "always at 9" in said


def test_a_job_that_was_stopped_for_good_is_not_started_again(start: Start) -> None:
    """F3: neither a requeue nor a new agent is a way around."""
    assert start(*FORKED, script=FAILS_AT_THE_SAME_STEP).wait() == exits.REPEATED
    again = start(*FORKED, script=FAILS_AT_THE_SAME_STEP)
    assert again.wait() == exits.REPEATED, again.said()
    assert not again.events("attempt.started")[2:]
    assert "not started, because it was stopped for good before" in again.said()
    assert "--reset-budget" in again.said()


EVERY_RANK_FAILS = """
import everstep, os

class Counter:
    count = 0
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]

run = everstep.attach(everstep.Options(snapshot_every=2), counter=Counter())
for step in run.steps(until=20):
    if step == 6:
        raise KeyError(f"no column 'label' in shard {1000 + int(os.environ['RANK'])}")
"""


def test_the_same_error_on_four_ranks_is_one_incident(start: Start, tmp_path: Path) -> None:
    """F1, F4: it is common to all, so that no rank is its root; one confirming retry, and whoever
    asks is told the file, the line, the rank and the step."""
    agent = start(*FORKED, "--job", "toy", "--nproc-per-node", "4", script=EVERY_RANK_FAILS)
    assert agent.wait() == exits.REPEATED, agent.said()
    assert len(agent.events("attempt.started")) == 2
    assert "the same failure came 2 times at step 7 (EVS-504)" in agent.said()
    asked = ("--store", str(tmp_path / "everstep-store"), "--job", "toy")
    told = json.loads(CliRunner().invoke(main, ["incidents", *asked, "--json"]).stdout)
    assert len(told["incidents"]) == 2, "one of each attempt"
    found = json.loads(CliRunner().invoke(main, ["explain", *asked, "--json"]).stdout)
    (what, decided, _), verdict = found["explanation"]["headline"], found["explanation"]["verdict"]
    assert "at step 7 in " in what
    assert "script.py:12" in what
    assert decided.startswith(f"decided: stop with exit code {exits.REPEATED}, because ")
    assert (verdict["class"], verdict["root_ranks"]) == ("USER_EXCEPTION", [])
    roots = {item["rank"] for item in verdict["evidence"] if item["role"] == "root"}
    assert roots == {0, 1, 2, 3}
    said = CliRunner().invoke(main, ["explain", "--last", *asked], terminal_width=200).stdout
    assert all(f"rank {rank} on " in said for rank in roots), said
    assert "no column 'label' in shard 1003" in said
