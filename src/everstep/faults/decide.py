"""From a verdict to what is done: history, budgets and the ladder put together.

Owns: the three questions an agent asks. :func:`begin`: may this job start now? :func:`respond`: an
incident is known, or known better; what now? :func:`fall`: that led to no new step in time; what
next? Each gives the records to write before anything is done (F6), and gives the same answer when
it is asked again after a crash. Never does: I/O, clocks, randomness. Called by: the agent, the
fleet's server, the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from everstep.core import exits
from everstep.faults import budget, ladder, rules
from everstep.faults.budget import Budgets
from everstep.faults.fold import History, Life, fold
from everstep.faults.history import (
    AttemptFacts,
    DecisionRecord,
    IncidentRecord,
    Record,
    Rung,
    Stamp,
    WordRecord,
    next_sequence,
)
from everstep.faults.ladder import Draft
from everstep.faults.records import UNKNOWN, Verdict
from everstep.faults.situation import Policy, Situation
from everstep.faults.suspicion import excluded, standings


class Response(NamedTuple):
    """``records`` are to be written in this order, before the decision is carried out; none where
    they are in the history already. ``decision`` is what to do."""

    records: tuple[Record, ...]
    decision: DecisionRecord


def respond(
    past: Sequence[Record],
    incident: IncidentRecord,
    situation: Situation,
    policy: Policy,
    at: Stamp,
) -> Response:
    """What to do about an incident. ``past`` are the records of the job's history.

    An incident that is asked about with a higher ``revision`` after a decision was made may stop
    the attempt that runs since, or move it, once; else its decision is ``continue``.
    """
    incident = _numbered(past, incident)
    records = [*past, incident]
    claimed = max(situation.highest_claim, incident.attempt)
    history = fold(records, highest_claim=claimed, now=at)
    made = history.decisions(incident.id)
    known = [d for d in made if d.revision >= incident.revision]
    if known:
        return Response(() if incident in past else (incident,), known[-1])
    if any(d.begins is not None or d.stops for d in made):
        draft = _late(history, incident, made, situation, policy, at)
    elif history.last_attempt > incident.attempt:
        draft = rules.kept(incident, "a later attempt was begun already, by another agent")
    else:
        draft = rules.draft_for(history, incident, situation, policy, at)
        draft = rules.with_window(history, incident, draft, policy)
    decision = _record(history, records, incident, draft, situation, policy, at)
    return Response((decision,) if incident in past else (incident, decision), decision)


def begin(
    past: Sequence[Record],
    situation: Situation,
    policy: Policy,
    at: Stamp,
    facts: AttemptFacts | None = None,
) -> Response:
    """Whether an agent that starts may begin an attempt, and which.

    A decision that was made and not carried out is carried on. An attempt that nobody ended is an
    incident of its own, with ``facts`` as far as store and keeper know them. A job that was stopped
    for good stays so until an operator resets its budget (F3): starting it again is no way around.
    """
    history = fold(past, highest_claim=situation.highest_claim, now=at)
    last = _last_decision(history)
    if last is not None and _still_holds(history, last):
        if last.stops:
            return Response((), last)
        return _carry_on(past, last, history, situation, policy, at)
    if history.lives:
        life = history.lives[-1]
        unanswered = [i for i in life.incidents if not _answered(history, i)]
        if unanswered:
            return respond(past, unanswered[0], situation, policy, at)
        if life.ended is None:
            return respond(past, _lost(life, facts, at), situation, policy, at)
    return _start(history, past, situation, policy, at)


def fall(
    past: Sequence[Record],
    decision: DecisionRecord,
    situation: Situation,
    policy: Policy,
    at: Stamp,
    why: str = "",
) -> Response:
    """The next rung, where ``decision`` led to no new step within its timeout. Its attempt, if it
    had one, counts as one without progress; where budgets allow no more, the rung is ``stop``."""
    claimed = max(situation.highest_claim, decision.attempt)
    lived = decision.begins is not None and claimed >= decision.begins
    attempt = decision.begins if lived and decision.begins is not None else decision.attempt
    name = f"{decision.id}.next"
    answered = next((r for r in past if isinstance(r, DecisionRecord) and r.id == name), None)
    if answered is not None:
        return Response((), answered)
    rungs = decision.ladder or (Rung("stop", why="nothing on the ladder led to a new step"),)
    reason = why or f"{decision.action} led to no new step within {decision.rung.timeout:g} s"
    fallen = msgspec.structs.replace(
        decision,
        id=name,
        attempt=attempt,
        at=at,
        sequence=next_sequence(past, attempt),
        rung=rungs[0],
        ladder=rungs[1:],
        reason=reason,
        begins=None,
        ends_running="fell" if lived else "",
        excluded=(),
        alerts=(),
        limits=policy.limits,
    )
    history = fold([*past, fallen], highest_claim=claimed, now=at)
    budgets = budget.count(history, policy.limits)
    spent = budget.progress_spent(budgets, policy.limits) or budget.window_spent(
        budgets, policy.limits
    )
    if spent is not None or fallen.stops:
        what = f"{reason}; {spent.reason}" if spent is not None else reason
        rung = Rung("stop", why=what)
        record = msgspec.structs.replace(
            fallen, rung=rung, ladder=(), reason=rules.how_to_go_on(what), final=True,
            exit_code=exits.NO_PROGRESS, fault=rules.LOOP if spent is not None else decision.fault,
        )  # fmt: skip
    else:
        record = msgspec.structs.replace(fallen, begins=claimed + 1)
    return Response((record,), record)


# the parts of respond


def _numbered(past: Sequence[Record], incident: IncidentRecord) -> IncidentRecord:
    """As it stands in the history already, else with its place in it."""
    for record in past:
        if isinstance(record, IncidentRecord):
            same = (record.id, record.revision) == (incident.id, incident.revision)
            if same and record.attempt == incident.attempt:
                return record
    # A last word is no failure that could be retried: what it says is for a person.
    cause = "person" if incident.last_word and incident.cause == "root" else incident.cause
    return msgspec.structs.replace(
        incident, sequence=next_sequence(past, incident.attempt), cause=cause
    )


def _late(
    history: History,
    incident: IncidentRecord,
    made: Sequence[DecisionRecord],
    situation: Situation,
    policy: Policy,
    at: Stamp,
) -> Draft:
    """What a better verdict changes about an attempt that may run already."""
    before = made[-1]
    if before.stops:
        return rules.kept(incident, "the job was stopped for this incident already")
    if before.begins is not None and history.last_attempt > before.begins:
        return rules.kept(incident, "a later attempt runs already")
    draft = rules.draft_for(history, incident, situation, policy, at)
    if draft.action == "stop":
        return draft
    why = _why_move(before, draft)
    if not why or any(d.ends_running == "moved" for d in made):
        return rules.kept(incident, "the verdict changes nothing about the attempt that runs")
    budgets = budget.count(history, policy.limits)
    if budget.window_spent(budgets, policy.limits) is not None:
        return rules.kept(incident, f"{why}, and the budget allows no attempt more")
    return replace(draft, reason=f"{draft.reason}; {why}")


def _why_move(before: DecisionRecord, draft: Draft) -> str:
    """Why the attempt that runs cannot go on as it is; an empty text where it can."""
    blamed = {*draft.excluded, *draft.avoided} & set(before.rung.nodes)
    if blamed and draft.action in ("restart_elsewhere", "rollback"):
        return f"it runs on {', '.join(sorted(blamed))}"
    wanted, taken = draft.rung.recovery, before.rung.recovery
    older = wanted is not None and (taken is None or wanted.point < taken.point)
    if draft.action == "rollback" and older:
        return "it went on from a state that is not sound"
    return ""


# the parts of begin


def _last_decision(history: History) -> DecisionRecord | None:
    """The newest decision that begins or ends something."""
    found = [d for d in history.decisions() if d.begins is not None or d.stops]
    return found[-1] if found else None


def _answered(history: History, incident: IncidentRecord) -> bool:
    return any(d.revision >= incident.revision for d in history.decisions(incident.id))


def _still_holds(history: History, decision: DecisionRecord) -> bool:
    """Whether it is still to be carried out: an attempt that was not begun, or a stop for good."""
    if _reset_since(history, decision):
        return False
    if decision.stops:
        return decision.final
    return decision.begins is not None and decision.begins > history.last_attempt


def _carry_on(
    past: Sequence[Record],
    decision: DecisionRecord,
    history: History,
    situation: Situation,
    policy: Policy,
    at: Stamp,
) -> Response:
    """The attempt that an agent had decided on and did not live to begin; or what a better verdict,
    which it had no time to look at, makes of it."""
    better = history.incident(decision.incident)
    if better is None or _answered(history, better):
        return _again(past, decision, history, situation, policy, at)
    answer = respond(past, better, situation, policy, at)
    if answer.decision.action != "continue":
        return answer
    again = _again([*past, *answer.records], decision, history, situation, policy, at)
    return Response((*answer.records, *again.records), again.decision)


def _again(
    past: Sequence[Record],
    decision: DecisionRecord,
    history: History,
    situation: Situation,
    policy: Policy,
    at: Stamp,
) -> Response:
    """It is written down once more, because it counts from when it is begun, and on nodes that are
    there."""
    rung = decision.rung
    if not set(rung.nodes) <= {*situation.nodes, *situation.spares}:
        rung = msgspec.structs.replace(rung, nodes=ladder.plain(history, situation, policy).nodes)
    record = msgspec.structs.replace(
        decision,
        id=f"{decision.id}.again-{at.agent}",
        at=at,
        rung=msgspec.structs.replace(rung, delay=_rest(decision, history)),
        sequence=next_sequence(past, decision.attempt),
        excluded=(),
        ends_running="",
        limits=policy.limits,
    )
    return Response((record,), record)


def _rest(decision: DecisionRecord, history: History) -> float:
    """What is left of its delay."""
    began = next((at for at, record in history.records if record == decision), history.now)
    return max(0.0, decision.rung.delay - (history.now - began))


def _reset_since(history: History, decision: DecisionRecord) -> bool:
    seen = False
    for _, record in history.records:
        if record == decision:
            seen = True
        elif seen and isinstance(record, WordRecord) and record.word == "reset-budget":
            return True
    return False


def _lost(life: Life, facts: AttemptFacts | None, at: Stamp) -> IncidentRecord:
    """The incident of an attempt whose agent left no word. What it failed of is not known."""
    verdict = Verdict(
        UNKNOWN, "unknown", "restart_in_place",
        message="the agent that ran it left no word: it was killed, or its host went down",
    )  # fmt: skip
    return IncidentRecord(
        id=f"lost-{life.attempt}",
        attempt=life.attempt,
        at=at,
        verdict=verdict,
        cause="agent_lost",
        facts=facts or AttemptFacts(),
    )


def _start(
    history: History, past: Sequence[Record], situation: Situation, policy: Policy, at: Stamp
) -> Response:
    budgets = budget.count(history, policy.limits)
    spent = budget.window_spent(budgets, policy.limits)
    attempt = max(situation.highest_claim, history.last_attempt)
    reason = "the job starts" if attempt == 0 else "the job is started again"
    rung = rules.replace_why(ladder.plain(history, situation, policy), reason)
    record = DecisionRecord(
        id=f"start-{attempt + 1}-{at.agent}",
        attempt=attempt,
        at=at,
        rung=rung,
        reason=reason,
        sequence=next_sequence(past, attempt),
        begins=attempt + 1,
        budget=budget.left(_with_this(budgets, history, attempt > 0), None, policy.limits),
        alerts=_used_all_the_same(history, rung, policy),
        limits=policy.limits,
    )
    taken = bool(history.lives) and history.lives[-1].cause == "external"
    if spent is not None and taken and budgets.useful and not budgets.stuck:
        # Only taken away again and again, it gets on in between: it waits until there is room.
        free = budget.window_frees(budgets, policy.limits, history.now)
        rung = Rung("wait_and_retry", rung.nodes, None, free + policy.wait, free, spent.reason)
        record = msgspec.structs.replace(record, rung=rung, alerts=(spent.reason,))
    elif spent is not None:
        last = _last_decision(history)
        if last is not None and last.stops and last.attempt == attempt and last.fault == rules.LOOP:
            return Response((), last)  # said already: a queue that tries for ever fills no store
        record = msgspec.structs.replace(
            record, rung=Rung("stop", why=spent.reason), reason=rules.how_to_go_on(spent.reason),
            fault=rules.LOOP, begins=None, exit_code=exits.NO_PROGRESS,
        )  # fmt: skip
    return Response((record,), record)


def _used_all_the_same(history: History, rung: Rung, policy: Policy) -> tuple[str, ...]:
    shut_out = sorted(excluded(standings(history, policy.rules)) & set(rung.nodes))
    if not shut_out:
        return ()
    names = ", ".join(shut_out)
    return (f"excluded, and used all the same, because no other node is there: {names}",)


# records and words


def _record(
    history: History,
    records: Sequence[Record],
    incident: IncidentRecord,
    draft: Draft,
    situation: Situation,
    policy: Policy,
    at: Stamp,
) -> DecisionRecord:
    """The draft with its name, its number and what is left of the budgets."""
    running = max(situation.highest_claim, history.last_attempt)
    begins = draft.action in rules.RESTARTS
    ends = running > incident.attempt and (begins or draft.action == "stop")
    attempt = running if ends else incident.attempt
    budgets = _with_this(budget.count(history, policy.limits), history, begins)
    near = budget.nearly_spent(budgets, incident, policy.limits)
    alerts = (*draft.alerts, *(f"80 % of the {name} budget are spent" for name in near))
    return DecisionRecord(
        id=f"{incident.id}.{incident.revision}",
        attempt=attempt,
        at=at,
        rung=draft.rung,
        reason=draft.reason,
        sequence=next_sequence(records, attempt),
        incident=incident.id,
        revision=incident.revision,
        fault=draft.fault,
        begins=running + 1 if begins else None,
        ends_running="moved" if ends else "",
        ladder=draft.ladder,
        alternatives=draft.alternatives,
        excluded=draft.excluded,
        avoided=draft.avoided,
        exit_code=draft.exit_code,
        final=draft.final,
        provisional=begins and not incident.closed,
        replay=draft.replay,
        skip=draft.skip,
        alerts=tuple(dict.fromkeys(alerts)),
        advice=draft.advice,
        budget=budget.left(budgets, incident, policy.limits),
        limits=policy.limits,
    )


def _with_this(budgets: Budgets, history: History, begins: bool) -> Budgets:
    """What is spent once the attempt that is decided on has begun."""
    if not begins:
        return budgets
    return msgspec.structs.replace(budgets, window=(*budgets.window, history.now))
