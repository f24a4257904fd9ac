"""The cache beside the store: it saves reading, and is never believed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.core.clock import SystemClock
from everstep.core.history import Entry
from everstep.errors import StoreError
from everstep.store import Job, cache
from everstep.store.backends.memory import MemoryBackend
from everstep.store.folder import Folder
from everstep.store.settings import make
from everstep.testing.faulty import BackendFault, FaultyBackend


class Counting(MemoryBackend):
    """A backend that counts the objects that are fetched."""

    fetched = 0

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        self.fetched += 1
        return super().get(key, offset, length)


def entry(number: int, body: bytes = b"body") -> Entry:
    return Entry("progress", 1, number, 1, body)


def folder_on(backend: object, store_id: str = "0" * 32, job: str = "a") -> Folder:
    return Folder(backend, job, make(chunk_bytes=64, store_id=store_id))  # type: ignore[arg-type]


@pytest.fixture
def backend() -> Counting:
    return Counting("counted")


@pytest.fixture
def folder(backend: Counting) -> Folder:
    return folder_on(backend)


@pytest.fixture
def job(folder: Folder) -> Job:
    found = Job(folder, SystemClock())
    for number in range(1, 6):
        found.record_history(entry(number))
    return found


def fetched(backend: Counting, job: Job, place: Path) -> int:
    """How many objects a reader through the cache fetches; what it gives is right."""
    before = backend.fetched
    found = job.history(cache=place)
    count = backend.fetched - before
    assert found == job.history()
    return count


def test_only_what_is_new_is_fetched(backend: Counting, job: Job, tmp_path: Path) -> None:
    assert fetched(backend, job, tmp_path) == 5
    assert fetched(backend, job, tmp_path) == 0
    job.record_history(entry(6))
    assert fetched(backend, job, tmp_path) == 1
    assert fetched(backend, job, tmp_path) == 0


def test_a_record_that_the_store_does_not_list_is_dropped(
    backend: Counting, folder: Folder, job: Job, tmp_path: Path
) -> None:
    """The store alone says what there is."""
    keys = job.history(cache=tmp_path).keys
    folder.delete(keys[2])
    assert keys[2] not in job.history(cache=tmp_path).keys
    with sqlite3.connect(cache.path_of(folder, tmp_path)) as database:
        left = {key for (key,) in database.execute("SELECT key FROM entries")}
    database.close()
    assert left == set(keys) - {keys[2]}
    assert fetched(backend, job, tmp_path) == 0


def test_other_stores_and_jobs_have_files_of_their_own(tmp_path: Path) -> None:
    paths = {
        cache.path_of(folder_on(None, store, job), tmp_path)
        for store in ("0" * 32, "1" * 32)
        for job in ("a", "b")
    }
    assert len(paths) == 4


def change(sql: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with sqlite3.connect(path) as database:
            database.execute(sql)
        database.close()

    return damage


def garbage(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def truncated(path: Path) -> None:
    os.truncate(path, 5000)


def flipped(path: Path) -> None:
    data = path.read_bytes()
    head, _, rows = data.rpartition(b"history/")
    path.write_bytes(head.replace(b"progress", b"progresx") + b"history/" + rows)


DAMAGE: dict[str, tuple[Callable[[Path], None], int]] = {
    "garbage": (garbage, 5),
    "truncated": (truncated, 5),
    "flipped bits": (flipped, 4),
    "another version": (change("PRAGMA user_version = 99"), 5),
    "another table": (change("ALTER TABLE entries RENAME COLUMN body TO head"), 5),
    "a body of something else": (change("UPDATE entries SET body = x'00' WHERE sequence = 2"), 1),
    "a number that is none": (change("UPDATE entries SET format = 'x' WHERE sequence = 2"), 1),
    "a kind that is none": (change("UPDATE entries SET kind = 'x' WHERE sequence = 2"), 1),
    "a record that never was": (
        change("INSERT INTO entries VALUES ('history/x', 'progress', 1, 9, 1, x'00')"), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_damaged_is_read_around_and_rebuilt(
    backend: Counting, folder: Folder, job: Job, tmp_path: Path, kind: str
) -> None:
    """S3: nothing in it is believed but what the digest in its key vouches for."""
    damage, again = DAMAGE[kind]
    job.history(cache=tmp_path)
    damage(cache.path_of(folder, tmp_path))
    assert fetched(backend, job, tmp_path) == again
    assert fetched(backend, job, tmp_path) == 0


def test_a_file_that_another_process_holds_is_done_without(
    backend: Counting, folder: Folder, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0.01)
    job.history(cache=tmp_path)
    holder = sqlite3.connect(cache.path_of(folder, tmp_path), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert fetched(backend, job, tmp_path) == 5
    holder.execute("ROLLBACK")
    holder.close()
    assert fetched(backend, job, tmp_path) == 0


def test_a_place_that_cannot_be_written_is_done_without(
    backend: Counting, job: Job, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.write_bytes(b"")
    assert fetched(backend, job, taken) == 5
    assert fetched(backend, job, taken) == 5


def test_a_store_that_is_away_is_an_error_whatever_is_cached(tmp_path: Path) -> None:
    away = FaultyBackend(MemoryBackend())
    job = Job(folder_on(away), SystemClock())
    job.record_history(entry(1))
    job.history(cache=tmp_path)
    away._faults = [BackendFault("fail", times=0)]
    with pytest.raises(StoreError):
        job.history(cache=tmp_path)
