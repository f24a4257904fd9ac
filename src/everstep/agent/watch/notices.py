"""Words of those who are about to take the node or the allocation away.

Owns: the notice's file, the end of a Slurm allocation. Never does: ask a network. Called by: the
watch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from everstep.agent.watch.source import Blind, Source, reason_of
from everstep.core.clock import Clock
from everstep.faults.records import Signal

EVERY = 1.0
MOST_BYTES = 4096
MOST_SHOWN = 500
SOON_SECONDS = 300.0
"""Before the end of an allocation from which on it is told that it comes."""
OVER_SECONDS = 90.0
"""After it within which the end of the processes is its doing: Slurm sends SIGKILL 30 s after
SIGTERM. One that runs on for longer got more time than it was told at its start."""
EARLY_SECONDS = 5.0
"""Slurm looks at limits in turns, and clocks of nodes differ a little."""

_NONE = frozenset(("none", "false", "0", "[]", "{}", "null", "no"))
"""What handlers write that keep the file up to date while there is nothing to tell."""


class NoticeFile(Source):
    """A file that a preStop hook or a termination handler writes: what it says is the notice; an
    empty one is a notice, too."""

    name, every = "termination notice", EVERY

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""

    def look(self) -> Iterable[Signal]:
        before, self._text = self._text, self._read()
        return self.standing() if self._text != before else []

    def standing(self) -> Iterable[Signal]:
        return [Signal("agent", self._text)] if self._text else []

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MOST_BYTES)
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise Blind(f"its folder {self._path.parent} is not there") from None
            return ""
        except OSError as error:
            raise Blind(reason_of(error, self._path)) from error
        said = " ".join(raw.decode("utf-8", "replace").split())
        if said.lower() in _NONE:
            return ""
        return f"termination notice for this node: {said[:MOST_SHOWN] or 'the file is empty'}"


class SlurmEnd(Source):
    """The end of the allocation as ``SLURM_JOB_END_TIME`` has it: what Slurm kills then, it kills
    by its time limit."""

    name, every = "end of the allocation", EVERY

    def __init__(self, end: float, clock: Clock) -> None:
        self._end = end
        self._clock = clock
        self._told = ""

    def look(self) -> Iterable[Signal]:
        before, self._told = self._told, self._phase()
        return self._signals() if self._told != before else []

    def standing(self) -> Iterable[Signal]:
        return self._signals()

    def _phase(self) -> str:
        left = self._end - self._clock.wall()
        if left > SOON_SECONDS or left < -OVER_SECONDS:
            return ""
        return "soon" if left > EARLY_SECONDS else "over"

    def _signals(self) -> list[Signal]:
        left = self._end - self._clock.wall()
        if self._told == "soon":
            return [Signal("slurm", f"slurm watch: the allocation ends in {left:.0f} s")]
        if self._told == "over":
            return [Signal("slurm", "slurm watch: allocation time limit reached")]
        return []


def notice_file(path: str) -> NoticeFile | None:
    """The source for a file; None where none is named."""
    return NoticeFile(Path(path)) if path else None


def slurm_end(environment: Mapping[str, str], clock: Clock) -> SlurmEnd | None:
    """The source for the allocation that this process runs in; None where it is in none, or Slurm
    is too old to say when it ends."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return SlurmEnd(float(end), clock) if end.isdigit() and int(end) else None
