"""The matrix's command line and its table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from everstep.cli.matrix import render
from everstep.cli.report import reporter
from everstep.core.events import Event
from everstep.drill.examine import ScenarioReport
from everstep.drill.matrix import conclude

SEGV = ScenarioReport(
    "segv", "", 1, 48, ok=True, fault="NATIVE_CRASH", action="restart_in_place", root="rank 1",
    then="resumed", detected_in=0.04, resumed_in=3.2, steps_repeated=3, tier="memory",
    identical=True, attempts=2, seconds=12.0, journal="/kept/segv/journal.jsonl",
)  # fmt: skip
WRONG = ScenarioReport(
    "oom", "", 0, 50, why=("attempt 1: judged UNKNOWN_ROOT, not HOST_OOM_KILL",),
    fault="UNKNOWN_ROOT", action="restart_in_place", then="resumed", identical=False, seconds=60.5,
    journal="/kept/oom/journal.jsonl",
)  # fmt: skip
NOT_HERE = ScenarioReport("partition", "", 1, 50, impossible="`unshare` is not installed.")


def _shown(*reports: ScenarioReport) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    render(conclude(7, reports), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_names_each_fault_and_what_was_wrong() -> None:
    lines = _shown(SEGV, WRONG, NOT_HERE)
    right = "segv NATIVE_CRASH restart_in_place rank 1 resumed 0.04 s 3.20 s 3 memory yes ok"
    assert right in lines
    wrong = "oom UNKNOWN_ROOT restart_in_place nobody resumed never never - - NO fail"
    assert wrong in lines
    assert "partition - - - - - - - - - not possible" in lines
    assert "1 of 2 judged right in 1 min 12 s; seed 7" in lines
    assert "oom: attempt 1: judged UNKNOWN_ROOT, not HOST_OOM_KILL" in lines
    assert "oom: see /kept/oom" in lines
    assert any("not possible on this machine" in line for line in lines)
    assert lines[-1] == "fail"


def test_what_the_machine_does_not_allow_is_neither_right_nor_wrong() -> None:
    assert conclude(1, (SEGV, NOT_HERE)).ok
    assert not conclude(1, (SEGV, WRONG)).ok
    lines = _shown(SEGV, NOT_HERE)
    assert "1 of 1 judged right in 0 min 12 s; seed 7" in lines
    assert lines[-1] == "ok"


def test_words_of_programs_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A message of gloo names a path in brackets, which looks like markup to the console."""
    text = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:537] Connection closed [bold]"
    event = Event(wall=0.0, mono=0.0, source="agent", kind="incident.judged", text=text)
    reporter(as_json=False).event(event)
    reporter(as_json=False).say(text)
    shown = capsys.readouterr().err
    assert shown.count(text) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--matrix", "--only", "segfault"], "'segfault' is no kind"),
        (["--only", "segv", "x.py"], "--matrix"),
        (["--matrix", "x.py"], "its own script"),
        (["--matrix", "--faults", "worker"], "its own script"),
    ],
)
def test_what_the_matrix_cannot_do_ends_with_2_before_anything_is_run(
    cli: Any, tmp_path: Path, arguments: list[str], says: str
) -> None:
    result = cli("drill", "--keep", tmp_path / "kept", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "kept").exists()
