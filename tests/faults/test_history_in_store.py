"""A history that went through stores is the history: budgets see no difference (F3, S2)."""

from __future__ import annotations

import random

import pytest
from histories import World, draw_history
from told import GPU, TIMEOUT, Agent

from everstep.core.clock import SystemClock
from everstep.errors import StoreError
from everstep.faults.budget import count
from everstep.faults.fold import fold
from everstep.faults.history import Record, pack, unpack
from everstep.faults.limits import Limits
from everstep.faults.situation import Policy
from everstep.store import Job, OwnerIdentity
from everstep.store.backends.memory import MemoryBackend
from everstep.store.folder import Folder
from everstep.store.settings import make
from everstep.testing.faulty import BackendFault, FaultyBackend

SETTINGS = make(chunk_bytes=64, store_id="0" * 32)
ME = OwnerIdentity("agent", "host", "boot", 1, 1)


def job_on(backend: MemoryBackend | FaultyBackend) -> Job:
    return Job(Folder(backend, "a", SETTINGS), SystemClock())


def read(job: Job) -> tuple[Record, ...]:
    found = job.history()
    told = unpack(found.entries)
    assert (found.problems, told.problems) == ((), ())
    return told.records


@pytest.mark.parametrize("seed", range(12))
def test_records_kept_here_and_there_merge_into_one_history(seed: int) -> None:
    """Some in the store, some on the disks of two agents while it was away, some in both."""
    draw = random.Random(seed)
    policy, spares, ops = draw_history(seed)
    world = World(policy, spares)
    world.play(ops)
    places = [job_on(MemoryBackend(f"place{n}")) for n in range(3)]
    for record in draw.sample(world.records, len(world.records)):
        for place in draw.sample(places, draw.randint(1, 2)):
            place.record_history(pack(record))
    for local in places[1:]:
        places[0].merge_history(local)
    records = read(places[0])
    told = fold(records, highest_claim=world.claims)
    assert told == fold(world.records, highest_claim=world.claims)
    assert count(told, policy.limits) == count(
        fold(world.records, highest_claim=world.claims), policy.limits
    )


def test_a_store_that_is_away_refills_nothing_and_loses_nothing() -> None:
    """F3: the agent goes on with what it has read and what it has written, and merges later."""
    away = FaultyBackend(MemoryBackend())
    job, local = job_on(away), job_on(MemoryBackend("local"))
    told = Agent(policy=Policy(limits=Limits(same_step=99)))
    told.fails(TIMEOUT)
    for record in told.records:
        job.record_history(pack(record))
    away._faults = [BackendFault("fail", times=0)]
    before = len(told.records)
    told.fails(TIMEOUT)
    for record in told.records[before:]:
        with pytest.raises(StoreError):
            job.record_history(pack(record))
        local.record_history(pack(record))
    away._faults = []
    job.merge_history(local)
    assert fold(read(job)) == fold(told.records)
    told.records = list(read(job))
    assert told.fails(TIMEOUT).stops, "the third attempt in a row that got no further"


def test_a_damaged_decision_gives_no_restart_for_nothing() -> None:
    """F3: the attempts that it began are known by their numbers."""
    memory = MemoryBackend()
    job = job_on(memory)
    told = Agent(policy=Policy(limits=Limits(None, None, None, 3)))
    told.fails(GPU)
    told.fails(TIMEOUT)
    told.fails(TIMEOUT, id="x")
    keys = [job.record_history(pack(record)) for record in told.records]
    for key in keys:
        if "decision" in key:
            memory.objects[f"jobs/a/{key}"] = b"damaged"
    found = job.history()
    assert len(found.problems) == 4
    history = fold(unpack(found.entries).records, highest_claim=max(found.highest, told.claims))
    assert len(history.restarts) == len(told.history().restarts) == 3
    assert count(history, told.policy.limits).window == history.restarts
