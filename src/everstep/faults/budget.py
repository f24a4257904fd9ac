"""How many restarts are left: three budgets, one inside the other (F3).

Owns: what is charged to whom, what refills, and when a budget is spent. Innermost is the budget of
a fingerprint; around it that of the job's attempts without progress, whatever they failed of;
outermost that of all restarts in a sliding window, whatever their cause. Never does: I/O, clocks,
the choice of an action. Called by: decide, and the commands that show what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from everstep.faults.fingerprint import Fingerprint, fingerprint
from everstep.faults.fold import History, Life, Reset
from everstep.faults.history import AttemptFacts, Cause, IncidentRecord
from everstep.faults.limits import Limits
from everstep.faults.records import Verdict

_PROGRAM = ("user_code", "user_data")


class FingerprintBudget(msgspec.Struct, frozen=True):
    """``spent`` failures since ``since``, the last refill. ``where`` is the furthest step at which
    it failed, ``at_step`` how often at which step."""

    fingerprint: Fingerprint
    spent: int = 0
    where: int = -1
    at_step: Mapping[int, int] = {}
    since: float = 0.0
    useful_before: float = 0.0


class Budgets(msgspec.Struct, frozen=True):
    """What is spent. ``stuck`` and ``unrestored`` are attempts in a row, ``furthest`` and
    ``restored`` the steps that the next one has to pass (``failed_there``: a failure ended an
    attempt at ``furthest``), ``committed`` the newest committed step, ``window`` the times of the
    restarts that still count."""

    fingerprints: Mapping[str, FingerprintBudget] = {}
    stuck: int = 0
    unrestored: int = 0
    furthest: int = -1
    failed_there: bool = False
    restored: int = -1
    setbacks: int = 0
    committed: int = -1
    useful: float = 0.0
    window: tuple[float, ...] = ()


class Spent(NamedTuple):
    """A budget that has come to its end: its name, and the reason in words."""

    name: str
    reason: str


def last_limits(history: History) -> Limits | None:
    """The limits by which the newest decision was made: the job's own, wherever they are read.
    None where no decision tells of any."""
    made = (decision.limits for decision in reversed(history.decisions()))
    return next((limits for limits in made if limits is not None), None)


def count(history: History, limits: Limits) -> Budgets:
    """What the history has spent, at the history's ``now``."""
    budgets = Budgets()
    for event in history.events:
        if isinstance(event, Reset):
            budgets = Budgets(committed=budgets.committed, useful=budgets.useful)
        else:
            budgets = _after(budgets, event, limits)
    recent = history.now - limits.window_seconds
    return msgspec.structs.replace(
        budgets, window=tuple(at for at in history.restarts if at > recent)
    )


def cause_of(verdict: Verdict) -> Cause:
    """Who ended an attempt, by the verdict alone. The agent knows better where nodes came and
    went (``external``), a person changed something (``person``), or nobody was left to tell."""
    if verdict.fault == "USER_CANCEL":
        return "person"
    if verdict.domain == "scheduler" and verdict.action != "stop":
        return "external"
    rooted = verdict.root_ranks or verdict.root_node or verdict.root_domain
    if rooted or any(item.role == "root" for item in verdict.evidence):
        return "root"
    return "victims" if verdict.victim_ranks else "root"


def fingerprint_of(incident: IncidentRecord) -> Fingerprint:
    """The incident's fingerprint; the names of its nodes are no part of it."""
    return fingerprint(incident.verdict, incident.nodes)


def of_program(incident: IncidentRecord) -> bool:
    """Whether a second identical failure settles it: the program's, the data's, or one of which
    the evidence says that no restart helps."""
    return incident.verdict.domain in _PROGRAM or incident.verdict.action == "stop"


def repeats(budgets: Budgets, incident: IncidentRecord) -> int:
    """How often this fingerprint has failed at this very step, this time included."""
    found = budgets.fingerprints.get(fingerprint_of(incident).key)
    return found.at_step.get(incident.where, 0) if found else 0


