"""The judgement of a scenario on synthetic records: what has to be there, and what it finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from everstep.core.events import Event
from everstep.core.ids import Point
from everstep.drill.examine import Told, examine, impossible
from everstep.drill.scenarios import SCENARIOS, Drawn, Scenario, armed, chosen, draw
from everstep.errors import UsageError
from everstep.faults.history import (
    DecisionRecord,
    IncidentRecord,
    RecoveryPoint,
    ResultRecord,
    Rung,
    Stamp,
)
from everstep.faults.records import Verdict

DRAWN = Drawn(1, 50)
BY_KIND = {scenario.kind: scenario for scenario in SCENARIOS}
AT = Stamp("a", 1e9, 10.0)


def _e(mono: float, kind: str, attempt: int, step: int | None = None, /, **facts: Any) -> Event:
    return Event(
        wall=1e9 + mono, mono=mono, source="keeper", kind=kind, attempt=attempt, step=step,
        facts=facts,
    )  # fmt: skip


EVENTS = (
    _e(0.2, "restore.elected", 1, source="fresh"),
    _e(1.0, "checkpoint.committed", 1, 20),
    _e(2.0, "checkpoint.committed", 1, 40),
    _e(2.1, "snapshot.complete", 1, 45),
    _e(3.05, "worker.exited", 1),
    _e(5.0, "restore.elected", 2, 45, source="memory"),
    _e(6.0, "train.log", 2, 46),
)


def _verdict(**more: Any) -> Verdict:
    given = {"fault": "NATIVE_CRASH", "domain": "framework", "action": "restart_in_place",
             "root_ranks": (1,)} | more  # fmt: skip
    return Verdict(**given)


def _incident(attempt: int = 1, name: str = "", **more: Any) -> IncidentRecord:
    return IncidentRecord(name or f"{attempt}-x", attempt, AT, _verdict(**more))


RECORDS = (_incident(), ResultRecord("r", "1-x", 2, AT, success=True, repeated=4, tier="memory"))
GOOD = Told(EVENTS, RECORDS, (0,), 3.0, ())


def _why(scenario: str | Scenario = "segv", told: Told = GOOD) -> tuple[str, ...]:
    one = BY_KIND[scenario] if isinstance(scenario, str) else scenario
    return examine(one, DRAWN, told).why


def test_a_right_recovery_is_ok() -> None:
    report = examine(BY_KIND["segv"], DRAWN, GOOD)
    assert report.ok, report.why
    assert (report.fault, report.action, report.root) == (
        "NATIVE_CRASH", "restart_in_place", "rank 1",
    )  # fmt: skip
    assert (report.detected_in, report.resumed_in) == (0.05, 3.0)
    assert (report.steps_repeated, report.tier, report.identical) == (4, "memory", True)
    assert (report.then, report.attempts) == ("resumed", 2)


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ((_incident(fault="HANG_APP"), RECORDS[1]), "judged HANG_APP, not NATIVE_CRASH"),
        ((_incident(action="stop"), RECORDS[1]), "action stop, not restart_in_place"),
        ((_incident(root_ranks=(0,)), RECORDS[1]), "blames rank 0, not rank 1"),
        ((_incident(root_ranks=(0, 1)), RECORDS[1]), "blames ranks 0, 1, not rank 1"),
        ((_incident(root_ranks=()), RECORDS[1]), "blames nobody, not rank 1"),
        ((*RECORDS, _incident(name="other")), "attempt 1: 2 incidents of one failure"),
        (RECORDS[:1], "the resume after incident 1-x is not proved"),
        ((), "the history has no incident"),
    ],
)
def test_what_the_history_says_wrongly_is_found(records: tuple[Any, ...], text: str) -> None:
    """F2, F7."""
    assert any(text in why for why in _why(told=replace(GOOD, records=records)))


def test_the_best_known_revision_counts() -> None:
    late = msgspec.structs.replace(RECORDS[0], revision=2)
    early = _incident(fault="UNKNOWN_ROOT", root_ranks=())
    assert _why(told=replace(GOOD, records=(late, early, RECORDS[1]))) == ()


def test_a_root_that_cannot_be_known_is_not_to_be_named() -> None:
    """F1."""
    told = replace(GOOD, records=(_incident(fault="UNKNOWN_ROOT"), RECORDS[1]))
    assert _why("exit-1", told) == ("attempt 1: blames rank 1",)


def test_a_committed_step_that_is_lost_is_found() -> None:
    events = tuple(
        msgspec.structs.replace(e, step=39) if e.kind == "restore.elected" and e.attempt > 1 else e
        for e in EVENTS
    )
    assert _why(told=replace(GOOD, events=events)) == (
        "restored step 39, though step 40 was committed",
    )


def test_a_continuation_that_differs_is_found_and_one_that_was_not_compared() -> None:
    """R4."""
    assert _why(told=replace(GOOD, differences=("loss differs",))) == ("loss differs",)
    assert _why(told=replace(GOOD, differences=None)) == ("nothing was compared",)


def test_a_wrong_end_is_found() -> None:
    assert _why(told=replace(GOOD, codes=(94,))) == ("`everstep run` ended with 94, not 0",)
    assert "`everstep run` ended with 0, not 94" in _why("segv-always")
    assert "the history has no decision to stop" in _why("segv-always")


def test_a_stop_is_right_with_its_decision_and_its_attempts() -> None:
    stop = DecisionRecord("d", 3, AT, Rung("stop"), "again", exit_code=94)
    third = tuple(msgspec.structs.replace(e, attempt=3) if e.attempt == 2 else e for e in EVENTS)
    told = Told(third, (_incident(1), _incident(2), _incident(3), stop), (94,), 3.0)
    assert _why("segv-always", told) == ()
    told = replace(told, events=EVENTS)
    assert _why("segv-always", told) == ("2 attempts, not 3",)


def test_a_hang_must_be_over_in_time() -> None:
    late = tuple(
        msgspec.structs.replace(e, mono=30.0) if e.kind == "train.log" else e for e in EVENTS
    )
    told = replace(GOOD, events=late, records=(_incident(fault="HANG_APP"), RECORDS[1]))
    assert _why("hang-loader", told) == ("resumed after 27.0 s, not within 20 s",)


def _rolled_back(restored: int, named: int, *, healthy: bool = True) -> Told:
    point = RecoveryPoint(Point(named, 1), healthy=healthy)
    made = DecisionRecord("d", 1, AT, Rung("rollback", recovery=point), "NaN", begins=2)
    events = tuple(
        msgspec.structs.replace(e, step=restored)
        if e.kind == "restore.elected" and e.attempt > 1 else e for e in EVENTS
    )  # fmt: skip
    incident = _incident(fault="NAN_INF", action="rollback", root_ranks=())
    return replace(GOOD, events=events, records=(incident, made, RECORDS[1]))


def test_a_rollback_gives_up_exactly_what_came_after_the_newest_healthy_checkpoint() -> None:
    assert _why("nan-once", _rolled_back(40, 40)) == ()
    assert _why("nan-once", _rolled_back(20, 20)) == (
        "attempt 2 restored step 20; the decision names 20, and step 40 was healthy",
    )
    assert _why("nan-once", _rolled_back(45, 40)) == (
        "attempt 2 restored step 45; the decision names 40, and step 40 was healthy",
    )


def test_what_was_never_injected_or_never_came_back_is_no_success() -> None:
    assert _why(told=replace(GOOD, struck=None)) == ("not injected: the run ended first",)
    assert "no step was computed afterwards" in _why(told=replace(GOOD, events=EVENTS[:5]))


def test_a_kind_that_the_machine_does_not_allow_is_not_ok() -> None:
    report = impossible(BY_KIND["partition"], DRAWN, "no namespaces")
    assert (report.ok, report.impossible, report.why) == (False, "no namespaces", ())


def test_a_seed_gives_the_same_again_and_another_one_something_else() -> None:
    drawn = [[draw(one, seed, (45, 60)) for one in SCENARIOS] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(45 <= one.step <= 60 for one in drawn[0])


def test_kinds_are_chosen_by_name() -> None:
    assert [one.kind for one in chosen(["oom", "segv"])] == ["segv", "oom"]
    assert chosen([]) == SCENARIOS
    with pytest.raises(UsageError, match="'sigsegv' is no kind"):
        chosen(["sigsegv"])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.kind)
def test_each_scenario_can_be_brought_about(scenario: Scenario, tmp_path: Any) -> None:
    faults = armed(scenario, DRAWN, tmp_path)
    assert faults or scenario.outside
    for fault in faults:
        assert fault.told
        assert bool(fault.once) is (scenario.once and not scenario.outside)
        assert fault.step == (DRAWN.step if scenario.at_step and not scenario.outside else None)
    ranks = [fault.rank for fault in faults]
    assert ranks == ([] if not faults else [None] if scenario.outside else
                     [0, 1] if scenario.every else [DRAWN.rank])  # fmt: skip
