"""A node that is to blame gets no work back: a spare takes its place (F1, F2)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from forked import Agent, Start, hosts_store, rendezvous, wait_for
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from everstep.core import exits

FALLS = """
import os, signal, time
open("up-" + os.environ["TORCHELASTIC_RESTART_COUNT"] + "-" + os.environ["RANK"], "w").close()
if os.environ["EVERSTEP_NODE_NAME"] == "bad":
    while not os.path.exists("fall"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_a_node_whose_gpu_fell_off_the_bus_is_left_out_and_a_spare_takes_its_place(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = rendezvous("c10d", (1, 1))[0]
    kernel = tmp_path / "kernel.log"
    kernel.touch()
    good = start(*flags, script=FALLS, EVERSTEP_NODE_NAME="good")
    good.until(lambda: hosts_store(good, flags))  # the one that parts must not be the host
    bad = start(*flags, script=FALLS, EVERSTEP_NODE_NAME="bad", EVERSTEP_KERNEL_LOG=str(kernel))
    wait_for(lambda: len(list(tmp_path.glob("up-0-*"))) == 2, good.said)
    with monkeypatch.context() as patched:
        patched.setattr(dynamic_rendezvous, "_delay", _tell_that_it_waits)
        spare = start(*flags, script=FALLS, EVERSTEP_NODE_NAME="spare")
    spare.until((tmp_path / "waits").exists)
    pid = _pid_of(bad)
    kernel.write_text(
        f"NVRM: Xid (PCI:0000:1b:00): 79, pid={pid}, name=python3, GPU has fallen off the bus.\n"
    )
    (tmp_path / "fall").touch()
    assert bad.wait() == exits.LEFT_OUT, bad.said()
    (tmp_path / "go").touch()
    assert [good.wait(), spare.wait()] == [0, 0], good.said() + spare.said()
    judged = good.events("incident.judged")[0].facts
    assert (judged["class"], judged["root_node"]) == ("XID_79", "bad")
    (decided,) = [e for e in good.events("decision.made") if e.facts["incident"]]
    assert decided.facts["action"] == "restart_elsewhere"
    assert decided.text.startswith("decided: restart on other nodes as attempt 2, because ")


def _tell_that_it_waits(seconds: float) -> None:
    """In place of torch's pause of a second between two looks: after the second one all know that
    this agent waits, because each looks once a second itself."""
    if isinstance(seconds, int):  # and no range to draw from, as before the first look
        time.sleep(seconds)
        Path("waits" if Path("looked").exists() else "looked").touch()


def _pid_of(agent: Agent) -> int:
    """Its one worker."""
    started = agent.events("workers.started")
    pids = [pid for event in started for pid in event.facts["pids"].values()]  # type: ignore[attr-defined]  # a dict
    return next(int(pid) for pid in pids if _parent_of(pid) == agent.pid)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
