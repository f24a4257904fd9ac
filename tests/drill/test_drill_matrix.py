"""Real jobs struck by each kind of fault, judged by what they recorded themselves (F1 to F7)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.drill.examine import ScenarioReport
from everstep.drill.matrix import Undisturbed, run_one, undisturbed
from everstep.drill.scenarios import KINDS, chosen
from everstep.drill.trial import Place

_FORKING = Path(__file__).parents[1] / "recovery" / "forking_agent.py"
SEED = 1
IN_TEST = ("exception", "exit-1", "segv", "oom", "hang-collective", "nan-once")
"""Cheap ones that differ: stopped after one confirming retry, all ranks at once, a crash, the
kernel's word, a hang, a rollback. ``make soak`` has all."""

Strike = Callable[[str], ScenarioReport]


def _place(folder: Path) -> Place:
    """Short runs whose workers have torch from their agent."""
    return Place(
        folder,
        {**os.environ, "EVERSTEP_VERDICT_DEADLINE": "0.3"},  # nothing comes late here
        launcher=(sys.executable, str(_FORKING), "run"),
        steps=70,
        between=(35, 45),
        checkpoint_every="0.2s",
        down=4.0,
        hang_floor=4.0,
        patience=100.0,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(_place(tmp_path_factory.mktemp("undisturbed")), lambda _: None)


@pytest.fixture
def strike(tmp_path: Path, reference: Undisturbed) -> Strike:
    def run(kind: str) -> ScenarioReport:
        (scenario,) = chosen([kind])
        return run_one(scenario, _place(tmp_path), reference, seed=SEED, tell=lambda _: None)

    return run


@pytest.mark.parametrize("kind", IN_TEST)
def test_a_fault_is_recognised_and_overcome(strike: Strike, kind: str) -> None:
    _check(strike(kind))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(IN_TEST)))
def test_every_fault_is_recognised_and_overcome(strike: Strike, kind: str) -> None:
    _check(strike(kind))


def _check(report: ScenarioReport) -> None:
    if report.impossible:
        pytest.skip(report.impossible)
    assert report.ok, report
