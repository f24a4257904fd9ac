"""The recovery benchmark's loop under everstep. Called by: :mod:`everstep.bench.recover_job`.

The cadence comes from the environment, as ``everstep run`` hands it on.
"""

from __future__ import annotations

from everstep.bench.training import FOREVER, Training
from everstep.train.run import attach


def train(training: Training) -> None:
    """Train until the benchmark ends the job."""
    run = attach(model=training.model, optimizer=training.optimizer)
    training.marks.write("restored", step=run.restore())
    for number in run.steps(until=FOREVER):
        training.step(number)
