"""The job's history in its store (spec section 12): S2, S3, and merging what was kept elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.history import BODY_BYTES, KINDS, Entry
from everstep.core.ids import Point
from everstep.errors import BadName, CorruptObject, StoreError, UsageError
from everstep.store import Branch, Job, OwnerIdentity, Retention, keys, open_store, records
from everstep.store.backends import Backend
from everstep.store.backends.memory import MemoryBackend
from everstep.store.digests import digest
from everstep.store.folder import Folder
from everstep.store.history import KEEP_BYTES, KEEP_SECONDS
from everstep.store.records import HistoryRecord
from everstep.store.settings import encode, make
from everstep.testing.faulty import BackendFault, FaultyBackend, Stopped
from everstep.testing.snapshots import world_of

SETTINGS = make(chunk_bytes=64, store_id="0" * 32)
ME = OwnerIdentity("me", "host", "boot", 1, 1)
FOLDER = "jobs/a/history/"


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now


def entry(attempt: int = 1, sequence: int = 1, body: bytes = b"\x80", **changes: object) -> Entry:
    found = Entry("incident", attempt, sequence, 1, body)
    return msgspec.structs.replace(found, **changes)


def job_on(backend: Backend, name: str = "a") -> Job:
    return Job(Folder(backend, name, SETTINGS), ManualClock())


def history_keys(memory: MemoryBackend) -> list[str]:
    return sorted(key for key in memory.objects if "/history/" in key)


@pytest.fixture
def memory() -> MemoryBackend:
    found = MemoryBackend(clock=ManualClock())
    found.create("everstep.json", encode(SETTINGS))
    return found


def test_records_are_read_in_the_order_of_the_spec_whatever_order_they_came_in(
    memory: MemoryBackend,
) -> None:
    job = job_on(memory)
    wanted = [entry(0, 3), entry(1, 1, b"a"), entry(1, 1, b"b"), entry(1, 2), entry(12, 1)]
    for one in (wanted[4], wanted[2], wanted[0], wanted[3], wanted[1]):
        job.record_history(one)
    found = job.history()
    assert list(found.entries) == wanted
    assert (found.problems, found.highest) == ((), 12)


def test_s2_a_record_that_is_written_again_is_there_once(memory: MemoryBackend) -> None:
    """By anyone, from anywhere: its name is its content."""
    first = job_on(memory).record_history(entry())
    assert job_on(memory).record_history(entry()) == first
    assert len(history_keys(memory)) == 1
    assert first.startswith("history/000001-000001-incident-")
    other = job_on(memory).record_history(entry(body=b"\x90"))
    assert other != first
    assert len(job_on(memory).history().entries) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_key_that_names_it(memory: MemoryBackend, kind: str) -> None:
    key = job_on(memory).record_history(entry(kind=kind))
    named = keys.parse_history(key)
    assert named is not None
    assert named.kind == kind
    assert job_on(memory).history().entries[0].kind == kind


def test_a_lost_answer_is_read_back(memory: MemoryBackend) -> None:
    faulty = FaultyBackend(memory, [BackendFault("lost", "create")])
    job_on(faulty).record_history(entry())
    assert job_on(memory).history().entries == (entry(),)


def test_what_cannot_be_stored_is_refused() -> None:
    job = job_on(MemoryBackend())
    with pytest.raises(UsageError, match=f"at most {BODY_BYTES}"):
        job.record_history(entry(body=bytes(BODY_BYTES + 1)))
    with pytest.raises(BadName):
        job.record_history(entry(sequence=10**6))


def test_s3_every_flipped_bit_is_found_named_and_passed_over(memory: MemoryBackend) -> None:
    """By a reader, and by verify; what is damaged still tells of its attempt by its name."""
    job = job_on(memory)
    job.record_history(entry(1, body=b"\x81\xa1a\x01"))
    damaged = job.record_history(entry(7, body=b"\x81\xa1b\x02"))
    whole = memory.objects[f"jobs/a/{damaged}"]
    for bit in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        memory.objects[f"jobs/a/{damaged}"] = bytes(changed)
        found = job.history()
        assert [e.attempt for e in found.entries] == [1], bit
        assert len(found.problems) == 1
        assert damaged in found.problems[0]
        assert found.highest == 7
    for cut in (b"", whole[:30], whole[:-1], whole + b"x"):
        memory.objects[f"jobs/a/{damaged}"] = cut
        assert len(job.history().problems) == 1


def test_s3_a_record_under_another_name_is_none(memory: MemoryBackend) -> None:
    """Moved to another attempt, another place, or another job."""
    job = job_on(memory)
    key = job.record_history(entry(1))
    data = memory.objects.pop(f"jobs/a/{key}")
    name = key.rpartition("-")[2]
    for moved in (
        f"jobs/a/history/000002-000001-incident-{name}",
        f"jobs/a/history/000001-000002-incident-{name}",
        f"jobs/a/history/000001-000001-decision-{name}",
        f"jobs/a/history/000001-000001-incident-{'0' * 32}",
        f"jobs/b/{key}",
    ):
        memory.objects = {moved: data}
        memory.modified[moved] = 0.0
        found = job_on(memory, moved.split("/")[1]).history()
        assert found.entries == ()
        assert moved in found.problems[0]


def test_a_later_format_is_refused_by_name_and_the_others_are_read(memory: MemoryBackend) -> None:
    job = job_on(memory)
    job.record_history(entry(1))
    later = bytearray(records.encode(HistoryRecord("a", "decision", 2, 1, 1, b"\x80")))
    later[12:16] = (9).to_bytes(4, "little")
    later[24:40] = digest(bytes(later[:24] + later[40:]))
    key = f"{FOLDER}000002-000001-decision-{digest(bytes(later)).hex()}"
    memory.create(key, bytes(later))
    found = job.history()
    assert [e.attempt for e in found.entries] == [1]
    assert "has version 9 of its format" in found.problems[0]
    assert key in found.problems[0]
    assert found.highest == 2


def test_what_is_known_is_not_read_again(memory: MemoryBackend) -> None:
    job = job_on(memory)
    job.record_history(entry(1))
    known = job.history()
    job.record_history(entry(2))
    counting = FaultyBackend(memory)
    found = job_on(counting).history(known)
    assert [e.attempt for e in found.entries] == [1, 2]
    assert [call for call, _ in counting.calls] == ["list", "get"]
    memory.objects = {
        key: data for key, data in memory.objects.items() if "history/000001" not in key
    }
    assert [e.attempt for e in job.history(found).entries] == [2], "what has expired is gone"


def test_a_strange_name_is_told_and_passed_over(memory: MemoryBackend) -> None:
    job = job_on(memory)
    job.record_history(entry())
    memory.create(f"{FOLDER}notes.txt", b"mine")
    found = job.history()
    assert len(found.entries) == 1
    assert found.problems == (f"{FOLDER}notes.txt is no name of a history record.",)


def test_a_store_that_fails_is_no_shorter_history(memory: MemoryBackend) -> None:
    """F3: what is not read would be a budget that refills itself."""
    job_on(memory).record_history(entry())
    for call in ("list", "get"):
        faulty = FaultyBackend(memory, [BackendFault("fail", call)])
        with pytest.raises(StoreError):
            job_on(faulty).history()


# what was kept on a local disk while the store was away


def test_what_was_recorded_locally_is_merged_once(memory: MemoryBackend, tmp_path: Path) -> None:
    job = job_on(memory)
    local = open_store(str(tmp_path / "local"), create=True).job("a")
    job.record_history(entry(1))
    for one in (entry(1), entry(2), entry(2, 2)):
        local.record_history(one)
    report = job.merge_history(local)
    assert (report.written, report.known, report.problems) == (2, 1, ())
    assert job.history().entries == (entry(1), entry(2), entry(2, 2))
    assert local.history().entries == ()
    again = job.merge_history(local)
    assert (again.written, again.known) == (0, 0)


@pytest.mark.parametrize("action", ["stop", "stop-after", "fail", "lost"])
def test_a_merge_that_ends_at_any_call_is_carried_on(action: str) -> None:
    """Of either store: no record is lost, and none is there twice."""
    entries = [entry(1), entry(1, 2), entry(2)]

    def prepared() -> tuple[MemoryBackend, MemoryBackend]:
        theirs, mine = MemoryBackend("theirs"), MemoryBackend("mine")
        job_on(theirs).record_history(entries[0])
        for one in entries:
            job_on(mine).record_history(one)
        return theirs, mine

    theirs, mine = prepared()
    counting = FaultyBackend(theirs), FaultyBackend(mine)
    job_on(counting[0]).merge_history(job_on(counting[1]))
    for which in (0, 1):
        for number in range(len(counting[which].calls)):
            both = prepared()
            faulty = list[Backend](both)
            faulty[which] = FaultyBackend(both[which], [BackendFault(action, after=number)])
            with contextlib.suppress(StoreError, Stopped):
                job_on(faulty[0]).merge_history(job_on(faulty[1]))
            told = {*job_on(both[0]).history().entries, *job_on(both[1]).history().entries}
            assert told == set(entries), (which, number)
            job_on(both[0]).merge_history(job_on(both[1]))
            assert list(job_on(both[0]).history().entries) == entries
            assert job_on(both[1]).history().entries == ()


def test_a_damaged_local_record_stays_where_it_is_and_the_others_are_merged() -> None:
    theirs, mine = MemoryBackend("theirs"), MemoryBackend("mine")
    key = job_on(mine).record_history(entry(1))
    job_on(mine).record_history(entry(2))
    mine.objects[f"jobs/a/{key}"] = b"damaged"
    report = job_on(theirs).merge_history(job_on(mine))
    assert report.written == 1
    assert key in report.problems[0]
    assert [e.attempt for e in job_on(theirs).history().entries] == [2]
    assert history_keys(mine) == [f"jobs/a/{key}"]


def test_a_damaged_record_in_the_store_stops_no_merge_of_the_others() -> None:
    theirs, mine = MemoryBackend("theirs"), MemoryBackend("mine")
    key = job_on(mine).record_history(entry(1))
    job_on(mine).record_history(entry(2))
    theirs.create(f"jobs/a/{key}", b"damaged")
    with pytest.raises(CorruptObject, match="other bytes"):
        job_on(theirs).record_history(entry(1))
    report = job_on(theirs).merge_history(job_on(mine))
    assert (report.written, len(report.problems)) == (1, 1)
    assert history_keys(mine) == [f"jobs/a/{key}"], "the sound copy is kept"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.binary(max_size=3)), max_size=8),
    st.data(),
)
def test_histories_merged_in_any_order_are_the_same(
    told: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    entries = [entry(*one) for one in told]
    theirs = MemoryBackend()
    for number, one in enumerate(data.draw(st.permutations(entries))):
        place = MemoryBackend(f"local{number % 2}")
        job_on(place).record_history(one)
        job_on(theirs).merge_history(job_on(place))
    found = job_on(theirs).history().entries
    assert set(found) == set(entries)
    assert list(found) == sorted(found, key=lambda e: (e.attempt, e.sequence, e.body))


# retention, sweep, verify


def test_sweep_keeps_history_but_what_is_past_its_age_and_its_size() -> None:
    clock = ManualClock()
    memory = MemoryBackend(clock=clock)
    job = Job(Folder(memory, "a", SETTINGS), clock)
    body = bytes(BODY_BYTES - 1024)
    count = KEEP_BYTES // BODY_BYTES + 20
    for number in range(count):
        job.record_history(entry(number, body=body + number.to_bytes(4, "big")))
    policy = Retention(keep_last=1)

    def sweep(age: float) -> int:
        clock.now = 1000.0 + age
        return job.execute(job.retain(policy)).history_removed

    assert sweep(KEEP_SECONDS - 1) == 0, "too young, however large"
    assert sweep(KEEP_SECONDS) > 0
    left = job.history().entries
    assert sum(len(memory.objects[key]) for key in history_keys(memory)) <= KEEP_BYTES
    assert [e.attempt for e in left] == list(range(count - len(left), count)), "the oldest go"
    assert sweep(10 * KEEP_SECONDS) == 0, "old, and small enough"


def test_verify_deep_checks_the_history(memory: MemoryBackend) -> None:
    job = job_on(memory)
    job.claim(ME)
    job.write_branch(1, Branch(None, "fresh", "first", 1))
    for part in world_of(5, 1, 1):
        job.write_rank(part, facts={}, unique="u")
        job.try_commit(Point(5, 1), 1)
    key = job.record_history(entry(1, body=b"\x81\xa1a\x01"))
    assert job.verify_around(deep=True).ok
    whole = memory.objects[f"jobs/a/{key}"]
    memory.objects[f"jobs/a/{key}"] = whole[:-1] + b"\x00"
    report = job.verify_around(deep=True)
    assert key in report.damage[0]
    assert job.verify(Point(5, 1), deep=True).ok, "the checkpoint itself is sound"
    memory.objects[f"jobs/a/{key}"] = whole
    memory.create(f"{FOLDER}strange", b"")
    assert "strange" in job.verify_around(deep=True).damage[0]


def test_the_history_goes_through_a_real_disk(tmp_path: Path) -> None:
    job = open_store(str(tmp_path / "store"), create=True).job("a")
    for number in range(3):
        job.record_history(entry(number + 1))
    read = open_store(str(tmp_path / "store")).job("a").history()
    assert [e.attempt for e in read.entries] == [1, 2, 3]
    assert not list((tmp_path / "store" / "jobs/a/history").glob(".*"))
