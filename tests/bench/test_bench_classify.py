"""The log that is measured, and one small round."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.bench import logs
from everstep.bench.classify import ClassifySetup, measure
from everstep.errors import UsageError


def test_the_same_seed_makes_the_same_log() -> None:
    first = b"".join(logs.pieces(500_000, seed=4))
    assert first == b"".join(logs.pieces(500_000, seed=4))
    assert first != b"".join(logs.pieces(500_000, seed=5))
    assert b"\xff\xfe" in first
    assert b"\r5%" in first
    assert 0.005 < first.count(b"Broken pipe") / first.count(b"\n") < 0.02


@pytest.mark.bench
def test_a_small_log_is_measured(tmp_path: Path) -> None:
    result = measure(ClassifySetup(1, 3_000_000, tmp_path), lambda _: None)
    assert [figure.what for figure in result.figures] == ["35 MB of log", "peak memory"]
    assert list(tmp_path.iterdir()) == []


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UsageError):
        ClassifySetup(rounds=0)
