"""Where a job stands now, in words: its state, its figures, and the next command to try.

Owns: those texts. Never does: I/O, clocks, layout. Called by: the commands.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.core.events import counted
from everstep.faults.fold import History
from everstep.faults.history import (
    DecisionRecord,
    IncidentRecord,
    ProgressRecord,
    ResultRecord,
    WordRecord,
)
from everstep.faults.limits import Limits
from everstep.faults.outcomes import Figures, outcomes
from everstep.faults.suspicion import Rules, standings
from everstep.faults.tell import LIMITS, RETRY, budget_left

State = Literal["running", "waiting", "stopped", "finished", "never run"]
RULES = Rules()


class Excluded(msgspec.Struct, frozen=True):
    """A node that gets no work. ``seconds_left`` None: until an operator pardons it."""

    node: str
    why: str
    seconds_left: float | None


class Present(msgspec.Struct, frozen=True):
    """What is known besides the history: ``owner`` who runs the job now (empty: nobody fresh),
    ``attempts`` how many were claimed, ``options`` those by which commands find the job."""

    owner: str = ""
    attempts: int = 0
    options: str = ""

    @property
    def start(self) -> str:
        """The command that starts the job; its script and arguments are not known here."""
        return (
            f"everstep run {self.options} ...".replace("  ", " ") + "  (as it was started before)"
        )

    @property
    def retry(self) -> str:
        """The command that lets a job start that was stopped for good."""
        return f"{RETRY} {self.options}".rstrip()


class Standing(msgspec.Struct, frozen=True):
    """``state`` and ``why`` it is so; ``next`` is the command to try, empty where there is nothing
    to do. ``final``: it will not start again before a budget is reset."""

    state: State
    why: str
    next: str
    final: bool
    mode: str
    figures: Figures
    by_class: dict[str, Figures]
    budget: tuple[str, ...]
    excluded: tuple[Excluded, ...]
    last_incident: str


def standing(
    history: History, present: Present, limits: Limits = LIMITS, rules: Rules = RULES
) -> Standing:
    """Where the job stands, at the history's ``now``. ``limits`` and ``rules`` are those of the
    agent's policy."""
    state, why, final = _state(history, present)
    found = outcomes(history)
    return Standing(
        state=state,
        why=why,
        next=_next(state, final, present),
        final=final,
        mode=history.mode,
        figures=found.figures,
        by_class=found.by_class,
        budget=tuple(budget_left(history, limits)),
        excluded=tuple(_excluded(history, rules)),
        last_incident=found.each[-1].incident if found.each else "",
    )


_Mark = DecisionRecord | ProgressRecord | IncidentRecord
"""A record that begins or ends something."""


def _state(history: History, present: Present) -> tuple[State, str, bool]:
    last = _last_mark(history)
    if present.owner:
        return (*_of_owned(history, present, last), False)
    if present.attempts == 0 and last is None:
        return "never run", "no attempt was ever claimed", False
    if isinstance(last, ProgressRecord):
        return ("finished" if last.finished else "stopped"), last.ended, False
    if isinstance(last, DecisionRecord) and last.stops:
        return "stopped", last.reason, last.final
    if isinstance(last, DecisionRecord) and (last.begins or 0) > present.attempts:
        return "stopped", f"attempt {last.begins} was to begin, and no agent runs", False
    return "stopped", f"no agent runs; attempt {present.attempts} was the last", False


def _of_owned(history: History, present: Present, last: _Mark | None) -> tuple[State, str]:
    if isinstance(last, DecisionRecord) and (last.begins or 0) > present.attempts:
        began = next((at for at, r in history.records if r == last), history.now)
        rest = last.rung.delay - (history.now - began)
        when = f"begins in {rest:.0f} s" if rest > 0 else "is about to begin"
        return "waiting", f"attempt {last.begins} {when}: {last.rung.why or last.reason}"
    if isinstance(last, IncidentRecord) and last.attempt >= present.attempts:
        return "waiting", f"{last.verdict.fault} is being looked at"
    return "running", f"attempt {present.attempts}, by {present.owner}"


def _last_mark(history: History) -> _Mark | None:
    """The newest one; none where the budget was reset since, or a later attempt is known."""
    found: _Mark | None = None
    for _, record in history.records:
        if isinstance(record, WordRecord) and record.word == "reset-budget":
            found = None
        elif not isinstance(record, WordRecord | ResultRecord) and _marks(record):
            found = record
    if found is None:
        return None
    begins = found.begins if isinstance(found, DecisionRecord) else None
    return found if (begins or found.attempt) >= history.last_attempt else None


def _marks(record: _Mark) -> bool:
    if isinstance(record, DecisionRecord):
        return record.begins is not None or record.stops
    if isinstance(record, ProgressRecord):
        return bool(record.ended)
    return record.fatal and record.revision == 1


def _next(state: State, final: bool, present: Present) -> str:
    if state == "stopped":
        return present.retry if final else present.start
    return present.start if state == "never run" else ""


def figures_text(found: Figures) -> str:
    """``5 of 6 incidents recovered (83%), ...``, in one line."""
    if not found.incidents:
        return "no incident yet"
    judged = found.recovered + found.failed
    rate = f" ({found.rate:.0%})" if found.rate is not None else ""
    parts = [f"{found.recovered} of {counted(judged, 'incident')} recovered{rate}"]
    if found.stopped:
        parts.append(f"{found.stopped} stopped as meant")
    if found.open:
        parts.append(f"{found.open} open")
    if found.mean_resume is not None and found.median_resume is not None:
        parts.append(
            f"new steps after {found.mean_resume:.1f} s on average, {found.median_resume:.1f} s in "
            "the median"
        )
    if found.repeated:
        parts.append(f"{counted(found.repeated, 'step')} repeated")
    return ", ".join(parts)


def excluded_text(found: Excluded) -> str:
    """One node and until when, in one line."""
    if found.seconds_left is None:
        return f"{found.node}, until it is pardoned: {found.why}"
    return f"{found.node}, for {found.seconds_left / 3600:.1f} h more: {found.why}"


def _excluded(history: History, rules: Rules) -> list[Excluded]:
    return [
        Excluded(node, found.why, max(0.0, found.until - history.now) if found.until else None)
        for node, found in standings(history, rules).items()
        if found.state == "excluded"
    ]
