"""The verdict, and the shape of what ``--json`` prints."""

from __future__ import annotations

import msgspec
import pytest

from everstep.drill.judge import FaultReport
from everstep.drill.losses import LossReport
from everstep.drill.result import EXIT, DrillResult, Reference, RunReport, conclude
from everstep.drill.states import StateReport

_RUN = RunReport("drill-1", "/s", 0, 12.5, 5, 300, "/j")
_LOSSES = LossReport(("loss",), 300, 640, 20, ())
_STATE = StateReport(300, 40, 10**6, 2, ())
_GOOD = FaultReport(0, "worker", "worker@90", "SIGKILL to rank 1", 90, 0.01, 2.5, "memory", 89, 1,
                    True)  # fmt: skip
_BAD = FaultReport(1, "agent", "agent@180", ok=False, why=("never detected",))


def _conclude(
    *faults: FaultReport, run: RunReport = _RUN, reference: Reference | None = None
) -> DrillResult:
    return conclude(seed=7, command=("t.py",), faults=faults, run=run, reference=reference)


def test_all_overcome_and_identical_is_recovered() -> None:
    result = _conclude(_GOOD, reference=Reference(_RUN, _LOSSES, _STATE))
    assert (result.verdict, result.why, EXIT[result.verdict]) == ("recovered", (), 0)


def test_one_bad_fault_fails_the_drill_and_is_named() -> None:
    result = _conclude(_GOOD, _BAD)
    assert (result.verdict, EXIT[result.verdict]) == ("failed", 1)
    assert result.why == ("agent@180: never detected",)


def test_a_run_that_did_not_finish_fails_the_drill() -> None:
    broken = msgspec.structs.replace(_RUN, exit_code=1, problems=("`everstep run` ended with 1",))
    assert _conclude(_GOOD, run=broken).verdict == "failed"


@pytest.mark.parametrize(
    ("reproducible", "verdict", "code"), [(True, "failed", 1), (False, "not reproducible", 3)]
)
def test_a_difference_is_ours_only_if_two_undisturbed_runs_agree(
    reproducible: bool, verdict: str, code: int
) -> None:
    """R4."""
    losses = msgspec.structs.replace(_LOSSES, differences=("loss of rank 0 at step 3 is 1.0",))
    reference = Reference(_RUN, losses, _STATE, reproducible)
    result = _conclude(_GOOD, reference=reference)
    assert (result.verdict, EXIT[result.verdict]) == (verdict, code)


def test_a_bad_fault_is_no_less_bad_in_a_script_that_is_not_reproducible() -> None:
    state = msgspec.structs.replace(_STATE, differences=("w differs",))
    result = _conclude(_BAD, reference=Reference(_RUN, _LOSSES, state, False))
    assert result.verdict == "failed"


def test_the_json_shape_is_stable() -> None:
    document = msgspec.to_builtins(_conclude(_GOOD, reference=Reference(_RUN, _LOSSES, _STATE)))
    assert document["format"] == "everstep.drill/1"
    assert set(document) == {
        "verdict", "why", "seed", "command", "faults", "run", "reference", "format",
    }  # fmt: skip
    assert set(document["faults"][0]) == {
        "index", "kind", "fault", "detail", "step", "detected_in", "resumed_in", "tier",
        "restored_step", "steps_repeated", "ok", "why",
    }  # fmt: skip
    assert set(document["run"]) == {
        "job", "store", "exit_code", "seconds", "attempts", "last_step", "journal", "problems",
    }  # fmt: skip
    assert set(document["reference"]) == {"run", "losses", "state", "reproducible"}
    assert set(document["reference"]["losses"]) == {
        "names", "steps", "compared", "repeated", "differences",
    }  # fmt: skip
    assert set(document["reference"]["state"]) == {
        "step", "tensors", "bytes", "ranks", "differences", "idle",
    }  # fmt: skip


def test_no_logged_value_is_no_proof() -> None:
    """Though nothing differs and every fault was overcome."""
    losses = LossReport((), 0, 0, 0, ())
    result = _conclude(_GOOD, reference=Reference(_RUN, losses, _STATE))
    assert (result.verdict, EXIT[result.verdict]) == ("failed", 1)
    assert "no logged value was compared" in result.why[0]
