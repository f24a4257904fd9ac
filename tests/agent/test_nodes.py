"""Two agents of one job on one machine: they meet, fail, restart and stop together."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest
from forked import Agent, Start, alive, hosts_store, rendezvous, wait_for

from everstep.agent import agree, supervise
from everstep.agent import line as lines
from everstep.core import exits, points

SCRIPT = """
import os, signal, time
names = ("TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE",
         "GROUP_WORLD_SIZE", "EVERSTEP_ATTEMPT", "EVERSTEP_KEEPER")
print(*(os.environ[name] for name in names), os.getpid())
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(f"up-{count}-{rank}", "w").close()
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)
for other in range(int(os.environ["WORLD_SIZE"])):
    wait_for(f"up-{count}-{other}")
if int(count) < DEATHS:
    if rank == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
wait_for("go")
"""


def begun(agents: list[Agent]) -> list[list[str]]:
    return sorted(line.split() for agent in agents for line in agent.printed())


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_death_on_one_node_restarts_both(start: Start, tmp_path: Path, backend: str) -> None:
    (tmp_path / "go").touch()
    script = SCRIPT.replace("DEATHS", "1")
    agents = [start(*flags, script=script) for flags in rendezvous(backend)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].said() + agents[1].said()
    lines = begun(agents)
    assert [line[:7] for line in lines] == [
        [str(count), str(rank // 2), str(rank), str(rank % 2), "4", "2", str(count + 1)]
        for count in (0, 1)
        for rank in range(4)
    ]
    keepers = {(line[1], line[7]) for line in lines}
    assert len(keepers) == 2, "each node has one keeper, the same in both attempts"
    said = [event.facts["pids"] for event in agents[0].events("workers.started")]
    assert len(said) == 4


def test_a_new_agent_takes_the_place_of_a_dead_one(start: Start, tmp_path: Path) -> None:
    script = SCRIPT.replace("DEATHS", "0")
    flags = rendezvous("c10d")[0]
    leader = start(*flags, script=script)
    # The agent that holds the rendezvous' store cannot be replaced; the other one can.
    leader.until(lambda: hosts_store(leader, flags))
    follower = start(*flags, script=script)
    first = [leader, follower]
    wait_for(lambda: len(begun(first)) == 4, lambda: leader.said() + follower.said())
    assert follower.printed()[0].split()[1] == "1"
    workers = [int(line.split()[-1]) for line in follower.printed()]
    follower.kill(signal.SIGKILL)
    follower.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers))
    for path in tmp_path.glob("up-*"):
        path.unlink()
    new = start(*flags, script=script)
    ups = [tmp_path / f"up-0-{rank}" for rank in range(4)]
    wait_for(lambda: all(up.exists() for up in ups), lambda: leader.said() + new.said())
    (tmp_path / "go").touch()
    assert [leader.wait(), new.wait()] == [0, 0], leader.said() + new.said()
    assert {line.split()[1] for line in new.printed()} == {"1"}
    assert [line.split()[7] for line in new.printed()] == [
        line.split()[7] for line in follower.printed()
    ], "the dead agent's keeper was adopted"


def test_sigterm_on_one_node_stops_both(start: Start) -> None:
    script = SCRIPT.replace("DEATHS", "0")
    agents = [start(*flags, script=script) for flags in rendezvous("c10d")]
    wait_for(lambda: len(begun(agents)) == 4, lambda: agents[0].said() + agents[1].said())
    agents[1].kill(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [exits.PREEMPTED] * 2


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_others_wait_for_one_in_place_of_the_agent_that_held_the_rendezvous(
    start: Start, tmp_path: Path, backend: str
) -> None:
    flags = rendezvous(backend)
    leader, follower = _two(start, backend, flags)
    workers = [int(line[-1]) for line in begun([leader, follower])]
    keepers = {line[7] for line in begun([leader, follower])}
    leader.kill(signal.SIGKILL)
    leader.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers), follower.said)
    wait_for(lambda: "Waiting for it to come back" in follower.said())
    (tmp_path / "go").touch()
    new = start(*flags[0], script=SCRIPT.replace("DEATHS", "0"))
    assert [new.wait(), follower.wait()] == [0, 0], new.said() + follower.said()
    assert "Traceback" not in follower.said()
    assert {line[7] for line in begun([new, follower])} == keepers, "memory is still there"


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_others_give_up_where_the_leaders_agent_hangs_and_a_worker_dies(
    start: Start, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(lines, "SILENT_SECONDS", 2.0)
    leader, follower = _two(start, backend)
    keeper = int(str(follower.events("keeper.started")[-1].facts["pid"]))
    mine = [int(printed.split()[-1]) for printed in follower.printed()]
    leader.kill(signal.SIGSTOP)
    os.kill(mine[0], signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in mine), follower.said)
    wait_for(lambda: "Waiting for it to come back" in follower.said(), follower.said)
    waited = re.search("has not answered for ([0-9]+) s", follower.said())
    assert waited is not None, follower.said()
    assert int(waited[1]) >= 2, "the limit, and on a busy machine a turn more"
    assert alive(keeper), "its memory is what the job goes on from"
    follower.kill(signal.SIGTERM)
    assert follower.wait() == exits.PREEMPTED, "signals are heard meanwhile"
    assert "Traceback" not in follower.said()


def test_a_signal_is_heard_while_the_leaders_agent_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "SILENT_SECONDS", 600.0)
    leader, follower = _two(start, "c10d")
    mine = [int(printed.split()[-1]) for printed in follower.printed()]
    leader.kill(signal.SIGSTOP)
    follower.kill(signal.SIGTERM)
    wait_for(lambda: not any(alive(pid) for pid in mine), follower.said)

    def obeys() -> bool:
        """What waits for the store by now; a signal that comes before that is the watch's."""
        follower.kill(signal.SIGTERM)
        return not alive(follower.pid)

    wait_for(obeys, follower.said)
    assert follower.wait() == exits.PREEMPTED


