"""Each signature finds its class, and lines that only look alike find none."""

from __future__ import annotations

import pytest
from classify_lines import NEGATIVE, POSITIVE, WORDINGS
from stress_lines import LINES

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident, Signal, Source

SOURCES: dict[str, Source] = {
    "K": "kernel", "L": "log", "P": "kubernetes", "S": "slurm", "A": "agent", "G": "gpu",
}  # fmt: skip


def alone(kind: str, text: str, *, dies: bool) -> Incident:
    rank = 3 if kind == "L" else None
    signals = [Signal(SOURCES[kind], text, rank=rank, node="b-1", time=900.0)]
    if dies and kind == "L":
        signals.append(Signal("exit", "pid 71: exited with code 1", 3, "b-1", 901.0, exit_code=1))
    return Incident("alone", tuple(signals), {"b-0": (0, 1), "b-1": (2, 3)})


@pytest.mark.parametrize(
    ("kind", "fault", "text"), POSITIVE + WORDINGS, ids=lambda value: str(value)[:40]
)
def test_line_gives_its_class(kind: str, fault: str, text: str) -> None:
    verdict = judge(alone(kind, text, dies=True), load())
    assert verdict.fault == fault, (verdict.fault, verdict.discarded)


def test_every_class_of_the_catalogue_has_a_line() -> None:
    by_structure = {  # shown by several lines or figures together: see test_judge
        "HANG_APP", "ABORT_HANG", "STRAGGLER", "LOSS_SPIKE", "SDC", "NCCL_WATCHDOG_TIMEOUT",
        "NCCL_REMOTE_ERROR", "GLOO_CONN_CLOSED", "GLOO_TIMEOUT", "XID_43_45", "ROCE_ECMP_SLOW",
        "SIGTERM_EXTERNAL", UNKNOWN,
    }  # fmt: skip
    assert {fault for _, fault, _ in POSITIVE} | by_structure == set(load().known)


def test_a_skipped_step_of_the_scaler_is_no_fault() -> None:
    text = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    verdict = judge(alone("L", text, dies=False), load())
    assert (verdict.fault, verdict.action, verdict.root_ranks) == ("NAN_INF", "continue", ())


@pytest.mark.parametrize(("kind", "text"), NEGATIVE, ids=lambda value: str(value)[:40])
def test_line_that_looks_alike_gives_none(kind: str, text: str) -> None:
    assert judge(alone(kind, text, dies=False), load()).fault == UNKNOWN


@pytest.mark.parametrize(
    ("kind", "fault", "action", "text"), LINES, ids=lambda value: str(value)[:40]
)
def test_line_of_some_version_gives_class_and_action(
    kind: str, fault: str, action: str, text: str
) -> None:
    catalog = load()
    wanted = action or catalog.known[fault].action
    verdict = judge(alone(kind, text, dies=wanted != "continue"), catalog)
    assert (verdict.fault, verdict.action) == (fault, wanted), verdict.discarded
