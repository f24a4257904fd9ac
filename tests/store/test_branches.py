"""A branch that cannot be read: what still loads, what is kept, what a person is told (S3, S6, R5).

The job: attempt 1 saves steps 5 and 9; attempt 2 goes on from 9 and saves 12; attempt 3 goes on
from 12 and saves 15.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cadence.policy import Policy
from everstep.core.ids import Point
from everstep.errors import NewerFormat, NoRecoveryPoint
from everstep.keeper import commands, facts
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.storing import Storing
from everstep.store import Branch, Job, OwnerIdentity, Retention, open_store
from everstep.store.digests import digest
from everstep.testing.snapshots import loads_as, world_of

ME = OwnerIdentity("me", "host", "boot", 1, 1)
OLD = [Point(9, 1), Point(5, 1)]
EVERYTHING = [Point(15, 3), Point(12, 2), *OLD]


def save(job: Job, step: int, attempt: int) -> None:
    for part in world_of(step, attempt, 1):
        job.write_rank(part, facts={}, unique=f"u{step}")
    assert job.try_commit(Point(step, attempt), 1) == "committed"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    job = open_store(str(tmp_path), create=True, chunk_bytes=64).job("a")
    job.write_branch(job.claim(ME), Branch(None, "fresh", "first start"))
    save(job, 5, 1)
    save(job, 9, 1)
    job.write_branch(job.claim(ME), Branch(Point(9, 1), "store"))
    save(job, 12, 2)
    job.write_branch(job.claim(ME), Branch(Point(12, 2), "memory"))
    save(job, 15, 3)
    return tmp_path


def job_in(store: Path) -> Job:
    return open_store(str(store)).job("a")


def damage(store: Path, attempt: int) -> str:
    """Flip a bit of the branch; its key."""
    key = f"jobs/a/attempts/{attempt:06d}/branch"
    data = bytearray((store / key).read_bytes())
    data[len(data) // 2] ^= 1
    (store / key).write_bytes(data)
    return key


@pytest.mark.parametrize(
    ("attempt", "candidates"),
    [(1, EVERYTHING), (2, EVERYTHING[:2]), (3, EVERYTHING[:1])],
)
def test_s6_a_damaged_branch_costs_only_what_lies_before_it(
    store: Path, attempt: int, candidates: list[Point]
) -> None:
    key = damage(store, attempt)
    job = job_in(store)
    assert list(job.candidates()) == candidates
    assert job.expected()
    assert loads_as(job.open_checkpoint(candidates[0]), 15)
    problems = {n: b.problem for n, b in job.branches().items() if b.problem}
    assert list(problems) == [attempt]
    assert problems[attempt].startswith(f"EVS-206: {key} ")
    read = Storing(str(store), "a").read(4)
    assert [c.point for c in read.candidates] == candidates
    assert read.damaged == (problems[attempt],)
    assert read.expected
    assert sorted(read.branches) == [1, 2, 3], "none is written a second time"


def test_s6_a_damaged_branch_beside_the_chain_costs_nothing(store: Path) -> None:
    job = job_in(store)
    job.write_branch(job.claim(ME), Branch(Point(9, 1), "store"))
    damage(store, 3)
    assert list(job.candidates()) == OLD
    assert [(i.point, i.undecided) for i in job.checkpoints()] == [
        (Point(15, 3), False), (Point(12, 2), False), (Point(9, 1), False), (Point(5, 1), False),
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["store", "memory"])
def test_s6_the_job_goes_on_after_a_damaged_branch(store: Path, source: str) -> None:
    """What is written next stands on it, and stays when the file is put back."""
    whole = (store / "jobs/a/attempts/000002/branch").read_bytes()
    key = damage(store, 2)
    job = job_in(store)
    job.write_branch(job.claim(ME), Branch(Point(15, 3), source))  # type: ignore[arg-type]
    save(job, 18, 4)
    assert list(job.candidates()) == [Point(18, 4), Point(15, 3), Point(12, 2)]
    (store / key).write_bytes(whole)
    assert list(job.candidates()) == [Point(18, 4), *EVERYTHING]


def test_s7_nothing_is_deleted_whose_lineage_a_damaged_branch_hides(store: Path) -> None:
    policy = Retention(keep_last=1, grace_seconds=0.0)
    job = job_in(store)
    job.write_rank(world_of(7, 1, 2)[0], facts={}, unique="incomplete")
    later = (store / "jobs/a/attempts/000003/claim").stat().st_mtime + 10
    gone = {Point(7, 1), *EVERYTHING[1:]}
    assert {r.point for r in job.retain(policy, later).remove} == gone
    damage(store, 2)
    assert {r.point for r in job.retain(policy, later).remove} == {Point(12, 2)}
    assert {r.point for r in job.retain(policy, later).keep} == gone - {Point(12, 2)} | {
        Point(15, 3)
    }


def test_r5_a_damaged_branch_without_anything_after_it_stops_the_job_and_names_the_file(
    store: Path,
) -> None:
    job = job_in(store)
    job.write_branch(job.claim(ME), Branch(Point(15, 3), "store"))
    key = damage(store, 4)
    read = Storing(str(store), "a").read(5)
    assert (read.candidates, read.expected) == ((), True)
    code, what = _refused(read)
    assert code == NoRecoveryPoint.code
    assert key in what
    assert "Put the file back from a backup" in what
    assert "no checkpoint of attempt 4 or a later one matters, remove it" in what
    (store / key).unlink()
    assert list(job.candidates()) == EVERYTHING, "as the message says"


def _refused(read: facts.StoreRead) -> tuple[str, str]:
    coordinator = Coordinator()
    out: list[commands.Command] = []
    for fact in (
        facts.Begun(5, ((0,),), "auto", False, Policy()),
        facts.NodeJoined(0, ()),
        read,
        facts.Registered(0),
        facts.OfferAsked(0, 1),
    ):
        out += coordinator.handle(fact, 0.0)
    (refused,) = [c for c in out if isinstance(c, commands.RefuseTo)]
    return refused.code, refused.what


def test_r5_the_first_branch_alone_damaged_hides_nothing(tmp_path: Path) -> None:
    job = open_store(str(tmp_path), create=True).job("a")
    job.write_branch(job.claim(ME), Branch(None, "fresh", "first start"))
    damage(tmp_path, 1)
    assert not job.expected()


def test_a_damaged_branch_of_the_attempt_itself_is_what_nobody_knows(store: Path) -> None:
    """A keeper that comes anew while the ranks train must not take it for a start from nothing."""
    damage(store, 3)
    read = Storing(str(store), "a").read(3)
    assert (read.branched, read.branch, read.branch_source) == (True, None, "memory")


def test_a_branch_of_a_newer_format_is_refused_by_name(store: Path) -> None:
    path = store / "jobs/a/attempts/000002/branch"
    data = path.read_bytes()
    head = data[:12] + (2).to_bytes(4, "little") + data[16:24]
    path.write_bytes(head + digest(head + data[40:]) + data[40:])
    with pytest.raises(NewerFormat, match=r"000002/branch has version 2"):
        job_in(store).candidates()
