"""The judge on synthetic events: what each fault must show, and what it must not get away with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from everstep.core.events import Event
from everstep.drill.judge import FaultReport, injections, judge, overcome
from everstep.drill.plan import Fault, Planned
from everstep.drill.progress import Progress, kept_of


def _e(mono: float, kind: str, attempt: int, step: int | None = None, /, **more: Any) -> Event:
    rank = more.pop("rank", None)
    return Event(
        wall=1e9 + mono, mono=mono, source="keeper", kind=kind, attempt=attempt, step=step,
        rank=rank, facts=more,
    )  # fmt: skip


def _injected(mono: float, kind: str, attempt: int, step: int, /, **more: Any) -> Event:
    facts = {"index": 0, "kind": kind, "fault": f"{kind}@{step}"} | more
    return _e(mono, "drill.injected", attempt, step, **facts)


def _steps(attempt: int, first: int, last: int, start: float, pace: float = 0.1) -> list[Event]:
    return [
        _e(start + i * pace, "train.log", attempt, step, loss=1.0)
        for i, step in enumerate(range(first, last + 1))
    ]


_BEFORE = [
    _e(0.0, "keeper.started", 1, pid=7),
    _e(0.1, "workers.started", 1, pids={"0": 8, "1": 9}),
    _e(0.2, "restore.elected", 1, source="fresh"),
    *_steps(1, 1, 20, 1.0),
    _e(2.0, "snapshot.complete", 1, 10),
    _e(2.5, "checkpoint.committed", 1, 10),
    _e(2.85, "snapshot.complete", 1, 18),
]


def _after(source: str, restored: int, kill: float = 3.0) -> list[Event]:
    return [
        _e(kill + 0.02, "worker.exited", 1, rank=1),
        _e(kill + 0.3, "workers.started", 2, pids={"0": 18, "1": 19}),
        _e(kill + 1.0, "restore.elected", 2, restored, source=source),
        *_steps(2, restored + 1, restored + 9, kill + 1.5),
    ]


def _one(events: list[Event], planned: tuple[Planned, ...] = ()) -> FaultReport:
    random.Random(4).shuffle(events)  # the journal's order is nobody's business
    reports = judge(events, planned)
    assert len(reports) == 1
    return reports[0]


def test_a_worker_kill_restored_from_memory() -> None:
    report = _one([*_BEFORE, _injected(3.0, "worker", 1, 20), *_after("memory", 18)])
    assert report.ok, report.why
    assert (report.detected_in, report.resumed_in) == (0.02, 1.5)
    assert (report.tier, report.restored_step, report.steps_repeated) == ("memory", 18, 2)


def test_restoring_less_than_the_newest_snapshot_fails() -> None:
    report = _one([*_BEFORE, _injected(3.0, "worker", 1, 20), *_after("store", 10)])
    assert not report.ok
    assert report.why == ("restored step 10, though step 18 was complete",)
    assert report.steps_repeated == 10


def test_everything_killed_may_fall_back_to_the_store() -> None:
    events = [
        *_BEFORE,
        _injected(3.0, "everything", 1, 20),
        _e(3.1, "drill.noticed", 1),
        *_after("store", 10),
    ]
    report = _one(events)
    assert report.ok, report.why
    assert (report.detected_in, report.tier, report.steps_repeated) == (0.1, "store", 10)


def test_starting_from_scratch_beside_a_checkpoint_fails() -> None:
    """R5."""
    events = [
        *_BEFORE,
        _injected(3.0, "everything", 1, 20),
        _e(3.1, "drill.noticed", 1),
        *_after("fresh", 0),
    ]
    assert _one(events).why == ("started from scratch, though step 10 was committed",)


def _corrupt(restored: int, *more: Event) -> FaultReport:
    return _one(
        [
            *_BEFORE,
            _e(2.9, "checkpoint.committed", 1, 18),
            _injected(3.0, "corrupt", 1, 20, damaged=18),
            *more,
            *_after("store", restored),
        ]
    )


def test_a_corrupt_checkpoint_is_reported_and_the_older_one_loads() -> None:
    """S6: the damaged one is skipped with a clear report."""
    report = _corrupt(10, _e(3.8, "restore.candidate_failed", 2, 18))
    assert report.ok, report.why
    assert (report.detected_in, report.restored_step) == (0.8, 10)


def test_loading_the_corrupt_checkpoint_fails() -> None:
    report = _corrupt(18, _e(3.8, "restore.candidate_failed", 2, 18))
    assert report.why == ("the damaged checkpoint of step 18 was restored",)


def test_falling_back_silently_fails() -> None:
    assert _corrupt(10).why == ("the damaged checkpoint was not reported",)


def test_a_keeper_kill_costs_no_step() -> None:
    """R3."""
    events = [
        *_BEFORE,
        _injected(3.0, "keeper", 1, 20),
        _e(3.05, "keeper.lost", 1),
        _e(3.2, "keeper.started", 1, pid=70),
        *_steps(1, 21, 40, 3.1),
        _e(4.0, "snapshot.complete", 1, 28),
    ]
    report = _one(events)
    assert report.ok, report.why
    assert (report.detected_in, report.resumed_in, report.tier) == (0.05, 1.0, None)
    assert report.steps_repeated == 0


def test_a_keeper_kill_that_restarts_the_workers_fails() -> None:
    events = [
        *_BEFORE,
        _injected(3.0, "keeper", 1, 20),
        _e(3.05, "keeper.lost", 1),
        _e(3.2, "keeper.started", 1, pid=70),
        *_after("memory", 18),
        _e(5.0, "snapshot.complete", 2, 24),
    ]
    assert _one(events).why == ("training was restarted, though no worker was hit",)


@pytest.mark.parametrize(("seconds", "ok"), [(0.4, True), (None, False), (7.0, False)])
def test_workers_must_end_with_their_agent(seconds: float | None, ok: bool) -> None:
    events = [
        *_BEFORE,
        _injected(3.0, "agent", 1, 20),
        _e(3.1, "drill.noticed", 1),
        _e(3.6, "drill.orphans", 1, seconds=seconds),
        *_after("memory", 18),
    ]
    report = _one(events)
    assert report.ok is ok
    assert ok or "outlived their agent" in report.why[0]


def test_a_full_disk_is_reported_and_the_next_save_works() -> None:
    events = [
        *_BEFORE,
        _injected(3.0, "disk-full", 1, 20),
        _e(3.4, "persist.failed", 1, 18),
        _e(3.5, "drill.released", 1),
        *_steps(1, 21, 40, 3.0),
        _e(4.5, "checkpoint.committed", 1, 30),
    ]
    report = _one(events)
    assert report.ok, report.why
    assert (report.detected_in, report.resumed_in, report.steps_repeated) == (0.4, 1.5, 0)


def test_nothing_seen_afterwards_fails_twice() -> None:
    report = _one([*_BEFORE, _injected(3.0, "worker", 1, 20)])
    assert report.why == ("never detected", "no step was computed afterwards")
    assert report.steps_repeated is None


def test_a_planned_fault_that_never_came_fails() -> None:
    report = _one(list(_BEFORE), (Planned(0, Fault("worker"), 900, 10),))
    assert not report.ok
    assert "not injected" in report.why[0]


def test_each_fault_is_judged_in_its_own_time() -> None:
    second = _injected(6.0, "worker", 2, 27, index=1)
    events = [
        *_BEFORE,
        _injected(3.0, "worker", 1, 20),
        *_after("memory", 18),
        _e(5.0, "snapshot.complete", 2, 25),
        second,
        _e(6.5, "worker.exited", 2, rank=0),
        _e(7.0, "restore.elected", 3, 25, source="memory"),
        *_steps(3, 26, 30, 7.2),
    ]
    first, last = judge(events)
    assert first.ok, first.why
    assert last.ok, last.why
    assert (last.detected_in, last.resumed_in, last.steps_repeated) == (0.5, 1.2, 2)


def test_steps_of_a_lineage_left_behind_count_for_no_later_fault() -> None:
    """After a fallback from step 20 to 10 a kill at 12 repeats steps of 12, not of 20."""
    events = [
        *_BEFORE,
        _injected(3.0, "everything", 1, 20),
        _e(3.1, "drill.noticed", 1),
        _e(3.5, "restore.elected", 2, 10, source="store"),
        *_steps(2, 11, 12, 3.6),
        _injected(5.0, "worker", 2, 12, index=1),
        _e(5.1, "worker.exited", 2, rank=0),
        _e(5.2, "restore.elected", 3, 11, source="memory"),
        *_steps(3, 12, 13, 5.3),
    ]
    assert [report.steps_repeated for report in judge(events)] == [10, 1]


def test_overcome_is_asked_while_the_run_goes_on() -> None:
    injected = _injected(3.0, "worker", 1, 20)
    (injection,) = injections([injected])
    so_far = [*_BEFORE, injected, *_after("memory", 18)[:3]]
    assert not overcome(injection, so_far)
    assert overcome(injection, [*_BEFORE, injected, *_after("memory", 18)])


def test_what_is_kept_follows_the_lineage() -> None:
    """S6: a restore cuts off what is newer; a dead attempt's late commit counts only below."""
    kept = kept_of(
        [
            *_BEFORE,
            _e(3.0, "checkpoint.committed", 1, 18),
            _e(4.0, "restore.elected", 2, 12, source="store"),
            _e(4.1, "checkpoint.committed", 1, 19),
            _e(4.2, "checkpoint.committed", 1, 11),
        ]
    )
    assert kept.commits == {10, 11}
    assert kept.snapshot == 12
    assert kept.newest_commit(without=11) == 10


def test_progress_knows_who_runs() -> None:
    progress = Progress()
    for event in _BEFORE:
        progress.feed(event)
    assert (progress.attempt, progress.step, progress.keeper) == (1, 20, 7)
    assert progress.workers == {0: 8, 1: 9}
    for event in _after("memory", 18):
        progress.feed(event)
    assert (progress.attempt, progress.step) == (2, 27)
    assert progress.workers == {0: 18, 1: 19}
