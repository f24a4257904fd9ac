"""A store of a tiny job, made through the store itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.core.ids import Point
from everstep.store import Branch, Job, OwnerIdentity, open_store
from everstep.testing.snapshots import world_of

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """``make_job(name, steps, world=2, seed=0, folder="store")``: one attempt with checkpoints."""

    def make(
        name: str, steps: list[int], *, world: int = 2, seed: int = 0, folder: str = "store"
    ) -> Job:
        job = open_store(str(tmp_path / folder), create=True).job(name)
        attempt = job.claim(OwnerIdentity("agent", "host", "boot", 1, 1))
        job.write_branch(attempt, Branch(None, "fresh", "first start", world))
        for step in steps:
            for snapshot in world_of(step, attempt, world, seed=seed):
                job.write_rank(snapshot, facts={"torch": "2.13"}, unique=f"u{step}")
            assert job.try_commit(Point(step, attempt), world) == "committed"
        return job

    return make
