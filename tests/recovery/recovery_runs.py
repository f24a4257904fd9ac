"""A real job for tests: its agents, the faults injected into it, and what it left.

Every process of a node bears the drill's mark in its environment, so that all of them can be
found; a node whose agent a fault has killed is started again, as a supervisor would do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recovery_moments import mark, with_marks

from everstep.core.events import Event
from everstep.core.points import VARIABLE, Fault
from everstep.drill import kinds, losses, processes, states
from everstep.drill.job import Job, Setup
from everstep.drill.journal import Journal
from everstep.drill.losses import Figures

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "gpt_ddp.py": ("--width", "32", "--layers", "1", "--batch", "2"),
    "gpt_fsdp2.py": ("--width", "32", "--layers", "1", "--batch", "2"),
    "resnet_amp_accumulate.py": ("--channels", "4", "--batch", "4"),
    "embedding_sparse.py": ("--users", "50", "--items", "20", "--batch", "16"),
}
WITHOUT_LOADER = frozenset({"embedding_sparse.py"})
JOB = "job"
SECONDS_EACH = 120.0
"""What a run, and each death in it, may take on a machine that is busy with other things."""
TICK = 0.01
_NOT_INHERITED = ("EVERSTEP_", "PET_", "TORCHELASTIC_", "MASTER_")
_SOON = "keep_alive_interval=1,keep_alive_max_attempt=4"
"""A node that is gone is missed after 4 s; torch's default is 15 s. Its heart beats every second
or, where its timer is early by a hair, every other one."""
_FORKING = (sys.executable, str(Path(__file__).with_name("forking_agent.py")), "run")
_FORKED = ("--run-path", "--start-method", "fork")


@dataclass(frozen=True)
class Case:
    """What is trained: an example on ``world`` ranks, which are spread over ``nodes``. ``forked``:
    workers have torch from their agent, which saves most of what a start costs."""

    example: str
    world: int
    nodes: int = 1
    steps: int = 200
    forked: bool = False

    @property
    def loader(self) -> bool:
        return self.example not in WITHOUT_LOADER


@dataclass(frozen=True)
class Undisturbed:
    """What a run without faults came to."""

    figures: Figures
    final: states.Final


class Trial:
    """One run of ``case`` in ``folder``, with ``faults``. ``restarts`` counts agents that a fault
    killed and that were started again. As a context manager it leaves no process."""

    def __init__(
        self, case: Case, folder: Path, faults: Sequence[Fault] = (), *, name: str = ""
    ) -> None:
        self.case = case
        self.folder = folder
        self.faults = tuple(faults)
        self.store = str(folder / "store")
        self.restarts = 0
        self.events: list[Event] = []
        self._name = name
        self._journal = Journal(folder / "journal.jsonl")
        self._port = _free_port()
        self._told = with_marks(self.faults, folder)
        self._began = time.monotonic()
        self._patience = SECONDS_EACH
        (folder / "tmp").mkdir(parents=True)
        self.nodes = [Job(self._setup()) for _ in range(case.nodes)]
        self._running: set[int] = set()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *error: object) -> None:
        for node in sorted(self._running):
            self.nodes[node].end()

    # -- from the start to the end

    def run(self) -> None:
        """Run to the end. Raises AssertionError, which tells all, where the job does not get
        there, or leaves a process."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Start all nodes. The first of several holds the rendezvous."""
        self.start_node(0)
        if self.case.nodes > 1:
            self.until(lambda: _listens(self._port), "the rendezvous was open")
        for node in range(1, self.case.nodes):
            self.start_node(node)

    def start_node(self, node: int) -> None:
        self._patience += SECONDS_EACH
        self._running.add(node)
        self.nodes[node].start()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for a condition on the events while the job goes on."""
        while not ready():
            assert not self._all_finished(), self.told(f"the job ended before {what}")
            self._tick(what)

    def finish(self) -> None:
        """Wait for the end of the job."""
        while not self._all_finished():
            self._tick("the job ended")
        for job in self.nodes:
            left = job.linger()
            assert not left, self.told(f"processes outlived the finished run: {left}")
        self._read()

    # -- what is done to it

    def kill_worker(self, rank: int) -> None:
        self._kill(self.worker_pids()[rank])

    def kill_keeper(self) -> None:
        started = [e for e in self.events if e.kind == kinds.KEEPER_STARTED]
        self._kill(kinds.fact_int(started[-1], "pid") or 0)

    def kill_agent(self, node: int = 0) -> None:
        """The agent alone, which is then started again."""
        self._kill(self.nodes[node].agent_pid)
        self.nodes[node].wait(SECONDS_EACH)
        self.start_node(node)

    def kill_node(self, node: int) -> None:
        """Agent, keeper and workers of a node at once; the test starts it again."""
        self.nodes[node].end()
        self._running.discard(node)

    def await_failure(self, node: int) -> int:
        """The exit code of a node's agent that has to give up."""
        code = self.nodes[node].wait(SECONDS_EACH)
        assert code > 0, self.told(f"`everstep run` of node {node} ended with {code}")
        self._running.discard(node)
        return code

    # -- what is known of it

    @property
    def attempt(self) -> int:
        return max((e.attempt for e in self.events if e.kind == kinds.WORKERS_STARTED), default=0)

    def await_training(self, attempt: int, steps: int, *, commits: int = 0) -> None:
        """Wait until the attempt has computed ``steps`` steps, has completed a snapshot, and has
        seen ``commits`` checkpoints of its own committed."""

        def ready() -> bool:
            mine = [event for event in self.events if event.attempt == attempt]
            computed = {event.step for event in mine if event.kind in kinds.PROGRESS}
            cut = any(event.kind == kinds.SNAPSHOT for event in mine)
            committed = sum(event.kind == kinds.COMMITTED for event in mine)
            return cut and len(computed) >= steps and committed >= commits

        self.until(ready, f"attempt {attempt} had trained {steps} steps")

    def worker_pids(self) -> dict[int, int]:
        """Process id by rank, of the newest attempt on all nodes."""
        started = [e for e in self.events if e.kind == kinds.WORKERS_STARTED]
        found: dict[int, int] = {}
        for event in started:
            if event.attempt == self.attempt:
                found |= kinds.fact_ints(event, "pids")
        return found

    def elected(self) -> list[tuple[int, str, int]]:
        """(attempt, tier, step) of each restore."""
        events = [e for e in self.events if e.kind == kinds.ELECTED]
        return [(e.attempt, kinds.fact_text(e, "source"), e.step or 0) for e in events]

    def missed(self) -> list[str]:
        """The points of faults that did not go off."""
        marks = [mark(self.folder, number) for number in range(len(self.faults))]
        return [f.point for f, path in zip(self.faults, marks, strict=True) if not path.exists()]

    def outcome(self) -> Undisturbed:
        return Undisturbed(losses.figures(self.events), states.final_of(self.store, JOB))

    def told(self, what: str) -> str:
        """``what``, and all that is needed to see it again."""
        told = [what, f"case: {self.case} {self._name}", f"{VARIABLE}={self._told}"]
        told += [f"in {self.folder}; faults that did not go off: {self.missed()}"]
        shown = [e for e in self.events if e.kind not in (kinds.LOGGED, kinds.SNAPSHOT)]
        told += [
            f"{e.mono - self._began:9.3f} {e.source:7} {e.attempt:2} {e.kind}: {e.text[:300]}"
            for e in shown[-60:]
        ]
        log = self.nodes[0].log
        told.append(log.read_text(errors="replace")[-4000:] if log.exists() else "no log")
        return "\n".join(told)

    # -- within

    def _setup(self) -> Setup:
        flags = ["--nproc-per-node", str(self.case.world // self.case.nodes)]
        if self.case.nodes > 1:
            flags += ["--nnodes", str(self.case.nodes), "--rdzv-backend", "c10d"]
            flags += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-conf", _SOON]
        flags += _FORKED if self.case.forked else ()
        script = [str(EXAMPLES / self.case.example), "--steps", str(self.case.steps)]
        command = (*flags, *script, *SMALL[self.case.example])
        setup = Setup(command, self.store, JOB, self.folder, self._environment())
        return replace(setup, launcher=_FORKING) if self.case.forked else setup

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        told = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "EVERSTEP_SNAPSHOT_EVERY": "1",
            "EVERSTEP_CHECKPOINT_EVERY": "0",
            # More deaths within a minute than in a year of real life: what is proved here is state.
            "EVERSTEP_PER_FINGERPRINT": "0",
            "EVERSTEP_WINDOW_RESTARTS": "0",
            "EVERSTEP_FINAL_DEADLINE": "90",
            # For the examples that import another one, where the script is not Python's own.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES), kept.get("PYTHONPATH")])),
        }
        return kept | told | ({VARIABLE: self._told} if self.faults else {})

    def _tick(self, what: str) -> None:
        self._read()
        for node in sorted(self._running):
            code = self.nodes[node].poll()
            if code == -signal.SIGKILL and self.restarts < len(self.faults):
                self.restarts += 1
                self.start_node(node)
            elif code:
                raise AssertionError(self.told(f"`everstep run` of node {node} ended with {code}"))
        allowed = self._patience + SECONDS_EACH * len(self.faults)
        if time.monotonic() - self._began > allowed:
            raise AssertionError(self.told(f"{allowed:g} s passed before {what}"))
        time.sleep(TICK)

    def _read(self) -> None:
        self.events += self._journal.read_new()

    def _all_finished(self) -> bool:
        return bool(self._running) and all(self.nodes[n].poll() == 0 for n in self._running)

    def _kill(self, pid: int) -> None:
        marks = [job.mark for job in self.nodes if processes.bears_mark(pid, job.mark)]
        assert marks, self.told(f"process {pid} is gone, though it was to be killed")
        with processes.held(pid, marks[0]) as fd:
            processes.strike(fd)


Begin = Callable[..., Trial]
Reference = Callable[[Case], Undisturbed]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
