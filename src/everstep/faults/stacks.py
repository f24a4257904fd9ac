"""Stacks of stuck processes: the large group waits, the outlier is the culprit (rule 6).

Owns: the forms of py-spy, faulthandler and gdb, what a frame does. Never does: I/O, weigh against
other evidence. Called by: :mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from everstep.faults.lines import Line

_THREAD = re.compile(r"^\s*(?:Current thread|Thread)\b.*|^Process \d+")
_PYSPY = re.compile(r"^\s*(?P<name>[\w.<>:~ ]+?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)\s*$")
_FAULT = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_GDB = re.compile(
    r"^\s*#\d+\s+(?:0x[0-9a-f]+ in )?(?P<name>[\w:~<>]+).*?(?:(?:from|at) (?P<file>\S+))?$"
)
_KERNEL = re.compile(r"^\s*(?:\[<[0-9a-f]+>\] )?(?P<name>[a-z_]\w+)\+0x[0-9a-f]+/0x[0-9a-f]+")
_COLLECTIVE = re.compile(
    r"(?i)all_?reduce|all_?gather|reduce_scatter|broadcast|barrier|all_to_all|\bsend\b|\brecv\b"
    r"|isend|irecv"
    r"|_wait|\bwait\b|scatter|gather|nccl(?!CommAbort)|gloo|synchronize|c10d"
)
_DISTRIBUTED = re.compile(
    r"torch/(?:distributed|cuda)|distributed_c10d|libnccl|libgloo|nccl|gloo|libtorch"
)
_NOT_OWN = re.compile(
    r"^torch/|/(?:site|dist)-packages/|/lib/python3[.\d]*/|/everstep/(?:train|state|keeper)/"
)
_ABORT = re.compile(
    r"ncclCommAbort|commFree|ncclProxyStop|ncclCommDestroy|abort_process_group|_abort\b"
)
_STORAGE = re.compile(
    r"nfs|rpc_wait|lustre|ll_|cl_io|ceph|fuse|s3fs|gcsfs|botocore|obstore|io_schedule|wait_on_page"
    r"|fsync"
    r"|jbd2|xfs_|ext4_|blk_|folio_wait|_async_reader|fsspec"
)


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, innermost frame first."""

    rank: int
    frames: tuple[tuple[str, str], ...]
    line: Line

    @property
    def waits(self) -> bool:
        """Whether it stands in a collective, where waiting for others is right."""
        return not self.aborts and any(
            (_COLLECTIVE.search(name) and _DISTRIBUTED.search(file)) or "ncclKernel" in name
            for name, file in self.frames[:6]
        )

    @property
    def aborts(self) -> bool:
        return any(_ABORT.search(name) for name, _ in self.frames)

    @property
    def stores(self) -> bool:
        """Whether it stands in a read or write that the storage does not answer."""
        return any(_STORAGE.search(name) or _STORAGE.search(file) for name, file in self.frames[:5])

    @property
    def where(self) -> str:
        """The innermost frame of the program."""
        own = [f for f in self.frames if "/" in f[1] and not _NOT_OWN.search(f[1])]
        name, file = (own or self.frames or ((("?"), ""),))[0]
        return f"{file} {name}".strip()

    @property
    def shape(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.frames)


def stacks_in(lines: list[Line]) -> list[Stack]:
    """The last stack of each rank."""
    found: dict[int, dict[int, list[Line]]] = {}
    for line in lines:
        if line.source == "stack" and line.rank is not None:
            found.setdefault(line.rank, {}).setdefault(line.signal, []).append(line)
    return [_stack(rank, _latest(dumps)) for rank, dumps in sorted(found.items())]


def outliers(stacks: list[Stack]) -> list[Stack]:
    """Those that do something else than the waiting majority; none where there is no majority."""
    waiting = [stack for stack in stacks if stack.waits]
    others = [stack for stack in stacks if not stack.waits and stack.frames]
    if waiting and others and len(others) < len(stacks) / 2 + 0.5 and len(others) <= len(waiting):
        return others
    if waiting or len(stacks) < 3:
        return []
    (common, count), *_ = Counter(stack.shape for stack in stacks).most_common(1)
    rest = [stack for stack in stacks if stack.shape != common]
    return rest if rest and count > len(stacks) / 2 else []


def _latest(dumps: dict[int, list[Line]]) -> list[Line]:
    return max(
        dumps.values(), key=lambda lines: (lines[0].time or 0.0, [line.text for line in lines])
    )


def _stack(rank: int, lines: list[Line]) -> Stack:
    threads: list[list[tuple[str, str]]] = [[]]
    main = 0
    for line in lines:
        if found := _frame(line.text):
            threads[-1].append(found)
        elif _THREAD.match(line.text):
            threads.append([])
            if "MainThread" in line.text or (
                "most recent call first" in line.text and ("Current thread" in line.text)
            ):
                main = len(threads) - 1
    frames = threads[main] or max(threads, key=len)
    return Stack(rank, tuple(frames), lines[0])


def _frame(text: str) -> tuple[str, str] | None:
    for form in (_FAULT, _PYSPY, _GDB, _KERNEL):
        if found := form.match(text):
            groups = found.groupdict()
            place = groups.get("file") or ""
            return groups["name"], place + (f":{groups['line']}" if groups.get("line") else "")
    return None
