"""Progress as real workers make it."""

from __future__ import annotations

import torch
from forked import Start

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


def test_a_script_that_always_fails_at_the_same_step_is_started_three_times(start: Start) -> None:
    """Although the second attempt restores what the first had saved."""
    agent = start(*FORKED, script=FAILS_AT_THE_SAME_STEP)
    assert agent.wait() == exits.NO_PROGRESS, agent.said()
    assert len(agent.events("attempt.started")) == 3
    assert [e.facts["source"] for e in agent.events("restore.elected")][1:] == ["memory"] * 2
    assert "3 attempts in a row got no further, not beyond step 9 (EVS-502)" in agent.said()
