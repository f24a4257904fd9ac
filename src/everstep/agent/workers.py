"""The workers of one attempt on this node.

Owns: starting them with torchrun's environment, seeing each end at once, killing them with all
their children, what they leave as evidence. Never does: decide. Called by: the loop.

Ends are waited for on pidfds and read without reaping: while a dead worker is a zombie its
process group cannot be given to another, so killing the group's leftovers (data loader workers)
hits nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.synchronize
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from string import Template

import msgspec
import torch.multiprocessing
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    PContext,
    start_processes,
)
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig

from everstep.agent.decide import WorkerEnd, describe
from everstep.agent.output import Output, Streams
from everstep.agent.redirect import Redirected, Routed, for_people, without_pipes
from everstep.agent.report import Failure, failure, written
from everstep.agent.watch.logs import JUDGED, since_wall
from everstep.errors import UsageError
from everstep.faults.records import Signal

Semaphore = multiprocessing.synchronize.Semaphore
_TORCHS = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

SETTLE_SECONDS = 0.05
"""After a worker's end: for its last words to be shown before it is said. A console that takes
longer is not waited for."""


@dataclass(frozen=True)
class Place:
    """Where this node's workers stand in the job: what torchrun's agent works out from the
    rendezvous. ``ranks`` and ``role_ranks`` are those of the local ranks, in order."""

    node: int
    nodes: int
    ranks: tuple[int, ...]
    role_ranks: tuple[int, ...]
    world_size: int
    role_world_size: int
    master_addr: str
    master_port: int
    restarts: int
    max_restarts: int
    run_id: str
    use_agent_store: bool


def environment_of(local_rank: int, place: Place, config: LaunchConfig) -> dict[str, str]:
    """What torchrun adds to a worker's environment, TORCHELASTIC_ERROR_FILE excepted (the log
    specification adds that)."""
    added = {
        "RANK": str(place.ranks[local_rank]),
        "GROUP_RANK": str(place.node),
        "ROLE_RANK": str(place.role_ranks[local_rank]),
        "ROLE_NAME": config.role,
        "LOCAL_WORLD_SIZE": str(len(place.ranks)),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return added | _device_environment(local_rank, config)


class Workers:
    """Started workers. ``ended`` grows by one record for each that :meth:`collect` saw end;
    ``unwritten`` says why they have no files for logs and errors, empty where they have."""

    def __init__(
        self,
        context: PContext,
        place: Place,
        output: Output,
        streams: Streams,
        node: str | None,
        begun: float,
        unwritten: str = "",
        returned: Semaphore | None = None,
    ) -> None:
        self.unwritten = unwritten
        self._context = context
        self._place = place
        self._output = output
        self._streams = streams
        self._node = node
        self._begun = begun
        self._returned = returned
        self._exits: list[Signal] = []
        self.must_be_polled = returned is not None
        self._fds = {rank: os.pidfd_open(pid) for rank, pid in context.pids().items()}
        self._killed: set[int] = set()
        self.ended: list[WorkerEnd] = []
        self.failures: list[Failure] = []

    @property
    def pids(self) -> dict[int, int]:
        """Global rank to pid."""
        return {self._place.ranks[local]: pid for local, pid in self._context.pids().items()}

    @property
    def descriptors(self) -> list[int]:
        """Pidfds of those that were not yet seen to end."""
        return list(self._fds.values())

    @property
    def running(self) -> bool:
        return bool(self._fds)

    def collect(self) -> list[WorkerEnd]:
        """The workers whose end was not yet seen, first come first."""
        codes = {rank: _exit_code(fd) for rank, fd in self._fds.items()}
        if self._all_returned() and not self._killed and not any(codes.values()):
            codes = self._let_go() or codes
        over = {rank: code for rank, code in codes.items() if code is not None}
        self._settle(over)
        new = [self._note(rank, code) for rank, code in over.items()]
        self.ended += new
        return new

    def kill(self, number: signal.Signals) -> list[int]:
        """Send ``number`` to every worker that runs, and to its children; their pids."""
        hit = [local_rank for local_rank in self._fds if _send(self._pid(local_rank), number)]
        self._killed.update(hit)
        return [self._pid(local_rank) for local_rank in hit]

    def drain(self, seconds: float) -> None:
        """Read what workers have printed by now, for at most so long, however slowly it is shown.
        What a worker printed before its end is there without this."""
        self._streams.drain(seconds)

    def signals(self, rank: int | None = None, most: int = JUDGED) -> tuple[Signal, ...]:
        """What the workers, or the one of that rank, printed, in about ``most`` bytes: the end of
        it, and of what came before the lines that can matter. ``mono`` is when the agent saw it,
        ``time`` the same in seconds since these workers were started."""
        local = None if rank is None else self._place.ranks.index(rank)
        return self._timed(self._streams.signals(self._place.ranks, self._node, local, most))

    def evidence(self, seconds: float, most: int = JUDGED) -> tuple[Signal, ...]:
        """Everything that is known of the workers: what they printed and left in error files by
        now, and how each that has ended did. Reads for at most so long; what they printed makes
        up about ``most`` bytes. Can be asked again, also after :meth:`close`."""
        self.drain(seconds)
        return (*self.signals(most=most), *self._timed([*self._error_files(), *self._exits]))

    def close(self) -> None:
        """Reap. Every worker must have ended."""
        assert not self._fds, "closed while workers run"
        self._context.close(signal.SIGKILL)
        self.drain(SETTLE_SECONDS)
        self._streams.part()

    def _timed(self, signals: list[Signal]) -> tuple[Signal, ...]:
        return tuple(msgspec.structs.replace(one, time=self._since(one.mono)) for one in signals)

    def _since(self, mono: float | None) -> float | None:
        return None if mono is None else max(0.0, mono - self._begun)

    def _settle(self, over: dict[int, int]) -> None:
        """Those that have ended: what they printed is read, and shown before it is said."""
        deadline = time.monotonic() + SETTLE_SECONDS
        for local_rank in over:
            self._streams.drain(deadline - time.monotonic(), local_rank)
        if over:
            self._output.flush(max(0.0, deadline - time.monotonic()))

    def _error_files(self) -> list[Signal]:
        found = []
        for local_rank, path in self._context.error_files.items():
            if (wrote := written(path)) is not None:
                text, wall = wrote
                seen = since_wall(wall, earliest=self._begun)
                rank = self._place.ranks[local_rank]
                found.append(Signal("log", text, rank, self._node, mono=seen))
        return found

    def _all_returned(self) -> bool:
        """Whether these are functions, and each of them has come back. Not before may torch's
        context be asked: where one has failed that was not yet seen, it sends SIGTERM to the
        others, which are to be stopped without a word (F2)."""
        returned = self._returned
        return returned is not None and returned.get_value() >= len(self._place.ranks)

    def _let_go(self) -> dict[int, int | None] | None:
        """Exit codes of functions that have all returned (each waits in its process until torch's
        context is asked and tells it so); None where their values are still on the way. The context
        has reaped them then."""
        _TORCHS.addFilter(_formatted)
        result = self._context.wait(0)
        if result is None:
            return None
        # Where one was killed while it waited, the context has ended the others.
        others = -int(signal.SIGTERM) if result.failures else 0
        if result.failures:
            self._killed.update(rank for rank in self._fds if rank not in result.failures)
        return {
            rank: result.failures[rank].exitcode if rank in result.failures else others
            for rank in self._fds
        }

    def _pid(self, local_rank: int) -> int:
        return self._context.pids()[local_rank]

    def _note(self, local_rank: int, code: int) -> WorkerEnd:
        pid, rank = self._pid(local_rank), self._place.ranks[local_rank]
        _send(pid, signal.SIGKILL)  # what it left running in its group
        os.close(self._fds.pop(local_rank))
        ours = code < 0 and local_rank in self._killed
        self._exits.append(
            Signal(
                "exit", _said(pid, code), rank, self._node, mono=time.monotonic(), exit_code=code,
                ours=ours,
            )
        )  # fmt: skip
        if code != 0:
            self.failures.append(
                failure(
                    rank=rank, local_rank=local_rank, pid=pid, code=code, now=time.time(),
                    error_file=self._context.error_files[local_rank], ours=ours,
                )
            )  # fmt: skip
        return WorkerEnd(rank, code, ours)


def start(
    config: LaunchConfig,
    entrypoint: str | Callable[..., object],
    arguments: tuple[str, ...],
    place: Place,
    extra: dict[str, str],
    output: Output,
    node: str | None = None,
) -> Workers:
    """Start this node's workers; ``extra`` is added to each one's environment. What they print
    goes through ``output``, except where the user has it written to files. ``node`` is the name
    of this one in their signals."""
    locals_ = range(len(place.ranks))
    envs = {rank: environment_of(rank, place, config) | extra for rank in locals_}
    args = {rank: tuple(macros.substitute(list(arguments), str(rank))) for rank in locals_}
    streams, begun = output.open(), time.monotonic()
    sys.stdout.flush()
    returned = _counter(config) if callable(entrypoint) else None
    try:
        told, unwritten = _logs(config, envs)
        context = _started(
            config, entrypoint, args, envs, place, output, streams, told, returned
        )  # fmt: skip
    except BaseException:
        streams.part()
        raise
    return Workers(context, place, output, streams, node, begun, unwritten, returned)


def _counter(config: LaunchConfig) -> Semaphore:
    made: Semaphore = torch.multiprocessing.get_context(config.start_method).Semaphore(0)
    return made


def _started(
    config: LaunchConfig,
    entrypoint: str | Callable[..., object],
    args: dict[int, tuple[str, ...]],
    envs: dict[int, dict[str, str]],
    place: Place,
    output: Output,
    streams: Streams,
    told: LogsDest,
    returned: Semaphore | None,
) -> PContext:
    routes = {rank: streams.route(rank, told.stdouts[rank], told.stderrs[rank]) for rank in args}
    if callable(entrypoint):
        assert returned is not None, "functions are counted"
        piped = {rank: _changed(told, rank, route) for rank, route in routes.items()}
        dest = without_pipes(told, piped)
        args = {rank: (*piped[rank], *args[rank]) for rank in args}
        forked = config.start_method == "fork"
        entrypoint = Redirected(entrypoint, output.descriptors if forked else (), returned)
    else:
        dest = replace(
            told, stdouts={rank: out for rank, (out, _) in routes.items()},
            stderrs={rank: err for rank, (_, err) in routes.items()},
        )  # fmt: skip
    envs = {rank: env | for_people(dict(os.environ) | env) for rank, env in envs.items()}
    return _outside_main_thread(
        lambda: start_processes(
            name=config.role, entrypoint=entrypoint, args=args, envs=envs,
            logs_specs=Routed(dest, _specs(config).root_log_dir),
            log_line_prefixes=_prefixes(config, place),
            start_method=config.start_method, numa_options=config.numa_options,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
        )
    )  # fmt: skip


def _logs(config: LaunchConfig, envs: dict[int, dict[str, str]]) -> tuple[LogsDest, str]:
    """Where torch has workers write; it puts the paths of the error files into ``envs``. Without
    any files where the folder for them is full, read-only or gone, and why."""
    try:
        return _specs(config).reify(envs), ""
    except OSError as error:
        told = DefaultLogsSpecs(log_dir=os.devnull).reify(envs)
        return replace(told, tee_stdouts={}, tee_stderrs={}), str(error)


def _specs(config: LaunchConfig) -> LogsSpecs:
    assert config.logs_specs is not None, "torchrun's configuration always has one"
    return config.logs_specs


def _changed(told: LogsDest, rank: int, route: tuple[str, str]) -> tuple[str, str]:
    """Where a worker's streams go if not where torch leads them."""
    out, err = route
    return (
        out if out != told.stdouts[rank] else "",
        err if err != told.stderrs[rank] else "",
    )


