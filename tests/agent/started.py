"""Workers for tests, started as the agent does, in the test's own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from everstep.agent import workers
from everstep.agent.flags import parse
from everstep.agent.output import Output
from everstep.agent.signals import Signals
from everstep.agent.workers import Place, Workers
from everstep.faults.catalog import Catalog, load

DEADLINE = 30.0


def loaded() -> Future[Catalog]:
    made: Future[Catalog] = Future()
    made.set_result(load())
    return made


@contextlib.contextmanager
def started(
    folder: Path,
    script: str,
    *flags: str,
    count: int = 1,
    told: Callable[[str], object] = str,
    **variables: str,
) -> Iterator[tuple[Workers, Output]]:
    """Ranks 10 and up run a script; whatever the test leaves of them is ended."""
    path = folder / "script.py"
    path.write_text(script)
    launch = parse(["--nproc-per-node", str(count), *flags, str(path)], {})
    ranks = tuple(range(10, 10 + count))
    place = Place(
        node=0, nodes=1, ranks=ranks, role_ranks=ranks, world_size=10 + count,
        role_world_size=10 + count, master_addr="127.0.0.1", master_port=1, restarts=0,
        max_restarts=0, run_id="tests", use_agent_store=False,
    )  # fmt: skip
    with contextlib.ExitStack() as ends:
        # Forked workers have the agent's handlers: torch has SIGINT sent to them when the thread
        # that forked them ends.
        ends.enter_context(Signals(launch.config.signals_to_handle))
        if launch.temporary_logs:
            ends.callback(shutil.rmtree, launch.temporary_logs)
        output = Output(loaded(), told)
        ends.callback(output.close, DEADLINE)
        group = workers.start(
            launch.config, launch.entrypoint, launch.arguments, place, variables, output, "here"
        )
        ends.callback(_end, group)
        yield group, output


def _end(group: Workers) -> None:
    group.kill(signal.SIGKILL)
    wait(group)
    group.close()


def wait(group: Workers) -> None:
    """Until all have ended."""
    deadline = time.monotonic() + DEADLINE
    while group.running:
        assert time.monotonic() < deadline, "workers run on"
        if not group.collect():
            time.sleep(0.005)


@contextlib.contextmanager
def stream(fd: int, to: int) -> Iterator[None]:
    """The process's own stream, led elsewhere."""
    before = os.dup(fd)
    os.dup2(to, fd)
    try:
        yield
    finally:
        os.dup2(before, fd)
        os.close(before)
