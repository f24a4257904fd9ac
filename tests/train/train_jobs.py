"""Training jobs as processes of their own, started in milliseconds.

They are forked from a server process that has imported torch and has done nothing else: torch's
autograd cannot be used in a fork of a process that has used it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from everstep.core import points
from everstep.core.events import Event, decode_line
from everstep.keeper.address import keeper_name

DEADLINE = 60.0
RARE = "100000"
"""Steps between snapshots where a test wants no cut but those that it asks for."""

_server = multiprocessing.get_context("forkserver")
# What the first optimizer of a process imports is seconds of its own.
_server.set_forkserver_preload(["everstep.train.run", "everstep.agent.main", "torch._dynamo"])


def fault(point: str, action: str = "kill", **more: object) -> str:
    """The text of EVERSTEP_FAULTS for one fault."""
    return json.dumps([{"point": point, "action": action, **more}])


@dataclass
class Started:
    """A process of a job: what it printed, how it ended, what its function gave back."""

    process: ForkServerProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        self.process.join(DEADLINE)
        assert self.process.exitcode is not None, f"it runs on:\n{self.said()}"
        return self.process.exitcode

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def result(self) -> Any:
        return json.loads((self.folder / "result").read_text())

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)


@dataclass
class Jobs:
    """Starts processes of one job in ``folder`` and reads its journal."""

    folder: Path
    environment: dict[str, str]
    name: str = "job"
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Path(self.environment.get("EVERSTEP_EVENTS", self.folder / "no-journal"))

    def start(
        self, work: Callable[..., object], /, *, env: Mapping[str, str] = {}, **arguments: object
    ) -> Started:
        """``work(**arguments)`` in a process with the job's environment and ``env``."""
        own = self.folder / f"process-{len(self.started)}"
        own.mkdir()
        (own / "said").touch()
        environment = {
            **self.environment, "EVERSTEP_JOB": self.name, "EVERSTEP_SNAPSHOT_EVERY": RARE, **env,
        }  # fmt: skip
        process = _server.Process(target=_main, args=(work, arguments, environment, own))
        process.start()
        self.started.append(Started(process, own))
        return self.started[-1]

    def run(self, work: Callable[..., object], /, **arguments: Any) -> Any:
        """The same to its end, which must be a good one; what ``work`` gave back."""
        started = self.start(work, **arguments)
        assert started.wait() == 0, started.said()
        return started.result()

    def fails(self, work: Callable[..., object], /, *, code: int = 1, **arguments: Any) -> str:
        """The same to an end with ``code``; what was said."""
        started = self.start(work, **arguments)
        assert started.wait() == code, started.said()
        return started.said()

    def events(self, kind: str) -> list[Event]:
        path = self.journal
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = [decode_line(line) for line in lines]
        return [event for event in found if event.kind == kind and event.job == self.name]

    def losses(self, rank: int = 0) -> dict[int, set[object]]:
        """Every loss that was logged for each step, by whatever attempt."""
        found: dict[int, set[object]] = {}
        for event in self.events("train.log"):
            if event.rank == rank:
                assert event.step is not None
                found.setdefault(event.step, set()).add(event.facts["loss"])
        return found

    def restored(self) -> list[tuple[object, object]]:
        """(step, source) of each restore so far."""
        return [(e.step, e.facts["source"]) for e in self.events("train.restored")]

    def close(self) -> None:
        for started in self.started:
            if started.process.exitcode is None:
                started.kill(signal.SIGKILL)
                started.wait()


def wait_for(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not ready():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.005)


def seen(kind: str) -> bool:
    """Whether the journal of this process's job has an event of that kind."""
    return f'"kind":"{kind}"' in Path(os.environ["EVERSTEP_EVENTS"]).read_text()


def keeper_pid(environment: Mapping[str, str], name: str = "job") -> int:
    """The process that holds the keeper's socket."""
    store = environment.get("EVERSTEP_STORE") or os.path.join(os.getcwd(), "everstep-store")
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + keeper_name(store, name, 0))
        raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", raw)[0]
    return pid


def kill_keeper(environment: Mapping[str, str], name: str = "job") -> None:
    """SIGKILL to the keeper, and wait until it is dead."""
    pid = keeper_pid(environment, name)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _alive(pid), f"keeper {pid} dies")


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def run_script(path: str) -> None:
    """A script as ``python path`` runs it."""
    runpy.run_path(path, run_name="__main__")


def _main(
    work: Callable[..., object],
    arguments: Mapping[str, object],
    environment: Mapping[str, str],
    folder: Path,
) -> None:
    os.chdir(folder.parent)
    os.environ.clear()
    os.environ.update(environment)
    points._plan = points._load(environment.get(points.VARIABLE))
    sys.argv = ["train.py"]
    said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    with as_an_interpreter_ends():
        result = work(**arguments)
        (folder / "result").write_text(json.dumps(result))


@contextlib.contextmanager
def as_an_interpreter_ends() -> Iterator[None]:
    """Exit as a script does: the hook for uncaught errors is called, then what was registered."""
    code = 0
    try:
        yield
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - whatever a script ends with
        sys.last_value = error
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