def test_healthy_workers_train_on_while_the_leaders_agent_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lines, "SILENT_SECONDS", 1.0)
    leader, follower = _two(start, "c10d")
    leader.kill(signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: time.monotonic() >= stopped + 2.5)
    leader.kill(signal.SIGCONT)
    (tmp_path / "go").touch()
    assert [leader.wait(), follower.wait()] == [0, 0], leader.said() + follower.said()


def test_a_node_whose_agent_dies_before_its_workers_start_is_missed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing breaks then: the leader's workers would wait for the other ones for half an hour."""
    for module in (supervise, agree):
        monkeypatch.setattr(module, "SILENT_SECONDS", 2.5)
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(agree, "ENDS_SECONDS", 1.0)
    flags = rendezvous("c10d")
    script = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""
    leader = start(*flags[0], script=script)
    leader.until(lambda: hosts_store(leader, flags[0]))
    with monkeypatch.context() as patched:
        patched.setattr(points, "_plan", _DIES_BEFORE_WORKERS)
        dead = start(*flags[1], script=script)
    assert dead.wait() == -signal.SIGKILL
    leader.until(lambda: leader.events("workers.killed"))
    assert "node 1 has shown no life" in leader.events("workers.killed")[0].text
    other = start(*flags[1], script=script)
    assert [leader.wait(), other.wait()] == [0, 0], leader.said() + other.said()


_DIES_BEFORE_WORKERS = points._load(
    msgspec.json.encode([points.Fault("agent.workers.before_start", "kill")]).decode()
)


def test_a_node_that_never_comes_is_a_clear_error(start: Start) -> None:
    flags = rendezvous("c10d")[0]
    flags[-1] += ",join_timeout=1"
    agent = start(*flags, script="raise SystemExit(0)")
    assert agent.wait() == exits.FAILED
    assert "could not meet" in agent.said()
    assert "Traceback" not in agent.said()


def _two(start: Start, backend: str, flags: list[list[str]] | None = None) -> tuple[Agent, Agent]:
    """The leader, whose agent holds the rendezvous' store, and the other one; their workers run."""
    flags = flags or rendezvous(backend)
    script = SCRIPT.replace("DEATHS", "0")
    leader = start(*flags[0], script=script)
    leader.until(lambda: hosts_store(leader, flags[0]))
    follower = start(*flags[1], script=script)
    both = [leader, follower]
    wait_for(lambda: len(begun(both)) == 4, lambda: leader.said() + follower.said())
    assert {printed.split()[1] for printed in leader.printed()} == {"0"}
    return leader, follower
