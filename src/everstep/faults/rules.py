"""The rules after an incident: stop, and why, or what the ladder says.

Owns: the order in which F4, the budgets and the operator's mode are asked, and the words of a stop.
Never does: I/O, clocks, names or numbers of records. Called by: decide.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from everstep.core import exits
from everstep.errors import NoProgress, RepeatedFailure
from everstep.faults import budget, ladder
from everstep.faults.budget import Budgets, Spent
from everstep.faults.fold import History
from everstep.faults.history import DecisionRecord, IncidentRecord, Mode, Rung, Stamp
from everstep.faults.ladder import Draft
from everstep.faults.records import Action
from everstep.faults.situation import Policy, Situation

LOOP = "NO_PROGRESS_LOOP"
RESTARTS: tuple[Action, ...] = (
    "restart_in_place",
    "restart_elsewhere",
    "wait_and_retry",
    "rollback",
)
SHORT = 200
"""Characters of a message in one line."""
_RESET = 'everstep retry --reset-budget "what was changed"'


def draft_for(
    history: History, incident: IncidentRecord, situation: Situation, policy: Policy, at: Stamp
) -> Draft:
    """The decision, but for the outermost budget, which only counts where an attempt begins."""
    budgets = budget.count(history, policy.limits)
    ended = _ended(incident)
    if ended is not None:
        return ended
    mode = policy.mode or history.mode
    spent = _deterministic(budgets, incident, policy) if mode == "act" else None
    spent = spent or _plain_limits(history, budgets, incident, policy, at)
    if spent is not None:
        return _stop(incident, spent)
    acted = _inherited(history, incident, _acting(history, incident, budgets, situation, policy))
    return acted if mode == "act" else _only_said(acted, history, situation, policy, mode)


def _deterministic(budgets: Budgets, incident: IncidentRecord, policy: Policy) -> Spent | None:
    """F4, which says more than any budget: it comes first."""
    if incident.verdict.fault == LOOP:
        return Spent("no_progress", "the evidence itself tells of attempts that got no further")
    spent = budget.repeated(budgets, incident, policy.limits)
    numeric = incident.verdict.domain == "numerical" and incident.verdict.action == "rollback"
    twice = budget.repeats(budgets, incident) >= 2 and incident.cause == "root"
    if spent is None and numeric and twice and not policy.skip_batches:
        where = incident.where
        return Spent("repeated", f"an exact replay gave it again at step {where}: program or data")
    return spent


def _acting(
    history: History,
    incident: IncidentRecord,
    budgets: Budgets,
    situation: Situation,
    policy: Policy,
) -> Draft:
    spent = _deterministic(budgets, incident, policy)
    spent = spent or budget.fingerprint_spent(budgets, incident, policy.limits)
    if spent is not None:
        return _stop(incident, spent)
    chosen = ladder.choose(history, incident, budgets, situation, policy)
    if chosen.action == "stop":
        return replace(
            chosen,
            reason=f"{describe(incident)}: {chosen.reason}",
            exit_code=exits.NO_RECOVERY_POINT,
            fault=incident.verdict.fault,
        )
    return replace(
        chosen, reason=f"{describe(incident)}: {chosen.reason}", fault=incident.verdict.fault
    )


def _inherited(history: History, incident: IncidentRecord, draft: Draft) -> Draft:
    """A roll back that its attempt did not live to make is still to be made: what is newer than its
    target is as unsound as before."""
    life = next((one for one in history.lives if one.attempt == incident.attempt), None)
    before = life.decision if life is not None else None
    owed = before.rung.recovery if before is not None else None
    if draft.action not in RESTARTS or draft.rung.recovery is not None or owed is None:
        return draft
    if incident.facts.restored >= 0 or before is None:
        return draft
    rung = msgspec.structs.replace(draft.rung, recovery=owed)
    return replace(draft, rung=rung, replay=before.replay, skip=before.skip)


def _ended(incident: IncidentRecord) -> Draft | None:
    """The incidents after which there is nothing to decide."""
    word = incident.last_word
    if word is not None:
        rung = Rung("stop", why=word.reason)
        return Draft(rung, word.reason, incident.verdict.fault, exit_code=word.exit_code)
    if not incident.fatal:
        why = f"{describe(incident)}: the attempt goes on"
        return Draft(Rung("continue", why=why), why, incident.verdict.fault)
    if incident.verdict.fault == "USER_CANCEL":
        why = "ended by a person; start the job again and it goes on"
        return Draft(Rung("stop", why=why), why, "USER_CANCEL", exit_code=exits.PREEMPTED)
    return None


def _plain_limits(
    history: History, budgets: Budgets, incident: IncidentRecord, policy: Policy, at: Stamp
) -> Spent | None:
    """The limits that hold whatever the verdict is, and whether or not it is acted on."""
    if incident.cause in ("root", "victims", "agent_lost"):
        spent = budget.progress_spent(budgets, policy.limits)
        if spent is not None:
            return spent
    most = policy.limits.max_restarts
    if most is not None and incident.cause != "external":
        others = [d for d in history.decisions() if d.incident != incident.id]
        made = sum(_is_restart_of(d, at.agent, history) for d in others)
        if made >= most:
            return Spent("max_restarts", f"--max-restarts {most} is used up")
    return None


def _is_restart_of(decision: DecisionRecord, agent: str, history: History) -> bool:
    """torchrun's count: the restarts that one agent made, but for nodes that came and went."""
    incident = history.incident(decision.incident)
    mine = decision.begins is not None and decision.at.agent == agent
    return mine and incident is not None and incident.cause != "external"


