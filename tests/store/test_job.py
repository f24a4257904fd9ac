"""A job's store from outside: writing, committing, racing, deleting (S1, S2, S4, S5, S6, S7)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from everstep.core.health import Health
from everstep.core.ids import Point
from everstep.core.layout import Box
from everstep.errors import (
    BadName,
    CommitRefused,
    CorruptObject,
    JobOwned,
    ObjectMissing,
    StateMismatch,
    StoreNotWritable,
    UsageError,
)
from everstep.store import Branch, Job, OwnerIdentity, ReadRequest, Retention, open_store
from everstep.store.backends import Backend
from everstep.store.backends.local import LocalBackend
from everstep.store.backends.memory import MemoryBackend
from everstep.store.folder import Folder
from everstep.store.settings import make
from everstep.testing.faulty import BackendFault, FaultyBackend
from everstep.testing.snapshots import Tensor, loads_as, snapshot, world_of

ME = OwnerIdentity("me", "host", "boot", 1, 1)
OTHER = OwnerIdentity("other", "host", "boot", 2, 1)
FRESH = Branch(None, "fresh", "first start", 1)
POLICY = Retention(keep_last=1, grace_seconds=600)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def memory(clock: ManualClock) -> MemoryBackend:
    return MemoryBackend(clock=clock)


@pytest.fixture
def job(memory: MemoryBackend, clock: ManualClock) -> Job:
    return job_on(memory, clock)


def job_on(backend: Backend, clock: ManualClock) -> Job:
    return Job(Folder(backend, "a", make(chunk_bytes=64, store_id="0" * 32)), clock)


def packs_of(memory: MemoryBackend, point: Point) -> list[str]:
    """Keys of the point's packs, whether an index names them or not."""
    return sorted(key for key in memory.objects if f"/packs/{point}-" in key)


def begin(job: Job, branch: Branch = FRESH) -> int:
    attempt = job.claim(ME)
    job.write_branch(attempt, branch)
    return attempt


def save(job: Job, step: int, attempt: int = 1, world: int = 1, unique: str = "u") -> Point:
    for part in world_of(step, attempt, world):
        job.write_rank(part, facts={"torch": "2"}, unique=unique)
    assert job.try_commit(Point(step, attempt), world) == "committed"
    return Point(step, attempt)


# writing and committing


def test_s5_a_commit_waits_for_all_ranks_and_anyone_may_finish_it(job: Job) -> None:
    begin(job)
    parts = world_of(5, 1, 3)
    for part in (parts[2], parts[0]):
        job.write_rank(part, facts={}, unique="u")
        assert job.try_commit(Point(5, 1), 3) == "waiting"
        assert job.candidates() == []
    job.write_rank(parts[1], facts={}, unique="u")
    assert job.try_commit(Point(5, 1), 3) == "committed"
    assert job.candidates() == [Point(5, 1)]
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5)


def test_s1_health_goes_with_the_indexes_into_the_manifest(job: Job, clock: ManualClock) -> None:
    begin(job)
    parts = world_of(5, 1, 2, health=Health("finite", "all", "agreed"))
    other = snapshot(5, 1, 1, 2, health=Health("none", "part", "agreed"))
    for part in (parts[0], other):
        job.write_rank(part, facts={}, unique="u")
    assert job.try_commit(Point(5, 1), 2) == "committed"
    together = Health("finite", "part", "agreed")
    assert job.open_checkpoint(Point(5, 1)).manifest.health == together
    assert [i.health for i in job.checkpoints()] == [together]
    clock.now += 20
    old = clock.now
    save(job, 6)  # without a word of its health
    assert job.recovery_points(now=old) == (
        (Point(5, 1), "store", True, True),
        (Point(6, 1), "store", False, False),
    )
    assert not any(p.healthy for p in job.recovery_points(now=old, detection_delay=21.0))


def test_records_without_health_are_those_of_the_first_version(
    job: Job, memory: MemoryBackend
) -> None:
    """A store of before loads, and what is written without it loads there."""
    begin(job)
    save(job, 5)
    for key, data in memory.objects.items():
        if key.endswith(("manifest", ".index")):
            assert data[12:16] == (1).to_bytes(4, "little")
            assert "health" not in msgspec.msgpack.decode(data[40:])
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5)


def test_s6_nothing_is_written_before_the_branch(job: Job) -> None:
    assert job.claim(ME) == 1
    with pytest.raises(CommitRefused, match="no branch"):
        job.write_rank(snapshot(5, 1, 0, 1), facts={}, unique="u")


