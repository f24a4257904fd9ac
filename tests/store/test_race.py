"""A committer and a sweep on one step, at every call of either (S1, S2, S7).

What a committer was told is committed stays where it is one of the newest K of the lineage;
elsewhere it may go, and whatever is there is whole or told to be no checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from everstep.core.ids import Point
from everstep.errors import CommitRefused, CorruptObject
from everstep.store import Branch, Job, OwnerIdentity, Retention
from everstep.store.backends import Backend
from everstep.store.backends.memory import MemoryBackend
from everstep.store.folder import Folder
from everstep.store.settings import make
from everstep.testing.faulty import FaultyBackend
from everstep.testing.snapshots import loads_as, world_of

ME = OwnerIdentity("me", "host", "boot", 1, 1)
FRESH = Branch(None, "fresh", "first start", 1)
SETTINGS = make(chunk_bytes=64, store_id="0" * 32)
DAY = 24 * 3600.0
PAUSES = {"at once": (), "a while": (700.0,), "days": (700.0, DAY + 1)}
"""How long each sleeps while the other works: seconds between its further sweeps."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now


class AtCall(FaultyBackend):
    """Does something just before the n-th call."""

    def __init__(self, inner: Backend, number: int, do: Callable[[], object]) -> None:
        super().__init__(inner)
        self._left, self._do = number, do
        self.done = False

    def _due(self, call: str, key: str) -> str:
        self._left -= 1
        if self._left == -1:
            self.done = True
            self._do()
        return super()._due(call, key)


class Scene:
    """A job with committed steps, and one (``raced``) whose indexes are there, older than grace.
    ``kept`` is a checkpoint that retention keeps whatever becomes of it."""

    def __init__(self, keep_last: int) -> None:
        self.clock = Clock()
        self.memory = MemoryBackend(clock=self.clock)
        self.policy = Retention(keep_last=keep_last, grace_seconds=600.0)
        self.job = self.through(self.memory)
        self.begin(FRESH)
        self.raced = self.kept = Point(0, 1)

    def through(self, backend: Backend) -> Job:
        return Job(Folder(backend, "a", SETTINGS), self.clock)

    def begin(self, branch: Branch) -> None:
        self.job.write_branch(self.job.claim(ME), branch)

    def write(self, step: int, *, commit: bool) -> None:
        for part in world_of(step, 1, 2):
            self.job.write_rank(part, facts={}, unique="u")
        if commit:
            self.kept = Point(step, 1)
            assert self.job.try_commit(self.kept, 2) == "committed"
        else:
            self.raced = Point(step, 1)

    def commit(self, job: Job) -> str:
        try:
            return job.try_commit(self.raced, 2)
        except CommitRefused:
            return "refused"

    def sweep(self, job: Job, pauses: tuple[float, ...] = ()) -> None:
        job.execute(job.retain(self.policy))
        for seconds in pauses:
            self.clock.now += seconds
            job.execute(job.retain(self.policy))


def of_the_newest_attempt() -> Scene:
    scene = Scene(keep_last=1)
    scene.write(5, commit=True)
    scene.write(9, commit=False)
    scene.kept = scene.raced
    return scene


def restored_from_memory() -> Scene:
    scene = of_the_newest_attempt()
    scene.begin(Branch(Point(9, 1), "memory"))
    return scene


def one_of_the_last() -> Scene:
    scene = Scene(keep_last=2)
    scene.write(5, commit=False)
    scene.write(9, commit=True)
    return scene


def older_than_the_last() -> Scene:
    scene = Scene(keep_last=1)
    scene.write(5, commit=False)
    scene.write(9, commit=True)
    return scene


def left_behind() -> Scene:
    scene = of_the_newest_attempt()
    scene.begin(Branch(Point(5, 1), "store"))
    scene.kept = Point(5, 1)
    return scene


def committed_before() -> Scene:
    """Another committer was faster, long ago."""
    scene = Scene(keep_last=1)
    scene.write(5, commit=True)
    scene.write(9, commit=True)
    scene.raced = Point(5, 1)
    return scene


