"""A rank that stands still is found and the job goes on without a human; what takes long by right
is let alone. Real workers, real stacks."""

from __future__ import annotations

import signal

import pytest
import torch
from forked import Agent, Start, rendezvous

from everstep.core import exits

# Workers forked from an agent that has imported torch already: seconds saved at every start.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
FORKED = ("--run-path", "--start-method", "fork", "--snapshot-every", "5")
SCRIPT = """
import os, signal, threading, time
import torch
import everstep
torch.manual_seed(0)
torch.set_num_threads(1)
step = 0
rank, attempt = int(os.environ["RANK"]), int(os.environ["EVERSTEP_ATTEMPT"])
torch.distributed.init_process_group("gloo")
class Model(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        if rank == 1 and attempt == 1 and "save" == "WHERE" and step >= 30:
            stuck_in_a_save()
        return super().state_dict(*args, **kwargs)
def stuck_in_a_save():
    threading.Event().wait()
def next_batch(step):
    if rank == 1 and attempt == 1 and step == 30 and "loader" == "WHERE":
        threading.Event().wait()
    return torch.ones(2, 4)
def evaluate(seconds):
    until, done = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        done += 1
        model(torch.ones(2, 4))
        time.sleep(0.01)
model = Model(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=40):
    loss = model(next_batch(step)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        if not (rank == 1 and attempt == 1 and step == 30 and "collective" == "WHERE"):
            torch.distributed.all_reduce(p.grad)
        else:
            torch.distributed.barrier()
            threading.Event().wait()
    optimizer.step()
    BODY
    time.sleep(0.01)
"""


def script(where: str = "", body: str = "pass") -> str:
    return SCRIPT.replace("WHERE", where).replace("BODY", body)


def found(agent: Agent) -> dict[str, object]:
    (event,) = agent.events("hang.found")
    return event.facts | {"step": event.step, "text": event.text}


def test_a_rank_that_waits_for_data_for_ever_is_found_and_the_job_goes_on(start: Start) -> None:
    agent = start(*FORKED, "--nproc-per-node", "2", "--hang-floor", "2", script=script("loader"))
    assert agent.wait() == exits.FINISHED, agent.said()
    hang = found(agent)
    assert hang["culprits"] == [1], agent.said()
    assert hang["step"] == 30
    assert "next_batch" in str(hang["text"])
    assert 2.0 <= float(str(hang["age"])) <= 5.0
    ended = agent.events("attempt.ended")[0]
    assert ended.facts["action"] == "restart"
    assert "HANG_APP on rank 1 at step 31 (stands at" in str(ended.facts["reason"])
    assert "next_batch" in str(ended.facts["reason"])
    (evidence,) = agent.events("hang.evidence")
    assert evidence.facts["stacks"] == [0, 0, 1, 1], "two of every rank"
    assert float(str(evidence.facts["seconds"])) <= 3.0
    assert evidence.facts["flight"], "torch's recorder says that rank 1 did not come"
    assert not agent.events("job.preempting"), "survivors are killed, never asked to cut"
    assert not list((agent.out.parent).rglob("*.stacks"))


@pytest.mark.soak
def test_an_evaluation_that_nobody_declared_is_let_alone_where_it_moves(start: Start) -> None:
    """On one rank alone, while the other stands still in a collective and waits for it."""
    body = "(rank == 0 and step == 25) and evaluate(3.0)"
    agent = start(*FORKED, "--nproc-per-node", "2", "--hang-floor", "2", script=script("", body))
    assert agent.wait() == exits.FINISHED, agent.said()
    assert not agent.events("hang.found")
    (moving,) = agent.events("hang.moving")
    assert moving.step == 25
    assert "run.long_phase" in moving.text
    assert len(agent.events("attempt.started")) == 1


@pytest.mark.soak
@pytest.mark.parametrize("where", ["collective", "save"])
def test_a_rank_that_is_stuck_elsewhere_is_found(start: Start, where: str) -> None:
    agent = start(*FORKED, "--nproc-per-node", "2", "--hang-floor", "2", script=script(where))
    assert agent.wait() == exits.FINISHED, agent.said()
    hang = found(agent)
    assert 1 in hang["culprits"], agent.said()  # type: ignore[operator]  # a list
    assert len(agent.events("attempt.started")) == 2


@pytest.mark.soak
def test_declared_phases_are_let_alone_and_their_limit_is_kept(start: Start) -> None:
    body = """
    if step == 25 and rank == 0:
        with run.long_phase("evaluation"):
            time.sleep(6.0)
    if step == 30 and rank == 0 and attempt == 1:
        with run.long_phase("export", limit=3.0):
            threading.Event().wait()"""
    agent = start(*FORKED, "--nproc-per-node", "2", "--hang-floor", "2", script=script("", body))
    assert agent.wait() == exits.FINISHED, agent.said()
    hang = found(agent)
    assert hang["step"] == 30
    assert 0 in hang["culprits"]  # type: ignore[operator]  # a list


@pytest.mark.soak
def test_a_stop_while_a_hang_is_suspected_is_a_stop(start: Start) -> None:
    """The rank that hangs cannot reach a boundary: the grace period ends it, and nothing counts as
    a hang."""
    agent = start(
        *FORKED, "--nproc-per-node", "2", "--hang-floor", "8", "--grace", "3",
        script=script("loader"),
    )  # fmt: skip
    agent.until(lambda: agent.events("hang.suspected"))
    agent.kill(signal.SIGTERM)
    assert agent.wait() == exits.PREEMPTED, agent.said()
    assert not agent.events("hang.found")
    again = start(*FORKED, "--nproc-per-node", "2", script=script())
    assert again.wait() == exits.FINISHED, again.said()


@pytest.mark.soak
@pytest.mark.parametrize("hung", [0, 1])
def test_a_rank_of_another_node_is_found_and_both_nodes_keep_their_stacks(
    start: Start, hung: int
) -> None:
    """Node 0's rank waits in a collective meanwhile, rightly; an evaluation of the other is let
    alone, declared or not."""
    body = f"""
    if step == 22 and rank == {hung}:
        with run.long_phase("evaluation"):
            time.sleep(5.0)
    if step == 26 and rank == {1 - hung}:
        evaluate(5.0)"""
    text = (
        script("loader", body)
        .replace("rank == 1", f"rank == {hung}")
        .replace("step == 30", "step == 130")
        .replace("until=40", "until=140")
    )
    agents = [
        start(*FORKED, "--hang-floor", "2", *flags, script=text)
        for flags in rendezvous("static", workers=(1, 1))
    ]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].said() + agents[1].said()
    ends = agents[0].events("hang.found")
    assert {event.step for event in ends} == {130}
    assert len([e for e in agents[0].events("attempt.started") if e.attempt == 2]) == 2
    assert not [e for e in agents[0].events("attempt.started") if e.attempt == 3]
    seen = {event.node: event.facts["stacks"] for event in agents[0].events("hang.evidence")}
    assert seen == {0: [0, 0], 1: [1, 1]}