def test_two_writers_of_one_step_agree_and_the_second_leaves_nothing(
    job: Job, memory: MemoryBackend
) -> None:
    """An adopted keeper may write again what the dead one had written."""
    begin(job)
    part = snapshot(5, 1, 0, 1)
    assert job.write_rank(part, facts={"a": "1"}, unique="u1") == job.write_rank(
        part, facts={"a": "2"}, unique="u2"
    )
    assert len([key for key in memory.objects if "/packs/" in key]) == 1


def test_two_writers_with_different_bytes_never_mix(job: Job) -> None:
    begin(job)
    job.write_rank(snapshot(5, 1, 0, 1, seed=1), facts={}, unique="u1")
    with pytest.raises(CommitRefused, match="other content"):
        job.write_rank(snapshot(5, 1, 0, 1, seed=2), facts={}, unique="u2")
    job.try_commit(Point(5, 1), 1)
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5, seed=1)


def test_a_second_writer_between_pack_and_index_agrees(
    memory: MemoryBackend, clock: ManualClock
) -> None:
    """Both see no index, both write packs; one index wins, and its pack is the one named."""
    begin(job_on(memory, clock))
    part = snapshot(5, 1, 0, 1)
    meddler = Meddler(
        memory,
        ("create", "packs"),
        lambda: job_on(memory, clock).write_rank(part, facts={}, unique="first"),
    )
    job_on(meddler, clock).write_rank(part, facts={}, unique="second")
    job = job_on(memory, clock)
    assert len(packs_of(memory, Point(5, 1))) == 2
    assert job.try_commit(Point(5, 1), 1) == "committed"
    index = job.open_checkpoint(Point(5, 1)).indexes[0]
    assert "-first.pack" in index.packs[0].key
    clock.now += 700
    report = job.execute(job.retain(POLICY))
    assert report.packs_deleted == 1
    assert [key for key in packs_of(memory, Point(5, 1)) if "first" in key]
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5)


def test_s1_racing_committers_write_equal_bytes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), create=True, chunk_bytes=64)
    begin(store.job("a"))
    for part in world_of(5, 1, 2):
        store.job("a").write_rank(part, facts={}, unique="u")
    barrier = threading.Barrier(6)

    def commit(_: int) -> str:
        barrier.wait(timeout=30)
        return open_store(str(tmp_path)).job("a").try_commit(Point(5, 1), 2)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(commit, range(6))) == {"committed"}
    assert loads_as(store.job("a").open_checkpoint(Point(5, 1)), 5)


def test_s5_a_manifest_is_never_built_from_two_layouts(job: Job) -> None:
    begin(job)
    for rank, layout in ((0, "1a"), (1, "1b")):
        job.write_rank(snapshot(5, 1, rank, 2, layout=layout), facts={}, unique="u")
    with pytest.raises(CommitRefused, match="layout"):
        job.try_commit(Point(5, 1), 2)
    assert job.candidates() == []


def test_s5_a_manifest_is_never_built_from_two_worlds(job: Job) -> None:
    begin(job)
    for world in (1, 2):
        job.write_rank(snapshot(5, 1, 0, world), facts={}, unique=f"u{world}")
    for world in (1, 2):
        with pytest.raises(CommitRefused, match="world"):
            job.try_commit(Point(5, 1), world)


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1)])
def test_s5_a_hole_or_an_overlap_is_refused(job: Job, ranks: tuple[int, int]) -> None:
    """Two ranks that both persisted the same half: the other half is missing."""
    begin(job)
    for rank, half in enumerate(ranks):
        part = snapshot(5, 1, half, 2, tensors=(Tensor("w", "float32", (6, 3)),))
        layout = msgspec.structs.replace(part.layout, rank=rank)
        job.write_rank(msgspec.structs.replace(part, layout=layout), facts={}, unique="u")
    with pytest.raises(CommitRefused, match="w stored twice"):
        job.try_commit(Point(5, 1), 2)


def test_s5_a_hole_is_refused(job: Job) -> None:
    begin(job)
    part = snapshot(5, 1, 0, 2)
    layout = msgspec.structs.replace(part.layout, world=1)
    job.write_rank(msgspec.structs.replace(part, layout=layout), facts={}, unique="u")
    with pytest.raises(CommitRefused, match="w with 6 of its 15 elements"):
        job.try_commit(Point(5, 1), 1)


