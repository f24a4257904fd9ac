"""Deaths and lost answers at every call of writers and committer, a full disk (S1, S2, S4).

The question is always the same: does a reader find the previous or the new checkpoint, whole, and
can the next process finish? Lost power is in test_power.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os

import pytest
from crash_job import ME, NEW, OLD, TENSORS, WORLD, job_on, newest_whole, prepare, recover, save

from everstep.errors import CorruptObject, StoreError, StoreFull
from everstep.store.backends.local import LocalBackend
from everstep.store.backends.memory import MemoryBackend
from everstep.testing.faulty import BackendFault, FaultyBackend, Stopped
from everstep.testing.recording_os import SimulatedDisk
from everstep.testing.snapshots import world_of


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