def repeated(budgets: Budgets, incident: IncidentRecord, limits: Limits) -> Spent | None:
    """F4: whether the failure is deterministic, so that the job stops with its reason."""
    times = repeats(budgets, incident)
    most = limits.same_step_program if of_program(incident) else limits.same_step
    blind = not (incident.facts.told or of_program(incident))
    if incident.cause != "root" or times < most or blind:
        return None
    at = f"step {incident.where}" if incident.where > 0 else "the start, before step 1"
    return Spent("repeated", f"the same failure came {times} times at {at}")


def fingerprint_spent(budgets: Budgets, incident: IncidentRecord, limits: Limits) -> Spent | None:
    """The innermost budget."""
    found = budgets.fingerprints.get(fingerprint_of(incident).key)
    if limits.per_fingerprint is None or incident.cause != "root" or found is None:
        return None
    if found.spent <= limits.per_fingerprint:
        return None
    return Spent(
        "fingerprint",
        f"this failure came {found.spent} times, and the job has not committed steps beyond "
        f"{found.where} for a useful share of the time",
    )


def progress_spent(budgets: Budgets, limits: Limits) -> Spent | None:
    """The budget of attempts without progress, whatever they failed of."""
    if limits.no_progress is not None and budgets.stuck >= limits.no_progress:
        at = f", not beyond step {budgets.furthest}" if budgets.furthest >= 0 else ""
        return Spent("no_progress", f"{budgets.stuck} attempts in a row got no further{at}")
    if limits.unrestored is not None and budgets.unrestored >= limits.unrestored:
        return Spent(
            "no_progress",
            f"{budgets.unrestored} attempts in a row could not go on from a later step",
        )
    return None


def window_spent(budgets: Budgets, limits: Limits) -> Spent | None:
    """The outermost budget alone: it holds for starts by an operator's scheduler, too."""
    used = len(budgets.window)
    if limits.window_restarts is None or used < limits.window_restarts:
        return None
    hours = limits.window_seconds / 3600
    return Spent("window", f"the job was restarted {used} times in {hours:g} h, whatever the cause")


def window_frees(budgets: Budgets, limits: Limits, now: float) -> float:
    """Seconds until the window has room for a restart."""
    if limits.window_restarts is None or len(budgets.window) < limits.window_restarts:
        return 0.0
    if limits.window_restarts == 0:
        return limits.window_seconds
    leaves = budgets.window[-limits.window_restarts] + limits.window_seconds
    return max(0.0, leaves - now)


def left(budgets: Budgets, incident: IncidentRecord | None, limits: Limits) -> dict[str, int]:
    """What is left of each budget, by name, of those that have an end."""
    found: dict[str, int] = {}
    if incident is not None and limits.per_fingerprint is not None:
        spent = budgets.fingerprints.get(fingerprint_of(incident).key)
        found["fingerprint"] = max(0, limits.per_fingerprint - (spent.spent if spent else 0))
    if limits.no_progress is not None:
        found["no_progress"] = max(0, limits.no_progress - budgets.stuck)
    if limits.window_restarts is not None:
        found["window"] = max(0, limits.window_restarts - len(budgets.window))
    return found


def nearly_spent(budgets: Budgets, incident: IncidentRecord | None, limits: Limits) -> list[str]:
    """Names of the budgets of which at least 80 % are spent."""
    whole = {
        "fingerprint": limits.per_fingerprint,
        "no_progress": limits.no_progress,
        "window": limits.window_restarts,
    }
    rest = left(budgets, incident, limits)
    return [
        name for name, most in whole.items() if most and name in rest and rest[name] <= most / 5
    ]


# one life's account


def _after(budgets: Budgets, life: Life, limits: Limits) -> Budgets:
    """Refill first, by what the life achieved; then charge what ended it."""
    budgets = _earn(budgets, life)
    fingerprints = {
        key: _refilled(spent, budgets, life, limits) for key, spent in budgets.fingerprints.items()
    }
    for incident in life.incidents:
        if incident.cause == "root":
            key = fingerprint_of(incident).key
            fingerprints[key] = _charged(fingerprints.get(key), incident, budgets, life)
    return _judge(msgspec.structs.replace(budgets, fingerprints=fingerprints), life, limits)


