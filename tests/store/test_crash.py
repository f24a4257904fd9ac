"""Deaths and lost answers at every call, lost power at every state of the disk (S1, S2, S4, S9).

The question is always the same: does a reader find the previous or the new checkpoint, whole, and
can the next process finish?
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.core.clock import SystemClock
from everstep.core.ids import Point
from everstep.errors import CorruptObject, StoreError, StoreFull
from everstep.store import Branch, Job, OwnerIdentity
from everstep.store.backends import Backend
from everstep.store.backends.local import LocalBackend
from everstep.store.backends.memory import MemoryBackend
from everstep.store.folder import Folder
from everstep.store.settings import Settings, encode, make, read
from everstep.testing.faulty import BackendFault, FaultyBackend, Stopped
from everstep.testing.recording_os import KEPT, LOST, TORN, SimulatedDisk
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


def copied(memory: MemoryBackend) -> MemoryBackend:
    other = MemoryBackend()
    for key, data in memory.objects.items():
        other.put(key, data)
    return other


@pytest.fixture(scope="module")
def prepared() -> MemoryBackend:
    memory = MemoryBackend()
    prepare(memory)
    return memory


def calls_of(prepared: MemoryBackend) -> list[tuple[str, str]]:
    counting = FaultyBackend(copied(prepared))
    save(job_on(counting), NEW)
    return counting.calls


@pytest.mark.parametrize("action", ["stop", "stop-after", "fail", "lost"])
def test_s1_a_writer_that_ends_at_any_call_leaves_the_old_or_the_new_whole(
    prepared: MemoryBackend, action: str
) -> None:
    for number in range(len(calls_of(prepared))):
        memory = copied(prepared)
        faulty = FaultyBackend(memory, [BackendFault(action, after=number)])
        committed = False
        with contextlib.suppress(StoreError, Stopped):
            committed = save(job_on(faulty), NEW) == "committed"
        found = newest_whole(memory)
        assert found in (OLD, NEW)
        assert found == NEW or not committed
        recover(memory)


def test_s1_a_torn_object_is_never_taken_for_a_whole_one(prepared: MemoryBackend) -> None:
    """A store that breaks its promise costs the step that it tore, never the one before."""
    creates = [key for call, key in calls_of(prepared) if call == "create"]
    assert len(creates) == 2 * WORLD + 1
    for key in creates:
        memory = copied(prepared)
        faulty = FaultyBackend(memory, [BackendFault("tear", call="create", key=key)])
        with pytest.raises(StoreError):
            save(job_on(faulty), NEW)
        job = job_on(memory)
        if key.endswith("manifest"):
            with pytest.raises(CorruptObject):
                job.open_checkpoint(NEW)
            assert job.candidates()[1] == OLD
        else:
            assert newest_whole(memory) == OLD


def test_s1_a_lost_answer_to_the_manifest_is_read_back(prepared: MemoryBackend) -> None:
    memory = copied(prepared)
    fault = BackendFault("lost", call="create", key="manifest")
    assert save(job_on(FaultyBackend(memory, [fault])), NEW) == "committed"
    fault = BackendFault("lost", call="create", key="claim")
    assert job_on(FaultyBackend(memory, [fault])).claim(ME) == 2
    assert job_on(memory).highest_claim() == 2


def test_a_hint_that_fails_is_reported_and_commits_all_the_same(prepared: MemoryBackend) -> None:
    memory = copied(prepared)
    job = job_on(FaultyBackend(memory, [BackendFault("fail", call="put", key="newest")]))
    for snapshot in world_of(NEW.step, 1, WORLD, tensors=TENSORS):
        job.write_rank(snapshot, facts={}, unique="u")
    said: list[str] = []
    assert job.try_commit(NEW, WORLD, report=said.append) == "committed"
    assert len(said) == 1
    assert "hint" in said[0]


def test_a_disk_full_in_the_middle_costs_nothing_but_the_step() -> None:
    disk = SimulatedDisk()
    backend = LocalBackend("/store", system=disk, create=True)
    prepare(backend)
    before = disk.tree()
    for after in itertools.count():
        if not _full_at_write(disk, after):
            break
        disk.hook = None
        assert newest_whole(backend) == OLD
        assert {k: v for k, v in disk.tree().items() if "refs" not in k and k in before} == {
            k: v for k, v in before.items() if "refs" not in k
        }
        assert not [path for path in disk.tree() if ".tmp-" in path]
        disk = disk.crash([])
        backend = LocalBackend("/store", system=disk)
    assert newest_whole(backend) == NEW


def _full_at_write(disk: SimulatedDisk, after: int) -> bool:
    """Save with the disk full from the n-th write on; False where the save needs fewer."""
    left = after

    def full(call: str, _: str) -> None:
        nonlocal left
        if call == "pwrite":
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.hook = full
    tries = itertools.count(after * 10)
    try:
        save(job_on(LocalBackend("/store", system=disk)), NEW, tries)
    except StoreFull:
        return True
    return False


# power


class _Dead(BaseException):
    pass


def stopped_at(number: int, work: Callable[[Job], object]) -> tuple[SimulatedDisk, bool]:
    """The disk of a machine whose process was stopped before its n-th call, and whether it was."""
    disk = SimulatedDisk()
    prepare(LocalBackend("/store", system=disk, create=True))
    left = number

    def stop(_call: str, _path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Dead

    disk.hook = stop
    try:
        work(job_on(LocalBackend("/store", system=disk)))
    except _Dead:
        disk.hook = None
        return disk, True
    disk.hook = None
    return disk, False


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
