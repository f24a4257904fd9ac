"""Where this node's ranks stand, read from outside of them: twice is enough to see what is stuck.

Owns: the ways to read a stack (py-spy where it is installed, else faulthandler in the worker, else
the kernel's own), all ranks at once and within a deadline. Never does: judge what is read, harm a
process that is well: nothing is paused, and no signal is sent to a process that does not handle it.
Called by: :mod:`everstep.agent.hang`, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.core.stacks import TURN, Answers, Kind, file_of_rank
from everstep.faults.hang import Look
from everstep.faults.lines import lines_of
from everstep.faults.records import Signal
from everstep.faults.stacks import stacks_in

SPY_SECONDS = 1.2
DUMP_SECONDS = 1.0
TURN_SECONDS = 0.3
"""What each way may take. Together they stay well below the three seconds of a hang's evidence."""

MOST_TEXT = 16 * 1024
"""Characters that are kept of one rank's stacks."""

_PAUSE = 0.01
_SETTLED = 0.05
"""A dump that has not grown for so long is complete: it is written in one go."""
_PROCESS = "-" * 80
_DEBUGGERS = ("/pdb.py", "/bdb.py", "debugpy/", "pydevd")
_BACKWARD = "_engine_run_backward"
"""DDP and FSDP wait for their peers inside of the backward pass, which is C++."""


@dataclass(frozen=True)
class Sample:
    """What all ranks were seen to do: ``looks`` for the judgement, ``signals`` for the record."""

    at: float
    looks: tuple[Look, ...]
    signals: tuple[Signal, ...]


