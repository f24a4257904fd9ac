"""What happened to a job, as records, and the history that they add up to.

Owns: the records of incidents, decisions, progress, results and an operator's words, their form as
bytes, their order, and the fold that turns any set of them into one :class:`History`. The fold
depends on nothing but the set: not on the order of arrival, on duplicates, or on who asks. Never
does: I/O, clocks, decisions. Called by: budget, suspicion, decide; the agent and the commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from everstep.core.history import Entry, Kind
from everstep.core.ids import Point
from everstep.faults.records import Action, Evidence, Verdict

FORMAT = 1
"""Of the bodies below. A body of a later one is refused by name, never guessed at."""

BODY_LIMIT = 64 << 10
"""Bytes of one record: evidence beyond it is left out, the rest counts for ever."""

_TEXT_LIMIT = 2000

Cause = Literal["root", "victims", "external", "person", "agent_lost"]
"""Who ended an attempt, as far as budgets go. ``root``: a failure with a cause of its own.
``victims``: only effects are seen. ``external``: taken by a scheduler, or nodes came and went.
``person``: ended by one, or by what only one can change. ``agent_lost``: nobody is left to
tell."""

Mode = Literal["act", "advise", "off"]
Word = Literal["reset-budget", "exclude", "pardon", "on-fault"]


class Stamp(msgspec.Struct, frozen=True):
    """When and by whom. ``agent`` is unique for a process; ``mono`` is CLOCK_MONOTONIC of the
    machine, since its boot ``boot`` (empty: not known). ``wall`` is the store's time where it can
    be had. Between records of one boot, ``mono`` alone counts: no jump of a wall clock moves them.
    """

    agent: str
    wall: float
    mono: float
    boot: str = ""


class RecoveryPoint(msgspec.Struct, frozen=True):
    """A complete state that the job could go on from. ``healthy`` as the design has it: finite,
    replicas agreed, and old enough for what is detected late."""

    point: Point
    tier: str = "store"
    healthy: bool = False


class AttemptFacts(msgspec.Struct, frozen=True):
    """What is known of an attempt that has ended, or is asked about. Steps are -1 where unknown.

    ``restored`` is the step it went on from, ``reached`` the newest step that a snapshot of it is
    complete for, ``finished`` the newest that all workers have finished, ``committed`` the newest
    that is committed in the store. ``lasted`` is its length in seconds, ``useful`` the part spent
    on steps that no attempt before had committed and this one has. ``offline``: the store could
    not be asked, so that nothing is refilled by it."""

    restored: int = -1
    reached: int = -1
    finished: int = -1
    committed: int = -1
    lasted: float = 0.0
    useful: float = 0.0
    offline: bool = False

    @property
    def furthest(self) -> int:
        """The furthest step that is known of it."""
        return max(self.restored, self.reached, self.finished)


class LastWord(msgspec.Struct, frozen=True):
    """An end after which no restart is wanted or can help: the agent's exit code, and why."""

    exit_code: int
    reason: str


class IncidentRecord(
    msgspec.Struct, frozen=True, tag="incident", tag_field="what", forbid_unknown_fields=True
):
    """One incident as it is known at ``at``. The same ``id`` with a higher ``revision`` is the same
    incident, known better; the last one counts. ``fatal``: the attempt ended by it. ``closed``: no
    more evidence is waited for. ``nodes`` gives the ranks of each node and ``pods`` its pod.
    ``first_symptom`` is the step at which the first sign of it was seen, where that is earlier
    than the step it is reported for."""

    id: str
    attempt: int
    at: Stamp
    verdict: Verdict
    sequence: int = 0
    revision: int = 1
    cause: Cause = "root"
    facts: AttemptFacts = AttemptFacts()
    fatal: bool = True
    closed: bool = True
    nodes: Mapping[str, tuple[int, ...]] = {}
    pods: Mapping[str, str] = {}
    first_symptom: int | None = None
    last_word: LastWord | None = None

    @property
    def where(self) -> int:
        """The step at which it failed: the verdict's, else the first that nobody finished."""
        step = self.verdict.step
        return step if step is not None else self.facts.furthest + 1


