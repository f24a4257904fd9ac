"""The bars on the labelled cases, and on the same cases told otherwise (issue: classification)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from changed_cases import CHANGES

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.read import Read, read
from everstep.faults.score import Score, score

HERE = Path(__file__).resolve().parents[2]
NAMED = os.environ.get("EVERSTEP_FAILURE_CASES")
CASES = Path(NAMED) if NAMED else HERE.parent / "shared" / "failure-cases" / "cases.jsonl"

pytestmark = pytest.mark.skipif(not CASES.is_file(), reason="no labelled cases are here")


def scored(cases: list[Read]) -> Score:
    return score(
        (case.incident.id, judge(case.incident, load()), case.expect)
        for case in cases
        if case.expect is not None
    )


def test_bars_on_labelled_cases() -> None:
    result = scored(list(read(CASES)))
    assert result.rate(result.domain) >= 0.97, result.misses
    assert result.rate(result.action) >= 0.95, result.misses
    assert result.rate(result.fault) >= 0.90, result.misses
    assert result.root >= 0.95 * result.labelled, result.misses
    assert result.named <= 2, result.misses
    assert result.wrong_blames == 0, result.misses
    assert result.wrong_stops == 0, result.misses
    assert result.missed_stops <= 2, result.misses


@pytest.mark.parametrize("change", CHANGES)
def test_changed_cases_are_within_two_points(change: str) -> None:
    cases = [case for case in read(CASES) if case.expect is not None]
    plain, rng = scored(cases), random.Random(11)
    changed = scored([CHANGES[change](case, rng) for case in cases])
    for field in ("domain", "action", "fault"):
        assert getattr(changed, field) >= getattr(plain, field) - 0.02 * len(cases), changed.misses
    assert changed.root >= plain.root - 0.02 * plain.labelled, changed.misses
    assert changed.wrong_blames <= 2, changed.misses
    assert changed.wrong_stops == 0, changed.misses
