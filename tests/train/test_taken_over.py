"""A worker without an agent ends when another owner has taken its job over."""

from __future__ import annotations

import os

from train_bodies import Training
from train_jobs import Jobs, kill_keeper

import everstep
from everstep.keeper.identity import identity_of
from everstep.store import open_store


def _train_on() -> None:
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=10**9):
        training.step(batch)
        if run.step == 2:
            _take_over()


def _take_over() -> None:
    """Another agent becomes the owner; the keeper that would say so dies."""
    job = open_store("everstep-store").job(os.environ["EVERSTEP_JOB"])
    stranger = identity_of(os.getppid(), "stranger")
    job.acquire_owner(stranger, is_alive=lambda _: False)
    job.claim(stranger)
    kill_keeper(os.environ)


def test_worker_ends_with_the_owner_that_took_its_job_over(jobs: Jobs) -> None:
    said = jobs.fails(_train_on)
    assert "EVS-501" in said
    assert "stranger" in said
