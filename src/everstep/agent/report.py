"""The failures of an attempt as torchrun's users know them: the root-cause block.

Owns: reading the workers' error files and the order of failures. Never does: start or stop
anything. Called by: workers (one failure at a time), the loop (the block, at the end).
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import dataclass, replace
from typing import TextIO

from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)

STOPPED = "stopped by everstep after the first failure"


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
    try:
        process = ProcessFailure(local_rank, pid, code, error_file)
    except (ValueError, KeyError, TypeError):  # torn: the worker died while it wrote the file
        process = ProcessFailure(local_rank, pid, code, "")
        process.message = f"the error file {error_file} is incomplete. {process.message}"
    if ours and not _wrote(process):
        process.message = STOPPED
    seen = os.stat(process.error_file).st_mtime if _wrote(process) else now
    return Failure(rank, seen, process, ours)


def block(name: str, failures: list[Failure]) -> str:
    """torchrun's block: all failures, and the first observed one as the root cause."""
    return str(_error(name, failures))


def tell(name: str, failures: list[Failure], stream: TextIO | None = None) -> None:
    """Print the block, and hand the root cause's error file up where a launcher above asks."""
    print(block(name, failures), file=stream or sys.stderr, flush=True)
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
        print(f"{_named(same)}:\n{trace}", file=stream or sys.stderr, flush=True)
    return bool(ranks)


def messages(failures: list[Failure]) -> dict[str, str]:
    """The last line of what each failed worker wrote, by rank."""
    wrote = [failed for failed in failures if _wrote(failed.process)]
    return {str(f.rank): _trace(f.process).rpartition("\n")[2] for f in wrote}


def _trace(process: ProcessFailure) -> str:
    message: object = process.message
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
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
