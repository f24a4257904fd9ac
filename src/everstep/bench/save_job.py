"""One training process of the saving benchmark: it trains and saves as it is told.

Owns: the measured round. Called by: :mod:`everstep.bench.child`, as ``python -m``. Commands come on
stdin; answers go to the descriptor that is named, so that nothing printed mixes with them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from everstep.bench.limits import Limits
from everstep.bench.methods import Saving, method
from everstep.bench.rounds import Answer, Ask, Job, Round
from everstep.bench.workload import Workload
from everstep.errors import BenchError

STEPS = 10
"""Undisturbed steps before a save, and as many after it is durable."""
DEADLINE = 300.0
"""Seconds for a save to become durable."""


class Process:
    """Answers the commands of one job."""

    def __init__(self, job: Job) -> None:
        self._workload = Workload(job.state_bytes, job.trained, job.batch, job.threads)
        self._folder = Path(job.folder)
        self._limits: Limits | None = None
        self._measures_limits = job.method == "limits"
        kind = "none" if self._measures_limits else job.method
        self._saving: Saving = method(kind, self._workload, self._folder)
        self._step = 0

    def answer(self, ask: Ask) -> Answer:
        """Do what is asked."""
        if ask.verb == "train":
            return Answer(steps=self._train(ask.count), state_bytes=self._state_bytes())
        if ask.verb == "open":
            self._open()
        elif ask.verb == "round":
            return self._round()
        elif ask.verb == "saves":
            self._saves(ask.count)
        else:
            self._saving.close()
        return Answer()

    def _open(self) -> None:
        self._saving.open()
        if self._measures_limits:
            self._limits = Limits(self._workload.tensors(), self._folder)

    def _round(self) -> Answer:
        if self._limits is not None:
            return Answer(limits=self._limits.measure())
        before = self._train(STEPS)
        began = time.monotonic()
        self._saving.save(self._step)
        blocked = time.monotonic() - began
        during: list[float] = []
        while (at := self._saving.durable_at()) is None:
            during += self._train(1)
            _check_deadline(began)
        after = self._train(STEPS)
        self._saving.tidy()
        return Answer(round=Round(blocked, at - began, before, during, after))

    def _saves(self, count: int) -> None:
        for _ in range(count):
            self._train(1)
            began = time.monotonic()
            self._saving.save(self._step)
            while self._saving.durable_at() is None:
                time.sleep(0.001)
                _check_deadline(began)
            self._saving.tidy()

    def _train(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            began = time.monotonic()
            self._workload.step()
            self._saving.step_end()
            seconds.append(time.monotonic() - began)
            self._step += 1
        return seconds

    def _state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._workload.tensors())


def _check_deadline(began: float) -> None:
    if time.monotonic() - began > DEADLINE:
        raise BenchError(f"a save was not durable after {DEADLINE:g} s.")


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    answers = int(sys.argv[2])
    process = Process(job)
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        os.write(answers, msgspec.json.encode(process.answer(ask)) + b"\n")
        if ask.verb == "close":
            return


if __name__ == "__main__":
    main()
