"""A store that is not there for a while, under a process that owns a job in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import CommitRefused, JobOwned, StoreError
from everstep.store import Job, OwnerIdentity, open_store

ME = OwnerIdentity("me", "host", "boot", 1, 1)
OTHER = OwnerIdentity("other", "elsewhere", "boot", 2, 2)


def opened(folder: Path) -> Job:
    return open_store(str(folder), create=True).job("job")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = opened(tmp_path / "store")
    job.acquire_owner(ME, is_alive=lambda _: True)
    assert job.claim(ME) == 1
    return job


@pytest.mark.parametrize("another", [False, True], ids=["an empty folder", "another store"])
def test_store_that_has_gone_is_unreachable_and_nobody_elses(
    job: Job, tmp_path: Path, another: bool
) -> None:
    """S6: only a stranger's record or claim stops a job; an unmounted path holds neither."""
    store, away = tmp_path / "store", tmp_path / "away"
    store.rename(away)
    store.mkdir()
    if another:
        open_store(str(store), create=True)
    before = sorted(store.rglob("*"))
    for call in (lambda: job.renew_owner(ME, attempt=1), lambda: job.check_claim(1)):
        with pytest.raises(StoreError) as gone:
            call()
        assert gone.value.retryable
    assert sorted(store.rglob("*")) == before, "something was written into what is no store of ours"
    for path in sorted(before, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store.rmdir()
    away.rename(store)
    job.renew_owner(ME, attempt=1)
    job.check_claim(1)


def test_owner_record_that_was_lost_is_written_anew(job: Job, tmp_path: Path) -> None:
    (tmp_path / "store/jobs/job/refs/owner").unlink()
    job.renew_owner(ME, attempt=1)
    with pytest.raises(JobOwned, match="agent me"):
        job.acquire_owner(OTHER, is_alive=lambda _: True)


def test_owner_record_that_cannot_be_read_is_respected_until_it_is_stale(
    job: Job, tmp_path: Path
) -> None:
    path = tmp_path / "store/jobs/job/refs/owner"
    path.write_bytes(b"torn")
    written = path.stat().st_mtime
    with pytest.raises(StoreError, match="cannot be read") as torn:
        job.renew_owner(ME, attempt=1, now=written + 29)
    assert torn.value.retryable
    job.renew_owner(ME, attempt=1, now=written + 31)
    owner = job.owner()
    assert owner is not None
    assert owner.agent == "me"


def test_strangers_record_and_claim_still_stop_the_job(job: Job, tmp_path: Path) -> None:
    (tmp_path / "store/jobs/job/refs/owner").unlink()
    job.acquire_owner(OTHER, is_alive=lambda _: True)
    job.claim(OTHER)
    with pytest.raises(JobOwned, match="agent other"):
        job.renew_owner(ME, attempt=1)
    with pytest.raises(CommitRefused, match="agent other"):
        job.check_claim(1)
