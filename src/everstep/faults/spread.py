"""Rule 8: the same on many ranks, nodes or pods, or on one node that does otherwise than others.

Owns: whom a fault that spreads may name, pods, probes of agents. Never does: I/O, choose. Called
by: :mod:`everstep.faults.judge`, :mod:`everstep.faults.class_rules`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from everstep.faults.candidates import NODE, OUTLIER, PEER, PROGRAM, Candidate, Found
from everstep.faults.scene import Scene

POD_S = 600.0
"""Seconds within which facts of several nodes of a pod are one."""
_OUTSIDE = frozenset(("storage", "network", "user_data"))
_NAMED_NODE = frozenset(("gpu_hardware", "host", "network"))
_PROBE = re.compile(
    r"(?P<what>[^:]{2,60}): (?P<answer>.+)$|(?P<path>/\S+) (?P<state>is (?:not )?(?:a mount ?point"
    r"|mounted).*)$"
)


def placed(candidate: Candidate, found: Found) -> Candidate:
    """Ranks and node: spread over most ranks names nobody; only some domains name a node."""
    scene = found.scene
    ranks, node = candidate.ranks, candidate.node
    if (
        candidate.level != NODE
        and candidate.place in ("job", "service")
        and candidate.domain not in ("network", "communication")
    ):
        ranks = frozenset()
    elif candidate.level == PROGRAM:
        ranks, node = _spread(candidate, found)
    elif (
        candidate.place == "rank"
        and candidate.level in (PEER, OUTLIER)
        and (len(ranks) > 1 and len(ranks) * 2 > scene.world)
    ):
        ranks, node = frozenset(), None
    if candidate.domain in _NAMED_NODE and candidate.place != "path" and node is None and ranks:
        nodes = {scene.node_of(rank) for rank in ranks}
        node = nodes.pop() if len(nodes) == 1 else None
    return replace(candidate, ranks=ranks, node=node)


def spread_over(group: list[Candidate], found: Found) -> Candidate | None:
    """One fault on several nodes: of one pod, of all nodes, or the first by far."""
    first, second = group[0], group[1]
    if first.time is not None and second.time is not None and second.time - first.time > 60:
        return first
    facts = tuple(fact for candidate in group for fact in candidate.facts)
    ranks = frozenset().union(*(candidate.ranks for candidate in group))
    nodes = frozenset(candidate.node for candidate in group if candidate.node)
    everywhere = len(nodes) * 2 > len(found.scene.nodes)
    return replace(
        first, facts=facts, node=None, ranks=frozenset() if everywhere else ranks, nodes=nodes,
        why=f"the same on {len(nodes)} nodes",
    )  # fmt: skip


def of_pod(group: list[Candidate], found: Found) -> Candidate | None:
    """Several nodes of one pod within ten minutes: the pod is blamed, not its nodes."""
    pods = {found.scene.incident.pods.get(candidate.node or "", "") for candidate in group}
    times = [candidate.time for candidate in group if candidate.time is not None]
    if len(pods) != 1 or "" in pods or (times and max(times) - min(times) > POD_S):
        return None
    deepest = max(group, key=lambda candidate: (candidate.depth, candidate.node or ""))
    nodes = frozenset(candidate.node for candidate in group if candidate.node)
    ranks = frozenset(rank for node in nodes for rank in found.scene.ranks_of(node))
    pod = pods.pop()
    return replace(deepest, node=None, nodes=nodes, ranks=ranks, pod=pod,
                   why=f"{len(nodes)} nodes of {pod} within ten minutes")  # fmt: skip


def differs(candidate: Candidate, found: Found) -> str | None:
    """The one node of several on which it happened, where another node is known to do well or to be
    set up otherwise (rule 8)."""
    scene = found.scene
    nodes = {scene.node_of(rank) for rank in candidate.ranks} | (
        {fact.node for fact in candidate.facts if fact.rank is None})  # fmt: skip
    nodes.discard(None)
    if len(nodes) != 1 or not scene.is_multi():
        return None
    node = nodes.pop()
    assert node is not None, "None was taken out"
    alive = {scene.node_of(rank) for rank in scene.alive} - {None, node}
    return node if alive or _otherwise(node, scene) else None


def whole_node(candidate: Candidate, found: Found) -> str | None:
    """The node, where all its ranks fail alike and those of another node do not."""
    scene = found.scene
    if not scene.is_multi() or not candidate.ranks:
        return None
    for node, ranks in scene.nodes.items():
        if set(ranks) == set(candidate.ranks) and len(ranks) > 1:
            return node
    return None


def _otherwise(node: str, scene: Scene) -> bool:
    """Whether the same probe gave another answer on another node."""
    answers: dict[str, dict[str, set[str]]] = {}
    for line in scene.lines:
        if line.source == "agent" and line.node and (probe := _PROBE.match(line.text)):
            what, answer = probe["what"] or probe["path"], probe["answer"] or probe["state"]
            answers.setdefault(what, {}).setdefault(line.node, set()).add(answer)
    return any(
        node in said and any(other != node and not (said[other] & said[node]) for other in said)
        for said in answers.values()
    )


def _spread(candidate: Candidate, found: Found) -> tuple[frozenset[int], str | None]:
    scene, ranks, node = found.scene, candidate.ranks, candidate.node
    if candidate.domain in ("host", "gpu_hardware") and node is not None:
        return ranks, node
    world = max(scene.world, 1)
    if (
        candidate.domain == "user_code"
        and ranks
        and len(ranks | _alike(candidate, found)) == world > 1
    ):
        return frozenset(), None
    if (len(ranks) > 1 and len(ranks) * 2 > world) or (
        world == 1 and len(ranks) == 1 and not scene.nodes
    ):
        return frozenset() if len(ranks) > 1 else ranks, None
    if candidate.domain in _OUTSIDE and len({scene.node_of(rank) for rank in ranks}) > 1:
        return frozenset(), None
    return ranks, node


def _alike(candidate: Candidate, found: Found) -> frozenset[int]:
    """Ranks without a word of their own that ended with the same code at the same time."""
    ends = found.scene.ends
    silent = [end for end in ends.values() if end.code > 0 and end.rank not in found.scene.heard]
    if not silent:
        return frozenset()
    codes = {ends[rank].code for rank in candidate.ranks if rank in ends}
    times = [ends[rank].time or 0.0 for rank in candidate.ranks if rank in ends]
    return frozenset(
        end.rank for end in silent
        if {end.code} == codes
        and abs((end.time or 0.0) - min(times)) <= 2.0
    )  # fmt: skip
