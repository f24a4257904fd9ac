"""When a cut is taken and when it is made durable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.cadence.policy import (
    LOOKAHEAD,
    MAX_LOOKAHEAD,
    Pace,
    Policy,
    checkpoint_due,
    first_cut,
    interval,
    lookahead,
    next_cut,
    smoothed,
)

SECONDS = st.floats(0, 1e4, allow_nan=False)
PACES = st.builds(Pace, SECONDS, SECONDS, SECONDS)
POLICIES = st.builds(Policy, st.integers(0, 1000), st.just(60.0), st.floats(0, 1, allow_nan=False))


@given(POLICIES, PACES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_next_cut_is_ahead_of_every_rank_and_after_the_last(
    policy: Policy, pace: Pace, boundary: int, last: int
) -> None:
    """R2: published ahead of time, so that no rank has to be asked."""
    step = next_cut(policy, pace, newest_boundary=boundary, last_cut=last)
    assert step >= boundary + LOOKAHEAD
    assert step > last
    if policy.snapshot_every:
        assert step % policy.snapshot_every == 0


@given(POLICIES, PACES, st.integers(0, 10**6))
def test_first_cut_is_the_next_due_step_while_everybody_waits(
    policy: Policy, pace: Pace, start: int
) -> None:
    step = first_cut(policy, pace, start=start)
    assert step > start
    if policy.snapshot_every:
        assert step - start <= policy.snapshot_every


@given(st.floats(1e-4, 100), st.floats(1e-4, 100), st.floats(1e-3, 1))
def test_cuts_block_at_most_the_budget(cut: float, step: float, budget: float) -> None:
    every = interval(Policy(stall_budget=budget), Pace(step, cut))
    assert cut / (every * step) <= budget * (1 + 1e-9)
    assert every == 1 or cut / ((every - 1) * step) > budget * (1 - 1e-9)


def test_unknown_pace_cuts_at_once_to_measure() -> None:
    assert interval(Policy(), Pace()) == 1
    assert interval(Policy(snapshot_every=7), Pace(1, 1)) == 7


def test_no_budget_means_no_snapshot_by_itself() -> None:
    assert interval(Policy(stall_budget=0.0), Pace(1.0, 0.1)) > 10**12


@pytest.mark.parametrize(
    ("pace", "steps"),
    [
        (Pace(), LOOKAHEAD),
        (Pace(1.0, 0.0, 0.02), LOOKAHEAD),
        (Pace(0.001, 0.0, 0.02), LOOKAHEAD + 20),
        (Pace(1e-9, 0.0, 10.0), MAX_LOOKAHEAD),
    ],
)
def test_lookahead_spans_the_way_of_a_publication(pace: Pace, steps: int) -> None:
    assert lookahead(pace) == steps


def test_checkpoint_is_due_at_first_and_then_after_the_interval() -> None:
    policy = Policy(checkpoint_every=60.0)
    assert checkpoint_due(policy, now=0.0, last_persist_began=None)
    assert not checkpoint_due(policy, now=59.9, last_persist_began=0.0)
    assert checkpoint_due(policy, now=60.0, last_persist_began=0.0)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50))
def test_smoothed_stays_within_what_was_measured(samples: list[float]) -> None:
    average = 0.0
    for sample in samples:
        average = smoothed(average, sample)
    assert min(samples) * (1 - 1e-9) <= average <= max(samples) * (1 + 1e-9)


def test_one_slow_step_does_not_count_for_much() -> None:
    assert smoothed(1.0, 1000.0) <= 2.0