def _earn(budgets: Budgets, life: Life) -> Budgets:
    """Time is useful only where steps were committed that never were before."""
    facts = life.facts
    if life.provisional or facts.committed <= budgets.committed:
        return budgets
    lived = facts.lasted if life.ended is None else life.ended - life.began
    return msgspec.structs.replace(
        budgets,
        committed=facts.committed,
        useful=budgets.useful + max(0.0, min(facts.useful, lived)),
    )


def _refilled(
    spent: FingerprintBudget, budgets: Budgets, life: Life, limits: Limits
) -> FingerprintBudget:
    """Refilled where the life committed a step past the failing one, and enough of the time since
    the last refill was useful."""
    if life.provisional or life.ended is None or life.facts.committed <= spent.where:
        return spent
    elapsed = life.ended - spent.since
    useful = budgets.useful - spent.useful_before
    if elapsed <= 0 or useful < limits.useful_share * elapsed:
        return spent
    return FingerprintBudget(spent.fingerprint, since=life.ended, useful_before=budgets.useful)


def _charged(
    spent: FingerprintBudget | None, incident: IncidentRecord, budgets: Budgets, life: Life
) -> FingerprintBudget:
    if spent is None:
        since = life.began if life.ended is None else life.ended
        spent = FingerprintBudget(
            fingerprint_of(incident), since=since, useful_before=budgets.useful
        )
    where = incident.where
    return msgspec.structs.replace(
        spent,
        spent=spent.spent + 1,
        where=max(spent.where, where, life.facts.furthest),
        at_step={**spent.at_step, where: spent.at_step.get(where, 0) + 1},
    )


def _judge(budgets: Budgets, life: Life, limits: Limits) -> Budgets:
    """Whether the life was progress, for the budget of attempts without it.

    Progress is: further than every attempt before, or going on from a later step than every one
    since the last. What ends at exactly the furthest step again is none, whatever it restored.
    Ends from outside count nothing here, and a lost agent only among those that did not restore
    a later step: its last moments are not known.
    """
    facts = life.facts
    restored, setbacks, later = _restored(budgets, facts, limits)
    further = facts.furthest > budgets.furthest
    stuck, unrestored = budgets.stuck, budgets.unrestored
    again = facts.furthest == budgets.furthest >= 0
    counted = life.cause in ("root", "victims")
    marked = msgspec.structs.replace(
        budgets,
        furthest=max(budgets.furthest, facts.furthest),
        failed_there=counted if further else budgets.failed_there or (again and counted),
        restored=restored,
    )
    if life.provisional and (further or later):
        return marked  # it refills nothing, and the next one has to pass what it came to
    if further:
        stuck = 0
    elif again and counted:
        stuck = (max(stuck, 1) if budgets.failed_there else stuck) + 1
    elif later:
        stuck = 0
    else:
        stuck += counted
    unrestored = 0 if later else unrestored + (counted or life.cause == "agent_lost")
    return msgspec.structs.replace(
        marked,
        stuck=stuck,
        unrestored=unrestored,
        setbacks=0 if further else setbacks,
    )


def _restored(budgets: Budgets, facts: AttemptFacts, limits: Limits) -> tuple[int, int, bool]:
    """(the step that the next restore has to pass, setbacks, whether this one passed it).

    A roll back, or a damaged checkpoint, sets the mark back, so that the way forward is progress
    again; but only so often before the job gets further than ever.
    """
    if facts.restored > budgets.restored:
        return facts.restored, budgets.setbacks, True
    if 0 <= facts.restored < budgets.restored and budgets.setbacks < limits.setbacks:
        return facts.restored, budgets.setbacks + 1, False
    return budgets.restored, budgets.setbacks, False
