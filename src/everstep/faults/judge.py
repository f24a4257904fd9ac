"""The verdict: which candidate is the root, who are its victims, what helps.

Owns: the order of levels, ties, the honest unknown. Never does: I/O, clocks, budgets. Called by:
the agent, the fleet's server, the simulator, ``everstep classify``.

A verdict is a function of the incident's signals alone: neither the order in which they arrived nor
how often one was told changes it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from everstep.faults.candidates import (
    NODE,
    NOTICE,
    PEER,
    PROGRAM,
    Candidate,
    Found,
)
from everstep.faults.catalog import Catalog
from everstep.faults.class_rules import CLASS_RULES
from everstep.faults.confidence import confidence
from everstep.faults.endings import ends_as_evidence, first_ends, in_words, last_words, of_end
from everstep.faults.facts import gathered
from everstep.faults.match import Fact
from everstep.faults.peers import vote
from everstep.faults.places import node_candidates
from everstep.faults.programs import external_ends, program_candidates
from everstep.faults.records import UNKNOWN, Evidence, Incident, Role, RootDomain, Signal, Verdict
from everstep.faults.recurrence import looping, recurring, same_again
from everstep.faults.scene import Scene, scene_of
from everstep.faults.series import step_of
from everstep.faults.spread import of_pod, placed, spread_over
from everstep.faults.standing_on import SAME_S, stands
from everstep.faults.victims import victims
from everstep.faults.waiting import (
    beat_candidates,
    collective_candidates,
    noted_candidates,
    peer_candidates,
    series_candidates,
    signal_candidates,
    stack_candidates,
    told_candidates,
)

SHOWN = 12
"""Lines of evidence in a verdict."""
NOTHING = "nothing that was seen names a cause"


def judge(incident: Incident, catalog: Catalog) -> Verdict:
    """What the incident was. Pure."""
    found = gathered(scene_of(_settled(incident), catalog), catalog)
    candidates = all_candidates(found)
    chosen, reason = choose(candidates, found)
    chosen = looping(chosen, found)
    return _verdict(chosen, candidates, found, reason)


def all_candidates(found: Found) -> list[Candidate]:
    """Everything that could be the root."""
    made = [
        *node_candidates(found), *program_candidates(found), *stack_candidates(found),
        *external_ends(found), *collective_candidates(found), *peer_candidates(found),
        *beat_candidates(found), *told_candidates(found), *series_candidates(found),
        *noted_candidates(found), *signal_candidates(found),
    ]  # fmt: skip
    settled = [_in_context(candidate, found) for candidate in made]
    return [candidate for candidate in settled if candidate.level > 0]


def choose(candidates: list[Candidate], found: Found) -> tuple[Candidate | None, str]:
    """The root, or None with the reason why nothing decides."""
    if _went_on(candidates, found):
        return _of_notices(candidates, found)
    programs = [c for c in candidates if c.level == PROGRAM]
    strong = [c for c in candidates if c.level == NODE and stands(c, programs, found)]
    if strong:
        return _of_nodes(strong, found)
    rest = [c for c in candidates if NOTICE + 1 < c.level < NODE]
    if not rest:
        return (None, "") if found.scene.dead else _of_notices(candidates, found)
    level = max(candidate.level for candidate in rest)
    top = [candidate for candidate in rest if candidate.level == level]
    if level != PROGRAM:
        return max(top, key=_depth), ""
    if _unordered(top, found):
        return _named_by_peers(top, found)
    return _first(top), ""


def _settled(incident: Incident) -> Incident:
    """The signals once each, in an order that is theirs and not that of their arrival."""
    signals = sorted(set(incident.signals), key=_order)
    return msgspec.structs.replace(incident, signals=tuple(signals))


def _order(signal: Signal) -> tuple[object, ...]:
    rank = -1 if signal.rank is None else signal.rank
    time = signal.time if signal.time is not None else float("inf")
    return (
        time, signal.source, rank, signal.node or "", signal.text, signal.exit_code or 0,
        signal.ours, signal.mono or 0.0, signal.wall or 0.0,
    )  # fmt: skip


def _went_on(candidates: list[Candidate], found: Found) -> bool:
    """Nothing died of it: only facts that training survives, and signs of life or of the end."""
    scene = found.scene
    fatal = [c for c in candidates
             if c.level > NOTICE + 1 and not c.survivable and not _late(c, scene)]  # fmt: skip
    if fatal:
        return False
    if scene.over:
        return True
    if scene.dead or not scene.alive:
        return False
    nodes = {c.node for c in candidates if c.level == NODE and scene.ranks_of(c.node)}
    return all(scene.alive & set(scene.ranks_of(node)) for node in nodes)


def _in_context(candidate: Candidate, found: Found) -> Candidate:
    """The candidate with what the rest of the incident says about it."""
    if candidate.domain == "gpu_hardware" and candidate.action == "restart_in_place":
        candidate = same_again(candidate, found)
    rule = CLASS_RULES.get(candidate.fault)
    if rule is not None:
        candidate = rule(candidate, found)
    if candidate.level in (PROGRAM, NODE):
        candidate = recurring(candidate, found)
    return placed(candidate, found)


def _harmless(candidate: Candidate) -> Candidate:
    """Of something that training survived nobody is to blame and nothing is done."""
    if candidate.fault == "STRAGGLER":
        return candidate
    return replace(candidate, action="continue", ranks=frozenset(), node=None)


def _late(candidate: Candidate, scene: Scene) -> bool:
    """Noise after a finished run (rule 7): all but errors of the program and facts of nodes."""
    if not scene.over or candidate.level == NODE:
        return False
    if candidate.level == PROGRAM and candidate.fault not in ("NATIVE_CRASH", "SIGBUS_SHM"):
        return False
    return scene.finished is None or candidate.time is None or candidate.time >= scene.finished


def _of_notices(candidates: list[Candidate], found: Found) -> tuple[Candidate | None, str]:
    scene = found.scene
    left = [c for c in candidates
            if c.survivable or c.level <= NOTICE + 1 or _late(c, scene)]  # fmt: skip
    if not left and scene.over:
        left = [found.made(fact.fault, NOTICE, [fact]) for fact in found.facts
                if fact.kind in ("peer", "watchdog")]  # fmt: skip
    if not left:
        return None, ""
    best = max(left, key=lambda c: (c.level if c.level <= NOTICE + 1 else c.depth, *_depth(c)))
    return _harmless(best), "nothing ended of it"


def _of_nodes(strong: list[Candidate], found: Found) -> tuple[Candidate | None, str]:
    by_node: dict[str | None, list[Candidate]] = {}
    for candidate in strong:
        by_node.setdefault(candidate.node, []).append(candidate)
    best = {node: max(group, key=_depth) for node, group in by_node.items()}
    if len(best) == 1:
        return next(iter(best.values())), ""
    wide = best.pop(None, None)
    top = _of_several(list(best.values()), found)
    if wide is not None and (top is None or wide.depth > top.depth):
        return wide, ""
    return top, "" if top else "facts of several nodes are equally near"


def _of_several(group: list[Candidate], found: Found) -> Candidate | None:
    """Of several nodes: the same fault on all, the earlier by more than clocks differ, the
    deeper."""
    group = sorted(
        group, key=lambda c: (c.time if c.time is not None else 0.0, -c.depth, c.node or "")
    )
    if len(group) == 1:
        return group[0]
    if pod := of_pod(group, found):
        return pod
    if len({candidate.fault for candidate in group}) == 1:
        return spread_over(group, found)
    first, second = group[0], group[1]
    if first.time is not None and second.time is not None and second.time - first.time > SAME_S:
        return first
    deep = sorted(group, key=lambda c: -c.depth)
    return deep[0] if deep[0].depth >= deep[1].depth + 10 else None


def _unordered(group: list[Candidate], found: Found) -> bool:
    """Whether a clock that is wrong stands behind the times of some candidates."""
    wrong = {fact.node for fact in found.of("CLOCK_SKEW") if fact.node is not None}
    places = [{found.scene.node_of(rank) for rank in candidate.ranks} for candidate in group]
    return len(group) > 1 and any(place & wrong for place in places) and len(set.union(*places)) > 1


def _named_by_peers(group: list[Candidate], found: Found) -> tuple[Candidate | None, str]:
    """Without an order in time: whom the errors of peers name."""
    votes = vote([fact for fact in found.facts if fact.kind == "peer"], found.scene)
    node = votes.node if votes is not None and not votes.tied else None
    named = [c for c in group if node in {found.scene.node_of(rank) for rank in c.ranks}]
    if node is not None and named:
        return max(named, key=_depth), "peers name its node"
    return None, "the clocks of the nodes give no order, and peers name neither"


def _first(group: list[Candidate]) -> Candidate:
    """Among ends of processes the first; where clocks do not tell, the more specific."""
    earliest = min(candidate.order for candidate in group)
    near = [candidate for candidate in group if candidate.order[0] <= earliest[0] + SAME_S]
    timed = all(candidate.time is not None for candidate in group)
    return max(near if timed else group, key=_depth)


def _depth(candidate: Candidate) -> tuple[int, float, str]:
    return (candidate.depth, -candidate.order[0], candidate.fault)


def _verdict(
    chosen: Candidate | None, candidates: list[Candidate], found: Found, reason: str
) -> Verdict:
    if chosen is None:
        return _unknown(candidates, found, reason)
    ranks = tuple(sorted(chosen.ranks))
    shown = sorted(
        chosen.facts, key=lambda fact: (-fact.depth, fact.line.time or 0, fact.line.order)
    )
    frame = next((fact.frame for fact in shown if fact.frame), "")
    message = next(
        (fact.message for fact in shown if fact.message), shown[0].line.text if shown else ""
    )
    evidence = _evidence(chosen, "root")
    if words := _own_words(chosen, found):
        frame, message = "", words
        evidence = _with_ends(chosen, found)
    return Verdict(
        fault=chosen.fault,
        domain=chosen.domain,
        action=chosen.action,
        root_ranks=ranks,
        root_node=chosen.node,
        root_domain=_root_domain(chosen),
        victim_ranks=victims(found, chosen),
        confidence=confidence(chosen),
        evidence=evidence,
        discarded=_discarded(candidates, chosen, found),
        advice=found.catalog.known[chosen.fault].advice,
        frame=frame,
        step=step_of(found.scene, chosen.facts),
        message=message,
    )


def _unknown(candidates: list[Candidate], found: Found, reason: str) -> Verdict:
    known = found.catalog.known[UNKNOWN]
    return Verdict(
        fault=UNKNOWN, domain="unknown", action=known.action,
        victim_ranks=victims(found, None), evidence=ends_as_evidence(found.scene),
        discarded=_discarded(candidates, None, found), advice=known.advice,
        message=reason or in_words(found.scene) or NOTHING,
    )  # fmt: skip


def _own_words(chosen: Candidate, found: Found) -> str:
    """Of a root that its peers name, and that ended by itself: how it ended, not what they say."""
    if chosen.level != PEER or not chosen.ranks or _tells_itself(chosen):
        return ""
    ends = [end for end in first_ends(found.scene) if end.rank in chosen.ranks]
    if not ends:
        return ""
    said = last_words(ends[0], found.scene)
    left = f"rank {ends[0].rank} ended with exit code {ends[0].code}; its last words: {said}"
    return left if said else of_end(ends[0])


def _tells_itself(chosen: Candidate) -> bool:
    return any(fact.line.rank in chosen.ranks for fact in chosen.facts)


def _with_ends(chosen: Candidate, found: Found) -> tuple[Evidence, ...]:
    """The root's own end, then what its peers say of it."""
    own = [end for end in ends_as_evidence(found.scene, chosen.ranks) if end.role == "root"]
    named = [msgspec.structs.replace(each, fault=chosen.fault) for each in own]
    return (*named, *_evidence(chosen, "victim"))[:SHOWN]


