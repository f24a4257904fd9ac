"""The root-cause block: torchrun's, with the first failure first and everstep's own kills last."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from everstep.agent.report import STOPPED, Failure, block, failure, tell


def fail(rank: int, code: int, *, now: float, file: Path | str = "", ours: bool = False) -> Failure:
    return failure(
        rank=rank, local_rank=rank, pid=100 + rank, code=code, error_file=str(file), now=now,
        ours=ours,
    )  # fmt: skip


def error_file(path: Path, text: str, at: float) -> Path:
    data = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": int(at)}}}
    path.write_text(json.dumps(data))
    os.utime(path, (at, at))
    return path


def test_the_first_error_written_is_the_root_cause_within_one_second(tmp_path: Path) -> None:
    late = error_file(tmp_path / "0", "Connection closed by peer", 1000.6)
    early = error_file(tmp_path / "1", "ValueError: bad batch", 1000.2)
    text = block(
        "train.py", [fail(0, 1, now=1000.7, file=late), fail(1, 1, now=1000.8, file=early)]
    )
    root = text.split("Root Cause (first observed failure):")[1]
    assert "ValueError: bad batch" in root
    assert "Connection closed" not in root
    assert "train.py FAILED" in text


def test_what_everstep_killed_is_listed_and_never_the_root(tmp_path: Path) -> None:
    """F2: victims are not blamed."""
    del tmp_path
    text = block("train.py", [fail(0, -9, now=1.0, ours=True), fail(1, -9, now=2.0)])
    listed, root = text.split("Root Cause (first observed failure):")
    assert STOPPED in listed
    assert "rank      : 1 " in root


def test_an_error_file_torn_by_a_kill_is_said_and_survived(tmp_path: Path) -> None:
    torn = tmp_path / "error.json"
    torn.write_text('{"message": {"mess')
    one = fail(0, -9, now=5.0, file=torn)
    assert "incomplete" in one.process.message
    assert "SIGKILL" in block("x", [one])


def test_the_root_causes_file_is_handed_to_a_launcher_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path / "above.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(above))
    told = error_file(tmp_path / "0", "ValueError: bad batch", 1000.0)
    stream = io.StringIO()
    tell("train.py", [fail(0, 1, now=1000.5, file=told)], stream)
    assert "bad batch" in stream.getvalue()
    assert "bad batch" in json.loads(above.read_text())["message"]["message"]


def test_the_same_error_of_many_ranks_has_one_traceback(tmp_path: Path) -> None:
    """The first one's, which is the root; another error keeps its own."""
    trace = "Traceback:\n  File train.py\nValueError: bad batch"
    failures = [
        fail(rank, 1, now=1001.0, file=error_file(tmp_path / str(rank), text, 1000.0 + rank / 10))
        for rank, text in enumerate([trace, trace, "Traceback:\n  here\nKeyError: 3", trace])
    ]
    text = block("train.py", failures)
    assert text.count("File train.py") == 1
    assert "File train.py" in text.split("Root Cause (first observed failure):")[1]
    assert text.count("the same error as rank 0: ValueError: bad batch") == 2
    assert "KeyError: 3" in text
