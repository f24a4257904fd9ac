"""R4: what decides the bits besides the state is kept, and a restore tells where it changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from everstep.core.events import decode_line
from everstep.train.environment import changes, observe

SCRIPT = """
import sys, torch, everstep
torch.set_num_threads(int(sys.argv[1]))
model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = everstep.attach(model=model, optimizer=optimizer)
for step in run.steps(until=int(sys.argv[2])):
    model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_nothing_is_said_where_nothing_changed() -> None:
    assert changes(observe(2), observe(2)) == []


def test_each_change_is_named_with_both_values() -> None:
    before = {**observe(1), "torch": "1.0"}
    assert changes(before, observe(1)) == [f"torch was 1.0 and is {torch.__version__}"]


def test_r4_a_restore_warns_of_other_threads(
    job_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**job_environment, "EVERSTEP_JOB": "job"}
    said = []
    for threads, until in (("1", "2"), ("1", "4"), ("2", "6")):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, threads, until],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append("threads was 1 and is 2" in done.stderr)
    assert said == [False, False, True]
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    events = [decode_line(line) for line in lines]
    assert [e.step for e in events if e.kind == "train.environment_changed"] == [4]
