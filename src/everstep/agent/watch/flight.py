"""torch's flight recorder of this node's ranks: which collectives each has issued.

Owns: having it written, and what torch's own analyzer says of it as signals. Never does: judge.
Called by: :mod:`everstep.agent.hang`, in a thread, when a hang is found.

A worker writes it itself when it is looked at (:mod:`everstep.train.stacks`), whatever its backend.
One that is stuck with the interpreter's lock in its hand cannot: NCCL's watchdog thread then does,
by a pipe that torch makes where its variables ask for one. Those are set for the workers unless the
user has set them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import is_nccl_available

from everstep.core.stacks import file_of_rank
from everstep.faults.records import Signal

_LOADER: Any = importlib.import_module("torch._weights_only_unpickler")
_FORM = b"\x80\x02"
"""How dumps begin; the loader prints a warning over others."""
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PAUSE = 0.02
_LOGGER = "Flight Recorder"
_MOST_TEXT = 16 * 1024


class Flight:
    """The recorders of ``ranks``. ``folder`` is where workers answer, ``began`` the
    attempt's start; ``environment`` is what the workers have inherited."""

    def __init__(
        self,
        folder: Path,
        ranks: tuple[int, ...],
        began: float,
        environment: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._began = began
        self._environment = {**variables(folder, environment), **environment}

    def dump(self, deadline: float) -> list[Signal]:
        """What the recorders say by ``deadline`` (CLOCK_MONOTONIC): what each rank has issued, and
        whom torch's analyzer misses."""
        dumps = self._read()
        asked = [rank for rank in self._ranks if rank not in dumps and self._trigger(rank)]
        while asked and time.monotonic() < deadline - _PAUSE and not set(asked) <= set(dumps):
            time.sleep(_PAUSE)
            dumps = self._read()
        at = time.monotonic()
        told: list[tuple[int | None, str]] = [
            (rank, text) for rank, dump in dumps.items() for text in _statuses(rank, dump)
        ]
        told += [(None, text) for text in analysed(dumps)]
        return [
            Signal("agent", text, rank=rank, time=at - self._began, mono=at) for rank, text in told
        ]

    def _read(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in self._ranks:
            for path in self._places(rank):
                if dump := _load(path):
                    found[rank] = dump
                    break
        return found

    def _places(self, rank: int) -> Iterator[Path]:
        yield self._folder / file_of_rank(rank, "flight")
        for name in _FILES:
            if stem := self._environment.get(name):
                yield Path(f"{stem}{rank}")

    def _trigger(self, rank: int) -> bool:
        """Ask NCCL's watchdog by its pipe, where it has made one."""
        stem = self._environment.get(_PIPE)
        if not stem:
            return False
        try:
            fd = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with contextlib.suppress(OSError):
            os.write(fd, b"1")
        os.close(fd)
        return True


def variables(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What workers need to write their recorders from NCCL's watchdog; what the user has set stays
    as it is. Empty where this torch has no NCCL."""
    if not is_nccl_available():
        return {}
    wanted = {_PIPE: str(folder / "pipe-")}
    if not any(environment.get(name) for name in _FILES):
        wanted |= {name: str(folder / "nccl-") for name in _FILES}
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def analysed(dumps: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What torch's analyzer finds: ranks that are missing in a collective, calls that do not match.
    Ranks without a dump are not known to be missing."""
    if len(dumps) < 2:
        return []
    with contextlib.suppress(ImportError, *_WRONG):
        return [text for one in _collectives(dumps) if (text := _finding(one, set(dumps)))]
    return []


_WRONG = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What the analyzer raises over dumps that it cannot make sense of: its form is torch's own."""


def _collectives(dumps: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    details = {
        f"rank_{rank}": {
            **dump, "rank": rank, "host_name": f"host_rank{rank}", "pg_config": _groups(dump)
        }
        for rank, dump in dumps.items()
    }  # fmt: skip
    version = str(next(iter(dumps.values()))["version"])
    with _unheard():
        from torch.distributed.flight_recorder.components.builder import build_db
        from torch.distributed.flight_recorder.components.config_manager import JobConfig

        arguments = JobConfig().parse_args(["dumps", "--allow-incomplete-ranks"])
        return list(build_db(details, arguments, version).collectives)


def _finding(one: Any, dumped: set[int]) -> str:
    missing = sorted((one.missing_ranks or set()) & dumped)
    where = (
        f"flight recorder: {one.collective_name} at work sequence id: {one.collective_seq_id} of "
        f"group {one.pg_desc or 'default'}"
    )
    if missing:
        return f"{where}: missing ranks: {{{', '.join(map(str, missing))}}}"
    if one.mismatch_collectives:
        ranks = ", ".join(map(str, sorted(one.mismatch_collectives)))
        kinds = "; ".join(
            sorted({str(c.type_of_mismatch) for c in one.mismatch_collectives.values()})
        )
        return f"{where}: the calls of ranks {ranks} do not match: {kinds}"[:_MOST_TEXT]
    return ""


def _groups(dump: Mapping[str, Any]) -> dict[str, Any]:
    """The groups by the names that the entries use: gloo leaves the default group's empty."""
    groups = dict(dump["pg_config"])
    for entry in dump["entries"]:
        if (name := entry["process_group"][0]) not in groups and "" in groups:
            groups[name] = groups[""]
    return groups


def _statuses(rank: int, dump: Mapping[str, Any]) -> list[str]:
    """How far a rank has come in each of its groups, in the words of NCCL's watchdog."""
    groups = dump.get("pg_config") or {}
    return [
        f"[PG ID {number} PG GUID {_name(groups, number)} Rank {rank}] flight recorder: last "
        f"enqueued work: {status['last_enqueued_collective']}, last completed work: "
        f"{status['last_completed_collective']}"
        for number, status in sorted((dump.get("pg_status") or {}).items())
        if {"last_enqueued_collective", "last_completed_collective"} <= status.keys()
    ]


def _name(groups: Mapping[str, Any], number: str) -> str:
    name = str((groups.get(number) or {}).get("name") or number)
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _load(path: Path) -> dict[str, Any]:
    """A dump, by torch's loader for weights: no function of the file's choice is ever called (S8).
    Empty where it is not whole, or holds anything but plain values."""
    errors = (OSError, EOFError, struct.error, _LOADER.UnpicklingError, *_WRONG)
    with contextlib.suppress(*errors):
        data = path.read_bytes()
        loaded = _LOADER.load(io.BytesIO(data)) if data.startswith(_FORM) else None
        if isinstance(loaded, dict) and {"version", "pg_config", "entries"} <= loaded.keys():
            return loaded
    return {}


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """torch's analyzer prints its findings, of which the records are kept."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
