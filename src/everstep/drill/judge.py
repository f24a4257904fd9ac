"""What a run's events say of each injected fault: noticed, overcome, from which tier, at what cost.

Owns: the judgement. Never does: I/O, clocks: all times are those of the events. Called by: the
drill's loop (is the fault overcome?), cli (the table), tests (synthetic events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec

from everstep.core.events import Event
from everstep.drill import kinds
from everstep.drill.kinds import fact_int, fact_text
from everstep.drill.plan import OF_STORE, Kind, Planned
from everstep.drill.progress import kept_of

ORPHAN_LIMIT = 5.0
"""Seconds within which workers must be gone when their agent died alone."""


class Injection(msgspec.Struct, frozen=True):
    """A fault as it was injected. ``mono`` in seconds of CLOCK_MONOTONIC, ``step`` the newest
    step known then, ``damaged`` the step of the checkpoint whose byte was flipped."""

    index: int
    kind: Kind
    fault: str
    mono: float
    step: int | None
    attempt: int
    rank: int | None
    damaged: int | None
    detail: str


class FaultReport(msgspec.Struct, frozen=True):
    """One line of the drill's table. Seconds count from the injection; None: it never happened.

    ``tier`` is where the restored state came from (``memory``, ``peer``, ``store``, ``fresh``),
    None where nothing had to be restored. ``ok`` is true iff ``why`` is empty.
    """

    index: int
    kind: Kind
    fault: str
    detail: str = ""
    step: int | None = None
    detected_in: float | None = None
    resumed_in: float | None = None
    tier: str | None = None
    restored_step: int | None = None
    steps_repeated: int | None = None
    ok: bool = False
    why: tuple[str, ...] = ()


def judge(events: Iterable[Event], planned: Sequence[Planned] = ()) -> tuple[FaultReport, ...]:
    """A report for each fault injected, in order, and for each planned that was not."""
    ordered = sorted(events, key=lambda event: event.mono)
    found = injections(ordered)
    ends = [*(injection.mono for injection in found), float("inf")][1:]
    reports = [_judge_one(i, ordered, end) for i, end in zip(found, ends, strict=True)]
    done = {injection.index for injection in found}
    missed = [_missed(plan) for plan in planned if plan.index not in done]
    return tuple(sorted(reports + missed, key=lambda report: report.index))


def injections(events: Iterable[Event]) -> list[Injection]:
    """The faults that the events say were injected, in their order."""
    return [injection_of(event) for event in events if event.kind == kinds.INJECTED]


def injection_of(event: Event) -> Injection:
    """The record of one ``drill.injected`` event."""
    return Injection(
        index=fact_int(event, "index") or 0,
        kind=cast(Kind, fact_text(event, "kind")),
        fault=fact_text(event, "fault"),
        mono=event.mono,
        step=event.step,
        attempt=event.attempt,
        rank=event.rank,
        damaged=fact_int(event, "damaged"),
        detail=event.text,
    )


def overcome(injection: Injection, events: Sequence[Event]) -> bool:
    """Whether the events up to now show that the fault lies behind the job."""
    return _resumed(injection, [e for e in events if e.mono >= injection.mono]) is not None


def _judge_one(injection: Injection, ordered: Sequence[Event], end: float) -> FaultReport:
    before = [e for e in ordered if e.mono < injection.mono]
    window = [e for e in ordered if injection.mono <= e.mono < end]
    detected, resumed = _detected(injection, window), _resumed(injection, window)
    elected = _first(window, kinds.ELECTED, lambda e: e.attempt > injection.attempt)
    restored = None if elected is None else (elected.step or 0)
    tier = None if elected is None else fact_text(elected, "source")
    why = _reasons(injection, before, window, detected, resumed, tier, restored)
    return FaultReport(
        index=injection.index,
        kind=injection.kind,
        fault=injection.fault,
        detail=injection.detail,
        step=injection.step,
        detected_in=_since(injection, detected),
        resumed_in=_since(injection, resumed),
        tier=tier,
        restored_step=restored,
        steps_repeated=_repeated(injection, ordered, restored, resumed),
        ok=not why,
        why=tuple(why),
    )


def _missed(plan: Planned) -> FaultReport:
    reason = "not injected: the run ended first; let it run longer or say an earlier step"
    return FaultReport(plan.index, plan.fault.kind, str(plan.fault), why=(reason,))


def _detected(injection: Injection, window: Sequence[Event]) -> Event | None:
    if injection.kind == "worker":
        return _first(window, kinds.WORKER_EXITED)
    if injection.kind == "keeper":
        return _first(window, kinds.KEEPER_LOST)
    if injection.kind == "corrupt":
        return next((e for e in window if e.kind in kinds.DAMAGE), None)
    if injection.kind in OF_STORE:
        return _first(window, kinds.PERSIST_FAILED)
    return _first(window, kinds.NOTICED)


def _resumed(injection: Injection, window: Sequence[Event]) -> Event | None:
    if injection.kind == "keeper":
        return _second(window, kinds.KEEPER_STARTED, kinds.SNAPSHOT)
    if injection.kind in OF_STORE:
        return _second(window, kinds.RELEASED, kinds.COMMITTED)
    steps = (e for e in window if e.kind in kinds.PROGRESS and e.attempt > injection.attempt)
    return next(steps, None)


def _repeated(
    injection: Injection, ordered: Sequence[Event], restored: int | None, resumed: Event | None
) -> int | None:
    """Steps that were computed twice: from the step restored to the last one computed before."""
    if resumed is None:
        return None
    if restored is None:
        return 0
    died = injection.attempt
    steps = [e.step or 0 for e in ordered if e.kind in kinds.PROGRESS and e.attempt == died]
    last = max(steps, default=restored)
    return max(0, last - restored)


def _reasons(
    injection: Injection,
    before: Sequence[Event],
    window: Sequence[Event],
    detected: Event | None,
    resumed: Event | None,
    tier: str | None,
    restored: int | None,
) -> list[str]:
    why = []
    if detected is None:
        why.append(_unnoticed(injection.kind))
    if resumed is None:
        why.append(_not_overcome(injection.kind))
    if injection.kind in OF_STORE or injection.kind == "keeper":
        if tier is not None:
            why.append("training was restarted, though no worker was hit")
    elif restored is not None and tier is not None:
        why += _restored_wrongly(injection, before, tier, restored)
    if injection.kind == "agent":
        why += _orphans(window)
    return why


def _unnoticed(kind: Kind) -> str:
    if kind == "corrupt":
        return "the damaged checkpoint was not reported"
    if kind in OF_STORE:
        return "the failed save was not reported"
    return "never detected"


def _not_overcome(kind: Kind) -> str:
    if kind == "keeper":
        return "no snapshot was completed by a new keeper"
    if kind in OF_STORE:
        return "no checkpoint was committed after the store worked again"
    return "no step was computed afterwards"


def _restored_wrongly(
    injection: Injection, before: Sequence[Event], tier: str, restored: int
) -> list[str]:
    kept = kept_of(before)
    if injection.damaged is not None and restored == injection.damaged:
        return [f"the damaged checkpoint of step {restored} was restored"]
    floor, name = kept.newest_commit(without=injection.damaged), "committed"
    if injection.kind in ("worker", "agent"):  # the keeper lives, so memory is still there
        floor, name = max(kept.snapshot, floor), "complete"
    if tier == "fresh" and floor:
        return [f"started from scratch, though step {floor} was {name}"]
    if restored < floor:
        return [f"restored step {restored}, though step {floor} was {name}"]
    return []


def _orphans(window: Sequence[Event]) -> list[str]:
    event = _first(window, kinds.ORPHANS)
    if event is None:
        return []
    seconds = event.facts.get("seconds")
    if isinstance(seconds, int | float) and seconds <= ORPHAN_LIMIT:
        return []
    return [f"workers outlived their agent by more than {ORPHAN_LIMIT:g} s"]


def _since(injection: Injection, event: Event | None) -> float | None:
    return None if event is None else round(event.mono - injection.mono, 3)


def _second(events: Sequence[Event], first: str, second: str) -> Event | None:
    after = _first(events, first)
    return after and _first(events, second, lambda e: e.mono >= after.mono)


def _first(
    events: Iterable[Event], kind: str, test: Callable[[Event], bool] = lambda _: True
) -> Event | None:
    return next((e for e in events if e.kind == kind and test(e)), None)
