"""What a set of records adds up to: attempts, restarts, resets, on one clock.

Owns: the fold that turns any set of records into one :class:`History`. It depends on nothing but
the set: not on the order of arrival, on duplicates, or on who asks. Never does: I/O, clocks,
decisions. Called by: budget, suspicion, decide; the commands that show what happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from everstep.faults.history import (
    MODES,
    AttemptFacts,
    Cause,
    DecisionRecord,
    IncidentRecord,
    Mode,
    ProgressRecord,
    Record,
    Stamp,
    WordRecord,
    encode,
)

_R = TypeVar("_R", bound=Record)


class Life(msgspec.Struct, frozen=True):
    """One attempt as the history tells it. Times are of the history's own clock. ``incidents`` are
    those that ended it, each as it was known last. ``ended`` None: it runs, or nobody knows.
    ``provisional``: it went on from an incident that was never closed."""

    attempt: int
    began: float
    ended: float | None
    cause: Cause
    facts: AttemptFacts
    incidents: tuple[IncidentRecord, ...] = ()
    decision: DecisionRecord | None = None
    provisional: bool = False
    fell: bool = False


class Reset(msgspec.Struct, frozen=True):
    """An operator's reset of the budgets."""

    at: float
    word: WordRecord


class History(msgspec.Struct, frozen=True):
    """The job's past. ``events`` are ended lives and resets in their order. ``restarts`` are the
    times of all begun attempts but the first, since the last reset. ``records`` are all records,
    in order, each with its time. ``now`` is the time at which it was asked for."""

    records: tuple[tuple[float, Record], ...] = ()
    events: tuple[Life | Reset, ...] = ()
    lives: tuple[Life, ...] = ()
    restarts: tuple[float, ...] = ()
    mode: Mode = "act"
    now: float = 0.0

    @property
    def last_attempt(self) -> int:
        return self.lives[-1].attempt if self.lives else 0

    def incident(self, name: str) -> IncidentRecord | None:
        """The incident of that id as it is known last."""
        found = [r for r in self._of(IncidentRecord) if r.id == name]
        return max(found, key=lambda r: r.revision, default=None)

    def decisions(self, incident: str = "") -> list[DecisionRecord]:
        """All decisions in order, or those about one incident."""
        return [r for r in self._of(DecisionRecord) if not incident or r.incident == incident]

    def words(self) -> list[tuple[float, WordRecord]]:
        return [(at, r) for at, r in self.records if isinstance(r, WordRecord)]

    def _of(self, kind: type[_R]) -> list[_R]:
        return [r for _, r in self.records if isinstance(r, kind)]


def fold(records: Iterable[Record], *, highest_claim: int = 0, now: Stamp | None = None) -> History:
    """The history that a set of records adds up to.

    ``highest_claim`` is the newest attempt that was ever claimed: one of which no record tells
    has been lived all the same, and counts. Time is the history's own: seconds since its first
    record, never backwards, taken from the wall clock only between agents.
    """
    ordered = _order(records)
    clock = _Clock()
    timed = tuple((clock.read(record.at), record) for record in ordered)
    end = clock.read(now) if now is not None else clock.now
    lives = _lives(timed, highest_claim, end)
    return History(
        records=timed,
        events=tuple(_events(timed, lives)),
        lives=tuple(lives),
        restarts=tuple(_restarts(timed, lives)),
        mode=_mode(timed),
        now=end,
    )


def _order(records: Iterable[Record]) -> list[Record]:
    """By what their authors had seen, then by their bytes: the same for every reader."""
    unique = {encode(record): record for record in records}
    return [r for _, r in sorted(unique.items(), key=lambda i: (i[1].attempt, i[1].sequence, i[0]))]


