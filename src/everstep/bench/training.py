"""What the recovery benchmark's script hands to whatever keeps its state.

Owns: the record. Called by: recover_job (makes it), recover_everstep and recover_dcp (use it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from everstep.bench.marks import MarkWriter

FOREVER = 10**9
"""Steps: the benchmark ends the job."""


@dataclass(frozen=True)
class Training:
    """``step(n)`` trains the step after ``n`` others and tells of it. ``every`` is the cadence in
    steps, ``folder`` exists on all ranks."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[int], None]
    marks: MarkWriter
    folder: Path
    every: int
    rank: int
