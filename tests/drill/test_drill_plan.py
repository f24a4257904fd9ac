"""The plan of faults: its text form, its order and its spread."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.core import points
from everstep.drill.plan import KINDS, Fault, draw_rank, parse_fault, schedule
from everstep.errors import UsageError

_kinds = st.sampled_from(KINDS)
_points = st.sampled_from(["store.commit.before_manifest", "keeper.persist.before_pack"])


@st.composite
def _faults(draw: st.DrawFn) -> Fault:
    kind = draw(_kinds)
    rank = draw(st.none() | st.integers(0, 9)) if kind == "worker" else None
    if kind in ("worker", "keeper", "agent") and draw(st.booleans()):
        return Fault(kind, rank, point=draw(_points), passes=draw(st.integers(0, 5)))
    return Fault(kind, rank, draw(st.none() | st.integers(0, 10**6)))


@given(_faults())
def test_text_form_round_trips(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reboot", "not a fault"),
        ("worker@", "not a fault"),
        ("keeper:1", "only a worker has a rank"),
        ("worker@40#2", "passes of a named point"),
        ("worker@abc", "neither a step nor a named point"),
        ("keeper@keeper.persist.befor_pack", "neither a step nor a named point"),
        ("corrupt@store.commit.before_manifest", "not one process"),
    ],
)
def test_bad_faults_say_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_fault(text)


def test_faults_without_a_step_are_spread_over_nine_tenths_of_the_run() -> None:
    plan = schedule([Fault("worker"), Fault("keeper"), Fault("agent")], total=400)
    assert [p.step for p in plan] == [90, 180, 270]


def test_without_a_total_each_fault_follows_the_one_before() -> None:
    plan = schedule([Fault("worker"), Fault("keeper")], gap=7)
    assert [(p.step, p.gap) for p in plan] == [(None, 7), (None, 7)]


@given(st.lists(_faults(), max_size=8), st.none() | st.integers(1, 10**5))
def test_every_fault_is_planned_once_and_steps_never_go_back(
    faults: list[Fault], total: int | None
) -> None:
    plan = schedule(faults, total=total)
    assert sorted(map(str, (p.fault for p in plan))) == sorted(map(str, faults))
    assert [p.index for p in plan] == list(range(len(faults)))
    steps = [p.step for p in plan if p.step is not None]
    assert steps == sorted(steps)


def test_the_rank_is_drawn_from_the_seed_and_must_exist() -> None:
    drawn = {draw_rank(Fault("worker"), [0, 1, 2, 3], seed=s, index=0) for s in range(40)}
    assert drawn == {0, 1, 2, 3}
    assert draw_rank(Fault("worker"), [0, 1], seed=5, index=1) == draw_rank(
        Fault("worker"), [1, 0], seed=5, index=1
    )
    with pytest.raises(UsageError, match="no rank 7"):
        draw_rank(Fault("worker", 7), [0, 1], seed=0, index=0)


def test_a_misspelt_point_is_answered_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as refused:
        parse_fault("keeper@keeper.persist.befor_pack")
    assert refused.value.hint == "Did you mean keeper.persist.before_pack?"


def test_the_known_points_are_those_that_the_code_reaches() -> None:
    source = Path(everstep.__file__).parent
    called = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'\b(?:reach|spoils|shift)\(\s*"([^"]+)"', path.read_text())
    }
    assert set(points.KNOWN) == called
    assert len(points.KNOWN) == len(called)
