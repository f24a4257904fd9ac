"""What a job's own records and events say of the fault that struck it, against what is expected.

Owns: the judgement of one scenario. Never does: I/O, clocks; know how the fault was brought about.
Called by: matrix, tests (synthetic records).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from everstep.core.events import Event
from everstep.drill import kinds
from everstep.drill.kinds import fact_text
from everstep.drill.progress import kept_of
from everstep.drill.scenarios import Drawn, Scenario
from everstep.faults.history import DecisionRecord, IncidentRecord, Record, ResultRecord
from everstep.faults.records import UNKNOWN, Verdict

SIGNS = frozenset({"worker.exited", "workers.killed", "incident.judged", "rendezvous.lost"})
"""Events by which an agent shows that it has noticed."""
AGED = "EVERSTEP_DETECTION_DELAY"


@dataclass(frozen=True)
class Told:
    """What is known of a run that is over. ``codes`` are the exit codes of the agents by node,
    ``struck`` when the fault came (CLOCK_MONOTONIC), None where it never did; ``differences`` what
    differs from the undisturbed run, None where that was not compared."""

    events: tuple[Event, ...]
    records: tuple[Record, ...]
    codes: tuple[int, ...]
    struck: float | None
    differences: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()


class ScenarioReport(msgspec.Struct, frozen=True):
    """One line of the matrix. ``fault`` is the class that the verdict gave, ``action`` what it
    asked for, ``root`` whom it named; ``then`` how the job ended. Seconds count from the fault.
    ``impossible`` says why this machine does not allow the kind: then nothing was judged. ``ok``
    is true iff it was judged and ``why`` is empty."""

    kind: str
    about: str
    rank: int
    step: int
    ok: bool = False
    why: tuple[str, ...] = ()
    impossible: str = ""
    fault: str = ""
    action: str = ""
    root: str = ""
    then: str = ""
    detected_in: float | None = None
    resumed_in: float | None = None
    steps_repeated: int | None = None
    tier: str = ""
    identical: bool | None = None
    attempts: int = 0
    seconds: float = 0.0
    journal: str = ""


def examine(
    scenario: Scenario, drawn: Drawn, told: Told, *, seconds: float = 0.0, journal: str = ""
) -> ScenarioReport:
    """The report of a run."""
    events = tuple(sorted(told.events, key=lambda event: event.mono))
    told = Told(events, told.records, told.codes, told.struck, told.differences, told.problems)
    seen = incidents(told.records)
    first = seen[0].verdict if seen else None
    why = tuple(_reasons(scenario, drawn, told, seen))
    return ScenarioReport(
        kind=scenario.kind, about=scenario.about, rank=drawn.rank, step=drawn.step,
        ok=not why, why=why,
        fault=first.fault if first else "", action=first.action if first else "",
        root=_named(first) if first else "", then=_ended(told),
        detected_in=_since(told, _first_sign(told)), resumed_in=_since(told, _resumed(told)),
        steps_repeated=_repeated(told), tier=_tier(events),
        identical=None if told.differences is None else not told.differences,
        attempts=_attempts(events), seconds=round(seconds, 1), journal=journal,
    )  # fmt: skip


def impossible(scenario: Scenario, drawn: Drawn, reason: str) -> ScenarioReport:
    """The line of a kind that this machine does not allow."""
    return ScenarioReport(scenario.kind, scenario.about, drawn.rank, drawn.step, impossible=reason)


def incidents(records: Iterable[Record]) -> list[IncidentRecord]:
    """Each incident as it is known best, in the order of attempts."""
    best: dict[str, IncidentRecord] = {}
    for record in records:
        if isinstance(record, IncidentRecord):
            known = best.get(record.id)
            if known is None or record.revision > known.revision:
                best[record.id] = record
    return sorted(best.values(), key=lambda one: (one.attempt, one.sequence))


# reasons


def _reasons(
    scenario: Scenario, drawn: Drawn, told: Told, seen: Sequence[IncidentRecord]
) -> Iterator[str]:
    yield from told.problems
    if told.struck is None:
        yield "not injected: the run ended first"
        return
    yield from _wrong_incidents(scenario, drawn, seen)
    yield from _wrong_end(scenario, told, seen)
    yield from _lost_steps(scenario, told)
    least, most = scenario.expect.attempts
    if not least <= (count := _attempts(told.events)) <= most:
        yield f"{count} attempts, not {least}" + (f" to {most}" if most > least else "")
    if scenario.expect.then == "resumes" and scenario.expect.identical:
        yield from told.differences if told.differences is not None else ("nothing was compared",)


def _wrong_incidents(
    scenario: Scenario, drawn: Drawn, seen: Sequence[IncidentRecord]
) -> Iterator[str]:
    expect = scenario.expect
    if not seen:
        yield "the history has no incident"
    for one in seen:
        verdict, where = one.verdict, f"attempt {one.attempt}"
        if verdict.fault not in expect.faults:
            yield f"{where}: judged {verdict.fault}, not {' or '.join(expect.faults)}"
        if verdict.action not in expect.actions:
            yield f"{where}: action {verdict.action}, not {' or '.join(expect.actions)}"
        if wrong := _wrong_root(scenario, drawn, verdict):
            yield f"{where}: {wrong}"
    for attempt, count in Counter(one.attempt for one in seen).items():
        if count > 1:
            yield f"attempt {attempt}: {count} incidents of one failure"


def _wrong_root(scenario: Scenario, drawn: Drawn, verdict: Verdict) -> str:
    root, named = scenario.expect.root, _named(verdict)
    if root == "nobody" or verdict.fault == UNKNOWN:
        # F1: where nothing is known nobody is punished.
        return f"blames {named}" if verdict.root_ranks or verdict.root_node else ""
    if root == "victim" and verdict.root_ranks != (drawn.rank,):
        return f"blames {named or 'nobody'}, not rank {drawn.rank}"
    struck = f"node-{drawn.rank}"
    if root == "node" and verdict.root_node not in (None, struck):
        return f"blames {named}, not {struck}"
    return ""


def _wrong_end(scenario: Scenario, told: Told, seen: Sequence[IncidentRecord]) -> Iterator[str]:
    expect = scenario.expect
    if set(told.codes) != {expect.exit_code}:
        ended = ", ".join(map(str, told.codes))
        yield f"`everstep run` ended with {ended}, not {expect.exit_code}"
    if expect.then == "stops":
        last = [r for r in told.records if isinstance(r, DecisionRecord)][-1:]
        if not (last and last[0].stops and last[0].exit_code == expect.exit_code):
            yield "the history has no decision to stop"
        return
    results = {r.incident: r for r in told.records if isinstance(r, ResultRecord)}
    for one in seen:
        if one.id not in results or not results[one.id].success:
            yield f"the resume after incident {one.id} is not proved"
    resumed = _since(told, _resumed(told))
    if resumed is None:
        yield "no step was computed afterwards"
    elif resumed > expect.within:
        yield f"resumed after {resumed:.1f} s, not within {expect.within:g} s"


def _lost_steps(scenario: Scenario, told: Told) -> Iterator[str]:
    """No committed step is lost, except by a rollback exactly those after the last healthy one."""
    for at, event in enumerate(told.events):
        if event.kind != kinds.ELECTED or event.attempt < 2:
            continue
        restored, before = event.step or 0, told.events[:at]
        floor = kept_of(before).newest_commit()
        if not scenario.expect.rollback:
            if restored < floor:
                yield f"restored step {restored}, though step {floor} was committed"
            continue
        wanted = _rolled_back_to(told.records, event.attempt)
        healthy = _newest_healthy(scenario, before)
        if restored != wanted or wanted < healthy:
            yield (
                f"attempt {event.attempt} restored step {restored}; the decision names "
                f"{wanted}, and step {healthy} was healthy"
            )


def _rolled_back_to(records: Iterable[Record], attempt: int) -> int:
    made = [r for r in records if isinstance(r, DecisionRecord) and r.begins == attempt]
    recovery = made[-1].rung.recovery if made else None
    return -1 if recovery is None else recovery.point.step


def _newest_healthy(scenario: Scenario, before: Sequence[Event]) -> int:
    """The newest committed step that was old enough when its attempt failed: a step that gave no
    number is never committed."""
    delay = float(dict(scenario.settings).get(AGED, "10"))
    failed = max((e.mono for e in before if e.kind == kinds.WORKER_EXITED), default=0.0)
    old = [e.step or 0 for e in before if e.kind == kinds.COMMITTED and e.mono <= failed - delay]
    return max(old, default=0)


# what the line shows


def _named(verdict: Verdict) -> str:
    ranks = ", ".join(map(str, verdict.root_ranks))
    rank = f"rank {ranks}" if len(verdict.root_ranks) == 1 else f"ranks {ranks}"
    parts = [rank if verdict.root_ranks else "", verdict.root_node or ""]
    return " on ".join(filter(None, parts))


def _ended(told: Told) -> str:
    codes = sorted(set(told.codes))
    return "resumed" if codes == [0] else f"stopped ({', '.join(map(str, codes))})"


def _attempts(events: Iterable[Event]) -> int:
    return max((event.attempt for event in events), default=0)


def _first_sign(told: Told) -> Event | None:
    struck = told.struck or 0.0
    signs = (e for e in told.events if e.kind in SIGNS and e.mono >= struck)
    return next(signs, None)


def _resumed(told: Told) -> Event | None:
    struck = told.struck or 0.0
    before = max((e.attempt for e in told.events if e.mono < struck), default=0)
    steps = (e for e in told.events if e.kind in kinds.PROGRESS and e.attempt > before)
    return next((e for e in steps if e.mono >= struck), None)


def _since(told: Told, event: Event | None) -> float | None:
    if event is None or told.struck is None:
        return None
    return round(event.mono - told.struck, 2)


def _repeated(told: Told) -> int | None:
    results = [r for r in told.records if isinstance(r, ResultRecord) and r.tier]
    return results[0].repeated if results else None


def _tier(events: Iterable[Event]) -> str:
    elected = (e for e in events if e.kind == kinds.ELECTED and e.attempt > 1)
    event = next(elected, None)
    return "" if event is None else fact_text(event, "source")
