"""Two agents of one job on one machine: deaths of workers and of whole nodes (R4, R6)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recovery_proofs import assert_nothing_lost, assert_same
from recovery_runs import Begin, Case, Reference

pytestmark = pytest.mark.timeout(1800)

ONE, TWO = Case("gpt_ddp.py", world=2), Case("gpt_ddp.py", world=2, nodes=2)
FORKED = Case("gpt_ddp.py", world=2, forked=True)


def test_a_dead_worker_costs_no_memory_and_a_dead_node_costs_the_memory_of_all(
    begin: Begin, reference: Reference
) -> None:
    """Each rank finds its extents on its own node, until a node has lost them: then the store
    has them."""
    undisturbed = reference(FORKED)
    trial = begin(replace(FORKED, nodes=2))
    trial.start()
    trial.await_training(1, steps=10)
    trial.kill_worker(rank=1)
    trial.await_training(2, steps=10, commits=1)
    trial.kill_node(1)
    trial.start_node(1)
    trial.finish()
    assert [(at, tier) for at, tier, _ in trial.elected()] == [
        (1, "fresh"), (2, "memory"), (3, "store"),
    ], trial.told("other tiers were expected")  # fmt: skip
    assert_nothing_lost(trial, memory_lost=True)
    assert_same(trial, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_workers_die_on_either_node(begin: Begin, reference: Reference, world: int) -> None:
    case = Case("gpt_ddp.py", world=world, nodes=2, steps=300)
    undisturbed = reference(Case("gpt_ddp.py", world=world, steps=300))
    trial = begin(case)
    trial.start()
    deaths = [world - 1, 0, world // 2, 0]
    for attempt, rank in enumerate(deaths, 1):
        trial.await_training(attempt, steps=8)
        trial.kill_worker(rank)
    trial.finish()
    tiers = [tier for _, tier, _ in trial.elected()]
    assert tiers == ["fresh", *["memory"] * len(deaths)], trial.told("memory was there")
    assert_nothing_lost(trial)
    assert_same(trial, undisturbed)


@pytest.mark.soak
def test_the_node_that_holds_the_rendezvous_dies(begin: Begin, reference: Reference) -> None:
    """The other one waits for an agent in its place, and the job goes on with what is stored."""
    undisturbed = reference(ONE)
    trial = begin(TWO)
    trial.start()
    trial.await_training(1, steps=10, commits=1)
    trial.kill_node(0)
    trial.start_node(0)
    trial.finish()
    assert [tier for _, tier, _ in trial.elected()] == ["fresh", "store"]
    assert_nothing_lost(trial, memory_lost=True)
    assert_same(trial, undisturbed)


@pytest.mark.soak
def test_both_nodes_die_at_once(begin: Begin, reference: Reference) -> None:
    undisturbed = reference(ONE)
    trial = begin(TWO)
    trial.start()
    trial.await_training(1, steps=10, commits=1)
    for node in (1, 0):
        trial.kill_node(node)
    trial.start()
    trial.finish()
    assert [tier for _, tier, _ in trial.elected()] == ["fresh", "store"]
    assert_nothing_lost(trial, memory_lost=True)
    assert_same(trial, undisturbed)
