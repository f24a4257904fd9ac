"""Whom the errors of peers name: votes (rule 5).

Owns: counting votes, ties. Never does: I/O, weigh against other evidence. Called by:
:mod:`everstep.faults.candidates`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from everstep.faults.match import Fact
from everstep.faults.scene import Scene

_LOOPBACK = re.compile(r"(?:127\.\d+\.\d+\.\d+|::1|localhost)$")
"""A peer on the same node."""


@dataclass(frozen=True)
class Vote:
    """The node that most name and that names nobody; ``tied`` where two nodes name each other or
    as many name one as another. ``unmapped``: an address of no known node won."""

    node: str | None
    address: str
    tied: bool
    voters: frozenset[int]


def vote(facts: list[Fact], scene: Scene, waiting: frozenset[str] = frozenset()) -> Vote | None:
    """Count the addresses that communication errors name. None where none is named. Nodes in
    ``waiting`` have timed out themselves: they closed since another did not come."""
    named: dict[str, set[int]] = defaultdict(set)
    naming: set[str] = set()
    for fact in facts:
        address = fact.groups.get("address") or ""
        if not address:
            continue
        voter = fact.node or scene.node_of(fact.rank)
        target = scene.node_at(address) or _host(address)
        if voter is not None and _LOOPBACK.match(target):
            target = voter
        if target != voter or scene.ranks_of(target)[1:]:
            named[target].add(fact.rank if fact.rank is not None else -1 - len(named[target]))
            naming |= {voter} if voter is not None and voter != target else set()
    if not named:
        return None
    naming |= waiting
    voters = frozenset(rank for ranks in named.values() for rank in ranks)
    silent = {target: ranks for target, ranks in named.items() if target not in naming}
    if not silent:
        return Vote(None, "", True, voters)
    (best, count), *others = Counter(
        {key: len(value) for key, value in silent.items()}
    ).most_common()
    if others and others[0][1] == count:
        return Vote(None, "", True, voters)
    node = best if best in scene.nodes else _silent(scene, naming)
    return Vote(node, best, False, voters)


def _silent(scene: Scene, naming: set[str]) -> str | None:
    """Where an address belongs to no known node: the only node that nobody was heard of, while
    ranks of all others name that address."""
    speaking = {line.node or scene.node_of(line.rank) for line in scene.lines
                if line.source in ("log", "exit") and line.rank is not None}  # fmt: skip
    silent = [node for node, ranks in scene.nodes.items() if ranks and node not in speaking]
    others = set(scene.nodes) - set(silent)
    return silent[0] if len(silent) == 1 and others <= naming else None


def _host(address: str) -> str:
    name = address.strip("[] ")
    return name.rsplit(":", 1)[0] if name.count(":") == 1 else name
