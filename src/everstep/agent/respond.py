"""After an attempt's end, and before the first: what is done, by verdict, budgets and history.

Owns: the order judge, decide, record, act (F6), the incident while it is open, and what people are
told of it. Never does: judge or decide (:mod:`everstep.faults`), touch a process. Called by: the
loop of the agent that leads.

The first decision comes at once, from what the nodes said when they ended. The incident stays open
for as long as late evidence (a kernel's line, a device's) may come: until then the attempt that was
begun is provisional, and what is learnt may stop or move it. A stop waits that time beforehand.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from everstep.agent.chronicle import Chronicle
from everstep.agent.decide import Decision, LastWord, first, last_word
from everstep.agent.incident import Case, at_its_step, facts_of, incident_of, with_stacks
from everstep.agent.record import Recorder
from everstep.core import exits, points
from everstep.faults import history as told
from everstep.faults.budget import cause_of
from everstep.faults.catalog import Catalog
from everstep.faults.decide import Response, begin, fall, respond
from everstep.faults.fold import fold
from everstep.faults.history import (
    AttemptFacts,
    Cause,
    DecisionRecord,
    IncidentRecord,
    ProgressRecord,
    Record,
    RecoveryPoint,
    ResultRecord,
    next_sequence,
)
from everstep.faults.judge import judge
from everstep.faults.records import UNKNOWN, Incident, Signal, Verdict
from everstep.faults.rules import describe
from everstep.faults.series import first_symptom
from everstep.faults.situation import Policy, Situation, waiting
from everstep.faults.suspicion import excluded, standings
from everstep.faults.tell import what_is_done
from everstep.faults.words import needless, word_of

Draw = Callable[[], float]
Gather = Callable[[float], tuple[Signal, ...]]
"""More signals of an incident that is open: waits up to so many seconds for them."""


@dataclass(frozen=True)
class Open:
    """An incident whose evidence may still come, until ``due`` (CLOCK_MONOTONIC)."""

    case: Case
    record: IncidentRecord
    due: float


class Responder:
    """``patience`` is how long an incident stays open, in seconds; ``catalog`` gives the patterns
    of failures (it may take a while at its first call); ``points`` the recovery points of the
    store; ``draw`` numbers from [0, 1) for jitter. ``mode`` is what
    the command line says of faults, empty where it says nothing."""

    def __init__(
        self,
        chronicle: Chronicle,
        record: Recorder,
        policy: Policy,
        *,
        agent: str,
        patience: float,
        catalog: Callable[[], Catalog],
        points: Callable[[], tuple[RecoveryPoint, ...] | None],
        draw: Draw,
        mode: str = "",
        tell: Callable[[DecisionRecord, IncidentRecord | None], None] = lambda *_: None,
    ) -> None:
        self._chronicle = chronicle
        self._record = record
        self._policy = policy
        self._agent = agent
        self._patience = patience
        self._catalog = catalog
        self._points = points
        self._draw = draw
        self._mode = mode
        self._tell = tell
        self.open: Open | None = None

    def begin(
        self, nodes: Sequence[str], facts: AttemptFacts | None, *, spares: int = 0
    ) -> Decision:
        """Whether this agent may begin an attempt, and which. ``facts`` are those of the newest
        attempt, as far as store and keeper know them; ``spares`` are agents that wait."""
        past = self._with_mode(self._chronicle.read())
        situation = Situation(
            nodes=tuple(nodes),
            spares=waiting(spares),
            checkpoints=self._points(),
            highest_claim=self._chronicle.highest_claim,
            jitter=self._draw(),
        )
        response = begin(past, situation, self._policy, self._chronicle.stamp(), facts)
        made = response.decision
        incident = fold([*past, *response.records]).incident(made.incident)
        decision = self._carry_out(response, incident)
        if made.stops and not response.records:
            why = f"not started, because it was stopped for good before: {decision.reason}"
            return replace(decision, reason=why)
        return decision

    def answer(self, case: Case, more: Gather) -> Decision:
        """What follows an attempt that has ended."""
        word = last_word(case.end)
        if word is not None and not word.failed:
            return self._ended(case, word)
        incident = self._incident(case, word, closed=word is not None or self._patience <= 0)
        response = self._respond(case, incident)
        left = case.failed + self._patience - time.monotonic()
        if response.decision.stops and not incident.closed:
            # The last word is worth the evidence that is still on its way.
            case = replace(case, late=more(max(0.0, left)))
            incident = self._incident(case, word, closed=True)
            response = self._respond(case, incident)
        decision = self._carry_out(response, incident)
        if word is not None:
            return replace(decision, warning=word.warning)
        if not incident.closed:
            self.open = Open(case, incident, case.failed + self._patience)
        return decision

    def settle(self, signals: tuple[Signal, ...]) -> Decision | None:
        """Close the incident that is open, with what was learnt since. None where that changes
        nothing about the attempt that runs."""
        waiting, self.open = self.open, None
        if waiting is None:
            return None
        case = replace(waiting.case, late=signals)
        before = waiting.record
        incident = self._incident(case, None, closed=True, before=before)
        response = self._respond(case, incident)
        self._chronicle.write(response.records)
        points.reach("agent.late.after_write")
        made = response.decision
        if made.action == "continue":
            if _differs(incident.verdict, before.verdict):
                self._say_incident(incident)
            return None
        self._say(made, incident)
        return _decision(made, incident)

    def _with_mode(self, past: tuple[Record, ...]) -> tuple[Record, ...]:
        """The past with the operator's word of this start in it, where it says something new."""
        history, mode = fold(past), self._mode
        if not mode or needless(history, "on-fault", mode):
            return past
        newest = max(self._chronicle.highest_claim, history.last_attempt)
        word = word_of(
            past, newest, "on-fault", mode, "--on-fault", self._agent, self._chronicle.stamp()
        )
        self._chronicle.write([word])
        return (*past, word)

    def fall(self, decided: DecisionRecord, nodes: Sequence[str]) -> Decision:
        """What is tried next: ``decided`` led to no new step in time."""
        past = self._chronicle.read()
        situation = Situation(
            nodes=tuple(nodes), min_nodes=len(nodes), checkpoints=self._points(),
            highest_claim=max(self._chronicle.highest_claim, decided.begins or 0),
            jitter=self._draw(),
        )  # fmt: skip
        why = f"{decided.action} led to no new step in time"
        stamp = self._chronicle.stamp()
        return self._carry_out(fall(past, decided, situation, self._policy, stamp, why), None)

    def unproved(self) -> list[tuple[IncidentRecord, float]]:
        """The incidents after which the job was restarted, and of which no result is known yet,
        with their age in seconds."""
        history = fold(self._chronicle.read(), now=self._chronicle.stamp())
        results = [r for _, r in history.records if isinstance(r, ResultRecord)]
        told = {result.incident for result in results if not result.replay_differed}
        known = {r.id: at for at, r in reversed(history.records) if isinstance(r, IncidentRecord)}
        found = []
        for name, at in known.items():
            incident = history.incident(name)
            going_on = any(d.begins is not None for d in history.decisions(name))
            if incident is not None and incident.fatal and going_on and name not in told:
                found.append((incident, history.now - at))
        return found

    def node_of(self, incident: str) -> str:
        """The one node on which an incident showed, empty where it showed on several, or where
        the verdict rests on nothing that was seen on a node."""
        found = fold(self._chronicle.read()).incident(incident)
        seen = [item for item in found.verdict.evidence if item.role == "root"] if found else []
        nodes = {item.node for item in seen}
        return (nodes.pop() or "") if len(nodes) == 1 else ""

    def excluded(self) -> set[str]:
        """The nodes that get no work now."""
        past = fold(self._chronicle.read(), now=self._chronicle.stamp())
        return excluded(standings(past, self._policy.rules))

    def watch_health(
        self, incident: Incident, told: set[tuple[str, str | None]], *, leads: bool
    ) -> None:
        """Something was seen while the attempt runs. It goes on; that is recorded by the node that
        leads, and said once an attempt (``told``)."""
        verdict = self._judged(incident)
        if verdict.fault == UNKNOWN or (verdict.fault, verdict.root_node) in told:
            return
        told.add((verdict.fault, verdict.root_node))
        attempt = self._record.attempt
        seen = IncidentRecord(
            id=f"{attempt}-{self._agent[-4:]}-seen{len(told)}", attempt=attempt,
            at=self._chronicle.stamp(), verdict=verdict, cause=cause_of(verdict), fatal=False,
            nodes=incident.nodes,
        )  # fmt: skip
        if leads:
            past = self._chronicle.read()
            stamp = self._chronicle.stamp()
            response = respond(past, seen, Situation(), self._policy, stamp)
            self._chronicle.write(response.records)
        self._record.say(
            "health.seen", f"{describe(seen)}: the attempt goes on", level="warning",
            incident=seen.id, action="continue", node=verdict.root_node,
        )  # fmt: skip

    def skips(self, decided: DecisionRecord) -> tuple[int, ...]:
        """All steps whose batches are left out: by this decision, and by those before it, for
        attempts that go on from before them."""
        made = fold(self._chronicle.read()).decisions()
        return tuple(sorted({step for one in (*made, decided) for step in one.skip}))

    def replayed_step(self, decided: DecisionRecord) -> int | None:
        """The step that had failed, where the attempt is an exact replay up to it."""
        if not decided.replay:
            return None
        incident = fold(self._chronicle.read()).incident(decided.incident)
        return incident.where if incident is not None else None

    def interrupted(self, attempt: int, word: LastWord) -> None:
        """A claimed attempt was given up before it had anything to lose: nobody failed in it."""
        self._write_end(attempt, AttemptFacts(offline=self._chronicle.offline), word)

    # -- the parts of an answer

    def _ended(self, case: Case, word: LastWord) -> Decision:
        """The attempt's end was no failure: nothing is charged, and nothing is to be explained."""
        facts = facts_of(case, time.monotonic(), offline=self._chronicle.offline)
        self._write_end(case.plan.attempt, facts, word)
        return Decision("stop", word.exit_code, word.reason, word.warning)

    def _write_end(self, attempt: int, facts: AttemptFacts, word: LastWord) -> None:
        cause: Cause = "external" if word.exit_code == exits.PREEMPTED else "person"
        past = self._chronicle.read()
        ended = ProgressRecord(
            attempt, self._chronicle.stamp(), facts, next_sequence(past, attempt),
            ended=word.reason, cause=cause, finished=word.exit_code == exits.FINISHED,
        )  # fmt: skip
        self._chronicle.write([ended])

    def _incident(
        self,
        case: Case,
        word: LastWord | None,
        *,
        closed: bool,
        before: IncidentRecord | None = None,
    ) -> IncidentRecord:
        attempt = case.plan.attempt
        name = before.id if before is not None else f"{attempt}-{self._agent[-4:]}"
        incident = incident_of(case, name)
        changed = case.end.members_changed and not case.end.failures and not case.end.hang
        verdict = _nodes_changed(case) if changed else self._judged(incident)
        verdict = with_stacks(at_its_step(verdict, case), incident)
        facts = facts_of(case, time.monotonic(), offline=self._chronicle.offline)
        return IncidentRecord(
            id=name,
            attempt=attempt,
            at=self._chronicle.stamp(),
            verdict=verdict,
            revision=1 if before is None else before.revision + 1,
            cause="external" if changed else cause_of(verdict),
            facts=facts if before is None else before.facts,
            closed=closed,
            nodes=case.nodes,
            pods=case.pods,
            first_symptom=first_symptom(verdict),
            last_word=told.LastWord(word.exit_code, word.reason) if word else None,
        )

    def _judged(self, incident: Incident) -> Verdict:
        """The verdict. Whatever a log may hold, a job is not lost by an error of the judge's own:
        what could not be judged is unknown, and that is said."""
        try:
            return judge(incident, self._catalog())
        except Exception as error:  # noqa: BLE001 - any error there is a bug, and no reason to stop
            self._record.say(
                "incident.unjudged", f"incident {incident.id} could not be judged, which is a bug "
                f"of everstep: {type(error).__name__}: {error}", level="error",
                trace=traceback.format_exc(),
            )  # fmt: skip
            return Verdict(
                UNKNOWN, "unknown", "restart_in_place",
                message=f"it could not be judged: {type(error).__name__}",
            )  # fmt: skip

    def _respond(self, case: Case, incident: IncidentRecord) -> Response:
        past = self._chronicle.read()
        names = tuple(case.nodes)
        lost = case.lost
        situation = Situation(
            nodes=names,
            spares=waiting(case.spares),
            lost=lost,
            min_nodes=len(names),
            checkpoints=self._points(),
            highest_claim=max(self._chronicle.highest_claim, case.plan.attempt),
            jitter=self._draw(),
        )
        return respond(past, incident, situation, self._policy, self._chronicle.stamp())

    def _carry_out(self, response: Response, incident: IncidentRecord | None) -> Decision:
        """Write first (F6), then say, then it is done."""
        self._chronicle.write(response.records)
        points.reach("agent.decision.after_write")
        self._say(response.decision, incident)
        return _decision(response.decision, incident)

    def _say(self, made: DecisionRecord, incident: IncidentRecord | None) -> None:
        if incident is not None:
            self._say_incident(incident)
        self._record.say(
            "decision.made", f"decided: {what_is_done(made)}",
            # What starts, and what stops, is said by the line that does it.
            level="info" if made.incident and not made.stops else "debug",
            action=made.action, incident=made.incident, begins=made.begins,
            provisional=made.provisional, budget=dict(made.budget), advice=made.advice,
            reason=made.reason,
        )  # fmt: skip
        if made.advice:
            self._record.say(
                "decision.advised", f"advice, which is not followed: {made.advice}",
                incident=made.incident,
            )  # fmt: skip
        for alert in made.alerts:
            self._record.say("fault.alert", alert, level="warning", incident=made.incident)
        if made.stops or made.alerts:
            self._tell(made, incident)

    def _say_incident(self, incident: IncidentRecord) -> None:
        verdict = incident.verdict
        facts: dict[str, Any] = {
            "incident": incident.id, "revision": incident.revision, "class": verdict.fault,
            "domain": verdict.domain, "action": verdict.action,
            "root_ranks": list(verdict.root_ranks), "root_node": verdict.root_node,
            "victim_ranks": list(verdict.victim_ranks), "confidence": verdict.confidence,
        }  # fmt: skip
        self._record.say(
            "incident.judged", f"incident {incident.id}: {describe(incident)}",
            level="debug" if incident.last_word else "warning", step=verdict.step, **facts,
        )  # fmt: skip


def _decision(made: DecisionRecord, incident: IncidentRecord | None = None) -> Decision:
    if made.stops:
        return Decision("stop", made.exit_code, made.reason, record=made, incident=incident)
    return Decision(
        "restart", 0, made.reason, delay=made.rung.delay, record=made, incident=incident
    )


def _differs(verdict: Verdict, before: Verdict) -> bool:
    def told(one: Verdict) -> tuple[object, ...]:
        return one.fault, one.root_ranks, one.root_node

    return told(verdict) != told(before)


def _nodes_changed(case: Case) -> Verdict:
    return Verdict(
        UNKNOWN, "scheduler", "restart_in_place", message=first(case.end), confidence=1.0
    )


def newer(past: Sequence[Record], decision: DecisionRecord, attempt: int) -> DecisionRecord:
    """``decision`` where the number that it was to begin had been taken: it begins ``attempt``."""
    return msgspec.structs.replace(
        decision, id=f"{decision.id}.at-{attempt}", begins=attempt,
        sequence=next_sequence(past, decision.attempt),
    )  # fmt: skip
