"""How processes ended, and by whom.

Owns: exit codes, torchrun's table of failures, signals that were ours. Never does: I/O, judge.
Called by: :mod:`everstep.faults.scene`.
"""

from __future__ import annotations

import re
import signal
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
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"
)

_SRUN = re.compile(
    r"srun: error: (?P<node>[\w.-]+): tasks? (?P<ranks>\d[\d,-]*): (?:Exited with exit code"
    r" (?P<code>\d+)"
    r"|(?P<how>Killed|Terminated|Segmentation fault|Bus error|Aborted|Illegal instruction"
    r"|Out Of Memory|Floating point exception))"
)
_SIGNALS = {
    "killed": 9, "terminated": 15, "segmentation fault": 11, "bus error": 7, "aborted": 6,
    "illegal instruction": 4, "out of memory": 9, "floating point exception": 8,
}  # fmt: skip
_MPI = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>[\w.-]+) exited (?:on signal"
    r" (?P<signal>\d+)|with (?:exit )?code (?P<code>\d+))"
)
_SPAWN = re.compile(
    r"(?:^|: )process (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)"
    r"|exit code (?P<code>\d+))"
    r"|^-- Process (?P<rank2>\d+) terminated with the following error"
)
_NAMES = frozenset(signal.Signals.__members__)
_ANYBODY = re.compile(
    r"(?i)\brank:? ?(?P<rank>\d+)\b[^\n]{0,60}?\b(?:exited with (?:exit )?(?:code|status)"
    r"|killed by signal|died with exit code|terminated with signal) (?P<code>-?\d+)"
)
_DEEPSPEED = re.compile(
    r"--local[_-]rank=(?P<rank>\d+)\b.*exits with return code = (?P<code>-?\d+)"
)
_LIGHTNING = re.compile(
    r"\[rank: (?P<rank>\d+)\] Child process with PID (?P<pid>\d+) terminated with code"
    r" (?P<code>-?\d+)"
)


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


def ends_of(incident: Incident, lines: list[Line], told: list[Line]) -> list[End]:
    """How each rank ended, where somebody says it; ``told``: the lines that speak of ends."""
    seen = list(_seen(incident, lines))
    known = {end.rank for end in seen}
    said = [line for line in told if line.source in ("log", "slurm")]
    return seen + [
        end for end in _told(said)
        if end.rank not in known
        and end.rank in incident.nodes.get(end.node or "", (end.rank,))  # a task may be a node's
    ]  # fmt: skip


def pid_in(text: str) -> int | None:
    """The first process number that a text names."""
    found = _PID.search(text)
    return int(found[1]) if found else None


def _seen(incident: Incident, lines: list[Line]) -> Iterator[End]:
    first = {line.signal: line for line in reversed(lines)}
    for number, one in enumerate(incident.signals):
        if one.source != "exit" or one.rank is None:
            continue
        code = one.exit_code if one.exit_code is not None else _code_in(one.text)
        if code is not None:
            line = first.get(number) or Line(
                f"exit code {code}", "exit", one.rank, one.node, one.time, 0, number
            )
            yield End(one.rank, normal(code), one.time, one.node, pid_in(one.text), line, one.ours)


def _code_in(text: str) -> int | None:
    found = _CODE.search(text)
    if found is None:
        return None
    return int(found["code"]) if found["code"] else -int(found["signal"])


def _told(lines: list[Line]) -> Iterator[End]:
    """What launchers say, the most exact first; of each rank the first word counts."""
    done: set[int] = set()
    for form in (_of_table, _of_launchers, _of_agents):
        for end in form(lines):
            if end.rank not in done:
                done.add(end.rank)
                yield end


def _of_table(lines: Iterable[Line]) -> Iterator[End]:
    """The rows of torchrun's table: ``rank : 3 (local_rank: 3)``, ``exitcode : 1 (pid: 40134)``."""
    host: str | None = None
    rank: int | None = None
    for line in lines:
        row = _TABLE.match(line.text)
        if row is None:
            continue
        number = re.match(r"-?\d+", row["value"])
        if row["key"] == "host":
            host = row["value"].strip() or None
        elif row["key"] == "rank" and number:
            rank = int(number[0])
        elif row["key"] == "exitcode" and number and rank is not None:
            yield _end(rank, int(number[0]), line, host, pid_in(row["value"]))
            rank = None


def _of_launchers(lines: Iterable[Line]) -> Iterator[End]:
    """Slurm, MPI, DeepSpeed, Lightning."""
    for line in lines:
        text = line.text
        if found := _SRUN.search(text):
            said = found["code"]
            code = int(said) if said else -_SIGNALS[found["how"].lower()]
            for rank in sorted(_expanded(found["ranks"])):
                yield _end(rank, code, line, found["node"])
        elif found := _MPI.search(text):
            code = int(found["code"]) if found["code"] else -int(found["signal"])
            yield _end(int(found["rank"]), code, line, found["node"])
        elif found := _SPAWN.search(text):
            number = signal.Signals[found["signal"]] if found["signal"] in _NAMES else None
            code = -int(number) if number else int(found["code"] or 1)
            yield _end(int(found["rank"] or found["rank2"]), code, line)
        elif found := _DEEPSPEED.search(text):
            yield _end(int(found["rank"]), int(found["code"]), line)
        elif found := _LIGHTNING.search(text):
            yield _end(int(found["rank"]), int(found["code"]), line, pid=int(found["pid"]))
        elif found := _ANYBODY.search(text):
            code = int(found["code"])
            code = -code if "signal" in found[0] else code
            node = re.search(r"\bon (?:node )?([A-Za-z][\w.-]*\d[\w.-]*)", text)
            name = node[1] if node else None
            yield _end(int(found["rank"]), code, line, name, pid=pid_in(text))


def _of_agents(lines: Iterable[Line]) -> Iterator[End]:
    """torchrun's own line, which names the local rank: of use where there is one node."""
    hosts = {line.node for line in lines} - {None}
    for line in lines:
        if len(hosts) <= 1 and (found := _FAILED.search(line.text)):
            yield _end(int(found["local"]), int(found["code"]), line, pid=int(found["pid"]))


def _end(rank: int, code: int, line: Line, node: str | None = None, pid: int | None = None) -> End:
    return End(rank, normal(code), line.time, node or line.node, pid, line, told=True)


def _expanded(ranks: str) -> set[int]:
    """``0,2-4`` as a set; a range of more than a million names nobody."""
    found: set[int] = set()
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        if first and int(last or first) - int(first) < 10**6:
            found |= set(range(int(first), int(last or first) + 1))
    return found