def _root_domain(chosen: Candidate) -> RootDomain:
    if chosen.pod:
        return "pod"
    if chosen.place == "gpu" and (chosen.ranks or chosen.node):
        return "gpu"
    if chosen.place in ("node", "switch") or (chosen.node and not chosen.ranks):
        return "node" if chosen.node else ""
    if chosen.place in ("path", "service"):
        return "path" if chosen.place == "path" else "service"
    return "rank" if chosen.ranks else ""


def _evidence(candidate: Candidate, role: Role | None = None) -> tuple[Evidence, ...]:
    facts = sorted(candidate.facts, key=lambda f: (f.line.time or 0.0, f.line.order, f.line.text))
    return tuple(
        _as_evidence(
            fact, candidate.fault,
            role or ("victim" if fact.meaning.role == "victim" else "noise"), candidate.why,
        )
        for fact in facts[:SHOWN]
    )  # fmt: skip


def _discarded(
    candidates: list[Candidate], chosen: Candidate | None, found: Found
) -> tuple[Evidence, ...]:
    others = [c for c in candidates if chosen is None or c.fault != chosen.fault]
    others.sort(key=lambda c: (-c.level, -c.depth, c.fault, c.node or ""))
    weighed = [item for c in others for item in _evidence(c)[:1]]
    aside = sorted(found.aside, key=lambda item: item[0].key)
    seen = [_as_evidence(fact, fact.fault, "noise", why) for fact, why in aside]
    half = max(SHOWN // 2, SHOWN - len(seen))
    return tuple(dict.fromkeys((*weighed[:half], *seen)))[:SHOWN]


def _as_evidence(fact: Fact, fault: str, role: Role, why: str) -> Evidence:
    return Evidence(
        text=fact.line.text[:500], source=fact.line.source, fault=fault, role=role,
        rank=fact.rank, node=fact.node, time=fact.line.time, why=why,
    )  # fmt: skip
