"""Real agents for tests, without paying for ``import torch`` each time.

An agent is forked from the test's process, which has imported torch already; from there on it is
what ``everstep run`` is: a process of its own with its own environment, folder, output and
signal handlers.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.agent.main import run as run_agent
from everstep.core.events import Event, decode_line

DEADLINE = 60.0


@dataclass
class Agent:
    """A started agent. ``out`` and ``err`` are its files, shared with its workers."""

    pid: int
    out: Path
    err: Path
    events_file: Path
    code: int | None = None

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        if self.code is None:
            fd = os.pidfd_open(self.pid)
            try:
                assert select.select([fd], [], [], DEADLINE)[0], f"agent runs on:\n{self.said()}"
            finally:
                os.close(fd)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        return self.err.read_text()

    def printed(self) -> list[str]:
        """Whole lines of the workers' standard output."""
        return self.out.read_text().splitlines()

    def events(self, kind: str) -> list[Event]:
        if not self.events_file.exists():
            return []
        lines = self.events_file.read_bytes().splitlines(keepends=True)
        found = []
        for line in lines:
            try:
                found.append(decode_line(line))
            except msgspec.DecodeError:
                assert line is lines[-1], "only the last line may still be in the writing"
        return [event for event in found if event.kind == kind]

    def end_workers(self) -> None:
        """End what is left of all workers that were started in this test's folder."""
        for event in self.events("workers.started"):
            for pid in event.facts["pids"].values():  # type: ignore[attr-defined]  # a dict
                if _runs_in(pid, self.out.parent):
                    os.kill(pid, signal.SIGKILL)

    def until(self, ready: Callable[[], object]) -> None:
        """Wait for a condition."""
        wait_for(ready, self.said)


def wait_for(ready: Callable[[], object], said: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not ready():
        assert time.monotonic() < deadline, f"it did not happen:\n{said()}"
        time.sleep(0.01)


Start = Callable[..., Agent]


def fork(folder: Path, number: int, line: list[str], environment: Mapping[str, str]) -> Agent:
    out, err = folder / f"out-{number}", folder / f"err-{number}"
    out.touch()
    err.touch()
    pid = os.fork()
    if pid:
        return Agent(pid, out, err, Path(environment["EVERSTEP_EVENTS"]))
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = str(folder)
        for fd, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_agent(line)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:  # noqa: BLE001 - the child must never run on as a second pytest
        traceback.print_exc()
    finally:
        os._exit(code)


def _runs_in(pid: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == folder.resolve()
    except OSError:
        return False


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def rendezvous(backend: str, workers: tuple[int, int] = (2, 2)) -> list[list[str]]:
    """The flags of node 0 and of node 1, for two agents of one job on this machine."""
    port = _free_port()
    both = [["--nnodes", "2", "--nproc-per-node", str(count), "--job", "two"] for count in workers]
    if backend == "static":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [[*flags, *where, "--node-rank", str(node)] for node, flags in enumerate(both)]
    # torch's heart beats every second or, where its timer is early by a hair, every other one.
    alive_after = "keep_alive_interval=1,keep_alive_max_attempt=4"
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    return [[*flags, *where, "--rdzv-conf", alive_after] for flags in both]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def hosts_store(agent: Agent, flags: list[str]) -> bool:
    """Whether the process listens on the rendezvous' port."""
    name = "--rdzv-endpoint" if "--rdzv-endpoint" in flags else "--master-port"
    port = int(flags[flags.index(name) + 1].rpartition(":")[2])
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{agent.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                listening.add(f"socket:[{fields[9]}]")
    held = set()
    for name in os.listdir(f"/proc/{agent.pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{agent.pid}/fd/{name}"))
        except FileNotFoundError:
            continue  # closed since it was listed
    return bool(listening & held)