def _only_said(
    acted: Draft, history: History, situation: Situation, policy: Policy, mode: Mode
) -> Draft:
    """``advise`` and ``off``: a restart in place, as without a verdict. Budgets hold."""
    advice = f"{acted.action}: {acted.reason}" if mode == "advise" else ""
    rung = ladder.plain(history, situation, policy)
    why = "the attempt ended" if mode == "off" else "advice is given, not followed"
    alerts = acted.alerts if mode == "advise" else ()
    return Draft(
        replace_why(rung, why), why, acted.fault, (Rung("stop"),), advice=advice, alerts=alerts
    )


def with_window(history: History, incident: IncidentRecord, draft: Draft, policy: Policy) -> Draft:
    """The outermost budget: no attempt begins where it is spent. A job that is only taken away
    again and again, and gets on in between, waits until it has room; any other stops."""
    if draft.action not in RESTARTS:
        return draft
    budgets = budget.count(history, policy.limits)
    spent = budget.window_spent(budgets, policy.limits)
    if spent is None:
        return draft
    if incident.cause != "external" or budgets.stuck or not budgets.useful:
        return _stop(incident, spent)
    free = budget.window_frees(budgets, policy.limits, history.now)
    rung = Rung(
        "wait_and_retry", draft.rung.nodes, draft.rung.recovery, free + policy.wait,
        max(free, draft.rung.delay), spent.reason,
    )  # fmt: skip
    return replace(draft, rung=rung, alerts=(*draft.alerts, spent.reason))


def kept(incident: IncidentRecord, why: str) -> Draft:
    """Nothing is done: what runs goes on."""
    return Draft(Rung("continue", why=why), f"{describe(incident)}: {why}", incident.verdict.fault)


def _stop(incident: IncidentRecord, spent: Spent) -> Draft:
    """Stop for good, with what failed, why no restart follows, and what a person can do."""
    code = {"repeated": exits.REPEATED, "max_restarts": exits.FAILED}.get(
        spent.name, exits.NO_PROGRESS
    )
    fault = LOOP if spent.name in ("no_progress", "window") else incident.verdict.fault
    known = {exits.REPEATED: RepeatedFailure.code, exits.NO_PROGRESS: NoProgress.code}.get(code)
    what = f"{describe(incident)}: {spent.reason}" + (f" ({known})" if known else "")
    advice = incident.verdict.advice
    # torchrun's own limit is for one start of the job: the next start has it again.
    final = spent.name != "max_restarts"
    what = f"{what}. {advice}" if advice else what
    reason = how_to_go_on(what) if final else what
    rung = Rung("stop", why=spent.reason)
    return Draft(rung, reason, fault, exit_code=code, final=final)


def how_to_go_on(what: str) -> str:
    return f"{what.rstrip('.')}. To go on all the same: {_RESET}"


def describe(incident: IncidentRecord) -> str:
    """The incident in one line: class, where, and its own words."""
    verdict = incident.verdict
    ranks = ", ".join(map(str, verdict.root_ranks[:8]))
    parts = [verdict.fault]
    if verdict.root_ranks:
        parts.append(f"on rank {ranks}" if len(verdict.root_ranks) == 1 else f"on ranks {ranks}")
    if verdict.root_node:
        parts.append(f"on node {verdict.root_node}")
    if verdict.step is not None:
        parts.append(f"at step {verdict.step}")
    if verdict.frame:
        parts.append(f"in {verdict.frame}")
    if verdict.message:
        parts.append(f"({_in_short(verdict.message)})")
    return " ".join(parts)


def _in_short(message: str) -> str:
    """No more of a long message than its first sentences, or words."""
    if len(message) <= SHORT:
        return message
    cut = message[:SHORT]
    sentence = cut.rfind(". ")
    return cut[: sentence + 1] if sentence > SHORT // 3 else cut[: cut.rfind(" ")] + " ..."


def replace_why(rung: Rung, why: str) -> Rung:
    return msgspec.structs.replace(rung, why=why)