STAY = [of_the_newest_attempt, restored_from_memory, one_of_the_last]
GO = [older_than_the_last, left_behind, committed_before]


def check(scene: Scene, result: str, *, stays: bool) -> bool:
    """Now and after further sweeps; whether the raced step is a checkpoint in the end."""
    for _ in range(3):
        found = list(scene.job.candidates())
        for point in found:
            try:
                assert loads_as(scene.job.open_checkpoint(point), point.step)
            except CorruptObject:
                assert (point, result) == (scene.raced, "refused")
        if stays:
            assert result == "committed"
            assert scene.raced in found
        assert scene.kept in found
        scene.clock.now += 700
        scene.sweep(scene.job)
    return scene.raced in scene.job.candidates()


def commits_within_a_sweep(
    make_scene: Callable[[], Scene], *, stays: bool
) -> set[tuple[str, bool]]:
    seen = set()
    for number in itertools.count():
        scene = make_scene()
        scene.clock.now += 700
        results: list[str] = []
        meddled = AtCall(scene.memory, number, lambda s=scene, r=results: r.append(s.commit(s.job)))
        scene.sweep(scene.through(meddled), PAUSES["a while"])
        if not meddled.done:
            return seen
        seen.add((results[0], check(scene, results[0], stays=stays)))
    raise AssertionError("the sweep has no end")


def sweeps_within_a_commit(
    make_scene: Callable[[], Scene], pauses: tuple[float, ...], *, stays: bool
) -> set[tuple[str, bool]]:
    seen = set()
    for number in itertools.count():
        scene = make_scene()
        scene.clock.now += 700
        meddled = AtCall(scene.memory, number, lambda s=scene: s.sweep(s.job, pauses))
        result = scene.commit(scene.through(meddled))
        if not meddled.done:
            return seen
        seen.add((result, check(scene, result, stays=stays)))
    raise AssertionError("the commit has no end")


@pytest.mark.parametrize("make_scene", STAY)
def test_s7_what_a_committer_was_told_stays_whenever_a_sweep_is_under_way(
    make_scene: Callable[[], Scene],
) -> None:
    assert commits_within_a_sweep(make_scene, stays=True) == {("committed", True)}
    for pauses in PAUSES.values():
        assert sweeps_within_a_commit(make_scene, pauses, stays=True) == {("committed", True)}


@pytest.mark.parametrize("make_scene", GO)
def test_s2_what_is_not_kept_goes_whole_and_its_committer_is_told_or_was_done(
    make_scene: Callable[[], Scene],
) -> None:
    """A commit that was done before the tombstone was true then; the sweep removes it as it
    removes any such checkpoint."""
    results = commits_within_a_sweep(make_scene, stays=False)
    assert {result for result, _ in results} == {"committed", "refused"}
    for pauses in PAUSES.values():
        results = sweeps_within_a_commit(make_scene, pauses, stays=False)
        told = {result for result, _ in results}
        assert {"committed", "refused"} <= told <= {"committed", "refused", "waiting"}


@pytest.mark.parametrize("pauses", PAUSES.values(), ids=PAUSES)
def test_s2_a_writer_that_slept_through_a_sweep_leaves_no_half_checkpoint(
    pauses: tuple[float, ...],
) -> None:
    for number in itertools.count():
        scene = Scene(keep_last=1)
        scene.write(5, commit=True)
        scene.write(7, commit=False)
        scene.begin(Branch(Point(5, 1), "store"))
        for path in [key for key in scene.memory.objects if "rank-00001" in key]:
            if "07-" in path:
                scene.memory.delete(path)
        scene.clock.now += 700
        meddled = AtCall(scene.memory, number, lambda s=scene, p=pauses: s.sweep(s.job, p))
        late = scene.through(meddled)
        try:
            late.write_rank(world_of(7, 1, 2)[1], facts={}, unique="late")
            result = late.try_commit(scene.raced, 2)
        except CommitRefused:
            result = "refused"
        if not meddled.done:
            break
        check(scene, "committed" if result == "committed" else "refused", stays=False)
    assert number > 10
