"""A script that can never run is refused before a job, a store or a keeper is made for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import Start

from everstep.agent.script import check_script
from everstep.core import exits
from everstep.errors import UsageError


@pytest.mark.parametrize(
    ("source", "says"),
    [(None, "there is no script script.py in "), ("for in x:\n", "script.py")],
    ids=["missing", "syntax"],
)
def test_nothing_is_started_for_a_script_that_can_never_run(
    start: Start, tmp_path: Path, source: str | None, says: str
) -> None:
    if source is not None:
        (tmp_path / "script.py").write_text(source)
    agent = start("--store", "store", "script.py")
    assert agent.wait() == exits.USAGE
    assert says in agent.said()
    assert ("SyntaxError" in agent.said()) == (source is not None)
    assert "Traceback" not in agent.said()
    assert not (tmp_path / "store").exists()
    assert not agent.events("keeper.started")


def test_what_python_runs_beside_files_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04")
    reader, writer = os.pipe()
    for name in (tmp_path / "folder", tmp_path / "archive.zip", f"/proc/self/fd/{reader}"):
        check_script(str(name), "file", {})
    check_script("any.module", "module", {})
    check_script("true", "program", {})
    os.close(reader)
    os.close(writer)


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no program no-such-program"):
        check_script("no-such-program", "program", {})


def test_the_syntax_of_another_python_is_not_judged(tmp_path: Path) -> None:
    script = tmp_path / "later.py"
    script.write_text("a new syntax")
    check_script(str(script), "file", {"PYTHON_EXEC": "/usr/bin/python99"})
    with pytest.raises(UsageError, match="SyntaxError"):
        check_script(str(script), "file", {})