def test_s5_a_missing_part_is_refused(job: Job) -> None:
    begin(job)
    part = snapshot(5, 1, 0, 1)
    layout = msgspec.structs.replace(part.layout, extents=part.layout.extents[1:])
    broken = msgspec.structs.replace(part, layout=layout, payload=_without_first(part.payload))
    job.write_rank(broken, facts={}, unique="u")
    with pytest.raises(CommitRefused, match="w, which rank 0 has to load, nowhere"):
        job.try_commit(Point(5, 1), 1)


def _without_first(payload: memoryview) -> memoryview:
    return memoryview(bytes(64) + bytes(payload[64:]))


def test_a_commit_without_its_pack_is_refused(job: Job, memory: MemoryBackend) -> None:
    begin(job)
    job.write_rank(snapshot(5, 1, 0, 1), facts={}, unique="u")
    memory.delete(packs_of(memory, Point(5, 1))[0])
    with pytest.raises(CommitRefused, match="gone"):
        job.try_commit(Point(5, 1), 1)


def test_s3_a_snapshot_with_dirty_padding_is_refused(job: Job) -> None:
    begin(job)
    part = snapshot(5, 1, 0, 1)
    end = part.layout.extents[0].nbytes
    payload = bytearray(part.payload)
    payload[end] = 1
    dirty = msgspec.structs.replace(part, payload=memoryview(payload))
    with pytest.raises(CorruptObject, match="between its extents"):
        job.write_rank(dirty, facts={}, unique="u")
    assert job.checkpoints() == []


def test_bad_arguments_are_refused_before_anything_is_written(job: Job) -> None:
    begin(job)
    part = snapshot(5, 1, 0, 1)
    for broken in (
        msgspec.structs.replace(part, payload=part.payload[:10]),
        msgspec.structs.replace(part, attempt=0),
        msgspec.structs.replace(part, step=6),
    ):
        with pytest.raises((UsageError, CommitRefused)):
            job.write_rank(broken, facts={}, unique="u")
    with pytest.raises(UsageError, match="digests"):
        job.write_rank(part, facts={}, unique="u", digests=lambda: [b"x"])
    with pytest.raises(BadName):
        job.write_rank(part, facts={}, unique="../x")
    assert job.checkpoints() == []


def test_digests_and_progress_of_the_caller(job: Job) -> None:
    from everstep.store import chunk_extents, digest

    begin(job)
    part = snapshot(5, 1, 0, 1)
    known = [digest(part.payload[at : at + n]) for _, at, n in chunk_extents(part.layout, 64)]
    seen: list[int] = []
    asked_after: list[int] = []

    def digests() -> list[bytes]:
        asked_after.append(sum(seen))
        return known

    job.write_rank(part, facts={}, unique="u", digests=digests, on_progress=seen.append)
    assert [at >= len(part.payload) for at in asked_after] == [True], "asked when it is written"
    job.try_commit(Point(5, 1), 1)
    checkpoint = job.open_checkpoint(Point(5, 1))
    assert sum(seen) == checkpoint.indexes[0].packs[0].length
    assert loads_as(checkpoint, 5)


# who runs it


def test_claims_are_handed_out_once(tmp_path: Path) -> None:
    open_store(str(tmp_path), create=True)

    def claim(_: int) -> int:
        return open_store(str(tmp_path)).job("a").claim(ME)

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(1, 9))


def test_a_higher_claim_of_a_stranger_stops_the_commit(job: Job) -> None:
    assert (job.claim(ME), job.claim(ME)) == (1, 2)
    job.check_claim(2)
    job.check_claim(1, agents=["me"])
    with pytest.raises(CommitRefused, match=r"attempt 2.*agent me"):
        job.check_claim(1)


def test_a_branch_is_written_once(job: Job) -> None:
    begin(job)
    job.write_branch(1, FRESH)
    with pytest.raises(CommitRefused, match="another branch"):
        job.write_branch(1, Branch(None, "fresh", "another reason", 1))
    assert job.branches() == {1: FRESH}


def test_s6_a_branch_needs_the_branch_that_it_went_on_from(job: Job) -> None:
    for attempt, branch, error in (
        (2, Branch(Point(3, 1), "memory"), CommitRefused),
        (2, Branch(Point(3, 2), "memory"), UsageError),
        (2, Branch(None, "store"), UsageError),
        (2, Branch(Point(3, 1), "fresh"), UsageError),
    ):
        with pytest.raises(error):
            job.write_branch(attempt, branch)
    job.write_branch(1, FRESH)
    job.write_branch(2, Branch(Point(3, 1), "memory"))


