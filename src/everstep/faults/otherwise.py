"""One node that does otherwise than the others (rule 8).

Owns: probes of agents, ranks of one node alone. Never does: I/O, choose. Called by:
:mod:`everstep.faults.special`.
"""

from __future__ import annotations

import re

from everstep.faults.candidates import Candidate, Found
from everstep.faults.scene import Scene

_PROBE = re.compile(
    r"(?P<what>[^:]{2,60}): (?P<answer>.+)$|(?P<path>/\S+) (?P<state>is (?:not )?(?:a mount ?point"
    r"|mounted).*)$"
)


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
