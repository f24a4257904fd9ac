"""What the script's Options say under an agent, which has begun before the script ran."""

from __future__ import annotations

import pytest
import torch
from forked import Start

from everstep.core import exits
from everstep.core.settings import variable

torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
FORKED = ("--run-path", "--start-method", "fork")

SCRIPT = """
import everstep, os, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.attach(everstep.Options({options}), model=model, optimizer=optimizer)
for step in run.steps(until=13):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep({pause})
"""


def script(options: str, pause: float = 0.0) -> str:
    """``pause``: seconds in each step, where a cut has to be published before it is reached."""
    return SCRIPT.replace("{options}", options).replace("{pause}", str(pause))


def test_the_scripts_cadence_is_the_jobs(start: Start) -> None:
    agent = start(*FORKED, script=script("snapshot_every=4", pause=0.05))
    assert agent.wait() == exits.FINISHED, agent.said()
    steps = [event.step for event in agent.events("snapshot.complete")]
    assert 13 in steps, "the last step's, which is always cut"
    assert {4, 8, 12} & set(steps)
    assert set(steps) <= {4, 8, 12, 13}, steps


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_flag_goes_before_the_script_even_with_the_default(start: Start, by: str) -> None:
    flags = ("--snapshot-every", "5") if by == "flag" else ()
    variables = {} if flags else {variable("snapshot_every"): "5"}
    source = script("snapshot_every=4, keep_last=9") + (
        "print('kept', os.environ.get('EVERSTEP_KEEP_LAST'), flush=True)"
    )
    agent = start(*FORKED, *flags, "--keep-last", "3", script=source, **variables)
    assert agent.wait() == exits.FINISHED, agent.said()
    steps = {event.step for event in agent.events("snapshot.complete")}
    assert steps <= {5, 10, 13}, steps
    assert agent.printed() == ["kept 3"]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("store='else where'", "--store 'else where'"),
        ("job='mine'", "--job mine"),
        ("store='s', job='j'", "--store s --job j"),
    ],
)
def test_a_store_or_job_that_the_agent_was_not_told_is_refused_with_the_flags(
    start: Start, options: str, flags: str
) -> None:
    agent = start("--nproc-per-node", "2", *FORKED, script=script(options))
    assert agent.wait() == exits.REFUSED, agent.said()
    # torch may log what a forked worker raised before it is stopped.
    ours = [line for line in agent.said().splitlines() if "torch/distributed" not in line]
    assert "\n".join(ours).count(f"`everstep run {flags} ...`") == 1, agent.said()
    assert len(agent.events("attempt.started")) == 1


def test_the_same_store_and_job_are_fine(start: Start) -> None:
    agent = start(*FORKED, "--job", "mine", script=script("store='./everstep-store', job='mine'"))
    assert agent.wait() == exits.FINISHED, agent.said()
    assert "warning" not in agent.said()


def test_what_the_agent_was_told_goes_before_the_script_and_that_is_said(start: Start) -> None:
    line = ("--store", "told", "--job", "told")
    agent = start(*FORKED, *line, script=script("store='theirs', job='theirs'"))
    assert agent.wait() == exits.FINISHED, agent.said()
    (said,) = agent.events("train.warning")
    assert said.text.startswith("the script's Options(store='theirs' and job='theirs') are without")


def test_a_model_without_its_optimizer_is_warned_of_once(start: Start) -> None:
    source = """
import everstep, torch
run = everstep.attach(model=torch.nn.Linear(2, 2))
for step in run.steps(until=2):
    pass
"""
    agent = start("--nproc-per-node", "2", *FORKED, script=source)
    assert agent.wait() == exits.FINISHED, agent.said()
    assert len(agent.events("train.warning")) == 1
    assert agent.said().count("no optimizer is attached, though model has parameters") == 1