def test_an_owner_is_respected_until_stale_released_or_dead(job: Job, clock: ManualClock) -> None:
    job.acquire_owner(ME, is_alive=lambda _: True, attempt=1)
    with pytest.raises(JobOwned, match="pid 1 on host"):
        job.acquire_owner(OTHER, is_alive=lambda _: True)
    clock.now += 25
    job.renew_owner(ME)
    clock.now += 25
    with pytest.raises(JobOwned):
        job.acquire_owner(OTHER, is_alive=lambda _: True)
    clock.now += 6
    job.acquire_owner(OTHER, is_alive=lambda _: True)
    with pytest.raises(JobOwned, match="other"):
        job.renew_owner(ME)
    job.release_owner(ME)
    assert job.owner() is not None
    job.release_owner(OTHER)
    assert job.owner() is None
    job.acquire_owner(ME, is_alive=lambda _: True)


def test_an_owner_that_is_dead_here_is_stale_at_once(job: Job) -> None:
    asked: list[OwnerIdentity] = []

    def is_alive(identity: OwnerIdentity) -> bool:
        asked.append(identity)
        return False

    job.acquire_owner(ME, is_alive=is_alive)
    job.acquire_owner(OTHER, is_alive=is_alive)
    assert asked == [ME]
    elsewhere = OwnerIdentity("x", "host2", "boot", 3, 1)
    with pytest.raises(JobOwned):
        job.acquire_owner(elsewhere, is_alive=is_alive)
    rebooted = OwnerIdentity("x", "host", "boot2", 3, 1)
    job.acquire_owner(rebooted, is_alive=lambda _: True)
    assert asked == [ME]


def test_of_many_agents_one_owns(tmp_path: Path) -> None:
    open_store(str(tmp_path), create=True)
    barrier = threading.Barrier(6)

    def acquire(n: int) -> bool:
        mine = OwnerIdentity(f"agent{n}", "host", "boot", n, 1)
        barrier.wait(timeout=30)
        try:
            open_store(str(tmp_path)).job("a").acquire_owner(mine, is_alive=lambda _: True)
        except JobOwned:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(acquire, range(6))) == 1


def test_an_owner_that_renews_twice_at_once_is_no_stranger_to_itself(tmp_path: Path) -> None:
    """A restart renews while the background renewal is under way."""
    job = open_store(str(tmp_path), create=True).job("a")
    job.acquire_owner(ME, is_alive=lambda _: True)
    barrier = threading.Barrier(4)

    def renew(_: int) -> None:
        barrier.wait(timeout=30)
        for _ in range(5):
            job.renew_owner(ME)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(renew, range(4)))


def test_a_lost_answer_to_the_owner_is_read_back(memory: MemoryBackend, clock: ManualClock) -> None:
    fault = BackendFault("lost", call="put", key="refs/owner")
    job_on(FaultyBackend(memory, [fault]), clock).acquire_owner(ME, is_alive=lambda _: True)
    job_on(memory, clock).renew_owner(ME)


# lineage end to end


def test_s6_a_late_commit_of_a_dead_attempt_does_not_lead_back(job: Job) -> None:
    begin(job)
    save(job, 5)
    late = snapshot(9, 1, 0, 1)
    job.write_rank(late, facts={}, unique="u")
    begin(job, Branch(Point(5, 1), "store"))
    save(job, 7, attempt=2)
    assert job.try_commit(Point(9, 1), 1) == "committed"
    assert job.candidates() == [Point(7, 2), Point(5, 1)]


def test_s6_a_late_commit_that_was_restored_from_memory_counts(job: Job) -> None:
    begin(job)
    save(job, 5)
    job.write_rank(snapshot(9, 1, 0, 1), facts={}, unique="u")
    begin(job, Branch(Point(9, 1), "memory"))
    assert job.candidates() == [Point(5, 1)]
    assert job.try_commit(Point(9, 1), 1) == "committed"
    assert job.candidates() == [Point(9, 1), Point(5, 1)]


def test_r5_a_deliberate_fresh_start_expects_nothing(job: Job) -> None:
    assert not job.expected()
    begin(job)
    assert not job.expected()
    save(job, 5)
    assert job.expected()
    begin(job, Branch(None, "fresh", "--resume=never"))
    assert not job.expected()
    assert job.candidates() == []


# deleting


