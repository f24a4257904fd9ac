"""A real process, killed with SIGKILL at each named point of a save, on a real disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.core.ids import Point
from everstep.store import Branch, Job, OwnerIdentity, open_store
from everstep.testing.snapshots import loads_as, world_of

WRITER = """
import sys
from everstep.core.ids import Point
from everstep.store import open_store
from everstep.testing.snapshots import world_of
job = open_store(sys.argv[1]).job("a")
for part in world_of(9, 1, 2):
    job.write_rank(part, facts={}, unique="killed")
    job.try_commit(Point(9, 1), 2)
"""
POINTS = [
    ("store.write.before_pack", 1),
    ("store.local.before_fsync", 2),
    ("store.local.before_link", 0),
    ("store.write.before_index", 1),
    ("store.commit.before_manifest", 0),
    ("store.commit.before_last_look", 0),
    ("store.local.before_rename", 0),
]


def save(job: Job, step: int, unique: str) -> None:
    for part in world_of(step, 1, 2):
        job.write_rank(part, facts={}, unique=unique)
        job.try_commit(Point(step, 1), 2)


@pytest.mark.parametrize(("point", "after"), POINTS)
def test_s1_a_writer_killed_at_a_named_point(tmp_path: Path, point: str, after: int) -> None:
    job = open_store(str(tmp_path), create=True, chunk_bytes=64).job("a")
    job.claim(OwnerIdentity("me", "host", "boot", os.getpid(), 1))
    job.write_branch(1, Branch(None, "fresh", "first start", 2))
    save(job, 5, "u")
    fault = json.dumps([{"point": point, "action": "kill", "after": after}])
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        env={**os.environ, "EVERSTEP_FAULTS": fault},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    found = job.candidates()[0]
    assert found in (Point(5, 1), Point(9, 1))
    assert loads_as(job.open_checkpoint(found), found.step)
    save(job, 9, "again")
    assert job.candidates()[0] == Point(9, 1)
    assert loads_as(job.open_checkpoint(Point(9, 1)), 9)
    assert job.verify(Point(9, 1), deep=True).ok
