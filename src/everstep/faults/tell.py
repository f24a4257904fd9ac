"""What happened to a job, in words: one incident explained, and the table of all.

Owns: the texts, so that commands, JSON and events say the same. Never does: I/O, clocks, layout.
Called by: the commands; lead and respond in the agent, for its events and what people see of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everstep.core.events import counted
from everstep.faults import budget, rules
from everstep.faults.fold import History, Life
from everstep.faults.history import (
    DecisionRecord,
    IncidentRecord,
    ResultRecord,
    Rung,
    WordRecord,
)
from everstep.faults.limits import Limits
from everstep.faults.outcomes import Outcome, outcome_of, outcomes
from everstep.faults.records import Evidence, Verdict
from everstep.faults.situation import is_waiting

LIMITS = Limits()
TEXT = 200
"""Characters of a line of evidence that a person sees; the records hold more."""

NOTHING_SEEN = "nothing: no evidence was recorded"
RETRY = 'everstep retry --reset-budget "what was changed"'

ACTIONS: Mapping[str, str] = {
    "continue": "go on as it is",
    "restart_in_place": "restart on the same nodes",
    "restart_elsewhere": "restart on other nodes",
    "wait_and_retry": "wait, then restart",
    "rollback": "roll back to a sound checkpoint",
    "stop": "stop",
}
CAUSES: Mapping[str, str] = {
    "root": "a failure with a cause of its own",
    "victims": "only effects of another failure were seen",
    "external": "taken from outside, or nodes came and went",
    "person": "ended by a person, or by what only a person can change",
    "agent_lost": "the agent that ran it is gone, and nobody else saw why",
}
PHASES = ("detect", "decide", "stop", "start", "restore", "first_step", "commit")
_BUDGETS: Mapping[str, str] = {
    "fingerprint": "restarts after this failure",
    "no_progress": "attempts without progress",
    "window": "restarts in {hours:g} h",
}


class Section(msgspec.Struct, frozen=True):
    """One part of an explanation; ``title`` is one of a fixed set of words."""

    title: str
    lines: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """One incident. ``headline`` are three lines that tell it all: what failed, what was decided,
    how it ended. ``sections`` say it at length, in a fixed order: ``seen``, ``verdict``,
    ``discarded``, ``decided``, ``otherwise``, ``done``, ``ended``, ``budget``. ``at`` is seconds
    since the epoch. The records follow as they are stored."""

    headline: tuple[str, str, str]
    sections: tuple[Section, ...]
    incident: str
    attempt: int
    at: float
    revision: int
    closed: bool
    cause: str
    verdict: Verdict
    outcome: Outcome
    decisions: tuple[DecisionRecord, ...]
    results: tuple[ResultRecord, ...]


class Row(msgspec.Struct, frozen=True):
    """One incident in the table: ``root`` and ``result`` in words, ``action`` the decision's."""

    incident: str
    attempt: int
    at: float
    fault: str = msgspec.field(name="class")
    root: str
    step: int | None
    action: str
    result: str
    ending: str
    resumed_in: float | None


def explain(history: History, name: str, limits: Limits = LIMITS) -> Explanation | None:
    """The incident of that id, None where the history has none."""
    incident = history.incident(name)
    found = outcome_of(history, name)
    if incident is None or found is None:
        return None
    decisions = tuple(history.decisions(name))
    mine = (r for _, r in history.records if isinstance(r, ResultRecord))
    results = tuple(r for r in mine if r.incident == name)
    return Explanation(
        headline=_headline(incident, decisions, found),
        sections=(
            Section("seen", tuple(_seen(incident.verdict.evidence)) or (NOTHING_SEEN,)),
            Section("verdict", tuple(_verdict(incident))),
            Section("discarded", tuple(_seen(incident.verdict.discarded))),
            Section("decided", tuple(_decided(decisions))),
            Section("otherwise", tuple(_otherwise(decisions))),
            Section("done", tuple(_done(history, incident, decisions))),
            Section("ended", tuple(_ended(found, decisions, results))),
            Section("budget", tuple(budget_left(history, limits, incident))),
        ),
        incident=name,
        attempt=incident.attempt,
        at=_first_seen(history, incident),
        revision=incident.revision,
        closed=incident.closed,
        cause=incident.cause,
        verdict=incident.verdict,
        outcome=found,
        decisions=decisions,
        results=results,
    )


