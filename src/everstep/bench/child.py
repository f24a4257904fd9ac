"""The benchmark's end of one training process.

Owns: starting :mod:`everstep.bench.save_job` and talking to it. Called by: save, memory.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from everstep.bench import processes
from everstep.bench.footprint import Footprint, footprint
from everstep.bench.rounds import Answer, Ask, Job, Verb
from everstep.core.settings import Settings, to_environment
from everstep.errors import BenchError

TIMEOUT = 600.0


class Child:
    """One training process and everything it starts, all of which bear :attr:`mark`."""

    def __init__(self, job: Job, mark: str) -> None:
        self.mark = mark
        self.job = job
        self._log = Path(job.folder) / "log"
        mine, theirs = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.bench.save_job",
                 msgspec.json.encode(job).decode(), str(theirs)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[theirs],
                env=_environment(job, mark), start_new_session=True, cwd=job.folder,
            )  # fmt: skip
        os.close(theirs)
        self._answers = mine
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        processes.end_all(self.mark)
        self._process.wait(20)
        os.close(self._answers)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ask(self, verb: Verb, count: int = 1, *, timeout: float = TIMEOUT) -> Answer:
        """Tell it what to do and wait for the answer. Raises :class:`BenchError` where it ended."""
        assert self._process.stdin is not None, "asked for above"
        try:
            self._process.stdin.write(msgspec.json.encode(Ask(verb, count)) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(verb, "ended") from None
        return msgspec.json.decode(self._line(verb, timeout), type=Answer)

    def footprint(self) -> Footprint:
        """Of the process and all it started."""
        return footprint(processes.bearers(self.mark))

    def _line(self, verb: str, timeout: float) -> bytes:
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            if not waiting.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise self._failed(verb, f"did not answer within {timeout:g} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise self._failed(verb, "ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _failed(self, verb: str, how: str) -> BenchError:
        said = self._log.read_text(errors="replace").splitlines()[-30:]
        return BenchError(
            f"the training process of {self.job.method!r} {how} at {verb!r}.",
            hint="It said last:\n" + "\n".join(said),
        )


def _environment(job: Job, mark: str) -> dict[str, str]:
    place = Path(job.folder)
    settings = Settings(
        store=str(place / "store"), job="bench", events=str(place / "events"),
        state_dir=str(place / "state"), keep_last=2,
        # It saves when it is told to and at no other time.
        snapshot_every=10**9, checkpoint_every=1e9,
    )  # fmt: skip
    return processes.clean(os.environ) | to_environment(settings) | {processes.VARIABLE: mark}
