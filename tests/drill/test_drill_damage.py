"""One flipped bit is found, and only the newest checkpoint has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core.ids import Point
from everstep.drill.damage import flip_newest, local_root
from everstep.drill.storefault import StoreFault, faulty_url
from everstep.errors import CorruptObject, DrillError, StoreError, StoreFull
from everstep.store import open_store
from everstep.testing.snapshots import loads_as


@pytest.mark.parametrize("seed", range(12))
def test_the_newest_checkpoint_no_longer_loads_and_the_older_one_does(
    make_job: object, tmp_path: Path, seed: int
) -> None:
    """S3: whichever bit of a chunk is flipped, a load that uses it says so."""
    job = make_job("toy", [10, 20])  # type: ignore[operator]
    damage = flip_newest(str(tmp_path / "store"), "toy", seed=seed)
    assert damage.point == Point(20, 1)
    with pytest.raises(CorruptObject):
        loads_as(job.open_checkpoint(Point(20, 1)), 20)
    assert loads_as(job.open_checkpoint(Point(10, 1)), 10)
    report = job.verify(Point(20, 1), deep=True)
    assert not report.ok
    assert any(damage.key.rpartition("/")[2] in problem for problem in report.problems)


def test_the_same_seed_flips_the_same_bit_back(make_job: object, tmp_path: Path) -> None:
    job = make_job("toy", [10])  # type: ignore[operator]
    flip_newest(str(tmp_path / "store"), "toy", seed=3)
    flip_newest(str(tmp_path / "store"), "toy", seed=3)
    assert loads_as(job.open_checkpoint(Point(10, 1)), 10)


def test_a_job_without_a_checkpoint_cannot_be_damaged(make_job: object, tmp_path: Path) -> None:
    make_job("toy", [])  # type: ignore[operator]
    with pytest.raises(DrillError, match="no checkpoint"):
        flip_newest(str(tmp_path / "store"), "toy", seed=0)


def test_store_faults_begin_and_end_at_a_word(tmp_path: Path) -> None:
    url = faulty_url(str(tmp_path / "a store"), tmp_path)
    assert local_root(url) == tmp_path / "a store"
    backend = open_store(url, create=True).backend
    fault = StoreFault(tmp_path)
    backend.create("jobs/a/packs/1.pack", b"12345678")
    fault.begin("disk-full")
    with pytest.raises(StoreFull):
        backend.create("jobs/a/packs/2.pack", b"12345678")
    fault.release()
    backend.create("jobs/a/packs/2.pack", b"12345678")
    fault.begin("torn-write")
    with pytest.raises(StoreError):
        backend.create("jobs/a/packs/3.pack", b"12345678")
    fault.release()
    assert backend.get("jobs/a/packs/3.pack") == b"1234"
