"""The agent itself dies, with SIGKILL, while it acts on a failure; another one follows (F3, F6)."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from forked import Agent, Start, hosts_store, rendezvous, wait_for

from everstep.core import exits, points
from everstep.faults.fold import History, fold
from everstep.faults.history import DecisionRecord, IncidentRecord, unpack
from everstep.store import Job, open_store

# Workers forked from an agent that has imported torch's compiler with its first optimizer.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

FORKED = ("--run-path", "--start-method", "fork", "--job", "toy", "--snapshot-every", "1")
KILLED_ONCE = """
import os, signal, time, torch, everstep
torch.manual_seed(1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=12):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 2)).square().sum()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    if step in (2, 8):
        run.checkpoint(wait=True)
    if step == 4 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 10 and not os.path.exists("go"):
        time.sleep(0.01)
print("end", [p.detach().numpy().tobytes().hex() for p in model.parameters()])
"""

AFTER_THE_DECISION, BEFORE_THE_RECORD = "agent.decision.after_write", "store.history.before_create"
MOMENTS = [
    pytest.param("agent.claim.after_write", 1, [1, 3], id="claimed", marks=pytest.mark.soak),
    pytest.param(AFTER_THE_DECISION, 0, [1, 2], id="decided-to-start", marks=pytest.mark.soak),
    pytest.param("agent.claim.after_write", 0, [2, 3], id="claimed-first", marks=pytest.mark.soak),
    pytest.param(BEFORE_THE_RECORD, 0, [1, 2], id="before-any-record", marks=pytest.mark.soak),
    pytest.param(BEFORE_THE_RECORD, 1, [1, 2], id="before-the-incident", marks=pytest.mark.soak),
    pytest.param(BEFORE_THE_RECORD, 2, [1, 2], id="before-the-decision", marks=pytest.mark.soak),
    pytest.param("agent.late.after_write", 0, [1, 2, 3], id="closed", marks=pytest.mark.soak),
    pytest.param("agent.result.before_write", 0, [1, 2, 3], id="proved", marks=pytest.mark.soak),
    pytest.param("agent.workers.before_start", 1, [1, 2, 3], id="begun", marks=pytest.mark.soak),
]
"""Where the first agent dies, at which pass, and the attempts that agents have begun in the end."""


@pytest.fixture
def start_dying(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start_dying(point, passes, *arguments, ...)``: an agent that dies there."""

    def begin(point: str, passes: int, *arguments: str, **more: str) -> Agent:
        fault = points.Fault(point, "kill", after=passes)
        plan = points._load(msgspec.json.encode([fault]).decode())
        with monkeypatch.context() as patched:
            patched.setattr(points, "_plan", plan)
            return start(*arguments, **more)

    return begin


def job_in(folder: Path, name: str = "toy") -> Job:
    return open_store(str(folder / "everstep-store")).job(name)


def history_of(job: Job) -> History:
    found = unpack(job.history().entries)
    assert not found.problems
    return fold(found.records, highest_claim=job.highest_claim())


@pytest.mark.parametrize(("point", "passes", "begun"), MOMENTS)
def test_what_an_agent_has_recorded_is_carried_on_by_the_next(
    start: Start, start_dying: Start, tmp_path: Path, point: str, passes: int, begun: Sequence[int]
) -> None:
    dead = start_dying(point, passes, *FORKED, script=KILLED_ONCE)
    assert dead.wait() == -signal.SIGKILL, dead.said()
    assert_carried_on(start, tmp_path, begun)


def assert_carried_on(start: Start, tmp_path: Path, begun: Sequence[int]) -> None:
    """F3, R4: no attempt is lost or made twice, no budget is refilled, and the end is the same to
    the bit."""
    (tmp_path / "go").touch()
    agent = start(*FORKED, script=KILLED_ONCE)
    assert agent.wait() == exits.FINISHED, agent.said()

    assert [e.attempt for e in agent.events("attempt.started")] == list(begun), agent.said()
    job = job_in(tmp_path)
    history = history_of(job)
    last = job.highest_claim()
    assert [life.attempt for life in history.lives] == list(range(1, last + 1))
    charged = [len(life.incidents) for life in history.lives]
    assert charged == [1] * (last - 1) + [0], "each failure is charged once, the success never"
    assert len(history.restarts) == last - 1, "the window counts every one of them"
    made = [d for d in history.decisions() if d.begins and d.incident.startswith("1-")]
    assert all(d.budget == made[0].budget for d in made), "what is carried on costs what it did"
    assert history.lives[-1].ended is not None
    assert end_of(agent) == alone(), "bit for bit (R4)"


def end_of(agent: Agent) -> str:
    return next(line for line in agent.printed() if line.startswith("end "))


def alone() -> str:
    """The same training without everstep."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return f"end {[p.detach().numpy().tobytes().hex() for p in model.parameters()]}"


def test_a_decision_is_in_the_store_before_anything_of_it_is_done(
    start: Start, start_dying: Start, tmp_path: Path
) -> None:
    """F6: neither a claim nor a worker of the next attempt is there when the record is; and who
    comes after goes on from the record."""
    dead = start_dying(AFTER_THE_DECISION, 1, *FORKED, script=KILLED_ONCE)
    assert dead.wait() == -signal.SIGKILL, dead.said()
    job = job_in(tmp_path)
    records = unpack(job.history().entries).records
    (incident,) = [r for r in records if isinstance(r, IncidentRecord)]
    decided = [r for r in records if isinstance(r, DecisionRecord)][-1]
    assert (decided.incident, decided.begins) == (incident.id, 2)
    assert job.highest_claim() == 1
    assert [e.attempt for e in dead.events("workers.started")] == [1]
    assert not dead.events("decision.made")[1:], "nor is it told before"
    assert_carried_on(start, tmp_path, [1, 2])


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.soak)])
def test_a_leader_that_dies_before_it_announces_has_decided_for_the_next(
    start: Start, start_dying: Start, tmp_path: Path, backend: str
) -> None:
    """F6: the others wait for one in its place, which finds what was decided and carries it out."""
    script = """
import os, signal, time
if os.environ["RANK"] == "1" and not os.path.exists("killed"):
    open("killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    flags = rendezvous(backend, (1, 1))
    dead = start_dying("agent.decision.before_announce", 0, *flags[0], script=script)
    dead.until(lambda: hosts_store(dead, flags[0]))  # so that it is the one that leads
    follower = start(*flags[1], script=script)
    assert dead.wait() == -signal.SIGKILL, dead.said()
    wait_for(lambda: "Waiting for it to come back" in follower.said(), follower.said)
    job = job_in(tmp_path, "two")
    decided = history_of(job).decisions()[-1]
    assert (decided.begins, job.highest_claim()) == (2, 1)
    (tmp_path / "go").touch()
    new = start(*flags[0], script=script)
    assert [new.wait(), follower.wait()] == [exits.FINISHED] * 2, new.said() + follower.said()
    history = history_of(job)
    assert [len(life.incidents) for life in history.lives] == [1, 0]
    assert len(history.restarts) == 1
    assert {e.attempt for e in new.events("attempt.started")} == {1, 2}
