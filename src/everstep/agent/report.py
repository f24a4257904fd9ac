"""The failures of an attempt as torchrun's users know them: the root-cause block.

Owns: reading the workers' error files and the order of failures. Never does: start or stop
anything. Called by: workers (one failure at a time), the loop (the block, at the end).
"""

from __future__ import annotations

import copy
import json
import os
import stat
import sys
from dataclasses import dataclass, replace
from typing import TextIO

import msgspec
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)

from everstep.core.shown import shown

STOPPED = "stopped by everstep after the first failure"
LONGEST_FILE = 4 << 20
"""Bytes of an error file above which it is not shown: torch would read it whole."""
LONGEST_TEXT = 256 << 10
"""Bytes of an error file that are evidence."""


@dataclass(frozen=True)
class Failure:
    """One worker's end that was no success. ``seen`` orders failures: when its error was written,
    else when its exit was seen (seconds since the epoch). ``ours`` says that everstep killed it."""

    rank: int
    seen: float
    process: ProcessFailure
    ours: bool = False


def failure(
    *, rank: int, local_rank: int, pid: int, code: int, error_file: str, now: float, ours: bool
) -> Failure:
    """The failure of one worker with what its error file says."""
    process = _process(local_rank, pid, code, error_file)
    if ours and not _wrote(process):
        process.message = STOPPED
    seen = os.stat(process.error_file).st_mtime if _wrote(process) else now
    return Failure(rank, seen, process, ours)


def written(error_file: str) -> tuple[str, float] | None:
    """What a worker wrote into its error file, and when (seconds since the epoch); None where it
    has not. The traceback, or the message where there is none. Of what is torn, too long or no
    JSON the file's own text, at most :data:`LONGEST_TEXT` bytes of its beginning."""
    try:
        with open(error_file, "rb") as file:
            about = os.fstat(file.fileno())
            raw = file.read(LONGEST_TEXT) if stat.S_ISREG(about.st_mode) else b""
    except OSError:
        return None
    return (_said(raw), about.st_mtime) if raw.strip() else None


def block(name: str, failures: list[Failure]) -> str:
    """torchrun's block: all failures, and the first observed one as the root cause."""
    return str(_error(name, failures))


def tell(name: str, failures: list[Failure], stream: TextIO | None = None) -> None:
    """Print the block, and hand the root cause's error file up where a launcher above asks."""
    print(shown(block(name, failures)), file=stream or sys.stderr, flush=True)
    _, root = _error(name, failures).get_first_failure()
    if _wrote(root) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        handler = get_error_handler()
        handler.dump_error_file(root.error_file, root.exitcode)


def tell_refusals(failures: list[Failure], stream: TextIO | None = None) -> bool:
    """Print each different error that workers wrote before they refused to go on, once, with the
    ranks that have it. False where none did."""
    ranks: dict[str, list[int]] = {}
    for failed in sorted(failures, key=lambda f: (f.ours, f.seen)):
        if _wrote(failed.process):
            ranks.setdefault(_trace(failed.process), []).append(failed.rank)
    for trace, same in ranks.items():
        print(shown(f"{_named(same)}:\n{trace}"), file=stream or sys.stderr, flush=True)
    return bool(ranks)


def messages(failures: list[Failure]) -> dict[str, str]:
    """The last line of what each failed worker wrote, by rank."""
    wrote = [failed for failed in failures if _wrote(failed.process)]
    return {str(f.rank): _trace(f.process).rpartition("\n")[2] for f in wrote}


def _process(local_rank: int, pid: int, code: int, error_file: str) -> ProcessFailure:
    """torch's record; without the error file where torch could not read it."""
    unusable = _unusable(error_file)
    process = ProcessFailure(local_rank, pid, code, "" if unusable else error_file)
    if unusable:
        process.message = f"the error file {error_file} {unusable}. {process.message}"
    return process


def _unusable(error_file: str) -> str:
    """Why torch cannot read an error file, empty where it can or there is none. It is not left to
    torch: to log a bad one it loads its compiler, for seconds in which no exit is seen."""
    try:
        if not os.path.isfile(error_file):
            return ""
        with open(error_file, "rb") as file:
            raw = file.read(LONGEST_FILE + 1)
        if len(raw) > LONGEST_FILE:
            return f"is longer than {LONGEST_FILE} bytes and was not read"
        return "" if _is_torchs(json.loads(raw)) else "is not of torch's form"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # the worker died while it wrote the file
        return "is incomplete"


def _is_torchs(data: object) -> bool:
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, str):
        assert isinstance(data, dict)
        return _is_number(data.get("timestamp", 0))
    more = message.get("extraInfo") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(more, dict):
        return False
    shown = more.get("py_callstack", message.get("message", ""))
    return isinstance(shown, str) and _is_number(more.get("timestamp"))


def _is_number(value: object) -> bool:
    """Whether torch can take it for a time."""
    return str(value).isdecimal() and len(str(value)) < 12


def _said(raw: bytes) -> str:
    try:
        message = msgspec.json.decode(raw)["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, RecursionError):
        # As text, with the line breaks that JSON has written as \\n.
        return raw.decode("utf-8", "backslashreplace").replace("\\n", "\n")
    return _text_of(message)


def _trace(process: ProcessFailure) -> str:
    return _text_of(process.message)


def _text_of(message: object) -> str:
    if isinstance(message, dict):
        more = message.get("extraInfo")
        stack = more.get("py_callstack") if isinstance(more, dict) else None
        message = stack or message.get("message", "")
    return str(message).rstrip()


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}, each"


def _error(name: str, failures: list[Failure]) -> ChildFailedError:
    # Failures that everstep caused come last: they are never the root (F2). Of those in the same
    # second, of which torch's block takes the first, the one seen first is the first.
    ordered = sorted(failures, key=lambda f: (f.ours, f.seen))
    return ChildFailedError(name, {f.rank: f.process for f in _folded(ordered)})


def _folded(ordered: list[Failure]) -> list[Failure]:
    """Where ranks have failed with the same message, the first one's traceback stands for all."""
    first: dict[str, int] = {}
    folded = []
    for failed in ordered:
        last = _trace(failed.process).rpartition("\n")[2]
        rank = first.setdefault(last, failed.rank)
        if rank == failed.rank or not _wrote(failed.process):
            folded.append(failed)
            continue
        process = copy.copy(failed.process)
        process.message = f"the same error as rank {rank}: {last}"
        folded.append(replace(failed, process=process))
    return folded


def _wrote(process: ProcessFailure) -> bool:
    return os.path.isfile(process.error_file)
