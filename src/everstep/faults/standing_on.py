"""Whether a fact of a node may go before an end of a process (rule 1).

Owns: device, process, host and time as ties between the two. Never does: I/O, choose among facts of
nodes. Called by: :mod:`everstep.faults.judge`.

A clean exception of the program says itself why its process ended. A kernel's line goes before it
only where it is near, and of the same device or process; everything else that ends a process has
the whole window of ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.faults.candidates import Candidate, Found
from everstep.faults.exits import KILL
from everstep.faults.foreign import plain, tells_of_child
from everstep.faults.records import Domain
from everstep.faults.scene import Scene

NEAR_S = 30.0
"""Seconds before a clean exception within which a kernel's line may have to do with it."""
SAME_S = 2.0
"""Times of two nodes that lie nearer than this have no order."""

_PROGRAMS: tuple[Domain, ...] = ("user_code", "user_data", "numerical")
_CLEAN_OF: dict[str, tuple[Domain, ...]] = {
    "gpu_hardware": _PROGRAMS, "host": _PROGRAMS, "network": _PROGRAMS,
    "storage": ("user_code", "numerical"),
}  # fmt: skip
"""By the domain of a kernel's line, the domains of exceptions that it does not explain."""
_OF_DEVICE = frozenset(("CUDA_OOM", "ILLEGAL_ADDR_SW", "DEVICE_ASSERT", "COLLECTIVE_MISMATCH"))


def stands(candidate: Candidate, programs: Iterable[Candidate], found: Found) -> bool:
    """Whether it stands on the node or device of a rank that failed, or is the scheduler's and came
    first; where no program failed, it does."""
    known = list(programs)
    return not known or any(_before(candidate, program, found) for program in known)


def _before(candidate: Candidate, program: Candidate, found: Found) -> bool:
    if candidate.node is None:
        known = candidate.time is not None and program.time is not None
        return not known or _since(candidate, program) <= SAME_S
    nodes = _nodes_of(program, found.scene)
    if nodes and candidate.node not in nodes and not candidate.ranks & program.ranks:
        return False
    return not _is_clean(candidate, program) or _is_tied(candidate, program, found)


def _nodes_of(program: Candidate, scene: Scene) -> set[str]:
    """The nodes on which a program failed, as far as they are known."""
    nodes = {scene.node_of(rank) for rank in program.ranks} | program.nodes
    nodes |= {fact.node for fact in program.facts}
    return {node for node in nodes if node is not None}


def _is_clean(candidate: Candidate, program: Candidate) -> bool:
    """Whether the program's exceptions say of themselves why, where a kernel's line says another
    thing."""
    if any(fact.line.source not in ("kernel", "gpu") for fact in candidate.facts):
        return False
    if program.domain not in _CLEAN_OF.get(candidate.domain, ()) or program.fault in _OF_DEVICE:
        return False
    said = [fact.message for fact in program.facts]
    return all(each and plain(each) and not tells_of_child(each) for each in said)


def _is_tied(candidate: Candidate, program: Candidate, found: Found) -> bool:
    """Device, process and time against a clean exception."""
    if candidate.domain == "network":
        return False  # the program would have lost a peer
    exact = _exactly(candidate, found.scene)
    if exact and program.ranks:
        return bool(exact & program.ranks)
    if candidate.fault == "HOST_OOM_KILL" and not _killed(candidate, found.scene):
        return False
    return _is_near(candidate, program)


def _exactly(candidate: Candidate, scene: Scene) -> set[int]:
    """The ranks of the devices and processes that the lines name."""
    ranks: set[int | None] = set()
    for fact in candidate.facts:
        if "pci" in fact.groups:
            ranks.add(scene.of_device(candidate.node, fact.groups["pci"]))
        if "pid" in fact.groups:
            ranks.add(scene.of_pid(candidate.node, int(fact.groups["pid"])))
    return {rank for rank in ranks if rank is not None}


def _killed(candidate: Candidate, scene: Scene) -> bool:
    """Whether a worker was killed, or may have been: where nobody tells how the ranks ended."""
    ends = [scene.ends[rank] for rank in candidate.ranks if rank in scene.ends]
    return not ends or any(end.signal == KILL and end.rank not in scene.ours for end in ends)


def _since(candidate: Candidate, program: Candidate) -> float:
    """Seconds by which a candidate came after the program's error; 0 where times are not known."""
    if candidate.time is None or program.time is None:
        return 0.0
    return candidate.time - program.time


def _is_near(candidate: Candidate, program: Candidate) -> bool:
    """Any of its lines, as one may tell of it again."""
    times = [fact.line.time for fact in candidate.facts]
    if program.time is None or None in times:
        return True
    return any(time >= program.time - NEAR_S for time in times if time is not None)
