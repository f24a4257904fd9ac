"""Candidates among facts of nodes, kernels and schedulers, and the ranks that they stand on.

Owns: the window around a failure, places (device, process, node, pod). Never does: I/O, choose.
Called by: :mod:`everstep.faults.judge`.
"""

from __future__ import annotations

import re
from collections import defaultdict

from everstep.faults.candidates import DEGRADED, NODE, NOTICE, Candidate, Found
from everstep.faults.exits import KILL
from everstep.faults.match import Fact
from everstep.faults.scene import Scene

BEFORE_S, AFTER_S = 600.0, 300.0
"""How far from the failure a fact of a node still belongs to it."""


_WORKER_KILLED = re.compile(
    r"DataLoader worker \(pids?\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly"
    r"|is killed by signal: Killed)"
)
_WIDE = frozenset(("job", "service", "switch", "node"))
"""Places that are no single rank's."""


def node_candidates(found: Found) -> list[Candidate]:
    """Facts of nodes, kernels and schedulers, one candidate for each class and node."""
    groups: dict[tuple[str, str | None], list[Fact]] = defaultdict(list)
    for fact in found.facts:
        if fact.kind == "node" and _belongs(fact, found):
            groups[fact.fault, _node_of(fact, found.scene)].append(fact)
    return [_node_candidate(fault, node, facts, found) for (fault, node), facts in groups.items()]


def _belongs(fact: Fact, found: Found) -> bool:
    """The window of rule 1; the clock of a node that is wrong orders nothing."""
    time = fact.line.time
    if found.span is None or time is None or fact.severity == "notice":
        return True
    if any(other.node == fact.node for other in found.of("CLOCK_SKEW") if other.node):
        return True
    return found.span[0] - BEFORE_S <= time <= found.span[1] + AFTER_S


def _node_of(fact: Fact, scene: Scene) -> str | None:
    if fact.place in ("job", "service"):
        return None
    named = fact.groups.get("node")
    if named and (known := scene.node_at(named)):
        return known
    return fact.line.node or scene.node_of(fact.rank)


def _node_candidate(fault: str, node: str | None, facts: list[Fact], found: Found) -> Candidate:
    facts = sorted(facts, key=lambda fact: fact.key)
    worst = next((fact for fact in facts if fact.severity == "fatal"), None)
    chosen = worst or next((fact for fact in facts if fact.severity == "degraded"), facts[0])
    level = {"fatal": NODE, "degraded": DEGRADED, "notice": NOTICE}[chosen.severity]
    counted = [fact for fact in facts if fact.severity == chosen.severity]
    named = {rank for fact in counted if fact.place not in _WIDE
             and (rank := _named_rank(fact, node, found)) is not None}  # fmt: skip
    ranks = frozenset(named) or frozenset().union(*(_ranks_of(f, node, found) for f in counted))
    if fault == "IMAGE_PULL" or chosen.place == "job":
        node = None  # the image is the registry's, not the node's
    return found.made(
        fault, level, counted, node=node, ranks=ranks, **chosen.traits,
    )  # fmt: skip


def _ranks_of(fact: Fact, node: str | None, found: Found) -> frozenset[int]:
    """The ranks that a fact of a node stands on."""
    scene = found.scene
    if fact.place in ("job", "service", "switch"):
        return frozenset()
    if fact.place == "node" and fact.fault != "HOST_OOM_KILL":
        return frozenset(scene.ranks_of(node))
    rank = _named_rank(fact, node, found)
    if rank is not None:
        return frozenset((rank,))
    if fact.place == "process" or fact.fault == "HOST_OOM_KILL":
        killed = {end.rank for end in scene.ends.values()
                  if end.signal == KILL and end.rank not in scene.ours
                  and (end.node or scene.node_of(end.rank)) == node}  # fmt: skip
        killed = killed or {
            raised.line.rank for raised in found.raised
            if raised.line.rank is not None and _WORKER_KILLED.search(raised.message)
            and (raised.line.node or scene.node_of(raised.line.rank)) == node
        }  # fmt: skip
        if killed:
            return frozenset(killed)
    if fact.place in ("pod", "node"):
        return frozenset(scene.ranks_of(node))
    if node not in found.touched:
        found.touched[node] = _touched(node, found)
    return found.touched[node]


def _named_rank(fact: Fact, node: str | None, found: Found) -> int | None:
    scene, groups = found.scene, fact.groups
    if "pci" in groups and (rank := scene.of_device(node, groups["pci"])) is not None:
        return rank
    if "pid" in groups:
        pid = int(groups["pid"])
        if (rank := scene.of_pid(node, pid)) is not None:
            return rank
        told = found.tellers.get(pid, set())
        if len(told) == 1:
            return next(iter(told))
    rank = fact.rank
    known = scene.ranks_of(node)
    return None if "rank" in groups and known and rank not in known else rank


def _touched(node: str | None, found: Found) -> frozenset[int]:
    """Without a map: the only rank of the node that shows anything of its own."""
    scene = found.scene
    if len(scene.ranks_of(node)) == 1:
        return frozenset(scene.ranks_of(node))
    ranks = set(scene.ranks_of(node))

    def here(rank: int, told: str | None) -> bool:
        return (told or scene.node_of(rank)) == node

    own = {
        fact.rank for fact in found.facts
        if fact.kind == "program" and fact.rank is not None and here(fact.rank, fact.line.node)
    } | {
        end.rank for end in scene.ends.values()
        if end.code != 0 and end.rank not in scene.ours and here(end.rank, end.node)
    }  # fmt: skip
    devices = {fact.rank for fact in found.of("NCCL_CUDA_ERROR", "CONFIG_INVALID", "CUDA_OOM")}
    beats = {beat.rank for beat in scene.beats if beat.age >= 60}
    for group in (own, devices & ranks, beats & ranks):
        if len(group) == 1:
            return frozenset(rank for rank in group if rank is not None)
    return frozenset()
