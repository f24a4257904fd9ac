"""One drilled job: its folder, its environment, and ``everstep run`` as a child process.

Owns: starting the launcher, the journal, and ending everything of the run. Never does: decide
what is injected when. Called by: the drill's loop.
"""

from __future__ import annotations

import ctypes
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.core import points, settings
from everstep.core.events import Event
from everstep.drill import processes
from everstep.drill.journal import Journal
from everstep.drill.plan import Planned

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1

SWEEP_SECONDS = 20.0
LINGER_SECONDS = 15.0
"""How long after a finished run its keeper may take to end by itself."""


@dataclass(frozen=True)
class Setup:
    """What is run and where. ``command`` is what follows ``everstep run``: flags, script,
    arguments. ``folder`` exists and holds journal and log; ``environment`` is the parent's.
    ``launcher`` is ``everstep run`` itself; ``state`` where its keeper's files go, by default
    ``folder``: two nodes that stand for two hosts share none."""

    command: tuple[str, ...]
    store: str
    job: str
    folder: Path
    environment: Mapping[str, str]
    checkpoint_every: str = "1s"
    launcher: tuple[str, ...] = (sys.executable, "-m", "everstep.cli", "run")
    state: Path | None = None


class Job:
    """The processes of one run, all of which bear :attr:`mark`."""

    def __init__(self, setup: Setup, planned: Sequence[Planned] = ()) -> None:
        self.setup = setup
        self.mark = secrets.token_hex(16)
        self.journal = Journal(setup.folder / "journal.jsonl")
        self.log = setup.folder / "run.log"
        self._environment = _environment(setup, self.journal.path, self.mark)
        self._armed = {
            plan.index: setup.folder / f"fired-{plan.index}"
            for plan in planned
            if plan.fault.point is not None
        }
        if self._armed:
            self._environment[points.VARIABLE] = _points(planned, self._armed)
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def agent_pid(self) -> int:
        """Process id of the launcher that was started last."""
        assert self._agent is not None, "the job was not started"
        return self._agent.pid

    def start(self) -> None:
        """Start ``everstep run``: at first, and again after its agent was killed."""
        command = [*self.setup.launcher, *self.setup.command]
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def poll(self) -> int | None:
        """The launcher's exit code (negative: a signal), None while it runs."""
        assert self._agent is not None, "the job was not started"
        return self._agent.poll()

    def wait(self, timeout: float) -> int:
        """Wait for the launcher to end. Raises ``subprocess.TimeoutExpired``."""
        assert self._agent is not None, "the job was not started"
        return self._agent.wait(timeout)

    def fired(self) -> list[tuple[int, float]]:
        """(index, CLOCK_MONOTONIC time) of point faults that went off since the last call."""
        offset = time.time() - time.monotonic()
        found = []
        for index, path in list(self._armed.items()):
            if path.exists():
                del self._armed[index]
                found.append((index, path.stat().st_mtime - offset))
        return found

    def note(self, event: Event) -> None:
        """Write an event of the drill's own into the journal."""
        self.journal.append(event)

    def linger(self, timeout: float = LINGER_SECONDS) -> list[int]:
        """Processes of the run that are still there ``timeout`` s after its end."""
        deadline = time.monotonic() + timeout
        while (left := processes.all_marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)  # a /proc scan is what there is to wait on; the keeper is no child
        return left

    def end(self) -> int:
        """Kill whatever is left of the run; how many processes that were."""
        killed = processes.kill_all(self.mark, timeout=SWEEP_SECONDS)
        if self._agent is not None:
            self._agent.wait(SWEEP_SECONDS)
        return killed


def _die_with_parent() -> None:
    """A launcher whose drill was killed goes too; its workers and keeper then end by themselves.

    It follows the thread that starts the launcher, which is the drill's only one.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(setup: Setup, journal: Path, mark: str) -> dict[str, str]:
    every = settings.variable("checkpoint_every")
    return {
        every: setup.checkpoint_every,
        **setup.environment,
        settings.variable("store"): setup.store,
        settings.variable("job"): setup.job,
        settings.variable("events"): str(journal),
        settings.variable("state_dir"): str(setup.state or setup.folder),
        processes.VARIABLE: mark,
    }


def _points(planned: Sequence[Planned], armed: Mapping[int, Path]) -> str:
    faults = [
        points.Fault(
            point=plan.fault.point or "",
            action="kill",
            after=plan.fault.passes,
            rank=plan.fault.rank,
            once=str(armed[plan.index]),
        )
        for plan in planned
        if plan.index in armed
    ]
    return msgspec.json.encode(faults).decode()
