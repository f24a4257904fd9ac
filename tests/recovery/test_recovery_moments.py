"""R4 under kills at random moments: named points, ranks and passes that a seed picks.

The message of a failure holds the case, the seed and the value of ``EVERSTEP_FAULTS``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import recovery_moments as at
from recovery_moments import moments
from recovery_proofs import assert_nothing_lost, assert_same
from recovery_runs import SMALL, Begin, Case, Reference

import everstep
from everstep.core.points import Fault

pytestmark = pytest.mark.timeout(1800)

GPT, OTHERS = "gpt_ddp.py", sorted(SMALL.keys() - {"gpt_ddp.py"})
IN_TEST = (1,)
"""One in which a rank dies while it loads; the soak has the others."""
SEEDS = range(1, 21)

ELSEWHERE = {
    "store.load.before_read",  # a rank reads the store: only after memory was lost as well
    "keeper.promise.before_claim",  # only while the store is away: the test of promises
    "store.local.before_rename",  # the owner's record, which no recovery depends on
    "store.sweep.before_tombstone",  # nothing is old enough to be deleted within a test's run
    "store.sweep.before_manifest",
    "store.sweep.before_index",
    "store.sweep.before_pack",
    "store.sweep.before_history",
    "store.history.before_forget",  # only after the store was away
    "agent.decision.before_announce",  # only where nodes agree: the test of a lost leader
    "train.data.before_batch",  # the drill's: what a script of the user does there
    "train.step.before_boundary",
}
"""Points that the store's own tests kill at, and the tests of lost memory."""


AGENT_ACTS = [
    ("store.history.before_create", 1),
    ("agent.decision.after_write", 1),
    ("agent.claim.after_write", 1),
    ("agent.late.after_write", 0),
    ("agent.result.before_write", 0),
]
"""After a worker's death, the first of each: an agent decides and claims at its start as well."""


def disturb(begin: Begin, reference: Reference, case: Case, seed: int, count: int) -> None:
    """Run ``case`` with ``count`` deaths of ``seed`` and compare it with the undisturbed run."""
    faults = moments(seed, case.world, count=count, loader=case.loader, nodes=case.nodes)
    undisturbed = reference(replace(case, nodes=1))
    trial = begin(case, faults, name=f"seed {seed}")
    trial.run()
    # Some wait for a pass that a slow disk, or a keeper that another fault has replaced and that
    # counts from 0, does not get to.
    missed = trial.missed()
    assert len(missed) <= max(1, count // 3), trial.told("hardly anything was disturbed")
    in_load = {*at.IN_RESTORE, at.AT_LOADER}.intersection(missed)
    assert not in_load, trial.told("nobody died while it restored")
    assert_nothing_lost(trial, memory_lost=trial.restarts > 0)
    assert_same(trial, undisturbed)


@pytest.mark.parametrize("seed", IN_TEST)
def test_a_gpt_goes_on_exactly(begin: Begin, reference: Reference, seed: int) -> None:
    disturb(begin, reference, Case(GPT, world=2, forked=True), seed, count=3)


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=() if e == "gpt_fsdp2.py" else pytest.mark.soak) for e in OTHERS],
)
def test_every_example_goes_on_exactly(begin: Begin, reference: Reference, example: str) -> None:
    seed = 1 + OTHERS.index(example)
    case = Case(example, world=2, steps=100, forked=True)
    disturb(begin, reference, case, seed, count=2)


@pytest.mark.soak
@pytest.mark.parametrize(("point", "passes"), AGENT_ACTS)
def test_the_agent_dies_while_it_acts_on_a_failure(
    begin: Begin, reference: Reference, point: str, passes: int
) -> None:
    """F6: what was decided is carried on, whatever of it was done."""
    case = Case(GPT, world=2, forked=True)
    worker = Fault("train.cut.copied", "kill", 5, 1)
    undisturbed = reference(case)
    trial = begin(case, [worker, Fault(point, "kill", passes)], name=point)
    trial.run()
    assert not trial.missed(), trial.told("not all of them died")
    assert trial.restarts == 1
    assert_nothing_lost(trial)
    assert_same(trial, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_a_gpt_goes_on_exactly_after_many_kills(
    begin: Begin, reference: Reference, seed: int
) -> None:
    # Every fourth starts its workers anew, as users do; forking them saves most of the time.
    disturb(begin, reference, Case(GPT, world=2, forked=seed % 4 != 0), seed, count=6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(21, 25))
@pytest.mark.parametrize("world", [1, 4])
def test_worlds_of_one_and_of_four_go_on_exactly(
    begin: Begin, reference: Reference, world: int, seed: int
) -> None:
    """With four ranks the order of DDP's gradient sums has to be the same in every attempt."""
    disturb(begin, reference, Case(GPT, world=world, forked=True), seed, count=5)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("example", OTHERS)
def test_every_example_in_every_world(
    begin: Begin, reference: Reference, example: str, world: int
) -> None:
    seed = 100 + 10 * OTHERS.index(example) + world
    disturb(begin, reference, Case(example, world=world, forked=True), seed, count=5)


@pytest.mark.soak
@pytest.mark.parametrize(("example", "seed"), list(zip([GPT, *OTHERS], range(31, 35), strict=True)))
def test_two_nodes_go_on_exactly(
    begin: Begin, reference: Reference, example: str, seed: int
) -> None:
    disturb(begin, reference, Case(example, world=2, nodes=2), seed, count=4)


def test_the_seeds_reach_every_kind_of_moment() -> None:
    """Each seed kills in a snapshot, in a persist or commit, and in a restore; together they reach
    every point there is, but those that another test has to itself."""
    reached: set[str] = set()
    for seed in SEEDS:
        points = {fault.point for fault in moments(seed, world=2, count=6)}
        assert points & set(at.IN_SNAPSHOT)
        assert points & {*at.IN_PERSIST, *at.IN_COMMIT}
        assert points & {*at.IN_RESTORE, *at.IN_ELECTION, at.AT_LOADER}
        assert len(points) == 6
        reached |= points
    assert reached == points_of_the_code() - ELSEWHERE


def points_of_the_code() -> set[str]:
    """Every name that is passed to ``reach``."""
    source = Path(everstep.__file__).parent
    texts = (path.read_text() for path in source.rglob("*.py"))
    return {name for text in texts for name in re.findall(r'\breach\("([a-z_.]+)"', text)}


def test_a_seed_gives_the_same_deaths_again() -> None:
    assert moments(7, world=4, count=6) == moments(7, world=4, count=6)
    assert moments(7, world=4, count=6) != moments(8, world=4, count=6)
