"""The examples: short enough to read, and exact when they are stopped and started again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.core.events import Event, decode_line
from everstep.errors import NoRecoveryPoint

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "gpt_ddp.py": ("--width", "32", "--layers", "1", "--batch", "2"),
    "gpt_fsdp2.py": ("--width", "32", "--layers", "1", "--batch", "2"),
    "resnet_amp_accumulate.py": ("--channels", "4", "--batch", "4"),
    "embedding_sparse.py": ("--users", "50", "--items", "20", "--batch", "16"),
}
LAST, STOP = 8, 5


def test_every_example_is_listed_and_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == SMALL.keys()
    assert not [name for name, count in lines.items() if count >= 120]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "embedding_sparse.py",
        *(pytest.param(name, marks=pytest.mark.soak) for name in SMALL if "sparse" not in name),
    ],
)
def test_an_example_that_is_stopped_and_started_again_goes_on_exactly(
    name: str,
    tmp_path: Path,
    job_environment: dict[str, str],
    end_keepers: Callable[[], list[int]],
) -> None:
    """R4: the same losses, step by step, under plain python and through the store."""
    _run(name, LAST, "whole", tmp_path, job_environment)
    _run(name, STOP, "parted", tmp_path, job_environment)
    end_keepers()  # so that the state comes from the store
    _run(name, LAST, "parted", tmp_path, job_environment)

    events = _events(tmp_path)
    assert [e.facts["source"] for e in events if e.kind == "train.restored"] == ["store"]
    whole, parted = _losses(events, "whole"), _losses(events, "parted")
    assert list(whole) == list(range(1, LAST + 1))
    assert parted == whole


@pytest.mark.timeout(300)
def test_s4_one_manifest_covers_all_that_a_run_needs_to_go_on(
    tmp_path: Path, job_environment: dict[str, str], end_keepers: Callable[[], list[int]]
) -> None:
    """S4: with nothing beside one checkpoint's own objects the run goes on; with everything but
    its manifest it does not, and does not begin anew either (R5)."""
    name = "embedding_sparse.py"
    _run(name, STOP, "job", tmp_path, job_environment)
    end_keepers()
    job = tmp_path / "everstep-store" / "jobs" / "job"
    shutil.rmtree(job / "refs")
    for path in (*job.glob("steps/*"), *job.glob("packs/*")):
        if not path.name.startswith(f"{STOP:012d}-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _run(name, LAST, "job", tmp_path, job_environment)
    restored = [e for e in _events(tmp_path) if e.kind == "train.restored"]
    assert [(e.step, e.facts["source"]) for e in restored] == [(STOP, "store")]

    end_keepers()
    for manifest in job.glob("steps/*/manifest"):
        manifest.unlink()
    refused = _start(name, LAST, "job", tmp_path, job_environment)
    assert refused.returncode != 0
    assert NoRecoveryPoint.code in refused.stderr


def _run(name: str, steps: int, job: str, folder: Path, environment: dict[str, str]) -> None:
    done = _start(name, steps, job, folder, environment)
    assert done.returncode == 0, done.stderr


def _start(
    name: str, steps: int, job: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / name, "--steps", str(steps), *SMALL[name]],
        cwd=folder,
        env={**environment, "EVERSTEP_JOB": job},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _events(folder: Path) -> list[Event]:
    with open(folder / "events.jsonl", "rb") as lines:
        return [decode_line(line) for line in lines]


def _losses(events: list[Event], job: str) -> dict[int, object]:
    """Loss by step; a step that was logged twice would differ in the count of lines."""
    logged = [(e.step, e.facts["loss"]) for e in events if e.kind == "train.log" and e.job == job]
    by_step = {step: loss for step, loss in logged if step is not None}
    assert len(by_step) == len(logged)
    return by_step
