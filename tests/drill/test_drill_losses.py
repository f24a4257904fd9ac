"""Losses are compared by their bits, repeated steps included."""

from __future__ import annotations

from everstep.core.events import Event, decode_line, encode_line
from everstep.drill.losses import compare, figures


def _log(step: int, mono: float, rank: int = 0, **facts: object) -> Event:
    made = Event(
        wall=0.0, mono=mono, source="worker", kind="train.log", step=step, rank=rank, facts=facts
    )
    return decode_line(encode_line(made))  # as the journal gives it back


_CLEAN = [_log(n, float(n), loss=1.0 / n, tokens_per_s=3.0 * n) for n in range(1, 6)]


def test_equal_runs_with_a_repeated_step_are_identical() -> None:
    again = [*_CLEAN, _log(3, 9.0, loss=1.0 / 3, tokens_per_s=1.0)]
    report = compare(figures(_CLEAN), figures(again))
    assert report.identical
    assert (report.names, report.steps, report.compared, report.repeated) == (("loss",), 5, 6, 1)


def test_one_bit_in_a_repeated_step_is_found() -> None:
    again = [*_CLEAN, _log(3, 9.0, loss=1.0 / 3 + 2**-54)]
    report = compare(figures(_CLEAN), figures(again))
    assert not report.identical
    assert "loss of rank 0 at step 3" in report.differences[0]


def test_a_step_that_one_run_lacks_is_a_difference() -> None:
    assert (
        "never logged in the drilled run"
        in compare(figures(_CLEAN), figures(_CLEAN[:-1])).differences[0]
    )
    assert (
        "never logged in the undisturbed run"
        in compare(figures(_CLEAN[:-1]), figures(_CLEAN)).differences[0]
    )


def test_signed_zero_differs_and_nan_equals_itself() -> None:
    zero = compare(figures([_log(1, 1.0, loss=0.0)]), figures([_log(1, 1.0, loss=-0.0)]))
    assert not zero.identical
    nan = [_log(1, 1.0, loss=float("nan"))]
    assert compare(figures(nan), figures(nan)).identical


def test_names_can_be_chosen() -> None:
    chosen = figures(_CLEAN, ("tokens_per_s",))
    assert {name for _, _, name in chosen} == {"tokens_per_s"}
    assert len(chosen) == 5


def test_ranks_are_compared_each_with_itself() -> None:
    two = [_log(1, 1.0, 0, loss=0.5), _log(1, 1.0, 1, loss=0.25)]
    assert compare(figures(two), figures(list(reversed(two)))).identical
