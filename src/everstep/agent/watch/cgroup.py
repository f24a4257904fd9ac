"""What the kernel counts of this agent's control group: memory kills, refused processes.

Owns: where the counters of versions 1 and 2 stand, and what their rise says. Never does: change a
group. Called by: the watch.

A container's memory kill stands in the kernel's log of the host, which the container seldom sees;
its own counters it always does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.watch.source import Blind, Source, reason_of
from everstep.core.clock import Clock
from everstep.faults.records import Signal

EVERY = 1.0
PRESSURE_SECONDS = 60.0
"""A group at its limit reclaims all the time; that is told once in so many seconds."""
UNLIMITED = 1 << 60
"""Version 1 has the largest number there is where it has no limit."""

GROUPS = Path("/sys/fs/cgroup")
MINE = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Files:
    """Where the counters of one group stand; ``kill`` has the line ``oom_kill N``."""

    group: str
    kill: Path
    limit: Path
    used: Path
    refused: Path
    processes: Path


@dataclass(frozen=True)
class Counts:
    """The counters at one moment; None where there is no such file."""

    kills: int | None = None
    at_limit: int | None = None
    refused: int | None = None


class Cgroup(Source):
    """Counters of the group that ``mine`` names, below ``groups``."""

    name, every = "cgroup", EVERY

    def __init__(self, clock: Clock, groups: Path = GROUPS, mine: Path = MINE) -> None:
        self._clock = clock
        self._groups = groups
        self._mine = mine
        self._before: Counts | None = None
        self._pressed_at = -PRESSURE_SECONDS

    def look(self) -> Iterable[Signal]:
        try:
            files = files_of(self._mine.read_text(), self._groups)
        except OSError as error:
            raise Blind(reason_of(error, self._mine)) from error
        now = _counts(files)
        if now == Counts():
            raise Blind(f"no counters of the group {files.group} under {self._groups}")
        before, self._before = self._before or now, now
        return [Signal("kernel", text) for text in self._risen(before, now, files)]

    def _risen(self, before: Counts, now: Counts, files: Files) -> Iterable[str]:
        if more := _more(before.kills, now.kills):
            yield (
                f"{files.kill.name}: oom_kill {now.kills} (+{more}): a process of the cgroup "
                f"{files.group} was killed for memory ({_memory(files)})"
            )
        if more := _more(before.refused, now.refused):
            yield (
                f"cgroup: fork rejected by pids controller in {files.group}: {files.refused.name} "
                f"max {now.refused} (+{more}), limit {_text(files.processes)}"
            )
        mono = self._clock.mono()
        more = _more(before.at_limit, now.at_limit)
        if more and mono - self._pressed_at >= PRESSURE_SECONDS:
            self._pressed_at = mono
            yield (
                f"{files.kill.name}: the cgroup {files.group} reclaims at its memory's limit, "
                f"{now.at_limit} times (+{more}) ({_memory(files)})"
            )


def files_of(mine: str, groups: Path) -> Files:
    """The counters' files, from the text of ``/proc/self/cgroup``. The line ``0::PATH`` is version
    2; of version 1 each controller has a tree of its own. In a container whose view begins at its
    own group, the path that is named may not be there: then the tree's top is the group."""
    paths = dict(_controllers(mine))
    if "memory" in paths:
        memory = _existing(groups / "memory", paths["memory"])
        pids = _existing(groups / "pids", paths.get("pids", "/"))
        return Files(
            paths["memory"], memory / "memory.oom_control", memory / "memory.limit_in_bytes",
            memory / "memory.usage_in_bytes", pids / "pids.events", pids / "pids.max",
        )  # fmt: skip
    name = paths.get("", "/")
    group = _existing(groups, name)
    return Files(
        name, group / "memory.events", group / "memory.max", group / "memory.current",
        group / "pids.events", group / "pids.max",
    )  # fmt: skip


def _controllers(mine: str) -> Iterable[tuple[str, str]]:
    for line in mine.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield from ((name, path) for name in controllers.split(","))


def _existing(top: Path, name: str) -> Path:
    group = top / name.lstrip("/")
    return group if group.is_dir() else top


def _counts(files: Files) -> Counts:
    memory, pids = _read(files.kill), _read(files.refused)
    at_limit = memory.get("max")
    if at_limit is None:  # version 1 counts it in a file of its own
        at_limit = _number(_text(files.kill.with_name("memory.failcnt")))
    return Counts(memory.get("oom_kill"), at_limit, pids.get("max"))


def _read(path: Path) -> Mapping[str, int]:
    """Lines of ``name number``."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _more(before: int | None, now: int | None) -> int:
    """By how much a counter rose; one that fell belongs to another group, and begins anew."""
    return max(0, now - before) if before is not None and now is not None else 0


def _memory(files: Files) -> str:
    limit, used = _number(_text(files.limit)), _number(_text(files.used))
    bound = "no limit" if limit is None or limit >= UNLIMITED else f"limit {limit >> 20} MiB"
    return bound if used is None else f"{bound}, {used >> 20} MiB in use"
