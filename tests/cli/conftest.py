"""A store with one job, made through the store itself, and the command line run in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from everstep.cli import main
from everstep.core.ids import Point
from everstep.store import Branch, Job, OwnerIdentity, open_store
from everstep.testing.snapshots import world_of

Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """``cli("ls", store)``: the command's result; nothing of this process's settings counts."""
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("EVERSTEP_STORE", raising=False)
    monkeypatch.delenv("EVERSTEP_JOB", raising=False)
    return lambda *arguments: CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def cli_json(cli: Cli) -> Callable[..., Any]:
    """``(exit code, document)`` of a command with ``--json``."""

    def call(*arguments: object) -> Any:
        result = cli(*arguments, "--json")
        return result.exit_code, json.loads(result.stdout)

    return call


@pytest.fixture
def toy_store(tmp_path: Path) -> Path:
    """A store whose job ``toy`` has attempt 1 with steps 10 and 20, attempt 2 from 10 with 15."""
    path = tmp_path / "store"
    job = open_store(str(path), create=True).job("toy")
    identity = OwnerIdentity("agent", "host", "boot", 1, 1)
    job.write_branch(job.claim(identity), Branch(None, "fresh", "first start", 2))
    save(job, 10, 1)
    save(job, 20, 1)
    job.write_branch(job.claim(identity), Branch(Point(10, 1), "store", world=2))
    save(job, 15, 2)
    return path


def save(job: Job, step: int, attempt: int) -> None:
    """Commit one checkpoint of two ranks."""
    for snapshot in world_of(step, attempt, 2):
        job.write_rank(snapshot, facts={"torch": "2.13"}, unique=f"u{step}a{attempt}")
    assert job.try_commit(Point(step, attempt), 2) == "committed"