class _Clock:
    """One time for the records of many processes and machines.

    The first record of each boot is placed by its wall clock, relative to the first of all and
    never before what was read already; later ones of that boot by its monotonic clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._base: float | None = None
        self._anchors: dict[str, tuple[float, float]] = {}

    def read(self, stamp: Stamp) -> float:
        wall, mono = _finite(stamp.wall), _finite(stamp.mono)
        if self._base is None:
            self._base = wall
        machine = stamp.boot or f"agent {stamp.agent}"
        if machine not in self._anchors:
            self._anchors[machine] = (max(self.now, wall - self._base), mono)
        placed, began = self._anchors[machine]
        self.now = max(self.now, placed + mono - began)
        return self.now


def _lives(timed: Sequence[tuple[float, Record]], highest_claim: int, end: float) -> list[Life]:
    own: dict[int, list[tuple[float, Record]]] = {}
    begun: dict[int, tuple[float, DecisionRecord]] = {}
    closed: set[str] = set()
    for at, record in timed:
        if _tells_of_a_life(record):
            own.setdefault(record.attempt, []).append((at, record))
        if isinstance(record, DecisionRecord) and record.begins:
            begun[record.begins] = (at, record)
        if isinstance(record, IncidentRecord) and record.closed:
            closed.add(record.id)
    last = max([highest_claim, *own], default=0)
    # What was claimed before the first record was lived by an everstep that kept none.
    first = min([*own, *begun], default=last + 1)
    found: list[Life] = []
    for attempt in range(last, first - 1, -1):
        after = found[-1].began if found else None
        life = _life(attempt, own.get(attempt, []), begun.get(attempt), after, end)
        decision = life.decision
        waits = decision is not None and decision.incident and decision.incident not in closed
        found.append(msgspec.structs.replace(life, provisional=bool(waits)))
    return found[::-1]


def _tells_of_a_life(record: Record) -> bool:
    """A start only says which attempt was claimed last; who lived it may have kept no records."""
    if isinstance(record, DecisionRecord):
        return bool(record.incident) and record.attempt > 0
    return not isinstance(record, WordRecord) and record.attempt > 0


def _life(
    attempt: int,
    own: Sequence[tuple[float, Record]],
    begun: tuple[float, DecisionRecord] | None,
    after: float | None,
    end: float,
) -> Life:
    """``after`` is when the next attempt began, None for the last."""
    fatal = [(at, r) for at, r in own if isinstance(r, IncidentRecord) and r.fatal]
    incidents = {r.id: r for _, r in sorted(fatal, key=lambda item: item[1].revision)}
    ending = [(at, r) for at, r in own if _ends(r) and not isinstance(r, IncidentRecord)]
    began = begun[0] if begun else own[0][0] if own else end if after is None else after
    return Life(
        attempt=attempt,
        began=began,
        ended=min((at for at, _ in (*fatal, *ending)), default=after),
        cause=_cause(incidents, [record for _, record in ending]),
        facts=_facts([r for _, r in own]),
        incidents=tuple(incidents[name] for name in sorted(incidents)),
        decision=begun[1] if begun else None,
        fell=any(_fell(r) for _, r in ending),
    )


def _ends(record: Record) -> bool:
    """Whether the record tells that its attempt has ended."""
    if isinstance(record, IncidentRecord):
        return record.fatal
    if isinstance(record, DecisionRecord):
        return bool(record.ends_running)
    return isinstance(record, ProgressRecord) and bool(record.ended)


def _fell(record: Record) -> bool:
    return isinstance(record, DecisionRecord) and record.ends_running == "fell"


def _cause(incidents: Mapping[str, IncidentRecord], ending: Sequence[Record]) -> Cause:
    causes = {incident.cause for incident in incidents.values()}
    causes |= {record.cause for record in ending if isinstance(record, ProgressRecord)}
    order: tuple[Cause, ...] = ("root", "victims", "agent_lost", "external", "person")
    for cause in order:
        if cause in causes:
            return cause
    if ending:
        # Moved by a late verdict: that incident is charged already. Fallen off a rung: it failed.
        return "victims" if any(map(_fell, ending)) else "external"
    return "agent_lost"


def _facts(own: Sequence[Record]) -> AttemptFacts:
    """All that is known of an attempt, with figures that cannot be taken at their word bounded."""
    told = [r.facts for r in own if isinstance(r, IncidentRecord | ProgressRecord)]
    lasted = max((_finite(f.lasted) for f in told), default=0.0)
    online = [f for f in told if not f.offline]
    return AttemptFacts(
        restored=max((f.restored for f in told), default=-1),
        reached=max((f.reached for f in told), default=-1),
        finished=max((f.finished for f in told), default=-1),
        committed=max((f.committed for f in online), default=-1),
        lasted=lasted,
        useful=min(lasted, max((_finite(f.useful) for f in online), default=0.0)),
        offline=bool(told) and not online,
        told=any(f.told for f in told),
    )


def _events(timed: Sequence[tuple[float, Record]], lives: Sequence[Life]) -> list[Life | Reset]:
    """Ended lives and resets in the order of the records that tell of them."""
    found: list[Life | Reset] = []
    waiting = [life for life in lives if life.ended is not None]
    for at, record in timed:
        while waiting and _has_ended(waiting[0], record):
            found.append(waiting.pop(0))
        if isinstance(record, WordRecord) and record.word == "reset-budget":
            found.append(Reset(at, record))
    return [*found, *waiting]


def _has_ended(life: Life, record: Record) -> bool:
    if record.attempt != life.attempt:
        return record.attempt > life.attempt
    return _ends(record)


def _restarts(timed: Sequence[tuple[float, Record]], lives: Sequence[Life]) -> list[float]:
    """When each attempt but the first was begun: by the last decision that says so, and its delay,
    or, where none does, not before it is first heard of."""
    begun: dict[int, float] = {}
    forgotten: set[int] = set()
    unbegun = {life.attempt: life.began for life in lives if life.decision is None}
    for at, record in timed:
        for attempt in [a for a in unbegun if a <= record.attempt]:
            begun[attempt] = unbegun.pop(attempt)
        if isinstance(record, DecisionRecord) and record.begins is not None:
            begun[record.begins] = at + max(0.0, _finite(record.rung.delay))
            forgotten.discard(record.begins)
        if isinstance(record, WordRecord) and record.word == "reset-budget":
            forgotten.update(begun)
    begun |= unbegun
    first = min(begun, default=0)
    return sorted(at for attempt, at in begun.items() if attempt not in {first, *forgotten})


def _mode(timed: Sequence[tuple[float, Record]]) -> Mode:
    mode: Mode = "act"
    for _, record in timed:
        if isinstance(record, WordRecord) and record.word == "on-fault":
            mode = MODES.get(record.subject, mode)
    return mode


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
