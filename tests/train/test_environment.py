"""R4: what decides the bits besides the state is kept, and a restore tells where it changed."""

from __future__ import annotations

import torch
from train_jobs import Jobs

import everstep
from everstep.train.environment import changes, observe


def train(threads: int, until: int) -> None:
    torch.set_num_threads(threads)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = everstep.attach(model=model, optimizer=optimizer)
    for _ in run.steps(until=until):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_nothing_is_said_where_nothing_changed() -> None:
    assert changes(observe(2), observe(2)) == []


def test_each_change_is_named_with_both_values() -> None:
    before = {**observe(1), "torch": "1.0"}
    assert changes(before, observe(1)) == [f"torch was 1.0 and is {torch.__version__}"]


def test_r4_a_restore_warns_of_other_threads(jobs: Jobs) -> None:
    said = []
    for threads, until in ((1, 2), (1, 4), (2, 6)):
        run = jobs.start(train, threads=threads, until=until)
        assert run.wait() == 0, run.said()
        said.append("threads was 1 and is 2" in run.said())
    assert said == [False, False, True]
    assert [event.step for event in jobs.events("train.environment_changed")] == [4]
