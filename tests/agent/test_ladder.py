"""The ladder in the agent: a rung that leads to no new step in time is given up for the next."""

from __future__ import annotations

import signal

from forked import Start

from everstep.core import exits

SLEEPS = """
import everstep, os, signal, time, torch
attempt = int(os.environ["EVERSTEP_ATTEMPT"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(everstep.Options(snapshot_every=1), model=model, optimizer=optimizer)
for step in run.steps(until=12):
    if attempt == 2:
        time.sleep(600)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if attempt == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_that_leads_to_no_new_step_falls_to_the_next_rung(start: Start) -> None:
    flags = ("--run-path", "--start-method", "fork", "--resume-deadline", "1", "--hang-floor")
    agent = start(*flags, "off", script=SLEEPS)
    agent.until(lambda: agent.events("attempt.waits"))
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    decided = [event.facts for event in agent.events("decision.made")][1:]
    assert [facts["action"] for facts in decided] == ["restart_in_place", "wait_and_retry"]
    assert "led to no new step in time" in agent.said()