class Meddler(FaultyBackend):
    """Does something just before the first call that matches."""

    def __init__(self, inner: Backend, at: tuple[str, str], do: Callable[[], object]) -> None:
        super().__init__(inner)
        self._at, self._do = at, do
        self._done = False

    def _due(self, call: str, key: str) -> str:
        if not self._done and call == self._at[0] and self._at[1] in key:
            self._done = True
            self._do()
        return super()._due(call, key)


def test_s2_the_order_of_deleting(job: Job, memory: MemoryBackend, clock: ManualClock) -> None:
    begin(job)
    save(job, 5)
    clock.now += 700
    save(job, 9)
    counting = FaultyBackend(memory)
    slow = job_on(counting, clock)
    report = slow.execute(slow.retain(POLICY))
    assert report.tombstoned == (Point(5, 1),)
    deleted = [key for call, key in counting.calls if call == "delete"]
    assert [key.rsplit("/", 1)[1] for key in deleted] == [
        "manifest",
        "rank-00000-of-00001.index",
    ]
    tombstone = ("create", "jobs/a/steps/000000000005-000001/tombstone")
    assert counting.calls.index(tombstone) < counting.calls.index(("delete", deleted[0]))
    with pytest.raises(ObjectMissing, match="tombstone"):
        job.open_checkpoint(Point(5, 1))
    assert len(packs_of(memory, Point(5, 1))) == 1
    clock.now += 599
    assert job.execute(job.retain(POLICY)).packs_deleted == 0
    clock.now += 2
    assert job.execute(job.retain(POLICY)).packs_deleted == 1
    assert packs_of(memory, Point(5, 1)) == []
    clock.now += 24 * 3600 - 1
    assert job.execute(job.retain(POLICY)).tombstones_removed == ()
    clock.now += 2
    assert job.execute(job.retain(POLICY)).tombstones_removed == (Point(5, 1),)
    assert [info.point for info in job.checkpoints()] == [Point(9, 1)]
    assert loads_as(job.open_checkpoint(Point(9, 1)), 9)


def test_s2_a_sweep_that_ends_at_any_call_is_finished_by_the_next(
    memory: MemoryBackend, clock: ManualClock
) -> None:
    job = job_on(memory, clock)
    begin(job)
    save(job, 5)
    clock.now += 700
    save(job, 9)
    start = dict(memory.objects), dict(memory.modified)
    number = 0
    while True:
        memory.objects, memory.modified = dict(start[0]), dict(start[1])
        clock.now = 1700.0
        faulty = FaultyBackend(memory, [BackendFault("fail", after=number)])
        failed = _fails(job_on(faulty, clock))
        for point in job.candidates():
            assert loads_as(job.open_checkpoint(point), point.step)
        clock.now += 601
        job.execute(job.retain(POLICY))
        clock.now += 601
        job.execute(job.retain(POLICY))
        assert packs_of(memory, Point(5, 1)) == []
        assert job.candidates() == [Point(9, 1)]
        if not failed:
            break
        number += 1
    assert number > 20


def _fails(job: Job) -> bool:
    from everstep.errors import StoreError

    try:
        job.execute(job.retain(POLICY))
    except StoreError:
        return True
    return False


def test_s2_a_committer_that_races_a_delete_is_told(
    memory: MemoryBackend, clock: ManualClock
) -> None:
    """The tombstone comes between the committer's first look and its create."""
    job = job_on(memory, clock)
    begin(job)
    save(job, 9)
    job.write_rank(snapshot(5, 1, 0, 1), facts={}, unique="u")
    clock.now += 700

    def sweep() -> None:
        assert job.execute(job.retain(POLICY)).tombstoned == (Point(5, 1),)

    meddler = Meddler(memory, ("create", "5-000001/manifest"), sweep)
    with pytest.raises(CommitRefused, match="being deleted"):
        job_on(meddler, clock).try_commit(Point(5, 1), 1)
    assert job.candidates() == [Point(9, 1)]
    with pytest.raises(CommitRefused, match="being deleted"):
        job.write_rank(snapshot(5, 1, 0, 1), facts={}, unique="u2")
    job.execute(job.retain(POLICY))
    assert "jobs/a/steps/000000000005-000001/manifest" not in memory.objects


def test_s7_a_plan_that_is_out_of_date_removes_nothing_more(job: Job, clock: ManualClock) -> None:
    begin(job)
    save(job, 5)
    save(job, 9)
    clock.now += 700
    plan = job.retain(POLICY)
    assert [ruling.point for ruling in plan.remove] == [Point(5, 1)]
    begin(job, Branch(Point(5, 1), "store"))
    report = job.execute(plan)
    assert report.tombstoned == ()
    assert report.skipped == (Point(5, 1),)
    assert loads_as(job.open_checkpoint(Point(5, 1)), 5)


