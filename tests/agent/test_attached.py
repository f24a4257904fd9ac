"""The agent with scripts that attach: what it learns through the keeper decides what it does."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from forked import Start, alive, rendezvous, wait_for

from everstep.core import exits

# Workers forked from an agent that has imported torch already: seconds saved at every start.
# torch imports its compiler with the first optimizer that is made.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
FORKED = ("--run-path", "--start-method", "fork")
SCRIPT = """
import os, signal, time
import torch
import everstep
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=UNTIL):
    print("step", step, os.environ["EVERSTEP_ATTEMPT"], os.getpid(), flush=True)
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    time.sleep(0.01)
    BODY
"""


def steps(lines: list[str], attempt: int) -> list[int]:
    """Steps that the attempt computed, in order."""
    words = [line.split() for line in lines]
    return [int(step) for _, step, number, _ in words if int(number) == attempt]


def test_a_killed_worker_goes_on_from_memory_and_that_is_progress(start: Start) -> None:
    body = """
    if step == 10 * int(os.environ["EVERSTEP_ATTEMPT"]) and step <= 20:
        os.kill(os.getpid(), signal.SIGKILL)"""
    script = SCRIPT.replace("UNTIL", "25").replace("BODY", body)
    agent = start(*FORKED, "--snapshot-every", "2", script=script)
    assert agent.wait() == exits.FINISHED, agent.said()
    assert [e.attempt for e in agent.events("attempt.started")] == [1, 2, 3]
    elected = agent.events("restore.elected")
    assert {event.facts["source"] for event in elected[1:]} == {"memory"}
    for attempt in (2, 3):
        again = steps(agent.printed(), attempt)[0]
        assert 10 * (attempt - 1) - 8 <= again <= 10 * (attempt - 1)
    decided = [e.facts["budget"] for e in agent.events("decision.made")]
    assert [left["no_progress"] for left in decided] == [3, 3, 3]
    assert steps(agent.printed(), 3)[-1] == 24


def test_sigterm_preempts_after_a_cut_and_the_job_goes_on_at_the_very_next_step(
    start: Start,
) -> None:
    script = SCRIPT.replace("UNTIL", "1000000").replace("BODY", "")
    agent = start(*FORKED, script=script)
    agent.until(lambda: len(agent.printed()) >= 5)
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    last = steps(agent.printed(), 1)[-1]
    again = start(*FORKED, script=script)
    again.until(lambda: again.printed())
    assert steps(again.printed(), 2)[0] == last + 1
    again.until(lambda: any(e.attempt == 2 for e in again.events("snapshot.complete")))
    # A keeper that is lost now is replaced, and can stop the job as the old one could.
    os.kill(int(str(again.events("keeper.started")[-1].facts["pid"])), signal.SIGKILL)
    again.until(lambda: len(again.events("keeper.started")) >= 3)
    new = again.events("keeper.started")[-1].mono
    again.until(lambda: any(e.mono > new for e in again.events("snapshot.complete")))
    again.kill(signal.SIGTERM)
    assert again.wait() == exits.PREEMPTED, again.said()
    reached = steps(again.printed(), 2)[-1] + 1
    assert [e.step for e in again.events("checkpoint.committed")][-1] == reached


@pytest.mark.parametrize("fate", [signal.SIGKILL, None], ids=["replaced", "roused"])
def test_a_stop_is_heard_by_the_keeper_that_comes_after_one_that_stood_still(
    start: Start, fate: signal.Signals | None
) -> None:
    """Nothing is lost, and the grace period is not waited out."""
    script = SCRIPT.replace("UNTIL", "1000000").replace("BODY", "")
    agent = start(*FORKED, "--snapshot-every", "1000000", script=script)
    agent.until(lambda: len(agent.printed()) >= 5)
    keeper = int(str(agent.events("keeper.started")[-1].facts["pid"]))
    os.kill(keeper, signal.SIGSTOP)
    agent.kill(signal.SIGTERM)
    agent.until(lambda: agent.events("signal.received"))
    if fate is not None:
        os.kill(keeper, fate)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    assert agent.events("job.stopped")[-1].mono - agent.events("signal.received")[-1].mono < 20
    last = steps(agent.printed(), 1)[-1]
    again = start(*FORKED, script=script)
    again.until(lambda: again.printed())
    assert steps(again.printed(), 2)[0] == last + 1


def test_nodes_of_different_sizes_go_on_from_memory(start: Start) -> None:
    """The agent says which ranks stand where; torchrun's variables do not."""
    body = """
    if step == 60 and os.environ["RANK"] == "2" and os.environ["EVERSTEP_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)"""
    group = "torch.distributed.init_process_group('gloo')\nrun = everstep.attach"
    script = SCRIPT.replace("UNTIL", "70").replace("BODY", "torch.distributed.barrier()" + body)
    script = script.replace("run = everstep.attach", group)
    agents = [
        start(*FORKED, "--snapshot-every", "2", *flags, script=script)
        for flags in rendezvous("static", workers=(2, 1))
    ]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].said() + agents[1].said()
    elected = agents[0].events("restore.elected")
    assert [event.facts["source"] for event in elected if event.attempt == 2] == ["memory"]
    for agent, workers in zip(agents, (2, 1), strict=True):
        assert steps(agent.printed(), 2).count(69) == workers


def test_workers_end_with_their_agent_though_the_keeper_hangs(start: Start) -> None:
    script = SCRIPT.replace("UNTIL", "1000000").replace("BODY", "")
    agent = start(*FORKED, script=script)
    agent.until(lambda: len(agent.printed()) >= 2)
    worker = int(agent.printed()[0].split()[-1])
    keeper = int(str(agent.events("keeper.started")[-1].facts["pid"]))
    os.kill(keeper, signal.SIGSTOP)
    try:
        agent.kill(signal.SIGKILL)
        wait_for(lambda: not alive(worker), agent.said)
    finally:
        os.kill(keeper, signal.SIGCONT)
