"""What real agents record is what the commands tell, and a person's word lets them start again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from forked import Start

from everstep.cli import main
from everstep.core import exits

FORKED = ("--run-path", "--start-method", "fork", "--job", "toy")
FAILS_UNTIL_IT_IS_FIXED = """
import os
if not os.path.exists("fixed"):
    raise ZeroDivisionError("division by zero")
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``told("status")``: the command's JSON, about the job that runs in the test's folder."""
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("EVERSTEP_STORE", str(tmp_path / "everstep-store"))

    def call(*arguments: str) -> Any:
        return json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)

    return call


def test_a_job_that_was_stopped_for_good_is_explained_and_starts_after_a_word(
    start: Start, told: Any, tmp_path: Path
) -> None:
    """F3: and nothing but a person's word lets it start."""
    agent = start(*FORKED, script=FAILS_UNTIL_IT_IS_FIXED)
    code = agent.wait()
    assert code in (exits.REPEATED, exits.NO_PROGRESS), agent.said()
    status = told("status")["standing"]
    assert (status["state"], status["final"]) == ("stopped", True)
    assert status["next"].startswith("everstep retry --reset-budget ")
    found = told("explain")["explanation"]
    assert found["headline"][1].startswith(f"decided: stop with exit code {code}, because ")
    assert found["outcome"]["ending"] in ("stopped", "failed")
    attempts = len(agent.events("attempt.started"))
    assert len(told("incidents")["incidents"]) == attempts

    (tmp_path / "fixed").touch()
    again = start(*FORKED, script=FAILS_UNTIL_IT_IS_FIXED)
    assert again.wait() == code, again.said()
    assert len(agent.events("attempt.started")) == attempts, "nothing was started"
    assert told("retry", "--reset-budget", "caught it")["recorded"]
    last = start(*FORKED, script=FAILS_UNTIL_IT_IS_FIXED)
    assert last.wait() == exits.FINISHED, last.said()
    assert told("status")["standing"]["state"] == "finished"
    assert not told("incidents")["figures"]["recovered"], "a person had helped"
