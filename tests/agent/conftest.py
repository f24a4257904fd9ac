"""What the agent's tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Agent, Start, fork

_WHOLE_LINES = (
    "import os as _os; "
    "print = lambda *words, **_: _os.write(1, (' '.join(map(str, words)) + '\\n').encode())"
)
"""torchrun starts workers with ``python -u``, whose print writes word by word: lines of two ranks
would run into each other."""


@pytest.fixture
def start(tmp_path: Path, job_environment: dict[str, str]) -> Iterator[Start]:
    """``start(*arguments, script=source, **variables)`` starts an agent in the test's folder."""
    agents: list[Agent] = []

    def begin(*arguments: str, script: str = "", **variables: str) -> Agent:
        line = list(arguments)
        if script:
            path = tmp_path / "script.py"
            # On the empty first line, so that the script's own lines keep their numbers.
            path.write_text(_WHOLE_LINES + script if script.startswith("\n") else script)
            line.append(str(path))
        agent = fork(tmp_path, len(agents), line, {**job_environment, **variables})
        agents.append(agent)
        return agent

    yield begin
    for agent in agents:
        if agent.code is None:
            os.kill(agent.pid, signal.SIGKILL)
            agent.wait()
    # A killed agent's workers are its keeper's to end, which the test may have killed as well.
    for agent in agents:
        agent.end_workers()
