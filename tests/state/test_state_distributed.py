"""DDP, FSDP2 and hybrid shards with two real gloo ranks: R1, R4, R8 where ranks share a state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("state_two_ranks.py")


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_two_ranks(case: str, tmp_path: Path) -> None:
    """R4 over a cut of both ranks, and the checks named in the script's cases."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as log:
            command = [sys.executable, str(SCRIPT), str(rank), str(tmp_path), case]
            ranks.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
    try:
        codes = [process.wait(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(output.read_text()[-3000:] for output in outputs)
