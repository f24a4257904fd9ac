"""Lines of a node's kernel that are about other processes than the attempt's own.

Owns: which process a line names, and what may still be a worker's where numbers differ. Never
does: I/O, choose. Called by: :mod:`everstep.faults.facts`.

In a container the kernel's numbers are those of the host and fit no worker's. So a number that is
unknown is a worker's all the same where one ended just then, and as such a line says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from everstep.faults.exits import ABORT, BUS, CRASHES, KILL, TERM, End
from everstep.faults.lines import Line
from everstep.faults.match import Fact
from everstep.faults.scene import Scene
from everstep.faults.tracebacks import Raised

NEAR_S = 30.0
"""Seconds between what the kernel says of a process and its end, as clocks and collectors go."""
JUST_S = 2.0
"""Within which what the kernel says and an end are one moment."""

_NAME = re.compile(
    r"(?i)\btask=(?P<task>[^,\s]+),pid=|kill(?:ed)? process \d+,? \(?(?P<killed>[^),]+)"
    r"|(?P<fault>[\w.:/-]+)\[\d+\]:? (?:segfault|general protection|trap )"
)
_PYTHON = re.compile(r"(?i)^(?:python|pt_|torchrun|everstep|ray|deepspeed|accelerate|cuda|nccl)")
_CHILD = re.compile(
    r"DataLoader worker"
    r"|^(?:\w+\.)*(?:EOFError|BrokenPipeError|ConnectionResetError|BrokenProcessPool)"
    r"|(?i:\bSIGKILL\b|was killed|died unexpectedly|terminated abruptly|exited unexpectedly"
    r"|exit (?:code|status) (?:-9|137)\b)"
)
"""What a worker says of a process of its own that is gone."""
_OF_DEVICE = re.compile(r"(?i)\b(?:CUDA|HIP|NCCL|cuDNN|cuBLAS|GPU|ECC)\b|Accelerator")
_CRASHING = frozenset((*CRASHES, BUS, ABORT))


def names_process(fact: Fact) -> bool:
    """Whether it is a kernel's line that names a process."""
    return "pid" in fact.groups and fact.line.source == "kernel"


def foreign(fact: Fact, raised: Mapping[str | None, list[Raised]], scene: Scene) -> str:
    """Why a line that names a process is of none that is a worker's; empty where it may be one's.
    ``raised``: the exceptions by their nodes."""
    pid, node = int(fact.groups["pid"]), fact.node
    here = [*raised.get(node, ()), *(raised.get(None, ()) if node is not None else ())]
    known = scene.pids_on(node)
    if not known or pid in known or _tells_of(pid, here) or _of_its_device(fact, scene):
        return ""
    name = _named(fact.line.text)
    ended = _ended(node, scene)
    # A process may call itself anything: of one that ended at that very moment no name is asked,
    # unless the whole host was short of memory, where others are killed as well.
    likely = not name or _PYTHON.search(name) or any(_just_then(fact, end) for end in ended)
    if likely and _may_be(fact, here, ended):
        return ""
    called = f" ({name})" if name else ""
    return f"process {pid}{called} is no worker of this attempt"


def plain(said: str) -> bool:
    """Whether an exception's text speaks of no device."""
    return _OF_DEVICE.search(said) is None


def tells_of_child(said: str) -> bool:
    """Whether an exception's text is that a process of the worker's own is gone."""
    return _CHILD.search(said) is not None


def _tells_of(pid: int, raised: Iterable[Raised]) -> bool:
    number = re.compile(rf"\bpid\W{{0,5}}{pid}\b|\(pid[^)]*\b{pid}\b")
    return any(number.search(each.message) for each in raised)


def _of_its_device(fact: Fact, scene: Scene) -> bool:
    pci = fact.groups.get("pci")
    return pci is not None and scene.of_device(fact.node, pci) is not None


def _named(text: str) -> str:
    found = _NAME.search(text)
    return (found["task"] or found["killed"] or found["fault"]).strip() if found else ""


def _may_be(fact: Fact, here: list[Raised], ended: Iterable[End]) -> bool:
    """Whether a worker, or a process of its own that it tells of, ended in such a way just then."""
    ends = [end for end in ended if _near(fact, end)]
    if fact.fault in ("HOST_OOM_KILL", "NATIVE_CRASH"):
        fits = {KILL} if fact.fault == "HOST_OOM_KILL" else _CRASHING
        return any(end.signal in fits for end in ends) or any(
            tells_of_child(f"{each.type}: {each.message}") and _near(fact, each.line)
            for each in here
        )
    if any(end.signal not in (0, TERM) for end in ends):
        return True
    return not here or not all(plain(f"{each.type}: {each.message}") for each in here)


def _just_then(fact: Fact, end: End) -> bool:
    fits = {"HOST_OOM_KILL": {KILL}, "NATIVE_CRASH": _CRASHING}.get(fact.fault, set())
    said, ended = fact.line.time, end.time
    known = said is not None and ended is not None
    if fact.fault == "HOST_OOM_KILL" and "cgroup" not in fact.line.text:
        return False
    return known and end.signal in fits and abs((ended or 0.0) - (said or 0.0)) <= JUST_S


def _ended(node: str | None, scene: Scene) -> list[End]:
    if node is None:
        return [end for ends in scene.ends_on.values() for end in ends]
    return [*scene.ends_on.get(node, ()), *scene.ends_on.get(None, ())]


def _near(fact: Fact, other: End | Line) -> bool:
    time = fact.line.time
    return time is None or other.time is None or abs(other.time - time) <= NEAR_S
