"""Which rung of the ladder a failure calls for, on which nodes, from which state, and what follows
where that fails.

Owns: the choice of action, target nodes and recovery point, for a failure after which the job may
go on. Never does: I/O, clocks, budgets' limits (decide asks them first). Called by: decide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

import msgspec

from everstep.faults import budget
from everstep.faults.budget import Budgets
from everstep.faults.fold import History
from everstep.faults.history import Alternative, DecisionRecord, IncidentRecord, RecoveryPoint, Rung
from everstep.faults.records import Action
from everstep.faults.situation import Policy, Situation
from everstep.faults.suspicion import (
    Exclusion,
    blamed_node,
    blamed_pods,
    blames,
    excluded,
    may_exclude,
    standings,
)

_YOUNG = "no sound checkpoint is old enough for what shows late: the newest sound one is taken"

LADDER: tuple[Action, ...] = (
    "continue",
    "restart_in_place",
    "restart_elsewhere",
    "wait_and_retry",
    "rollback",
    "stop",
)
"""From the least to the most: what fails is followed by what stands behind it."""


@dataclass(frozen=True)
class Draft:
    """A decision without its name, number and time."""

    rung: Rung
    reason: str
    fault: str = ""
    ladder: tuple[Rung, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    excluded: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    exit_code: int = 0
    final: bool = False
    replay: bool = False
    skip: tuple[int, ...] = ()
    alerts: tuple[str, ...] = ()
    advice: str = ""

    @property
    def action(self) -> Action:
        return self.rung.action


def choose(
    history: History,
    incident: IncidentRecord,
    budgets: Budgets,
    situation: Situation,
    policy: Policy,
) -> Draft:
    """The action for a fatal incident after which a restart is allowed. Its ``action`` is ``stop``
    only where there is nothing to go on from."""
    chooser = _Chooser(history, incident, budgets, situation, policy)
    return chooser.draft()


def plain(history: History, situation: Situation, policy: Policy) -> Rung:
    """A restart in place, on the nodes of the attempt before, but those that may not be used."""
    gone = excluded(standings(history, policy.rules)) | set(situation.lost)
    nodes = _fill(situation, gone)
    return Rung("restart_in_place", _or(nodes, situation.nodes), timeout=policy.in_place)


class _Leaving(NamedTuple):
    """Nodes that the next attempt is to do without: those shut out for good, those that only it
    avoids, and what a person has to know."""

    excluded: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    why: str = ""

    @property
    def nodes(self) -> set[str]:
        return {*self.excluded, *self.avoided}


@dataclass
class _Chooser:
    history: History
    incident: IncidentRecord
    budgets: Budgets
    situation: Situation
    policy: Policy
    gone: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.standings = standings(self.history, self.policy.rules)
        self.gone = excluded(self.standings) | set(self.situation.lost)
        self.times = max(1, budget.repeats(self.budgets, self.incident))

    def draft(self) -> Draft:
        wanted, why = self._wanted()
        leaving = self._leaving(wanted)
        if wanted == "rollback":
            draft = self._roll_back(leaving, why)
        elif wanted == "restart_elsewhere":
            draft = self._elsewhere(leaving, why)
        elif wanted == "wait_and_retry":
            draft = Draft(self._wait(why), why)
        else:
            draft = self._in_place(why)
        if draft.action == "stop":
            return draft
        return replace(
            draft, ladder=self._below(draft), alternatives=self._alternatives(draft, leaving)
        )

    # which action

    def _wanted(self) -> tuple[Action, str]:
        """The action that evidence and history ask for, and why."""
        verdict, incident = self.incident.verdict, self.incident
        if verdict.action == "rollback":
            return "rollback", "the state is not sound"
        if incident.cause == "agent_lost":
            return "restart_in_place", "the agent that ran it is gone"
        if verdict.action == "restart_elsewhere":
            return "restart_elsewhere", "the verdict blames where it ran"
        if verdict.action == "wait_and_retry":
            return "wait_and_retry", "what it needs is not to be had now"
        if incident.cause == "root" and self.times == 2 and not budget.of_program(incident):
            return "restart_elsewhere", f"the same failure came twice at step {incident.where}"
        if self._distrusted():
            return "restart_elsewhere", f"node {verdict.root_node} has failed before"
        if budget.of_program(incident):
            return "restart_in_place", "one restart shows whether it comes again"
        return "restart_in_place", "a restart may help"

    def _distrusted(self) -> bool:
        """Whether this incident is one too many for its node."""
        node, weight = blamed_node(self.incident, self.policy.rules)
        standing = self.standings.get(node)
        if not weight or standing is None:
            return False
        return standing.state == "probation" or standing.score >= self.policy.rules.threshold - 1e-6

    # which nodes

    def _leaving(self, wanted: Action) -> _Leaving:
        verdict = self.incident.verdict
        pod = self._pod()
        if pod:
            nodes = tuple(n for n in self.situation.nodes if self.incident.pods.get(n) == pod)
            why = f"several nodes of pod {pod} failed within minutes: the pod is blamed"
            return _Leaving(avoided=nodes, alerts=(why,), why=why)
        node, weight = blamed_node(self.incident, self.policy.rules)
        if weight and node not in self.situation.nodes:
            return _Leaving(why=f"node {node} has no part in it any more")
        if node in self.situation.lost:
            # It may come back, and no worse for it: only what is decided now does without it.
            return _Leaving(avoided=(node,))
        if weight and (weight >= 1.0 or self._distrusted()):
            return self._shut_out(node)
        if wanted != "restart_elsewhere" or (not verdict.root_node and self.times > 1):
            return _Leaving()
        if not verdict.root_node:
            return _Leaving(why="the evidence names no node")
        if self.incident.cause == "external" or self.times == 2:
            return _Leaving(avoided=(verdict.root_node,))
        return _Leaving(why="the evidence is not enough to blame a node")

    def _pod(self) -> str:
        """The pod that is to blame for this incident, an empty text for none."""
        verdict, rules = self.incident.verdict, self.policy.rules
        node, weight = blamed_node(self.incident, rules)
        if verdict.root_domain == "pod" and verdict.confidence >= rules.confidence:
            return self._pod_of_roots()
        pod = self.incident.pods.get(verdict.root_node or "", "")
        charges = blames(self.history, rules)
        last = blamed_pods(charges, rules).get(pod)
        own = max((c.at for c in charges if c.incident == self.incident.id), default=None)
        near = last is not None and own is not None and abs(last - own) <= rules.pod_window
        return pod if weight and node and near else ""

    def _pod_of_roots(self) -> str:
        """The one pod in which all root ranks, or the root node, stand."""
        incident, verdict = self.incident, self.incident.verdict
        roots = set(verdict.root_ranks)
        nodes = {node for node, ranks in incident.nodes.items() if roots & set(ranks)}
        nodes |= {verdict.root_node} if verdict.root_node else set()
        pods = {incident.pods.get(node, "") for node in nodes}
        return pods.pop() if len(pods) == 1 else ""

    def _shut_out(self, node: str) -> _Leaving:
        known = {*self.situation.nodes, *self.situation.spares, *self.gone}
        # Until the state can be loaded on fewer nodes, the job needs as many as it has.
        situation = self.situation
        least = situation.min_nodes if situation.can_shrink else len(situation.nodes)
        already = excluded(self.standings)
        found: Exclusion = may_exclude((node,), already, known, least, self.policy.rules)
        if found.kept:
            alert = f"node {node} should be left out and cannot be: {found.why_kept}"
            return _Leaving(alerts=(alert,), why=alert)
        return _Leaving(excluded=(node,))

    # the rungs

    def _in_place(self, why: str) -> Draft:
        nodes = self._without(self.gone)
        if nodes is None:
            return self._short_of_nodes(why)
        if set(nodes) != set(self.situation.nodes):
            timeout = self.policy.elsewhere
            return Draft(Rung("restart_elsewhere", nodes, timeout=timeout, why=why), why)
        return Draft(Rung("restart_in_place", nodes, timeout=self.policy.in_place, why=why), why)

    def _elsewhere(self, leaving: _Leaving, why: str) -> Draft:
        targets = self._targets(leaving)
        if targets is not None and set(targets) != set(self.situation.nodes):
            rung = Rung("restart_elsewhere", targets, timeout=self.policy.elsewhere, why=why)
            draft = Draft(rung, why)
        elif leaving.excluded or leaving.avoided or set(self.situation.nodes) & self.gone:
            draft = self._cannot_leave(leaving, why)
        else:
            draft = self._in_place(f"{why}; {leaving.why or 'there are no other nodes'}")
        return replace(
            draft,
            excluded=leaving.excluded,
            avoided=leaving.avoided,
            alerts=(*draft.alerts, *leaving.alerts),
        )

    def _targets(self, leaving: _Leaving) -> tuple[str, ...] | None:
        """Nodes for an attempt that leaves some out; where nobody is blamed, as many other nodes
        as there are spares for."""
        if leaving.nodes:
            return self._without(self.gone | leaving.nodes)
        if leaving.why or self.incident.verdict.root_node:
            return _fill(self.situation, self.gone)
        spares = [n for n in self.situation.spares if n not in self.gone]
        if not spares:
            return None
        stay = [n for n in self.situation.nodes if n not in self.gone]
        wanted = len(self.situation.nodes)
        keep = stay[: max(0, wanted - len(spares))]
        return tuple([*keep, *spares][:wanted]) if len(keep) + len(spares) >= wanted else None

    def _cannot_leave(self, leaving: _Leaving, why: str) -> Draft:
        """No node takes the place of one that has to go: wait for one where it is gone or a
        scheduler takes it, else go on with it, and say so."""
        lacking = ", ".join(sorted(leaving.nodes | (set(self.situation.nodes) & self.gone)))
        alert = f"no node is there to take the place of {lacking}"
        absent = leaving.nodes & set(self.situation.lost) or self.incident.cause == "external"
        if absent or set(self.situation.nodes) & self.gone or leaving.excluded:
            return Draft(
                self._wait_for_nodes(alert, leaving.nodes), f"{why}; {alert}", alerts=(alert,)
            )
        return replace(self._in_place(f"{why}; {alert}"), alerts=(alert,))

    def _short_of_nodes(self, why: str) -> Draft:
        alert = "too few nodes are left for the job"
        return Draft(self._wait_for_nodes(alert), f"{why}; {alert}", alerts=(alert,))

    def _wait_for_nodes(self, why: str, leaving: Collection[str] = ()) -> Rung:
        """The nodes meet as soon as there are enough: only one that is there and must not be used
        again at once is a reason for a delay."""
        rung = self._wait(why)
        lacking = (self.gone | set(leaving)) & set(self.situation.nodes)
        present = lacking - set(self.situation.lost)
        return rung if present else msgspec.structs.replace(rung, delay=0.0)

    def _without(self, away: Collection[str]) -> tuple[str, ...] | None:
        """The nodes of an attempt without some: spares in their place, else a smaller world."""
        nodes = _fill(self.situation, away)
        if nodes is not None:
            return nodes
        left = tuple(n for n in (*self.situation.nodes, *self.situation.spares) if n not in away)
        enough = len(left) >= max(1, self.situation.min_nodes)
        return left if self.situation.can_shrink and enough else None

    def _wait(self, why: str) -> Rung:
        """Backoff from one wait to the next, with half of it at random."""
        policy = self.policy
        waits = _waits_in_a_row(self.history.decisions())
        longest = min(policy.wait_most, policy.wait_first * policy.wait_factor ** min(waits, 32))
        jitter = min(1.0, max(0.0, self.situation.jitter))
        nodes = _or(_fill(self.situation, self.gone), self.situation.nodes)
        return Rung(
            "wait_and_retry", nodes, timeout=policy.wait, delay=longest * (0.5 + jitter / 2),
            why=why,
        )  # fmt: skip

    def _roll_back(self, leaving: _Leaving, why: str) -> Draft:
        numeric = self.incident.verdict.domain == "numerical"
        skip = (self.incident.where,) if numeric and self.times > 1 else ()
        if self.situation.checkpoints is None:
            alert = "the store cannot be asked for a sound checkpoint: the newest state is tried"
            return replace(self._in_place(f"{why}; {alert}"), alerts=(*leaving.alerts, alert))
        target = self._healthy()
        young = () if target is None or target.healthy else (_YOUNG,)
        if target is None and self.situation.checkpoints:
            reason = f"{why}, and no healthy checkpoint is older than step {self._symptom()}"
            return Draft(Rung("stop", why=reason), reason)
        nodes = self._targets(leaving) if leaving.nodes else None
        nodes = _or(nodes, _or(_fill(self.situation, self.gone), self.situation.nodes))
        if numeric:
            what = (
                "without the batches that gave it" if skip else "an exact replay is the diagnosis"
            )
            why = f"{why}; {what}"
        return Draft(
            Rung("rollback", nodes, target, self.policy.rollback, why=why),
            why,
            excluded=leaving.excluded,
            avoided=leaving.avoided,
            replay=numeric and not skip,
            skip=skip,
            alerts=(*leaving.alerts, *young),
        )

    def _healthy(self) -> RecoveryPoint | None:
        """The newest healthy point before the first symptom, else one that is only too young to be
        called so. Where a checkpoint is damaged, values are not in doubt: any older one will do."""
        before, damaged = self._symptom(), self.incident.verdict.domain == "storage"
        earlier = [p for p in self.situation.checkpoints or () if p.point.step < before]
        sound = [p for p in earlier if p.healthy or damaged] or [p for p in earlier if p.sound]
        return max(sound, key=lambda p: p.point, default=None)

    def _symptom(self) -> int:
        """A damaged checkpoint is the symptom itself, whatever step came after it."""
        incident = self.incident
        if incident.first_symptom is not None:
            return incident.first_symptom
        points = [p.point.step for p in self.situation.checkpoints or ()]
        if incident.verdict.domain == "storage" and (incident.facts.restored >= 0 or points):
            # Where it could not even be restored, it is the newest, which is tried first.
            return incident.facts.restored if incident.facts.restored >= 0 else max(points)
        return incident.where

    # what follows, and what else was possible

    def _below(self, draft: Draft) -> tuple[Rung, ...]:
        """What is tried next, in order, where the action does not lead to a new step in time."""
        found: list[Rung] = []
        for action in LADDER[LADDER.index(draft.action) + 1 :]:
            rung = self._fallback(action, draft)
            if rung is not None:
                found.append(rung)
        return tuple(found)

    def _fallback(self, action: Action, draft: Draft) -> Rung | None:
        why = f"{draft.action} led to no new step in time"
        if action == "restart_elsewhere":
            nodes = self._targets(_Leaving(avoided=draft.avoided, excluded=draft.excluded))
            if nodes is None or set(nodes) == set(draft.rung.nodes):
                return None
            return Rung(action, nodes, timeout=self.policy.elsewhere, why=why)
        if action == "wait_and_retry":
            return self._wait(why)
        if action == "rollback":
            target = self._healthy()
            if target is None:
                return None
            nodes = draft.rung.nodes
            return Rung(action, nodes, target, self.policy.rollback, why=why)
        return Rung("stop", why="nothing on the ladder led to a new step")

    def _alternatives(self, draft: Draft, leaving: _Leaving) -> tuple[Alternative, ...]:
        below = {rung.action for rung in draft.ladder or self._below(draft)}
        found = []
        for action in LADDER:
            if action == draft.action:
                continue
            if action in below:
                found.append(Alternative(action, "is tried next, where this leads to no new step"))
            else:
                found.append(Alternative(action, self._why_not(action, leaving)))
        return tuple(found)

    def _why_not(self, action: Action, leaving: _Leaving) -> str:
        if action == "continue":
            return "the attempt has ended"
        if action == "restart_in_place":
            return "the evidence, or the history, speaks against the same again"
        if action == "restart_elsewhere":
            return leaving.why or "there are no other nodes"
        if action == "rollback":
            return "no healthy checkpoint is older than the first symptom"
        return "there is nothing to wait for"


assert set(LADDER) == set(get_args(Action)), "an action without a rung"


def _fill(situation: Situation, away: Collection[str]) -> tuple[str, ...] | None:
    """As many nodes as before: those that stay in their places, spares in the gaps. None where
    there are too few."""
    spares = [n for n in situation.spares if n not in away and n not in situation.nodes]
    found: list[str] = []
    for node in situation.nodes:
        if node not in away:
            found.append(node)
        elif spares:
            found.append(spares.pop(0))
        else:
            return None
    return tuple(found)


def _or(nodes: tuple[str, ...] | None, instead: tuple[str, ...]) -> tuple[str, ...]:
    return instead if nodes is None else nodes


def _waits_in_a_row(decisions: Sequence[DecisionRecord]) -> int:
    count = 0
    for decision in reversed(decisions):
        if decision.action != "wait_and_retry":
            break
        count += 1
    return count
