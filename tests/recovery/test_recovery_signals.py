"""R4 under SIGKILL of whole parts, again and again within one run: workers, keepers, agents,
everything at once, and a byte of the newest checkpoint flipped while nothing runs."""

from __future__ import annotations

import random

import pytest
from recovery_proofs import assert_nothing_lost, assert_same
from recovery_runs import JOB, Begin, Case, Reference, Trial

from everstep.drill import kinds
from everstep.drill.damage import flip_newest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STRIKES = ("worker", "keeper", "agent", "everything", "corrupt")
CASES = [
    Case("gpt_ddp.py", world=1, steps=500, forked=True),
    Case("gpt_ddp.py", world=2, steps=500),
    Case("gpt_ddp.py", world=4, steps=400, forked=True),
    Case("gpt_fsdp2.py", world=2, steps=400),
    Case("resnet_amp_accumulate.py", world=2, steps=300, forked=True),
    Case("embedding_sparse.py", world=2, steps=500, forked=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.example}-{case.world}")
def test_a_storm_of_kills_changes_nothing(begin: Begin, reference: Reference, case: Case) -> None:
    """Each kind of kill twice in random order; the whole run is one job."""
    undisturbed = reference(case)
    rng = random.Random(f"storm/{case.example}/{case.world}")
    order = rng.sample(STRIKES * 2, k=2 * len(STRIKES))
    trial = begin(case, name=f"storm of {order}")
    damaged: dict[int, int] = {}
    trial.start()
    for number, kind in enumerate(order):
        lost = kind in ("everything", "corrupt")
        trial.await_training(trial.attempt or 1, steps=rng.randint(5, 12), commits=2 if lost else 0)
        strike(trial, kind, rng, number, damaged)
    trial.finish()
    assert_nothing_lost(trial, memory_lost=True, damaged=damaged)
    assert_damage_was_seen(trial, damaged)
    assert_same(trial, undisturbed)


def strike(
    trial: Trial, kind: str, rng: random.Random, number: int, damaged: dict[int, int]
) -> None:
    """Kill, start again where the agent is gone, and wait until the job has noticed."""
    before = trial.attempt
    if kind == "keeper":
        strike_keeper(trial)
        return
    if kind == "worker":
        trial.kill_worker(rng.randrange(trial.case.world))
    elif kind == "agent":
        trial.kill_agent()
    else:
        trial.kill_node(0)
        if kind == "corrupt":
            damaged[before + 1] = flip_newest(trial.store, JOB, seed=number).point.step
        trial.start_node(0)
    trial.until(lambda: trial.attempt > before, f"the {kind} was replaced")


def strike_keeper(trial: Trial) -> None:
    started = [event for event in trial.events if event.kind == kinds.KEEPER_STARTED]
    trial.kill_keeper()

    def again() -> bool:
        new = [event for event in trial.events if event.kind == kinds.KEEPER_STARTED]
        since = new[len(started)].mono if len(new) > len(started) else float("inf")
        return any(event.kind == kinds.SNAPSHOT and event.mono > since for event in trial.events)

    trial.until(again, "a new keeper had completed a snapshot")


def assert_damage_was_seen(trial: Trial, damaged: dict[int, int]) -> None:
    """S3: the damaged checkpoint was not loaded, and the restore said so."""
    for attempt, step in damaged.items():
        (restored,) = [point for at, _, point in trial.elected() if at == attempt]
        assert restored != step, trial.told(f"the damaged checkpoint of step {step} was loaded")
        mine = [event.kind for event in trial.events if event.attempt == attempt]
        assert kinds.DAMAGE & set(mine), trial.told(f"attempt {attempt} saw no damage")
