"""A job of two ranks on any backend, for the tests that stop it everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from everstep.core.clock import SystemClock
from everstep.core.ids import Point
from everstep.store import Branch, Job, OwnerIdentity
from everstep.store.backends import Backend
from everstep.store.folder import Folder
from everstep.store.settings import Settings, encode, make, read
from everstep.testing.snapshots import Tensor, loads_as, world_of

SETTINGS: Settings = make(chunk_bytes=64, store_id="0" * 32)
ME = OwnerIdentity("agent", "host", "boot", 1, 1)
WORLD = 2
OLD, NEW = Point(5, 1), Point(9, 1)
TENSORS = (Tensor("w", "float32", (9, 3)), Tensor("rng", "uint8", (7,), split=False))


def job_on(backend: Backend) -> Job:
    return Job(Folder(backend, "a", SETTINGS), SystemClock())


def prepare(backend: Backend) -> None:
    """A store with one committed checkpoint."""
    backend.create("everstep.json", encode(SETTINGS))
    job = job_on(backend)
    assert job.claim(ME) == 1
    job.write_branch(1, Branch(None, "fresh", "first start", WORLD))
    assert save(job, OLD) == "committed"


def save(job: Job, point: Point, tries: Iterator[int] | None = None) -> str:
    state = ""
    for snapshot in world_of(point.step, point.attempt, WORLD, tensors=TENSORS):
        unique = f"u{next(tries) if tries else 0}"
        job.write_rank(snapshot, facts={"torch": "2"}, unique=unique)
        state = job.try_commit(point, WORLD)
    return state


def newest_whole(backend: Backend) -> Point:
    """What a restore would load, checked bit for bit; nothing before it may be damaged."""
    assert read(backend) == SETTINGS
    job = job_on(backend)
    found = job.candidates()[0]
    assert job.expected()
    assert loads_as(job.open_checkpoint(found), found.step, tensors=TENSORS)
    return found


def recover(backend: Backend) -> None:
    """The next process writes the same step under new names and commits it."""
    assert save(job_on(backend), NEW, itertools.count(1)) == "committed"
    assert newest_whole(backend) == NEW
    assert job_on(backend).verify(NEW, deep=True).ok
