"""How processes ended, and by whom.

Owns: exit codes, torchrun's table of failures, signals that were ours. Never does: I/O, judge.
Called by: :mod:`everstep.faults.scene`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from everstep.faults.lines import Line
from everstep.faults.records import Incident

ABORT, BUS, KILL, TERM, INT = 6, 7, 9, 15, 2
CRASHES = frozenset((4, 8, 11))
"""SIGILL, SIGFPE, SIGSEGV."""

_CODE = re.compile(r"exited with code (?P<code>-?\d+)|killed by signal (?P<signal>\d+)")
_PID = re.compile(r"\bpid:? ?(\d+)")
_TABLE = re.compile(r"^\s*(?P<key>time|host|rank|exitcode)\s+: (?P<value>.*)$")
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")


@dataclass(frozen=True)
class End:
    """The end of a rank's process. ``code`` negative: a signal; a shell's 128+n is given so, too.
    ``told``: by a launcher's table, not by an exit that was seen."""

    rank: int
    code: int
    time: float | None
    node: str | None
    pid: int | None
    line: Line
    ours: bool = False
    told: bool = False

    @property
    def signal(self) -> int:
        """The signal that ended it, or 0."""
        return -self.code if self.code < 0 else 0


def normal(code: int) -> int:
    """The code with a signal seen through a shell or a container made negative."""
    return 128 - code if 128 < code <= 128 + 64 else code


def ends_of(incident: Incident, lines: list[Line]) -> list[End]:
    """How each rank ended, where somebody says it."""
    seen = list(_seen(incident, lines))
    known = {end.rank for end in seen}
    return seen + [end for end in _told(lines) if end.rank not in known]


def pid_in(text: str) -> int | None:
    """The first process number that a text names."""
    found = _PID.search(text)
    return int(found[1]) if found else None


def _seen(incident: Incident, lines: list[Line]) -> Iterator[End]:
    first = {line.signal: line for line in reversed(lines)}
    for number, signal in enumerate(incident.signals):
        if signal.source != "exit" or signal.rank is None:
            continue
        code = signal.exit_code if signal.exit_code is not None else _code_in(signal.text)
        if code is not None:
            line = first.get(number) or Line(
                f"exit code {code}", "exit", signal.rank, signal.node, signal.time, 0, number
            )
            yield End(
                signal.rank, normal(code), signal.time, signal.node, pid_in(signal.text), line,
                signal.ours,
            )  # fmt: skip


def _code_in(text: str) -> int | None:
    found = _CODE.search(text)
    if found is None:
        return None
    return int(found["code"]) if found["code"] else -int(found["signal"])


def _told(lines: Iterable[Line]) -> Iterator[End]:
    """The rows of torchrun's table: ``rank : 3 (local_rank: 3)``, ``exitcode : 1 (pid: 40134)``."""
    host: str | None = None
    rank: int | None = None
    done: set[int] = set()
    for line in lines:
        row = _TABLE.match(line.text)
        if row is None:
            continue
        number = re.match(r"-?\d+", row["value"])
        if row["key"] == "host":
            host = row["value"].strip() or None
        elif row["key"] == "rank" and number:
            rank = int(number[0])
        elif row["key"] == "exitcode" and number and rank is not None and rank not in done:
            done.add(rank)
            yield End(
                rank, normal(int(number[0])), None, host, pid_in(row["value"]), line, told=True
            )
            rank = None