def test_s7_unreadable_proofs_block_and_verifying_unblocks(
    job: Job, memory: MemoryBackend, clock: ManualClock
) -> None:
    begin(job)
    save(job, 5)
    save(job, 9)
    job.verify(Point(5, 1), deep=True)
    memory.put("jobs/a/refs/verified", b"scribble")
    clock.now += 700
    assert job.retain(POLICY).remove == ()
    assert job.verify(Point(5, 1), deep=True).proof == "bytes"
    plan = job.retain(POLICY)
    assert plan.remove == ()
    assert {r.point: r.reason for r in plan.keep}[Point(5, 1)] == "the last verified"


def test_incomplete_steps_of_dead_attempts_expire(
    job: Job, memory: MemoryBackend, clock: ManualClock
) -> None:
    begin(job)
    save(job, 5)
    job.write_rank(snapshot(9, 1, 0, 2), facts={}, unique="u")
    begin(job, Branch(Point(5, 1), "store"))
    assert job.retain(POLICY).remove == ()
    clock.now += 700
    job.execute(job.retain(POLICY))
    clock.now += 700
    job.execute(job.retain(POLICY))
    assert not [key for key in memory.objects if "000000000009" in key and "pack" in key]


# reading


def test_s3_reading_changes_nothing(job: Job, memory: MemoryBackend) -> None:
    begin(job)
    point = save(job, 5)
    job.acquire_owner(ME, is_alive=lambda _: True)
    before = dict(memory.objects)
    assert loads_as(job.open_checkpoint(point), 5)
    job.candidates(), job.checkpoints(), job.expected(), job.branches(), job.owner()
    assert memory.objects == before


def test_what_a_checkpoint_does_not_hold_is_a_mismatch(job: Job) -> None:
    begin(job)
    checkpoint = job.open_checkpoint(save(job, 5))
    out = memoryview(bytearray(60))
    for fqn, rank, box, buffer in (
        ("new", -1, Box((0, 0), (5, 3)), out),
        ("w", 0, Box((0, 0), (5, 3)), out),
        ("w", -1, Box((0, 0), (6, 3)), out),
        ("w", -1, Box((0,), (5,)), out),
        ("w", -1, Box((0, 0), (5, 3)), out[:-4]),
    ):
        with pytest.raises(StateMismatch, match=fqn):
            checkpoint.load([ReadRequest(fqn, rank, box, buffer)])
    with pytest.raises(UsageError, match="writable"):
        checkpoint.load([ReadRequest("w", -1, Box((0, 0), (5, 3)), out.toreadonly())])


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    import errno
    import os

    from everstep.store.backends.posix import PosixOs

    class ReadOnly(PosixOs):
        def open_new(self, path: str) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    begin(open_store(str(tmp_path), create=True, chunk_bytes=64).job("a"))
    backend = LocalBackend(str(tmp_path), system=ReadOnly())
    job = job_on(backend, ManualClock())
    with pytest.raises(StoreNotWritable, match="--store"):
        job.write_rank(snapshot(5, 1, 0, 1), facts={}, unique="u")


def test_jobs_are_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), create=True)
    assert store.jobs() == []
    assert not store.job("b").exists()
    for name in ("b", "a"):
        begin(store.job(name))
    assert list(store.jobs()) == ["a", "b"]
    assert store.job("b").exists()
    with pytest.raises(BadName):
        store.job("../x")


def test_settings_of_a_store_are_fixed(tmp_path: Path) -> None:
    made = open_store(str(tmp_path), create=True, digest="blake3", chunk_bytes=128).settings
    assert open_store(str(tmp_path), create=True).settings == made
    assert (made.digest, made.chunk_bytes) == ("blake3", 128)
    with pytest.raises(UsageError, match="chunk_bytes"):
        open_store(str(tmp_path), chunk_bytes=64)


def test_a_blake3_store_round_trips(tmp_path: Path) -> None:
    job = open_store(str(tmp_path), create=True, digest="blake3", chunk_bytes=64).job("a")
    begin(job)
    point = save(job, 5, world=2)
    assert loads_as(job.open_checkpoint(point), 5)
    assert len(job.open_checkpoint(point).manifest.ranks[0].digest) == 32
    assert job.verify(point, deep=True).ok