def rows(history: History) -> tuple[Row, ...]:
    """All incidents in order, each as it is known last."""
    told: dict[str, list[IncidentRecord]] = {}
    decided: dict[str, list[DecisionRecord]] = {}
    for _, record in history.records:
        if isinstance(record, IncidentRecord):
            told.setdefault(record.id, []).append(record)
        elif isinstance(record, DecisionRecord):
            decided.setdefault(record.incident, []).append(record)
    return tuple(
        _row(item, told[item.incident], decided.get(item.incident, []))
        for item in outcomes(history).each
    )


def newest(history: History) -> str | None:
    """The id of the newest incident, None where there is none."""
    ids = [r.id for _, r in history.records if isinstance(r, IncidentRecord) and r.revision == 1]
    ids = ids or [r.id for _, r in history.records if isinstance(r, IncidentRecord)]
    return ids[-1] if ids else None


def root_of(verdict: Verdict) -> str:
    """Whom the verdict blames, in a few words."""
    parts = []
    if verdict.root_ranks:
        noun = "rank" if len(verdict.root_ranks) == 1 else "ranks"
        parts.append(f"{noun} {ranks(verdict.root_ranks)}")
    if verdict.root_node:
        parts.append(f"node {verdict.root_node}")
    outside = verdict.root_domain if verdict.root_domain not in ("rank", "node", "") else ""
    if outside and parts:
        parts[-1] += f" ({outside})"
    elif outside:
        parts.append(f"a {outside}")
    return " on ".join(parts) or "nobody is blamed"


def result_of(found: Outcome) -> str:
    """How an incident ended, in a few words."""
    if found.ending != "recovered":
        return found.ending
    took = found.resumed_in
    return "recovered" if took is None else f"recovered in {took:.1f} s"


def what_is_done(decision: DecisionRecord) -> str:
    """A decision in one line: the action, the attempt that it begins or the code that it ends
    with, and why."""
    done = ACTIONS[decision.action]
    begun = f" as attempt {decision.begins}" if decision.begins is not None else ""
    why = decision.rung.why or decision.reason
    code = f" with exit code {decision.exit_code}" if decision.stops else ""
    return f"{done}{begun}{code}, because {why}" if why else f"{done}{begun}{code}"


def how_it_ended(found: Outcome) -> str:
    """How an incident ended, in one line with what proves it."""
    if found.ending == "recovered":
        return f"recovered: {'; '.join(_proof(found))}"
    if found.ending == "stopped":
        return f"stopped, as it was meant: {found.why}"
    return f"{found.ending}: {found.why}"


def moment(wall: float) -> str:
    """``2026-11-30 19:40:12 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))


def ranks(numbers: Sequence[int]) -> str:
    """``0-3, 6``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def budget_left(
    history: History, limits: Limits, incident: IncidentRecord | None = None
) -> list[str]:
    """What is left of each budget now, one line each."""
    counted_ = budget.count(history, limits)
    left = budget.left(counted_, incident, limits)
    whole = {
        "fingerprint": limits.per_fingerprint,
        "no_progress": limits.no_progress,
        "window": limits.window_restarts,
    }
    hours = limits.window_seconds / 3600
    return [
        f"{left[name]} of {whole[name]} {text.format(hours=hours)} left"
        for name, text in _BUDGETS.items()
        if name in left
    ]


# the parts of an explanation