class Stacks:
    """Reads the stacks of the workers ``pids`` (by rank). ``folder`` is where they answer,
    ``began`` is the attempt's start (CLOCK_MONOTONIC)."""

    def __init__(self, folder: Path, pids: Mapping[int, int], began: float) -> None:
        self._folder = folder
        self._pids = dict(pids)
        self._began = began
        self._spy = find_spy()
        self._owing: dict[int, int] = {}

    def look(self) -> Sample:
        """Look at every rank; takes at most the sum of the three limits above."""
        at = time.monotonic()
        answers = {rank: found for rank in self._pids if (found := self._answers(rank))}
        pids = {rank: answers[rank].pid if rank in answers else self._pids[rank]
                for rank in self._pids}  # fmt: skip
        texts = spy(self._spy, pids, at + SPY_SECONDS) if self._spy else {}
        if not texts:
            self._spy = ""  # it may not look: no other time either
        texts |= self._dumps({rank: found for rank, found in answers.items() if rank not in texts})
        for rank, pid in pids.items():
            texts.setdefault(rank, kernel_stack(pid))
        turns = self._turns(answers)
        looks = [self._look(rank, texts[rank], turns) for rank in sorted(self._pids)]
        signals = [
            self._signal(look.rank, f"stands at {look.where}\n{texts[look.rank]}", at)
            for look in looks if texts[look.rank]
        ]  # fmt: skip
        return Sample(at, tuple(looks), (*signals, *self._children(texts, at)))

    def _look(self, rank: int, text: str, turns: Mapping[int, tuple[int | None, bool]]) -> Look:
        turn, came_late = turns.get(rank, (None, False))
        own = text.partition(_PROCESS)[0]
        found = stacks_in(list(lines_of(Signal("stack", own, rank=rank), 0, {})))
        if not found or _is_debugged(found[0].frames):
            return Look(rank, turn=turn, came_late=came_late)
        stack = found[0]
        waits = stack.waits or any(name == _BACKWARD for name, _ in stack.frames[:1])
        frames = tuple(f"{name} ({place})" for name, place in stack.frames)
        return Look(rank, frames, waits, stack.where, turn, came_late)

    def _signal(self, rank: int | None, text: str, at: float) -> Signal:
        return Signal("stack", text[:MOST_TEXT], rank=rank, time=at - self._began, mono=at)

    def _children(self, texts: dict[int, str], at: float) -> list[Signal]:
        """Data loader workers and the like, as py-spy gives them behind their parent: without a
        rank, because the rank itself is not where they are."""
        parts = ((rank, part) for rank, text in texts.items() for part in text.split(_PROCESS)[1:])
        return [self._signal(None, f"a child of rank {rank}:\n{part}", at) for rank, part in parts]

    # -- what the workers answer

    def _answers(self, rank: int) -> Answers | None:
        try:
            return msgspec.json.decode(self._file(rank, "answers").read_bytes(), type=Answers)
        except (OSError, msgspec.DecodeError):
            return None  # it did not attach

    def _dumps(self, answers: Mapping[int, Answers]) -> dict[int, str]:
        """What faulthandler writes of each, at its signal."""
        sizes = {rank: self._size(rank) for rank in answers}  # before any of them writes
        before = {rank: sizes[rank] for rank, found in answers.items()
                  if send(found.pid, found.dump)}  # fmt: skip
        deadline = time.monotonic() + DUMP_SECONDS
        found: dict[int, str] = {}
        while len(found) < len(before) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            for rank, start in before.items():
                if rank not in found and self._is_settled(rank, start):
                    found[rank] = self._dump(rank, start)
        return found

    def _size(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return self._file(rank, "stacks").stat().st_size
        return 0

    def _is_settled(self, rank: int, start: int) -> bool:
        with contextlib.suppress(OSError):
            now = self._file(rank, "stacks").stat()
            return now.st_size > start and time.time() - now.st_mtime >= _SETTLED
        return False

    def _dump(self, rank: int, start: int) -> str:
        with contextlib.suppress(OSError), self._file(rank, "stacks").open("rb") as file:
            file.seek(start)
            return file.read(MOST_TEXT).decode(errors="replace")
        return ""

    def _turns(self, ranks: Iterable[int]) -> dict[int, tuple[int | None, bool]]:
        """For each rank the digest that it writes when asked now (None: it does not come to it),
        and whether it has answered since what it was asked at the look before."""
        counts = {rank: self._turn(rank)[0] for rank in ranks}
        asked = [rank for rank in counts if ask(self._file(rank, "ask"))]
        deadline = time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            if all(self._turn(rank)[0] > counts[rank] for rank in asked):
                break
            time.sleep(_PAUSE)
        made: dict[int, tuple[int | None, bool]] = {}
        for rank, before in counts.items():
            count, digest = self._turn(rank)
            late = count > self._owing.pop(rank, count)
            made[rank] = (digest if count > before else None, late)
            if rank in asked and count == before:
                self._owing[rank] = count
        return made

    def _turn(self, rank: int) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            data = self._file(rank, "turn").read_bytes()
            if len(data) == TURN.size:
                count, digest = TURN.unpack(data)
                return count, digest
        return 0, 0

    def _file(self, rank: int, kind: Kind) -> Path:
        return self._folder / file_of_rank(rank, kind)


def ask(fifo: Path) -> bool:
    """Ask the worker at the other end; False where nobody listens."""
    try:
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, b"?") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def find_spy() -> str:
    """py-spy beside this Python or on the path; empty where there is none."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=beside) or shutil.which("py-spy") or ""


def spy(command: str, pids: Mapping[int, int], deadline: float) -> dict[int, str]:
    """What py-spy says of each process and its children, all at once; none of those that it cannot
    read in time. It only reads: one that is ended half way leaves no process stopped."""
    running = {}
    for rank, pid in pids.items():
        line = [command, "dump", "--nonblocking", "--full-filenames", "--subprocesses",
                "--pid", str(pid)]  # fmt: skip
        with contextlib.suppress(OSError):
            running[rank] = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "NO_COLOR": "1"},
            )  # fmt: skip
    found = {rank: _heard(process, deadline) for rank, process in running.items()}
    return {rank: _named(text, pids[rank]) for rank, text in found.items() if "\nThread " in text}


def _named(text: str, pid: int) -> str:
    """Without the command line, which is nobody's business; the main thread is that of the
    process's own number, whatever a fork has left its name."""
    text = _PROCESS.join(part[part.find("Thread ") :] for part in text.split(_PROCESS))
    return re.sub(rf'^(Thread {pid} \([^)]*\): )".*"$', r'\1"MainThread"', text, flags=re.M)


def _heard(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return ""
    return said.decode(errors="replace")


def kernel_stack(pid: int) -> str:
    """Where the kernel holds the main thread that no signal reaches: in a read, say, that a dead
    server never ends. Empty for others, and where that may not be read."""
    if not _is_held(pid):
        return ""
    with contextlib.suppress(OSError):
        stack = Path(f"/proc/{pid}/stack").read_text()
        if stack.strip():
            return f"Process {pid}, in the kernel\n{stack}"
    with contextlib.suppress(OSError):
        wait = Path(f"/proc/{pid}/wchan").read_text().strip()
        if wait not in ("", "0"):
            return f"Process {pid}, in the kernel\n{wait}+0x0/0x0\n"
    return ""


def _is_held(pid: int) -> bool:
    """Whether no signal reaches the process: it waits for a device or a server (state D)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    return False


def send(pid: int, number: int) -> bool:
    """Send a signal to a process that handles it; without a handler it would die of it."""
    if not number or not _handles(pid, number):
        return False
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _handles(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii",
                                            errors="replace") as status:  # fmt: skip
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _is_debugged(frames: tuple[tuple[str, str], ...]) -> bool:
    """Whether a person holds it there."""
    return any(name in place for _, place in frames for name in _DEBUGGERS)
