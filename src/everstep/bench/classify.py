"""``everstep bench classify``: how fast a log of a failed job is judged, on one core.

Owns: the rounds, the goals. Never does: judge by itself (a process of each round does). Called by:
:mod:`everstep.bench.main`, tests.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.bench import logs
from everstep.bench.classify_job import Took
from everstep.bench.figures import spread
from everstep.bench.machine import read_machine, require_disk
from everstep.bench.result import Figure, Goal, Machine, Result, report
from everstep.bench.scratch import scratch
from everstep.errors import BenchError, UsageError

RATE = 35e6
"""Bytes a second that one core is to judge."""
MEMORY = 200e6

Say = Callable[[str], None]


@dataclass(frozen=True)
class ClassifySetup:
    """``rounds`` logs of ``log_bytes`` each."""

    rounds: int = 5
    log_bytes: int = 200_000_000
    folder: Path = Path()

    def __post_init__(self) -> None:
        if min(self.rounds, self.log_bytes) < 1:
            raise UsageError("every number of `bench classify` must be at least 1.")


def measure(setup: ClassifySetup, say: Say) -> Result:
    """Run all rounds. Raises :class:`~everstep.errors.BenchError` where a log is judged wrongly."""
    took: list[Took] = []
    plain: list[float] = []
    with scratch(setup.folder) as folder:
        require_disk(folder, 2 * setup.log_bytes)
        machine = read_machine(setup.folder.resolve())
        for number in range(setup.rounds):
            path = folder / "job.log"
            with path.open("wb") as file:
                file.writelines(logs.pieces(setup.log_bytes, seed=number))
            plain.append(_read(path))
            took.append(_judged(path))
            rate = setup.log_bytes / took[-1].seconds / 1e6
            say(f"round {number + 1}/{setup.rounds}: {rate:.0f} MB/s")
    return _result(setup, machine, took, plain)


def _read(path: Path) -> float:
    """Seconds of CPU to read the file alone."""
    before = time.process_time()
    with path.open("rb") as file:
        while file.read(1 << 18):
            pass
    return time.process_time() - before


def _judged(path: Path) -> Took:
    ran = subprocess.run(
        [sys.executable, "-m", "everstep.bench.classify_job", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise BenchError(f"the judging process ended with {ran.returncode}: {ran.stderr[-400:]}")
    took = msgspec.json.decode(ran.stdout, type=Took)
    if took.fault != logs.FAULT or took.ranks != (logs.RANK,):
        raise BenchError(f"the log was judged as {took.fault} of ranks {list(took.ranks)}.")
    return took


def _result(setup: ClassifySetup, machine: Machine, took: list[Took], plain: list[float]) -> Result:
    share = RATE / setup.log_bytes
    seconds = [one.seconds * share for one in took]
    resident = [float(one.resident) for one in took]
    goals = [
        Goal("35 MB of log in at most 1 s of one core", spread(seconds).median, 1.0),
        Goal("at most 200 MB of memory", max(resident), MEMORY),
    ]
    figures = (
        Figure("everstep", "35 MB of log", "s", spread(seconds), "reading alone",
               spread([one * share for one in plain]).median),
        Figure("everstep", "peak memory", "bytes", spread(resident)),
    )  # fmt: skip
    notes = (
        f"of the lines {1 - logs.STORM:.0%} are benign, the rest is a storm of matches; lines of "
        "1 MB, progress bars of carriage returns and invalid UTF-8 stand in between",
        "seconds of CPU of one process that reads and judges; loading the catalogue is not in it",
    )
    samples: dict[str, list[dict[str, float | None]]] = {
        "everstep": [{"seconds": a.seconds, "resident": float(a.resident)} for a in took],
        "read": [{"seconds": one} for one in plain],
    }
    parameters: dict[str, float | int | str] = {
        "rounds": setup.rounds, "log MB": round(setup.log_bytes / 1e6),
    }  # fmt: skip
    return Result("classify", machine, parameters, figures, report(goals), notes, samples)
