"""Lost power at every call on the disk, with every subset of what was not synced (S1, S2, S6, S9).

A reader finds the previous or the new state, whole; what was reported as done is there; the next
process can go on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from crash_job import (
    ME,
    NEW,
    OLD,
    SETTINGS,
    TENSORS,
    WORLD,
    job_on,
    newest_whole,
    prepare,
    recover,
    save,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.core.ids import Point
from everstep.errors import ObjectMissing
from everstep.store import Branch, Job, OwnerIdentity, Retention
from everstep.store import settings as store_settings
from everstep.store.backends.local import LocalBackend
from everstep.store.folder import Folder
from everstep.testing.recording_os import KEPT, LOST, TORN, SimulatedDisk
from everstep.testing.snapshots import loads_as


class _Dead(BaseException):
    pass


def stopped_at(number: int, work: Callable[[Job], object]) -> tuple[SimulatedDisk, bool]:
    """The disk of a machine whose process was stopped before its n-th call, and whether it was."""
    disk = SimulatedDisk()
    prepare(LocalBackend("/store", system=disk, create=True))
    backend = LocalBackend("/store", system=disk)
    return disk, stopped(disk, number, lambda: work(job_on(backend)))


def fates_of(pending: int, seed: int) -> Iterator[tuple[int, ...]]:
    """All subsets where they are few; else the extremes, each alone, and a seeded sample."""
    if pending <= 6:
        yield from itertools.product((LOST, KEPT), repeat=pending)
        return
    yield (LOST,) * pending
    yield (KEPT,) * pending
    for i in range(pending):
        yield tuple(KEPT if i == j else LOST for j in range(pending))
        yield tuple(LOST if i == j else KEPT for j in range(pending))
    draw = random.Random(seed)
    for _ in range(16):
        yield tuple(draw.choice((LOST, KEPT, TORN)) for _ in range(pending))


def visible(disk: SimulatedDisk) -> dict[str, bytes]:
    return {path: data for path, data in disk.tree().items() if "/." not in path}


def test_s9_lost_power_at_any_call_leaves_the_old_or_the_new_whole() -> None:
    """Every call of writers and committer, every subset of what was not synced (sampled where
    there are more than 64).
    """
    seen: dict[tuple[tuple[str, bytes], ...], Point] = {}
    for number in itertools.count():
        disk, was_stopped = stopped_at(number, lambda job: save(job, NEW))
        for fates in fates_of(disk.pending(), number):
            after = disk.crash(fates)
            state = tuple(sorted(visible(after).items()))
            if state not in seen:
                seen[state] = newest_whole(LocalBackend("/store", system=after))
                if seen[state] == OLD:
                    recover(LocalBackend("/store", system=after.crash([])))
            assert was_stopped or seen[state] == NEW, "committed means durable"
        if not was_stopped:
            break
    assert set(seen.values()) == {OLD, NEW}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.integers(0, 400), st.lists(st.sampled_from([LOST, KEPT, TORN]), max_size=40))
def test_s9_any_subset_of_unsynced_changes(number: int, fates: list[int]) -> None:
    disk, was_stopped = stopped_at(number, lambda job: save(job, NEW))
    found = newest_whole(LocalBackend("/store", system=disk.crash(fates)))
    assert found == NEW or was_stopped


def test_a_claim_that_was_given_survives_power() -> None:
    disk, _ = stopped_at(10_000, lambda job: job.claim(ME))
    assert job_on(LocalBackend("/store", system=disk.crash([]))).highest_claim() == 2


def test_the_simulated_disk_does_forget() -> None:
    """Without fsync the test above would prove nothing: what is not synced must be losable."""
    disk = SimulatedDisk()
    fd = disk.open_new("/a")
    disk.pwrite(fd, memoryview(b"1234"), 0)
    assert disk.tree() == {"/a": b"1234"}
    assert disk.pending() == 2
    assert disk.crash([]).tree() == {}
    assert disk.crash([KEPT]).tree() == {"/a": b""}
    assert disk.crash([KEPT, TORN]).tree() == {"/a": b"12"}
    disk.fsync(fd)
    assert disk.crash([]).tree() == {}
    disk.fsync_folder("/")
    assert disk.crash([]).tree() == {"/a": b"1234"}
    disk.rename("/a", "/b")
    assert disk.crash([]).tree() == {"/a": b"1234"}
    assert disk.crash([KEPT]).tree() == {"/b": b"1234"}


# the first steps of a store and a job


@dataclass
class First:
    """A process that makes a store and a job's first checkpoint; ``done`` is what it was told."""

    disk: SimulatedDisk
    done: set[str] = field(default_factory=set)

    def run(self) -> None:
        backend = LocalBackend("/store", system=self.disk, create=True)
        assert store_settings.create(backend, SETTINGS) == SETTINGS
        self.done.add("store")
        job = job_on(backend)
        job.acquire_owner(ME, is_alive=lambda _: True)
        self.done.add("owner")
        assert job.claim(ME) == 1
        self.done.add("claim")
        job.write_branch(1, Branch(None, "fresh", "first start", WORLD))
        self.done.add("branch")
        assert save(job, OLD) == "committed"
        self.done.add("checkpoint")


