"""The recovery benchmark's loop with torch's distributed checkpoint, as a careful user writes it.

Owns: saves every N steps into a folder of their own, a pointer that is moved only after the save
is complete, the last two kept, loading at the start. Called by: :mod:`everstep.bench.recover_job`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from everstep.bench.training import FOREVER, Training

KEPT = 2


def train(training: Training) -> None:
    """Train until the benchmark ends the job."""
    checkpoints = Checkpoints(training.folder, training.rank)
    step = checkpoints.load(training.model, training.optimizer)
    training.marks.write("restored", step=step)
    while step < FOREVER:
        training.step(step)
        step += 1
        if step % training.every == 0:
            checkpoints.save(step, training.model, training.optimizer)


class Checkpoints:
    """DCP checkpoints in ``folder``; ``latest`` holds the name of the newest complete one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Save on all ranks; dcp.save returns when every rank has written and synced its file."""
        place = self._folder / f"step-{step}"
        save({**_state(model, optimizer), "step": step}, checkpoint_id=place)
        if self._rank == 0:
            self._point_to(place.name)
            self._prune(step)

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the newest complete checkpoint; the step it holds, 0 where there is none."""
        pointer = self._folder / "latest"
        if not pointer.exists():
            return 0
        state = {**_state(model, optimizer), "step": 0}
        load(state, checkpoint_id=self._folder / pointer.read_text())
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        step: int = state["step"]
        return step

    def _point_to(self, name: str) -> None:
        new = self._folder / "latest.new"
        with new.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._folder / "latest")

    def _prune(self, step: int) -> None:
        steps = sorted(int(path.name[5:]) for path in self._folder.glob("step-*"))
        for old in [number for number in steps if number <= step][:-KEPT]:
            shutil.rmtree(self._folder / f"step-{old}")


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
