"""A real process, killed with SIGKILL at each named point of a save, a sweep or a load, on a real
disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.core.history import Entry
from everstep.core.ids import Point
from everstep.store import Branch, Job, OwnerIdentity, Retention, open_store
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
SWEEPER = """
import sys
from everstep.store import Retention, open_store
job = open_store(sys.argv[1]).job("a")
for now in map(float, sys.argv[2:]):
    job.execute(job.retain(Retention(keep_last=1), now), now)
"""
LOADER = """
import sys
from everstep.store import open_store
from everstep.testing.snapshots import loads_as
job = open_store(sys.argv[1]).job("a")
assert loads_as(job.open_checkpoint(job.candidates()[0]), 5)
"""
MERGER = """
import sys
from everstep.core.history import Entry
from everstep.store import open_store
local, main = (open_store(path).job("a") for path in sys.argv[1:])
local.record_history(Entry("word", 1, 1, 1, b"said"))
main.merge_history(local)
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


def job_in(store: Path) -> Job:
    job = open_store(str(store), create=True, chunk_bytes=64).job("a")
    job.claim(OwnerIdentity("me", "host", "boot", os.getpid(), 1))
    job.write_branch(1, Branch(None, "fresh", "first start", 2))
    return job


def killed_at(point: str, after: int, program: str, *arguments: object) -> None:
    fault = json.dumps([{"point": point, "action": "kill", "after": after}])
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "EVERSTEP_FAULTS": fault},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("point", "after"), POINTS)
def test_s1_a_writer_killed_at_a_named_point(tmp_path: Path, point: str, after: int) -> None:
    job = job_in(tmp_path)
    save(job, 5, "u")
    killed_at(point, after, WRITER, tmp_path)
    found = job.candidates()[0]
    assert found in (Point(5, 1), Point(9, 1))
    assert loads_as(job.open_checkpoint(found), found.step)
    save(job, 9, "again")
    assert job.candidates()[0] == Point(9, 1)
    assert loads_as(job.open_checkpoint(Point(9, 1)), 9)
    assert job.verify(Point(9, 1), deep=True).ok


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("store.sweep.before_tombstone", 0),
        ("store.sweep.before_tombstone", 1),
        ("store.sweep.before_manifest", 1),
        ("store.sweep.before_index", 0),
        ("store.sweep.before_index", 1),
        ("store.sweep.before_pack", 0),
        ("store.sweep.before_pack", 3),
    ],
)
def test_s2_a_sweep_killed_at_a_named_point(tmp_path: Path, point: str, after: int) -> None:
    """What is left loads whole, what goes is no checkpoint, and the next sweeps finish it."""
    job = job_in(tmp_path)
    for step in (3, 5, 9):
        save(job, step, "u")
    now = time.time()
    killed_at(point, after, SWEEPER, tmp_path, now + 700, now + 1400)
    found = list(job.candidates())
    assert found[0] == Point(9, 1)
    for each in found:
        assert loads_as(job.open_checkpoint(each), each.step)
    assert job.verify_around(deep=True).ok
    policy = Retention(keep_last=1)
    for later in (now + 2000, now + 2700, now + 3400, now + 3400 + 25 * 3600):
        job.execute(job.retain(policy, later), later)
    assert [info.point for info in job.checkpoints()] == [Point(9, 1)]
    assert loads_as(job.open_checkpoint(Point(9, 1)), 9)


def test_s3_a_load_killed_before_its_first_read_changes_nothing(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    save(job, 5, "u")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    killed_at("store.load.before_read", 1, LOADER, tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5)


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("store.history.before_create", 0),
        ("store.history.before_create", 1),
        ("store.history.before_forget", 0),
    ],
)
def test_s2_history_is_recorded_and_merged_once_wherever_it_was_killed(
    tmp_path: Path, point: str, after: int
) -> None:
    folders = (tmp_path / "local", tmp_path / "main")
    local, main = (job_in(folder) for folder in folders)
    killed_at(point, after, MERGER, *folders)
    local.record_history(Entry("word", 1, 1, 1, b"said"))
    main.merge_history(local)
    assert [entry.body for entry in main.history().entries] == [b"said"]
    assert local.history().entries == ()
    assert main.verify_around(deep=True).ok
