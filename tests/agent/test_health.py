"""What a node tells while its workers run: said and recorded, and nothing is ended by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import Start

from everstep.agent import lead
from everstep.core import exits
from everstep.faults.history import DecisionRecord, IncidentRecord, unpack
from everstep.store import open_store

WAITS = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def test_a_row_remapped_on_a_gpu_is_told_once_and_the_attempt_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "HEALTH_SECONDS", 0.2)
    kernel = tmp_path / "kernel.log"
    kernel.touch()
    agent = start("--job", "j", script=WAITS, EVERSTEP_KERNEL_LOG=str(kernel))
    agent.until(lambda: agent.events("workers.started"))
    line = "NVRM: Xid (PCI:0000:1b:00): 63, Row Remapper: New row marked for remapping, reset gpu\n"
    kernel.write_text(line)
    agent.until(lambda: agent.events("health.seen"))
    kernel.write_text(line * 2)
    agent.until(lambda: kernel.stat().st_size > len(line))
    (tmp_path / "go").touch()
    assert agent.wait() == exits.FINISHED, agent.said()
    assert len(agent.events("health.seen")) == 1
    assert "the attempt goes on" in agent.said()
    history = unpack(open_store(str(tmp_path / "everstep-store")).job("j").history().entries)
    (seen,) = [record for record in history.records if isinstance(record, IncidentRecord)]
    assert not seen.fatal
    decisions = [record for record in history.records if isinstance(record, DecisionRecord)]
    assert [decision.action for decision in decisions] == ["restart_in_place", "continue"]
