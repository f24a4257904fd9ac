"""Where the time between a kill and the first new step went."""

from __future__ import annotations

import pytest

from everstep.bench.marks import Mark, Name
from everstep.bench.phases import (
    PHASES,
    Recovery,
    everstep_detected,
    recovery,
    torchrun_detected,
)
from everstep.core.events import Event
from everstep.errors import BenchError

KILLED = 100.0
NAMES: tuple[Name, ...] = ("began", "imported", "joined", "built", "restored")


def _old(reached: int) -> list[Mark]:
    return [Mark(90.0 + step, 1, 0, "step", step) for step in range(1, reached + 1)]


def _new(rank: int, at: float, restored: int, steps: int) -> list[Mark]:
    """Boundaries 1 s apart from ``at`` on, then steps 0.5 s apart."""
    marks = [Mark(at + n, 10 + rank, rank, name, restored if name == "restored" else -1)
             for n, name in enumerate(NAMES)]  # fmt: skip
    first = at + len(NAMES)
    return marks + [
        Mark(first + 0.5 * n, 10 + rank, rank, "step", restored + 1 + n) for n in range(steps)
    ]


def _recovery(new: list[Mark], *, detected: float | None, gone: float) -> Recovery:
    return recovery(
        killed=KILLED, detected=detected, survivors_gone=gone, old=_old(7), new=new, world=2
    )


def test_phases_end_when_the_last_rank_has_passed_and_sum_to_the_whole() -> None:
    new = _new(0, 101.0, 5, 3) + _new(1, 101.5, 5, 3)
    found = _recovery(new, detected=100.1, gone=100.3)
    assert tuple(found.phases) == PHASES
    assert sum(found.phases.values()) == pytest.approx(found.total)
    assert found.total == pytest.approx(6.5)
    assert found.phases["detect"] == pytest.approx(0.1)
    assert found.phases["stop"] == pytest.approx(0.2)
    assert found.phases["start"] == pytest.approx(1.2)
    assert found.phases["import"] == pytest.approx(1.0)


def test_steps_between_the_restored_and_the_newest_one_are_repeated() -> None:
    new = _new(0, 101.0, 5, 3) + _new(1, 101.5, 5, 3)
    found = _recovery(new, detected=None, gone=100.3)
    assert found.repeated == 2
    # Step 8 is the first that had not been done: two steps of 0.5 s after the first one.
    assert found.caught_up == pytest.approx(found.total + 1.0)


def test_a_launcher_that_tells_nothing_has_its_detection_in_the_stop() -> None:
    new = _new(0, 101.0, 7, 1) + _new(1, 101.0, 7, 1)
    found = _recovery(new, detected=None, gone=100.3)
    assert "detect" not in found.phases
    assert found.phases["stop"] == pytest.approx(0.3)
    assert sum(found.phases.values()) == pytest.approx(found.total)


def test_a_survivor_that_dies_before_the_launcher_notices_gives_no_negative_phase() -> None:
    new = _new(0, 101.0, 7, 1) + _new(1, 101.0, 7, 1)
    found = _recovery(new, detected=100.2, gone=100.01)
    assert found.phases["stop"] == 0.0
    assert sum(found.phases.values()) == pytest.approx(found.total)


def test_a_step_that_was_finished_after_the_kill_is_not_counted_as_done() -> None:
    late = Mark(KILLED + 0.01, 1, 0, "step", 8)
    new = _new(0, 101.0, 5, 3) + _new(1, 101.0, 5, 3)
    found = recovery(
        killed=KILLED, detected=None, survivors_gone=100.1, old=[*_old(7), late], new=new, world=2
    )
    assert found.repeated == 2


def test_ranks_that_restore_different_steps_are_no_recovery() -> None:
    with pytest.raises(BenchError, match=r"different steps: \[5, 6\]"):
        _recovery(_new(0, 101.0, 5, 3) + _new(1, 101.0, 6, 3), detected=None, gone=100.1)


def test_a_rank_that_does_not_come_back_is_no_recovery() -> None:
    with pytest.raises(BenchError, match=r"ranks \[0\] of 2"):
        _recovery(_new(0, 101.0, 5, 3), detected=None, gone=100.1)


def test_everstep_tells_of_the_killed_worker_in_its_journal() -> None:
    def exited(mono: float, pid: int) -> Event:
        return Event(wall=0, mono=mono, source="agent", kind="worker.exited", facts={"pid": pid})

    events = [exited(3.0, 8), exited(4.0, 7)]
    assert everstep_detected(events, 7) == 4.0
    assert everstep_detected(events, 9) is None


def test_torchrun_tells_of_it_in_its_log_after_the_kill() -> None:
    said = [
        (99.0, "W0101 Sending process 3 closing signal SIGTERM"),
        (100.2, "Traceback of the survivor"),
        (100.3, "W0101 Sending process 4 closing signal SIGTERM"),
        (100.4, "E0101 failed (exitcode: -9) local_rank: 1 (pid: 5)"),
    ]
    assert torchrun_detected(said, KILLED) == 100.3
    assert torchrun_detected(said[:2], KILLED) is None
