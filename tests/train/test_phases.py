"""Phases: what is posted, whatever is nested, raises, or compiles; and the longest step."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from everstep.errors import UsageError
from everstep.keeper.control import LONGEST_NAME
from everstep.train.options import phase_limit, phase_name
from everstep.train.phases import COMPILE, ENDED, FIRST_STEP, SAVE, STARTING, STEP, Pace, Phases


class Clock:
    """Nanoseconds, set by the test."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def made() -> tuple[Phases, list[tuple[str, int, int]], Clock]:
    posted: list[tuple[str, int, int]] = []
    clock = Clock()
    return Phases(lambda *words: posted.append(words), clock), posted, clock


def test_phases_nest_and_what_comes_back_begins_anew() -> None:
    phases, posted, clock = made()
    clock.now = 5
    phases.become(STEP)
    clock.now = 10
    with phases.within("evaluation", limit=60.0):
        clock.now = 20
        with phases.within(SAVE):
            clock.now = 30
        clock.now = 40
    assert posted == [
        (STARTING, 0, 0), (STEP, 5, 0), ("evaluation", 10, 60 * 10**9), (SAVE, 20, 0),
        ("evaluation", 10, 60 * 10**9), (STEP, 40, 0),
    ]  # fmt: skip
    assert phases.take_declared() == 30
    assert phases.take_declared() == 0


def test_a_phase_ends_with_an_exception_too() -> None:
    phases, posted, _ = made()
    with pytest.raises(ZeroDivisionError), phases.within("evaluation"):
        raise ZeroDivisionError
    assert posted[-1][0] == STARTING


def test_what_the_rank_becomes_meanwhile_is_said_afterwards() -> None:
    phases, posted, _ = made()
    with phases.within(COMPILE):
        phases.become(FIRST_STEP)
        assert posted[-1][0] == COMPILE
    assert posted[-1][0] == FIRST_STEP


def test_a_boundary_within_a_phase_takes_what_has_passed_of_it() -> None:
    """An evaluation that spans two steps is no part of either."""
    phases, _, clock = made()
    with phases.within("evaluation"):
        clock.now = 100
        assert phases.take_declared() == 100
        clock.now = 150
    assert phases.take_declared() == 50


def test_phases_of_other_threads_and_a_close_in_the_midst_leave_no_trace() -> None:
    phases, posted, _ = made()
    phase = phases.enter("evaluation")
    other = threading.Thread(target=lambda: phases.leave(phases.enter(COMPILE)))
    other.start()
    other.join()
    assert posted[-1][0] == "evaluation"
    phases.close()
    phases.leave(phase)
    assert posted[-1][0] == ENDED


def test_compilations_are_phases_where_torch_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = pytest.importorskip("torch._dynamo.callback")
    phases, posted, _ = made()
    handler = callback.callback_handler
    before = list(handler.start_callbacks), list(handler.end_callbacks)
    phases.watch_compiler()
    phases.watch_compiler()
    with handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "0/0"):
        assert posted[-1][0] == COMPILE
    assert posted[-1][0] == STARTING
    phases.close()
    assert (handler.start_callbacks, handler.end_callbacks) == before
    # Another torch, whose compiler tells nothing: it is covered by the first step alone.
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", SimpleNamespace())
    made()[0].watch_compiler()


def test_the_longest_step_is_that_of_the_last_ones_and_never_the_first() -> None:
    pace = Pace()
    assert pace.pass_step(10**12) == 0
    assert pace.pass_step(7) == 7
    assert [pace.pass_step(1) for _ in range(47)][-1] == 7
    assert [pace.pass_step(1) for _ in range(50)][-1] == 7
    assert [pace.pass_step(1) for _ in range(2)][-1] == 1
    assert pace.steps == 101


@pytest.mark.parametrize("name", ["", "  ", "save", "step", "a\nb", "x" * (LONGEST_NAME + 1), 3])
def test_names_that_cannot_be_are_refused(name: object) -> None:
    with pytest.raises(UsageError, match="long_phase"):
        phase_name(name)


@pytest.mark.parametrize("limit", [0, -1, "soon", float("inf"), True, [], "0s"])
def test_limits_that_cannot_be_are_refused(limit: object) -> None:
    with pytest.raises(UsageError, match="limit"):
        phase_limit(limit)


def test_limits_are_seconds_or_text() -> None:
    assert (phase_limit(None), phase_limit(90), phase_limit("20min")) == (0.0, 90.0, 1200.0)
    assert phase_name("évaluation 2") == "évaluation 2"