def _headline(
    incident: IncidentRecord, decisions: Sequence[DecisionRecord], found: Outcome
) -> tuple[str, str, str]:
    what = f"{rules.describe(incident)}, attempt {incident.attempt}"
    decision = _that_counts(decisions)
    if decision is None:
        return what, "nothing is decided yet", how_it_ended(found)
    return what, f"decided: {what_is_done(decision)}", how_it_ended(found)


def _that_counts(decisions: Sequence[DecisionRecord]) -> DecisionRecord | None:
    """The last that begins or stops something, else the last."""
    found = [d for d in decisions if d.begins is not None or d.stops]
    return next(reversed(found or list(decisions)), None)


def _proof(found: Outcome) -> list[str]:
    parts = []
    if found.resumed_in is not None:
        step = f"step {found.new_step}" if found.new_step is not None else "the first new step"
        parts.append(f"{step} was done {found.resumed_in:.1f} s after the failure")
    if found.tier:
        parts.append(f"state from {found.tier}")
    if found.repeated:
        parts.append(f"{counted(found.repeated, 'step')} repeated")
    return [*parts, found.why]


def _seen(evidence: Iterable[Evidence]) -> list[str]:
    """In the order of time; what has none stands last, as it came."""
    ordered = sorted(evidence, key=lambda e: (e.time is None, e.time or 0.0))
    return [_fact(item) for item in ordered]


def _fact(item: Evidence) -> str:
    at = "         ?" if item.time is None else f"{item.time:8.2f} s"
    who = "" if item.rank is None else f"rank {item.rank}"
    who = f"{who} on {item.node}" if who and item.node else who or item.node or "-"
    text = " ".join(item.text.split())[:TEXT]
    why = item.why or (f"{item.role}: {item.fault}" if item.fault else item.role)
    return f"{at}  {who}  [{item.source}] {text}  ({why})"


def _verdict(incident: IncidentRecord) -> list[str]:
    verdict = incident.verdict
    lines = [
        f"{verdict.fault} ({verdict.domain}), confidence {verdict.confidence:.0%}: "
        f"{root_of(verdict)}; {CAUSES[incident.cause]}"
    ]
    if verdict.victim_ranks:
        lines.append(f"victims, not blamed: ranks {ranks(verdict.victim_ranks)}")
    if verdict.frame:
        lines.append(f"in {verdict.frame}")
    if verdict.message:
        lines.append(f"it said: {' '.join(verdict.message.split())[:TEXT]}")
    lines.append(f"the evidence alone says: {ACTIONS[verdict.action]}")
    if verdict.advice:
        lines.append(f"what a person should do: {verdict.advice}")
    if not incident.closed:
        lines.append("more evidence may come: the incident is not closed")
    return lines


def _decided(decisions: Sequence[DecisionRecord]) -> list[str]:
    lines: list[str] = []
    for decision in decisions:
        lines.append(f"{moment(decision.at.wall)}  {what_is_done(decision)}")
        lines += [f"  {text}" for text in _particulars(decision)]
    return lines


def _particulars(decision: DecisionRecord) -> list[str]:
    rung = decision.rung
    lines = []
    if rung.nodes:
        lines.append(f"nodes: {_named(rung.nodes)}")
    if rung.recovery is not None:
        lines.append(f"from step {rung.recovery.point.step} ({rung.recovery.tier})")
    if rung.delay:
        lines.append(f"after a wait of {rung.delay:.0f} s")
    if decision.replay:
        lines.append("an exact replay, to tell the program from the device")
    if decision.skip:
        lines.append(f"without the batches of steps {ranks(decision.skip)}")
    if decision.excluded:
        lines.append(f"no work any more for: {', '.join(decision.excluded)}")
    if decision.avoided:
        lines.append(f"this attempt leaves out: {', '.join(decision.avoided)}")
    if decision.provisional:
        lines.append("provisional: the incident was not closed yet")
    if decision.advice:
        lines.append(f"only advised: {decision.advice}")
    return [*lines, *(f"alert: {text}" for text in decision.alerts)]


