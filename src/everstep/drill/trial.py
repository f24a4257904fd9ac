"""One run of one scenario: its agents, what is done to it from without, and its end.

Owns: the order of start, injection and end. Never does: judge (examine does). Called by: matrix.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.core import points, settings
from everstep.core.events import Event
from everstep.core.points import Fault
from everstep.drill import kinds, namespaces, processes
from everstep.drill.job import Job, Setup
from everstep.drill.journal import Journal
from everstep.drill.progress import Progress
from everstep.drill.scenarios import SNAPSHOT_EVERY, Drawn, Scenario, armed, told
from everstep.drill.storefault import StoreFault, faulty_url
from everstep.errors import DrillError

TICK = 0.02
COMMITS = 2
"""Checkpoints that must be there before a fault from without."""
JUMP_SEEN = 2.5
"""Seconds for the agent to see that its clock jumped: it looks every second."""
CUT_SECONDS = 20.0

_WARM = """
import torch
import torch.nn.parallel
from everstep.cli import main
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
main(prog_name="everstep")
"""
"""``everstep run`` with all in memory that its forked workers need: torch imports its compiler with
the first optimizer that is made."""

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class Place:
    """Where and how runs of a matrix are made. ``launcher`` and ``flags`` start ``everstep run``,
    by default with workers that have torch from their agent, so that no start imports it anew;
    ``script`` is what is run, up to ``steps``; a fault strikes at a step ``between`` two: behind
    some checkpoints, and with steps to come. ``down`` is how long (seconds) the store is away,
    ``hang_floor`` as the setting of that name. ``patience``: seconds that a run may take."""

    folder: Path
    environment: Mapping[str, str]
    launcher: tuple[str, ...] = (sys.executable, "-c", _WARM, "run")
    flags: tuple[str, ...] = ("--run-path", "--start-method", "fork")
    script: tuple[str, ...] = (str(Path(__file__).with_name("small.py")),)
    steps: int = 150
    between: tuple[int, int] = (45, 60)
    checkpoint_every: str = "0.5s"
    down: float = 60.0
    hang_floor: float | None = None
    patience: float = 240.0


@dataclass(frozen=True)
class Done:
    """A run that is over. ``struck`` is when (CLOCK_MONOTONIC) and in which attempt the fault came
    first, None where it never did; ``codes`` the exit codes of the agents, by node."""

    store: str
    job: str
    journal: Path
    events: tuple[Event, ...]
    codes: tuple[int, ...]
    struck: float | None
    seconds: float
    problems: tuple[str, ...] = ()


@dataclass
class _Nodes:
    """The agents of a run by node. Those that run, and the exit codes of those that are over."""

    jobs: list[Job]
    running: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)

    def start(self, node: int) -> None:
        self.ended.pop(node, None)
        self.running.add(node)
        self.jobs[node].start()

    def poll(self) -> bool:
        """Whether none runs."""
        for node in sorted(self.running):
            code = self.jobs[node].poll()
            if code is not None:
                self.running.discard(node)
                self.ended[node] = code
        return not self.running


class Trial:
    """One run of ``scenario`` (None: undisturbed) in ``folder``, which is made."""

    def __init__(
        self, place: Place, scenario: Scenario | None, drawn: Drawn, name: str, tell: Tell
    ) -> None:
        self._place = place
        self._scenario = scenario
        self._drawn = drawn
        self._tell = tell
        self.folder = place.folder / name
        self.folder.mkdir(parents=True)
        self._journal = Journal(self.folder / "journal.jsonl")
        self._progress = Progress()
        self._events: list[Event] = []
        self._problems: list[str] = []
        self._struck: float | None = None
        self._down = StoreFault(self.folder)
        self._store = str(self.folder / "store")
        if scenario is not None and scenario.outside == "store-down":
            self._store = faulty_url(self._store, self.folder)
        self._job = "drill"
        self._undo = ExitStack()
        self._nodes = _Nodes([])
        self._began = time.monotonic()

    def run(self) -> Done:
        """Run to the end; whatever happens, no process of the run is left."""
        with self._undo:
            networks = self._networks()
            self._nodes.jobs = [Job(setup) for setup in self._setups(networks)]
            for job in self._nodes.jobs:
                self._undo.callback(job.end)
            self._start(networks)
            waiting = self._scenario is not None and bool(self._scenario.outside)
            while not self._turn():
                if waiting and self._due():
                    waiting = False
                    self._strike(networks)
                time.sleep(TICK)
            self._read()
        return self._done()

    def given_up(self, why: str) -> Done:
        """What the run came to that :meth:`run` has raised from."""
        self._problems.append(why)
        self._read()
        return self._done()

    def _done(self) -> Done:
        return Done(
            store=self._store, job=self._job, journal=self._journal.path,
            events=tuple(self._events),
            codes=tuple(self._nodes.ended.get(n, -1) for n in range(len(self._nodes.jobs))),
            struck=self._went_off(), seconds=round(time.monotonic() - self._began, 3),
            problems=tuple(self._problems),
        )  # fmt: skip

    # -- the run

    def _networks(self) -> namespaces.Networks | None:
        if self._scenario is None or self._scenario.needs != "networks":
            return None
        return self._undo.enter_context(namespaces.networks())

    def _setups(self, networks: namespaces.Networks | None) -> list[Setup]:
        nodes = 1 if self._scenario is None else self._scenario.nodes
        script = (*self._place.script, "--steps", str(self._place.steps))
        flags = ("--nproc-per-node", str(2 // nodes), *self._place.flags)
        where = f"{networks.addresses[0] if networks else '127.0.0.1'}:{_free_port()}"
        found = []
        for node in range(nodes):
            met = _meeting(where, node, networks) if nodes > 1 else ()
            launcher = (*self._prefix(node, networks), *self._place.launcher)
            found.append(
                Setup(
                    (*flags, *met, *script), self._store, self._job, self.folder,
                    self._environment(node, networks), self._place.checkpoint_every, launcher,
                    self.folder / f"host-{node}" if networks else None,
                )
            )  # fmt: skip
        return found

    def _prefix(self, node: int, networks: namespaces.Networks | None) -> tuple[str, ...]:
        if networks is not None:
            return networks.prefixes[node]
        needs = "" if self._scenario is None else self._scenario.needs
        return namespaces.SMALL_SHARED_MEMORY if needs == "mounts" else ()

    def _environment(self, node: int, networks: namespaces.Networks | None) -> dict[str, str]:
        kernel = self.folder / "kernel.log"
        kernel.touch()
        own = {
            settings.variable("snapshot_every"): str(SNAPSHOT_EVERY),
            settings.variable("kernel_log"): str(kernel),
            settings.variable("node_name"): f"node-{node}",
            "OMP_NUM_THREADS": "1",
        }
        if networks is not None:
            own["GLOO_SOCKET_IFNAME"] = networks.interfaces[node]
        if self._scenario is not None:
            own |= dict(self._scenario.settings)
            if faults := armed(self._scenario, self._drawn, self.folder):
                own[points.VARIABLE] = _encoded(faults)
        floor = settings.PREFIX + "HANG_FLOOR"
        if floor in own and self._place.hang_floor is not None:
            own[floor] = str(self._place.hang_floor)
        return {**_cleaned(self._place.environment), **own}

    def _start(self, networks: namespaces.Networks | None) -> None:
        for node in range(len(self._nodes.jobs)):
            self._nodes.start(node)
            if node == 0 and len(self._nodes.jobs) > 1 and networks is None:
                self._await(self._rendezvous_open, "the rendezvous was open")

    def _rendezvous_open(self) -> bool:
        command = self._nodes.jobs[0].setup.command
        host, _, port = command[command.index("--rdzv-endpoint") + 1].rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        while not ready():
            if self._turn():
                raise DrillError(f"the job ended before {what}; see {self._nodes.jobs[0].log}")
            time.sleep(TICK)

    def _turn(self) -> bool:
        self._read()
        if self._nodes.poll():
            return True
        if time.monotonic() - self._began < self._place.patience:
            return False
        self._problems.append(f"the run was not over after {self._place.patience:g} s")
        for job in self._nodes.jobs:
            job.end()
        return self._nodes.poll()

    def _read(self) -> None:
        for event in self._journal.read_new():
            self._events.append(event)
            self._progress.feed(event)
            self._tell(event)

    def _went_off(self) -> float | None:
        path = told(self.folder)
        if self._struck is not None or not path.exists():
            return self._struck
        return float(path.read_text().split()[1])

    # -- from without

    def _due(self) -> bool:
        kept = self._progress.kept
        enough = len(kept.commits) >= COMMITS and bool(kept.snapshot)
        return enough and self._progress.step >= self._drawn.step

    def _strike(self, networks: namespaces.Networks | None) -> None:
        assert self._scenario is not None, "an undisturbed run is not struck"
        outside, node = self._scenario.outside, self._drawn.rank
        if outside == "oom":
            self._kill_for_memory()
        elif outside == "store-down":
            self._store_down()
        elif outside == "clock-jump":
            (self.folder / "during").touch()
            self._pause(JUMP_SEEN)
            self._kill_worker()
        elif outside == "partition":
            assert networks is not None, "a partition has networks to cut"
            self._struck = time.monotonic()
            networks.cut()
            self._pause(CUT_SECONDS)
            networks.join()
        else:
            self._struck = time.monotonic()
            self._nodes.jobs[node].end()
            self._nodes.start(node)

    def _kill_worker(self) -> None:
        """SIGKILL to the worker that was drawn."""
        rank = self._drawn.rank
        job = self._nodes.jobs[0]
        with processes.held(self._worker(), job.mark) as fd:
            self._struck = time.monotonic()
            processes.strike(fd)
            self._note(kinds.INJECTED, f"SIGKILL to rank {rank}")

    def _worker(self) -> int:
        pid = self._progress.workers.get(self._drawn.rank)
        if pid is None:
            raise DrillError(f"rank {self._drawn.rank} was gone before it was to be killed.")
        return pid

    def _kill_for_memory(self) -> None:
        pid = self._worker()
        line = (
            f"[{time.monotonic():12.6f}] Out of memory: Killed process {pid} (python) "
            "total-vm:31457280kB, anon-rss:16777216kB, file-rss:2048kB, shmem-rss:0kB, UID:0 "
            "pgtables:66560kB oom_score_adj:0\n"
        )
        with (self.folder / "kernel.log").open("a") as file:
            file.write(line)
        self._kill_worker()

    def _store_down(self) -> None:
        self._down.begin("store-down")
        began = time.monotonic()
        self._pause(1.0)
        self._kill_worker()
        self._pause(self._place.down - (time.monotonic() - began))
        self._down.release()
        self._note(kinds.RELEASED, "the store works again")

    def _pause(self, seconds: float) -> None:
        """Let the run go on for so long, or to its end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._turn():
            time.sleep(TICK)

    def _note(self, kind: str, text: str) -> None:
        self._journal.append(
            Event(
                wall=time.time(), mono=time.monotonic(), source="drill", kind=kind, text=text,
                job=self._job, attempt=self._progress.attempt, step=self._progress.step,
            )
        )  # fmt: skip


def _meeting(where: str, node: int, networks: namespaces.Networks | None) -> tuple[str, ...]:
    """The flags by which two nodes find each other. In networks of their own, whose addresses no
    name stands for, each is told which is its own."""
    flags = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", where)
    if networks is None:
        return (*flags, "--local-addr", "127.0.0.1")
    host = ("--rdzv-conf", f"is_host={1 - node}")
    return (*flags, *host, "--local-addr", networks.addresses[node])


def _cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what belongs to another job, or to the machine's own launcher."""
    foreign = ("EVERSTEP_", "PET_", "TORCHELASTIC_", "MASTER_")
    return {name: text for name, text in environment.items() if not name.startswith(foreign)}


def _encoded(faults: Sequence[Fault]) -> str:
    return msgspec.json.encode(list(faults)).decode()


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
