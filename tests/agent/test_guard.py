"""Workers end with their agent from ``import everstep`` on, whatever has become of the keeper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from forked import Start, alive, wait_for

from everstep import guard

NOT_ATTACHED = """
import os, threading, time
import everstep
print(os.getpid(), [t.name for t in threading.enumerate()].count("everstep-agent"), flush=True)
time.sleep(600)  # as in init_process_group, where other ranks are missing
"""


def test_workers_that_have_not_attached_end_with_agent_and_keeper(start: Start) -> None:
    agent = start(script=NOT_ATTACHED)
    agent.until(agent.printed)
    worker, watches = (int(word) for word in agent.printed()[0].split())
    assert watches == 1
    keeper = int(str(agent.events("keeper.started")[-1].facts["pid"]))
    os.kill(keeper, signal.SIGSTOP)  # it must not be the one that ends them
    try:
        agent.kill(signal.SIGKILL)
        wait_for(lambda: not alive(worker), agent.said)
    finally:
        os.kill(keeper, signal.SIGCONT)


def _import(agent: int, *line: str) -> int:
    return subprocess.run(
        [sys.executable, *line], env=dict(os.environ) | {guard.VARIABLE: str(agent)},
        capture_output=True, timeout=60,
    ).returncode  # fmt: skip


@pytest.fixture
def dead() -> int:
    """The pid of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_worker_whose_agent_has_ended_already_ends_at_the_import(dead: int) -> None:
    assert _import(dead, "-c", "import everstep") == -signal.SIGKILL


def test_what_a_worker_runs_of_everstep_is_no_worker(dead: int) -> None:
    assert _import(dead, "-m", "everstep.cli", "--help") == 0
    assert _import(dead, "-m", "everstep.keeper", "--help") == 0


def test_the_watch_is_begun_once_and_only_where_an_agent_is_named() -> None:
    twice = "import everstep, os, threading\nfrom everstep import guard\nguard.begin(os.environ)\n"
    count = "raise SystemExit([t.name for t in threading.enumerate()].count(guard.THREAD))"
    assert _import(os.getpid(), "-c", twice + count) == 1
    assert _import(0, "-c", twice + count) == 0


@pytest.mark.parametrize(
    ("line", "script", "own"),
    [
        (["python", "/bin/everstep", "run", "a.py"], ["/bin/everstep"], True),
        (["python", "-u", "-m", "everstep.cli"], ["-m"], True),
        (["python", "-m", "everstep.keeper", "--store", "s"], ["-m"], True),
        (["python", "-m", "everstep.bench.job"], ["-m"], False),
        (["python", "-u", "everstep.py"], ["everstep.py"], False),
        (["python", "-c", "import everstep"], ["-c"], False),
        (["python"], [], False),
    ],
)
def test_everstep_knows_its_own_programs(line: list[str], script: list[str], own: bool) -> None:
    assert guard.is_own_program(line, script) is own
