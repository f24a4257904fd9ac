"""A real drill of a tiny script: real launcher, keeper, workers and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os, time
import torch
import everstep

rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
run = everstep.attach(model=model, optimizer=optimizer)
for _ in run.steps(until=150):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.detach())
    time.sleep(0.02)  # the pace of a step, so that there is time for a fault
"""


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


def test_every_default_fault_is_overcome_and_nothing_differs(tmp_path: Path) -> None:
    """R4, and the drill's own promise: afterwards no process of the runs is left."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    drill = subprocess.Popen(
        [
            sys.executable, "-m", "everstep.cli", "drill", "--json", "--reference", "--seed", "7",
            "--checkpoint-every", "0.3s", "--patience", "40", "--keep", str(tmp_path / "kept"),
            "--nproc-per-node", "2", str(script),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(), cwd=tmp_path,
    )  # fmt: skip
    try:
        stdout, stderr = drill.communicate(timeout=100)
    finally:
        drill.terminate()
        drill.wait(30)
    result = json.loads(stdout)
    assert drill.returncode == 0, (result, stderr[-3000:])
    assert (result["format"], result["verdict"], result["why"]) == (
        "everstep.drill/1", "recovered", [],
    )  # fmt: skip
    faults = {report["kind"]: report for report in result["faults"]}
    assert set(faults) == {"worker", "keeper", "agent", "corrupt"}
    assert faults["worker"]["tier"] == "memory"
    assert faults["keeper"]["tier"] is None
    assert faults["agent"]["tier"] == "memory"
    assert faults["corrupt"]["tier"] == "store"
    reference = result["reference"]
    assert reference["losses"]["steps"] == 150
    assert reference["losses"]["compared"] >= 300
    assert reference["state"]["step"] == 150
    assert _left_behind(tmp_path) == []


def _left_behind(folder: Path) -> list[int]:
    """Processes whose events were to go into ``folder``."""
    wanted = f"EVERSTEP_EVENTS={folder}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if any(entry.startswith(wanted) for entry in environment.split(b"\0")):
            found.append(int(name))
    return found
