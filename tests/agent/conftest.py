"""What the agent's tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Agent, Start, fork


@pytest.fixture
def start(tmp_path: Path, job_environment: dict[str, str]) -> Iterator[Start]:
    """``start(*arguments, script=source, **variables)`` starts an agent in the test's folder."""
    agents: list[Agent] = []

    def begin(*arguments: str, script: str = "", **variables: str) -> Agent:
        line = list(arguments)
        if script:
            path = tmp_path / "script.py"
            path.write_text(script)
            line.append(str(path))
        agent = fork(tmp_path, len(agents), line, {**job_environment, **variables})
        agents.append(agent)
        return agent

    yield begin
    for agent in agents:
        if agent.code is None:
            os.kill(agent.pid, signal.SIGKILL)
            agent.wait()