def _named(nodes: Sequence[str]) -> str:
    """The nodes' names; those that only wait have none yet."""
    names = [node for node in nodes if not is_waiting(node)]
    count = len(nodes) - len(names)
    if count:
        names.append("an agent that waits" if count == 1 else f"{count} agents that wait")
    return ", ".join(names)


def _otherwise(decisions: Sequence[DecisionRecord]) -> list[str]:
    """What else was possible, and what would have followed."""
    decision = _that_counts(decisions)
    if decision is None:
        return []
    lines = [f"not {ACTIONS[item.action]}: {item.why_not}" for item in decision.alternatives]
    return [*lines, *(_next_rung(rung) for rung in decision.ladder)]


def _next_rung(rung: Rung) -> str:
    text = f"if that leads to no new step: {ACTIONS[rung.action]}"
    return f"{text} ({rung.why})" if rung.why else text


def _done(
    history: History, incident: IncidentRecord, decisions: Sequence[DecisionRecord]
) -> list[str]:
    """What really followed: attempts, and what an operator said."""
    begun = {d.begins for d in decisions if d.begins is not None}
    lines = [_lived(life) for life in history.lives if life.attempt in begun]
    for d in decisions:
        if d.ends_running == "moved":
            lines.append(f"attempt {d.attempt}, which ran, was ended by a better verdict")
        elif d.ends_running == "fell":
            lines.append(f"attempt {d.attempt} led to no new step in its time")
    since = _first_seen(history, incident)
    words = [w for _, w in history.words() if w.at.wall >= since and w.attempt >= incident.attempt]
    return [*lines, *map(word_text, words)]


def _lived(life: Life) -> str:
    facts = life.facts
    went_on = f" from step {facts.restored}" if facts.restored >= 0 else ""
    came = f" and came to step {facts.furthest}" if facts.furthest >= 0 else ""
    return f"attempt {life.attempt} was begun{went_on}{came}"


def word_text(word: WordRecord) -> str:
    """``2026-11-30 ...: ann@host said: exclude b (loose cable)``."""
    subject = f" {word.subject}" if word.subject else ""
    reason = f" ({word.reason})" if word.reason else ""
    return f"{moment(word.at.wall)}  {word.by or 'an operator'} said: {word.word}{subject}{reason}"


def _ended(
    found: Outcome, decisions: Sequence[DecisionRecord], results: Sequence[ResultRecord]
) -> list[str]:
    lines = [how_it_ended(found)]
    for result in results:
        told = [f"{name.replace('_', ' ')} {took:.2f} s" for name, took in _times(result)]
        if told:
            lines.append(f"times: {', '.join(told)}")
        if result.replay_differed:
            lines.append("an exact replay passed the step: the device is suspected")
    decision = _that_counts(decisions)
    if decision is not None and decision.stops and decision.final:
        lines.append(f"it does not start again by itself; to go on all the same: {RETRY}")
    return lines


def _times(result: ResultRecord) -> list[tuple[str, float]]:
    phases = ((name, getattr(result, name)) for name in PHASES)
    return [(name, took) for name, took in phases if took is not None]


def _first_seen(history: History, incident: IncidentRecord) -> float:
    """When it was written down first, seconds since the epoch."""
    told = (r for _, r in history.records if isinstance(r, IncidentRecord))
    return next((r.at.wall for r in told if r.id == incident.id), incident.at.wall)


def _row(found: Outcome, told: Sequence[IncidentRecord], decided: Sequence[DecisionRecord]) -> Row:
    verdict = max(told, key=lambda r: r.revision).verdict
    decision = _that_counts(decided)
    return Row(
        incident=found.incident,
        attempt=found.attempt,
        at=told[0].at.wall,
        fault=found.fault,
        root=root_of(verdict),
        step=verdict.step,
        action=decision.action if decision is not None else "",
        result=result_of(found),
        ending=found.ending,
        resumed_in=found.resumed_in,
    )