def _outside_main_thread(make: Callable[[], PContext]) -> PContext:
    """Call ``make`` in a thread: in the main one torch would replace the agent's handlers."""
    made: list[PContext | BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            made.append(error)

    with _quiet(_TORCHS):
        thread = threading.Thread(target=run, name="everstep-start")
        thread.start()
        thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    # torch warns that no handlers were set and workers may be orphaned: the agent has its own.
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _formatted(record: logging.LogRecord) -> bool:
    # torch's own formatter loads its compiler for a record with an exception: for seconds no
    # other exit would be seen.
    if record.exc_info:
        record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
    return True


def _said(pid: int, code: int) -> str:
    """An end in the words that :mod:`everstep.faults.exits` reads."""
    if code < 0:
        return f"pid {pid}: killed by signal {-code} ({describe(code)})"
    return f"pid {pid}: exited with code {code}"


def _exit_code(pidfd: int) -> int | None:
    """The exit code, negative for a signal, of a child that may still run; it is not reaped."""
    seen = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def _send(pid: int, number: signal.Signals) -> bool:
    """Signal the process and, where it leads a group of its own, the whole group."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or (killpg on a group of zombies alone on some kernels) nothing left to signal.
        return False
    return True


def _device_environment(local_rank: int, config: LaunchConfig) -> dict[str, str]:
    """LOCAL_RANK, and the visible device where ``--virtual-local-rank`` hides the others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not config.virtual_local_rank:
        kept = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return {"LOCAL_RANK": str(local_rank)} | kept
    devices = [str(n) for n in range(local_rank + 1)] if visible is None else visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"local rank {local_rank} has no device: CUDA_VISIBLE_DEVICES={visible}.",
            hint="Give at least as many devices as --nproc-per-node.",
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def _prefixes(config: LaunchConfig, place: Place) -> dict[int, str] | None:
    if not config.log_line_prefix_template:
        return None
    template = Template(config.log_line_prefix_template)
    return {
        local: template.safe_substitute(role_name=config.role, rank=rank, local_rank=local)
        for local, rank in enumerate(place.ranks)
    }
