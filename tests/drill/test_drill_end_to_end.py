"""A real drill of a tiny script: real launcher, keeper, workers and signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import os, time
import torch
import everstep

rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
run = everstep.attach(model=model, optimizer=optimizer)
for _ in run.steps(until=STEPS):
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


def _drill(tmp_path: Path, faults: str, *, steps: int) -> tuple[int, Any, str]:
    """Exit code, document and talk of a drill with an undisturbed run beside it."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("STEPS", str(steps)))
    drill = subprocess.Popen(
        [
            sys.executable, "-m", "everstep.cli", "drill", "--json", "--reference", "--seed", "7",
            "--faults", faults, "--checkpoint-every", "0.3s", "--patience", "60",
            "--keep", str(tmp_path / "kept"), "--nproc-per-node", "2", str(script),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(), cwd=tmp_path,
    )  # fmt: skip
    try:
        stdout, stderr = drill.communicate(timeout=280)
    finally:
        drill.terminate()
        drill.wait(30)
    return drill.returncode, json.loads(stdout), stderr


def _check(tmp_path: Path, faults: str, *, steps: int) -> dict[str, Any]:
    code, result, talk = _drill(tmp_path, faults, steps=steps)
    assert (code, result["verdict"], result["why"]) == (0, "recovered", []), (result, talk[-4000:])
    assert result["format"] == "everstep.drill/1"
    reports = {report["kind"]: report for report in result["faults"]}
    assert list(reports) == faults.split(",")
    reference = result["reference"]
    assert (reference["losses"]["steps"], reference["state"]["step"]) == (steps, steps)
    assert reference["losses"]["compared"] >= 2 * steps
    assert reference["state"]["tensors"] == 16
    assert _left_behind(tmp_path) == []
    return reports


@pytest.mark.soak  # `make demo` does the same; the matrix has six faults in `make test`
@pytest.mark.timeout(300)
def test_faults_are_overcome_and_nothing_differs(tmp_path: Path) -> None:
    """R4, and the drill's own promise: afterwards no process of the runs is left."""
    reports = _check(tmp_path, "worker,corrupt", steps=100)
    assert {kind: report["tier"] for kind, report in reports.items()} == {
        "worker": "memory", "corrupt": "store",
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_kind_of_fault_is_overcome(tmp_path: Path) -> None:
    """R3 (a failing save never stops training), R4, S6."""
    kinds = "worker,keeper,disk-full,agent,everything,torn-write,corrupt"
    reports = _check(tmp_path, kinds, steps=400)
    assert {kind: report["tier"] for kind, report in reports.items()} == {
        "worker": "memory", "keeper": None, "disk-full": None, "agent": "memory",
        "everything": "store", "torn-write": None, "corrupt": "store",
    }  # fmt: skip


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
