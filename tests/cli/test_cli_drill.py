"""The drill's command line: which faults, what is refused, what the table says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from everstep.cli.drill import chosen_faults, render
from everstep.drill.judge import FaultReport
from everstep.drill.losses import LossReport
from everstep.drill.plan import KINDS, Fault
from everstep.drill.result import Reference, RunReport, conclude
from everstep.drill.states import StateReport


@pytest.mark.parametrize(
    ("single", "several", "faults"),
    [
        ((), None, ["worker", "keeper", "agent", "corrupt"]),
        ((), "worker,keeper@30", ["worker", "keeper@30"]),
        (("worker:1@40",), "agent", ["worker:1@40", "agent"]),
        ((), "all", list(KINDS)),
    ],
)
def test_chosen_faults(single: tuple[str, ...], several: str | None, faults: list[str]) -> None:
    assert [str(fault) for fault in chosen_faults(single, several)] == faults


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no script"),
        (["--faults", "reboot", "x.py"], "not a fault"),
        (["--faults", "disk-full", "--store", "s3://bucket", "x.py"], "local path"),
        (["--nproc-per-node", "2", "--fault", "worker:5", "x.py"], "ranks 0 to 1"),
        (["--fault", "worker:1", "x.py"], "rank 0 alone"),
        (["--fault", "worker:2@9", "--nnodes", "2", "x.py"], "ranks 0 to 1"),
        (["--fault", "worker@abc", "x.py"], "neither a step nor a named point"),
        (["--reference", "missing.py"], "no script missing.py"),
        (["broken.py"], "SyntaxError"),
        (["--nproc-per-nodes", "2", "x.py"], "--nproc-per-node"),
    ],
)
def test_what_can_never_be_drilled_ends_with_2_before_anything_is_run(
    cli: Any, tmp_path: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise SystemExit(1)")
    (tmp_path / "broken.py").write_text("for in x")
    result = cli("drill", "--keep", tmp_path / "kept", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "kept").exists()


def test_a_job_that_exists_is_not_drilled(cli: Any, toy_store: Path, tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    result = cli("drill", "--store", toy_store, "--job", "toy", tmp_path / "x.py")
    assert result.exit_code == 2
    assert "must not hurt it" in result.stderr


def test_a_script_that_fails_is_reported(cli: Any, tmp_path: Path) -> None:
    """A real launcher on a script that ends at once: a failed drill, not a hanging one."""
    keep, script = tmp_path / "kept", tmp_path / "fails.py"
    script.write_text("raise SystemExit(78)")
    answer = cli("drill", "--json", "--keep", keep, "--faults", "worker", script)
    result = json.loads(answer.stdout)
    assert (answer.exit_code, result["verdict"]) == (1, "failed")
    assert any("not injected" in reason for reason in result["why"])
    assert any("`everstep run` ended with" in reason for reason in result["why"])


def test_the_table_names_each_fault_and_the_verdict() -> None:
    reports = (
        FaultReport(0, "worker", "worker@90", "", 90, 0.012, 2.5, "memory", 89, 1, True),
        FaultReport(1, "keeper", "keeper@180", "", 180, 0.004, 0.9, None, None, 0, True),
        FaultReport(2, "agent", "agent@270", "", 270, None, None, None, None, None, False,
                    ("never detected",)),
    )  # fmt: skip
    run = RunReport("drill-1", "/kept/drilled/store", 0, 12.5, 5, 300, "/kept/drilled/journal")
    reference = Reference(
        run, LossReport(("loss",), 300, 640, 20, ()), StateReport(300, 40, 10**6, 2, ())
    )
    result = conclude(seed=7, command=("t.py",), faults=reports, run=run, reference=reference)
    console = Console(file=io.StringIO(), width=200)
    render(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "worker@90 90 0.01 s 2.50 s memory 1 ok" in lines
    assert "keeper@180 180 0.00 s 0.90 s none needed 0 ok" in lines
    assert "agent@270 270 never never - - fail" in lines
    assert "agent@270: never detected" in lines
    assert any("40 tensors, 1.0 MB" in line and "identical" in line for line in lines)
    assert "fail failed" in lines
    assert "journals, logs and stores: /kept" in lines


def test_parsed_faults_are_faults() -> None:
    assert chosen_faults(("worker:1@40",), None) == (Fault("worker", 1, 40),)


def test_where_nothing_was_logged_the_table_does_not_say_identical() -> None:
    run = RunReport("drill-1", "/kept/drilled/store", 0, 12.5, 1, 300, "/kept/drilled/journal")
    reference = Reference(run, LossReport((), 0, 0, 0, ()), StateReport(300, 1, 10**6, 1, ()))
    result = conclude(seed=7, command=("t.py",), faults=(), run=run, reference=reference)
    console = Console(file=io.StringIO(), width=300)
    render(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "logged: nothing was compared" in text
    assert "fail failed" in text
    assert "1 attempt to step 300" in text
    assert "1 tensor, 1.0 MB, objects of 1 rank, identical to" in text