class Rung(msgspec.Struct, frozen=True):
    """One step of the ladder: what is done, where, from what, and how long (seconds) it may take
    until the next one is tried. ``nodes`` are those of the next attempt; ``recovery`` None: from
    the newest state. ``delay`` is waited before the attempt begins."""

    action: Action
    nodes: tuple[str, ...] = ()
    recovery: RecoveryPoint | None = None
    timeout: float = 0.0
    delay: float = 0.0
    why: str = ""


class Alternative(msgspec.Struct, frozen=True):
    """What else was possible, and why it was not done."""

    action: Action
    why_not: str


class DecisionRecord(
    msgspec.Struct, frozen=True, tag="decision", tag_field="what", forbid_unknown_fields=True
):
    """What is done about an incident, recorded before it is begun (F6).

    ``begins`` is the number of the attempt that it begins, None where it begins none. ``ladder``
    holds what is tried after ``rung`` (the action itself), in order. ``ends_running`` says that it
    ends the attempt ``attempt``, which runs. ``excluded`` are nodes that get no work from now on,
    ``avoided`` those that only this attempt leaves out. ``provisional``: its incident is still
    open; ``hold`` is how long (seconds) the first optimizer step waits for the verdict. ``replay``:
    an exact replay, as a diagnosis. ``skip`` are steps whose batches are left out. ``advice`` is
    what would have been done, where it was only to be said."""

    id: str
    attempt: int
    at: Stamp
    rung: Rung
    reason: str
    sequence: int = 0
    incident: str = ""
    revision: int = 0
    fault: str = ""
    begins: int | None = None
    ends_running: Literal["", "moved", "fell"] = ""
    ladder: tuple[Rung, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    excluded: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    exit_code: int = 0
    final: bool = False
    provisional: bool = False
    hold: float = 0.0
    replay: bool = False
    skip: tuple[int, ...] = ()
    alerts: tuple[str, ...] = ()
    advice: str = ""
    budget: Mapping[str, int] = {}

    @property
    def action(self) -> Action:
        return self.rung.action

    @property
    def stops(self) -> bool:
        return self.rung.action == "stop"


class ProgressRecord(
    msgspec.Struct, frozen=True, tag="progress", tag_field="what", forbid_unknown_fields=True
):
    """What a running attempt has come to: so that a lost agent's work still counts."""

    attempt: int
    at: Stamp
    facts: AttemptFacts
    sequence: int = 0


class ResultRecord(
    msgspec.Struct, frozen=True, tag="result", tag_field="what", forbid_unknown_fields=True
):
    """How an incident ended. Times are seconds of each phase, None where it was not come to.
    ``replay_differed``: the step that had failed was passed in an exact replay. Nothing is
    charged or refilled by it."""

    id: str
    incident: str
    attempt: int
    at: Stamp
    sequence: int = 0
    success: bool = False
    detect: float | None = None
    decide: float | None = None
    stop: float | None = None
    start: float | None = None
    restore: float | None = None
    first_step: float | None = None
    new_step: int | None = None
    repeated: int = 0
    tier: str = ""
    replay_differed: bool = False


class WordRecord(
    msgspec.Struct, frozen=True, tag="word", tag_field="what", forbid_unknown_fields=True
):
    """What an operator said. ``subject`` is the node, or the mode of ``on-fault``."""

    word: Word
    attempt: int
    at: Stamp
    sequence: int = 0
    subject: str = ""
    reason: str = ""
    by: str = ""


Record = IncidentRecord | DecisionRecord | ProgressRecord | ResultRecord | WordRecord

_R = TypeVar("_R", bound=Record)
_MODES: dict[str, Mode] = {"act": "act", "advise": "advise", "off": "off"}
_KINDS: dict[type, Kind] = {
    IncidentRecord: "incident",
    DecisionRecord: "decision",
    ProgressRecord: "progress",
    ResultRecord: "result",
    WordRecord: "word",
}


def pack(record: Record) -> Entry:
    """The record's form for the store. Equal records give equal bytes. Evidence is cut where the
    record would be larger than ``BODY_LIMIT``."""
    if isinstance(record, IncidentRecord):
        record = _bounded(record)
    return Entry(_KINDS[type(record)], record.attempt, record.sequence, FORMAT, _encode(record))


class Unpacked(NamedTuple):
    """``problems`` names what could not be read, one text each."""

    records: tuple[Record, ...]
    problems: tuple[str, ...]


def unpack(entries: Iterable[Entry]) -> Unpacked:
    """The records that entries hold. One that is of a later format, or does not decode, is named
    among the problems, and the others are read: its attempt still counts by its number."""
    found: list[Record] = []
    problems: list[str] = []
    for entry in entries:
        name = f"{entry.kind} {entry.sequence} of attempt {entry.attempt}"
        if entry.format > FORMAT:
            problems.append(
                f"{name} has format {entry.format}; this everstep knows {FORMAT}. Upgrade it."
            )
            continue
        try:
            record: Record = msgspec.msgpack.decode(entry.body, type=Record)
        except (msgspec.DecodeError, RecursionError) as error:
            problems.append(f"{name} does not decode: {error}")
            continue
        if (_KINDS[type(record)], record.attempt) != (entry.kind, entry.attempt):
            problems.append(f"{name} holds a record of something else")
            continue
        found.append(record)
    return Unpacked(tuple(found), tuple(problems))


def next_sequence(records: Iterable[Record], attempt: int) -> int:
    """The sequence of a new record of ``attempt``: behind all that its author has seen."""
    return 1 + max((r.sequence for r in records if r.attempt == attempt), default=0)


# the fold


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
    unique = {_encode(record): record for record in records}
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
    ending = [(at, r) for at, r in own if isinstance(r, DecisionRecord) and r.ends_running]
    began = begun[0] if begun else own[0][0] if own else end if after is None else after
    return Life(
        attempt=attempt,
        began=began,
        ended=min((at for at, _ in (*fatal, *ending)), default=after),
        cause=_cause(incidents, ending),
        facts=_facts([r for _, r in own]),
        incidents=tuple(incidents[name] for name in sorted(incidents)),
        decision=begun[1] if begun else None,
        fell=any(r.ends_running == "fell" for _, r in ending),
    )


def _cause(
    incidents: Mapping[str, IncidentRecord], ending: Sequence[tuple[float, DecisionRecord]]
) -> Cause:
    causes = {incident.cause for incident in incidents.values()}
    order: tuple[Cause, ...] = ("root", "victims", "agent_lost", "external", "person")
    for cause in order:
        if cause in causes:
            return cause
    if ending:
        # Moved by a late verdict: that incident is charged already. Fallen off a rung: it failed.
        return "victims" if any(r.ends_running == "fell" for _, r in ending) else "external"
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
    ends = isinstance(record, IncidentRecord) and record.fatal
    return ends or (isinstance(record, DecisionRecord) and bool(record.ends_running))


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
            mode = _MODES.get(record.subject, mode)
    return mode


# bytes


def _encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record, order="deterministic")


def _bounded(record: IncidentRecord) -> IncidentRecord:
    """The record with clean, short texts, and no more evidence than fits."""
    verdict = record.verdict
    verdict = msgspec.structs.replace(
        verdict,
        message=_clean(verdict.message),
        frame=_clean(verdict.frame),
        advice=_clean(verdict.advice),
        evidence=tuple(map(_short, verdict.evidence)),
        discarded=tuple(map(_short, verdict.discarded)),
    )
    record = msgspec.structs.replace(record, verdict=verdict)
    while len(_encode(record)) > BODY_LIMIT and (verdict.discarded or verdict.evidence):
        verdict = msgspec.structs.replace(
            verdict,
            discarded=verdict.discarded[: len(verdict.discarded) // 2],
            evidence=verdict.evidence
            if verdict.discarded
            else verdict.evidence[: len(verdict.evidence) // 2],
        )
        record = msgspec.structs.replace(record, verdict=verdict)
    return record


def _short(item: Evidence) -> Evidence:
    return msgspec.structs.replace(item, text=_clean(item.text), why=_clean(item.why))


def _clean(text: str) -> str:
    """Text that can be stored: bytes that are no UTF-8 came as lone surrogates."""
    return text[:_TEXT_LIMIT].encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
