"""Which nodes are to be trusted with the job.

Owns: the blame that a history lays on nodes and pods, its decay, exclusion, probation after the
return, and how many nodes may be excluded. Blame is laid by roots alone: never by victims, never
from outside, never where the verdict is a guess (F1, F2). Never does: I/O, clocks. Called by:
decide, and the commands that show nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from everstep.faults.fold import History
from everstep.faults.history import DecisionRecord, IncidentRecord, ResultRecord, WordRecord

State = Literal["trusted", "suspect", "probation", "excluded"]

_DEVICE_DOMAINS = ("gpu_hardware", "host", "network")
_EPSILON = 0.01
"""Blame below it is forgotten."""


class Rules(msgspec.Struct, frozen=True):
    """``half_life``: seconds in which blame halves. ``threshold``: blame at which a node is no
    longer given work. ``soft``: what one incident weighs that can be survived in place; one that
    cannot weighs 1. ``exclusion``: seconds until an excluded node may return, doubled with each
    exclusion; ``probation``: seconds after it in which any blame excludes it again, because a node
    just back fails far more often than others. ``share`` and at least 1: how many of the job's
    nodes may be excluded. ``pod_window``: seconds in which blame on several nodes of one pod
    blames the pod. ``confidence``: that a verdict needs to blame a node."""

    half_life: float = 24 * 3600.0
    threshold: float = 0.9
    soft: float = 0.5
    exclusion: float = 24 * 3600.0
    probation: float = 12 * 3600.0
    share: float = 0.05
    pod_window: float = 600.0
    confidence: float = 0.5


class Standing(msgspec.Struct, frozen=True):
    """How a node stands: its blame now, its state, until when (history's time; 0: no end), how
    often it was excluded, and why it stands so."""

    node: str
    score: float = 0.0
    state: State = "trusted"
    until: float = 0.0
    exclusions: int = 0
    why: str = ""


class Blame(NamedTuple):
    """One charge: when, whom, the pod that it stands in, and how much."""

    at: float
    node: str
    pod: str
    weight: float
    incident: str


def blamed_node(incident: IncidentRecord, rules: Rules) -> tuple[str, float]:
    """The node that an incident charges and the weight; an empty name where it charges none."""
    verdict = incident.verdict
    node = verdict.root_node
    if not node or incident.cause != "root" or verdict.confidence < rules.confidence:
        return "", 0.0
    device = verdict.domain in _DEVICE_DOMAINS
    if verdict.action == "restart_elsewhere" or (device and verdict.action == "rollback"):
        return node, 1.0
    if device and verdict.action != "stop":
        return node, rules.soft
    return "", 0.0


def blames(history: History, rules: Rules) -> list[Blame]:
    """All charges in order of time. An incident charges once, as it is known last."""
    found: dict[str, Blame] = {}
    first: dict[str, float] = {}
    latest: dict[str, IncidentRecord] = {}
    for at, record in history.records:
        if isinstance(record, IncidentRecord):
            first.setdefault(record.id, at)
            known = latest.get(record.id)
            if known is None or record.revision >= known.revision:
                latest[record.id] = record
        elif isinstance(record, ResultRecord) and record.replay_differed:
            _charge_replay(found, history, record, at, rules)
    for name, incident in latest.items():
        if incident.fatal:
            _charge(found, name, incident, first[name], rules)
    return sorted(found.values())


def _charge(
    found: dict[str, Blame], name: str, incident: IncidentRecord, at: float, rules: Rules
) -> None:
    node, weight = blamed_node(incident, rules)
    if node:
        found[name] = Blame(at, node, incident.pods.get(node, ""), weight, name)


def _charge_replay(
    found: dict[str, Blame], history: History, record: ResultRecord, at: float, rules: Rules
) -> None:
    """The same batches gave finite values: the device on which they did not is suspect. Where no
    node was named, nobody is (F1)."""
    incident = history.incident(record.incident)
    node = (incident.verdict.root_node if incident is not None else None) or record.node
    if incident is not None and node:
        pod = incident.pods.get(node, "")
        found[f"replay {record.incident}"] = Blame(at, node, pod, rules.soft, record.incident)


def blamed_pods(charges: Sequence[Blame], rules: Rules) -> dict[str, float]:
    """Pods of which several nodes were charged within the window, with the time of the last."""
    found: dict[str, float] = {}
    for one in charges:
        for other in charges:
            near = abs(one.at - other.at) <= rules.pod_window
            if one.pod and one.pod == other.pod and one.node != other.node and near:
                found[one.pod] = max(found.get(one.pod, 0.0), one.at, other.at)
    return found


def without_pods(charges: Sequence[Blame], rules: Rules) -> list[Blame]:
    """The charges that are the nodes' own: those that a pod is blamed for are not."""
    return [
        one
        for one in charges
        if not one.pod
        or not any(
            other.pod == one.pod
            and other.node != one.node
            and abs(other.at - one.at) <= rules.pod_window
            for other in charges
        )
    ]


def standings(history: History, rules: Rules) -> dict[str, Standing]:
    """How every node stands that was ever charged, excluded or spoken of, at the history's now."""
    charges = blames(history, rules)
    own = without_pods(charges, rules)
    # A node that was shut out for what its pod is blamed for now is not shut out any more.
    lifted = {(blame.incident, blame.node) for blame in charges if blame not in own}
    nodes = {blame.node for blame in own} | _spoken_of(history)
    return {node: _standing(node, history, own, lifted, rules) for node in sorted(nodes)}


def excluded(standing: Mapping[str, Standing]) -> set[str]:
    return {node for node, found in standing.items() if found.state == "excluded"}


class Exclusion(NamedTuple):
    """Which nodes may go, and which have to stay, with the reason."""

    nodes: tuple[str, ...]
    kept: tuple[str, ...]
    why_kept: str = ""


def may_exclude(
    wanted: Iterable[str],
    already: Collection[str],
    known: Collection[str],
    min_nodes: int,
    rules: Rules,
) -> Exclusion:
    """How many of ``wanted`` (the most wanted first) can be excluded.

    ``already`` are excluded now; ``known`` are all nodes that the job has or could have, the
    excluded ones among them. At most max(1, 5 %) of them, and never so many that fewer than
    ``min_nodes`` are left.
    """
    whole = set(known) | set(already)
    gone = set(already) & whole
    cap = max(1, int(len(whole) * rules.share))
    nodes: list[str] = []
    kept: list[str] = []
    why = ""
    for node in wanted:
        if node in gone:
            continue
        if len(gone) >= cap:
            why = f"{len(gone)} of {len(whole)} nodes are excluded already; at most {cap} may be"
        elif len(whole) - len(gone) - 1 < min_nodes:
            why = f"the job needs {min_nodes} nodes, and no more are left"
        else:
            gone.add(node)
            nodes.append(node)
            continue
        kept.append(node)
    return Exclusion(tuple(nodes), tuple(kept), why)


def _spoken_of(history: History) -> set[str]:
    words = {word.subject for _, word in history.words() if word.word in ("exclude", "pardon")}
    decided = {node for decision in history.decisions() for node in decision.excluded}
    return {node for node in words | decided if node}


def _standing(
    node: str,
    history: History,
    charges: Sequence[Blame],
    lifted: Collection[tuple[str, str]],
    rules: Rules,
) -> Standing:
    """Follow one node through the history."""
    standing = Standing(node)
    since = -1.0
    for at, record in history.records:
        if isinstance(record, DecisionRecord) and node in record.excluded:
            if (record.incident, node) not in lifted:
                standing = _shut_out(standing, at, record, rules)
        elif isinstance(record, WordRecord) and record.subject == node:
            if record.word == "exclude":
                why = record.reason or "excluded by a person"
                standing = Standing(node, 0.0, "excluded", 0.0, standing.exclusions + 1, why)
            elif record.word == "pardon":
                since = at
                why = record.reason or "pardoned by a person"
                standing = Standing(node, 0.0, "probation", at + rules.probation, 0, why)
    score = _score(node, charges, since, history.now, rules)
    return _now(msgspec.structs.replace(standing, score=score), history.now, rules)


def _shut_out(standing: Standing, at: float, decision: DecisionRecord, rules: Rules) -> Standing:
    if standing.state == "excluded" and standing.until == 0.0:
        return standing  # a person's word has no end but a person's word
    until = at + rules.exclusion * 2**standing.exclusions
    return Standing(standing.node, 0.0, "excluded", until, standing.exclusions + 1, decision.reason)


def _score(node: str, charges: Sequence[Blame], since: float, now: float, rules: Rules) -> float:
    """Blame now, each charge halved with every half life. A pardon wipes what came before."""
    return sum(
        blame.weight * math.pow(0.5, max(0.0, now - blame.at) / rules.half_life)
        for blame in charges
        if blame.node == node and blame.at > since
    )


def _now(standing: Standing, now: float, rules: Rules) -> Standing:
    """The state at this moment: an exclusion that has run out is probation, then trust."""
    state, until = standing.state, standing.until
    if state == "excluded" and until and now >= until:
        state, until = "probation", until + rules.probation
    if state == "probation" and now >= until:
        state, until = "trusted", 0.0
    if state == "trusted" and standing.score > _EPSILON:
        state = "suspect"
    return msgspec.structs.replace(standing, state=state, until=until)