def stopped(disk: SimulatedDisk, number: int, work: Callable[[], object]) -> bool:
    """Whether the process was stopped before its n-th call."""
    left = number

    def stop(_call: str, _path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Dead

    disk.hook = stop
    try:
        work()
    except _Dead:
        return True
    finally:
        disk.hook = None
    return False


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_s9_lost_power_while_a_store_and_a_job_begin(stride: int) -> None:
    """Store, owner, claim, branch, first checkpoint: what was told is there, nothing is damaged,
    and the next process begins or goes on."""
    seen: dict[tuple[tuple[str, bytes], ...], str] = {}
    for number in itertools.count(0, stride):
        first = First(SimulatedDisk())
        was_stopped = stopped(first.disk, number, first.run)
        assert was_stopped or "checkpoint" in first.done
        for fate in fates_of(first.disk.pending(), number):
            after = first.disk.crash(fate)
            state = (*sorted(visible(after).items()), ("told", repr(sorted(first.done)).encode()))
            if state not in seen:
                seen[state] = _begun(after, first.done)
                _begin_again(after)
        if not was_stopped:
            break
    assert set(seen.values()) == {"nothing", "a store", "a job", "a checkpoint"}


def _begun(disk: SimulatedDisk, told: set[str]) -> str:
    backend = LocalBackend("/store", system=disk, create=True)
    try:
        assert store_settings.read(backend) == SETTINGS
    except ObjectMissing:
        assert not told
        assert list(backend.list("")) == []
        return "nothing"
    job = job_on(backend)
    assert job.owner() is not None or "owner" not in told
    assert job.highest_claim() == 1 or "claim" not in told
    assert set(job.branches()) == {1} or "branch" not in told
    assert not any(branch.problem for branch in job.branches().values())
    if not job.candidates():
        assert "checkpoint" not in told
        assert not job.expected()
        return "a job" if job.highest_claim() else "a store"
    assert newest_whole(backend) == OLD
    return "a checkpoint"


def _begin_again(disk: SimulatedDisk) -> None:
    """Another process, after the reboot."""
    backend = LocalBackend("/store", system=disk, create=True)
    assert store_settings.create(backend, SETTINGS) == SETTINGS
    job = job_on(backend)
    found = job.candidates()
    next_one = OwnerIdentity("next", "host", "another boot", 2, 1)
    job.acquire_owner(next_one, is_alive=lambda _: True)
    attempt = job.claim(next_one)
    origin = Branch(found[0], "store", world=WORLD) if found else Branch(None, "fresh", world=WORLD)
    job.write_branch(attempt, origin)
    assert save(job, Point(20, attempt), itertools.count(1)) == "committed"
    assert newest_whole(backend) == Point(20, attempt)
    assert job.verify_around(deep=True).ok


# deleting


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now


ONE = Retention(keep_last=1, grace_seconds=600.0)
PAUSES = (0.0, 700.0, 24 * 3600.0 + 1)
"""Between a sweep and the next: tombstone and records, packs, tombstone."""


@pytest.fixture(scope="module")
def swept_soon() -> SimulatedDisk:
    """A disk, nothing unsynced, with one checkpoint to keep and one to delete."""
    clock = Clock()
    disk = SimulatedDisk(clock=clock.wall)
    prepare(LocalBackend("/store", system=disk, create=True))
    clock.now += 700
    save(job_on(LocalBackend("/store", system=disk)), NEW)
    return disk


def sweep_at(disk: SimulatedDisk, now: float) -> None:
    job = Job(Folder(LocalBackend("/store", system=disk), "a", SETTINGS), Clock())
    job.execute(job.retain(ONE, now), now)


def sweep_through(disk: SimulatedDisk, clock: Clock) -> None:
    for pause in PAUSES:
        clock.now += pause
        sweep_at(disk, clock.now)


def test_s2_lost_power_at_any_call_of_a_sweep(swept_soon: SimulatedDisk) -> None:
    """What is kept loads; what goes is whole or no checkpoint; the next sweeps finish it."""
    seen: dict[tuple[tuple[str, bytes], ...], tuple[Point, ...]] = {}
    for number in itertools.count():
        clock = Clock()
        clock.now += 1400
        disk = on_the_clock(swept_soon, clock)
        was_stopped = stopped(disk, number, lambda d=disk, c=clock: sweep_through(d, c))
        for fate in fates_of(disk.pending(), number):
            after = disk.crash(fate)
            state = tuple(sorted(visible(after).items()))
            if state not in seen:
                seen[state] = _swept(after, clock)
        if not was_stopped:
            break
    assert set(seen.values()) == {(NEW, OLD), (NEW,)}


def on_the_clock(disk: SimulatedDisk, clock: Clock) -> SimulatedDisk:
    """A copy whose changes are stamped by ``clock``."""
    assert disk.pending() == 0
    return disk.crash([], clock=clock.wall)


def _swept(disk: SimulatedDisk, clock: Clock) -> tuple[Point, ...]:
    job = job_on(LocalBackend("/store", system=disk))
    found = tuple(job.candidates())
    for point in found:
        assert loads_as(job.open_checkpoint(point), point.step, tensors=TENSORS)
    later = Clock()
    later.now = clock.now + 700
    finished = on_the_clock(disk.crash([]), later)
    sweep_through(finished, later)
    sweep_through(finished, later)
    left = [path for path in finished.tree() if "/steps/" in path or "/packs/" in path]
    assert all("000000000009-" in path for path in left), left
    assert newest_whole(LocalBackend("/store", system=finished)) == NEW
    return found
