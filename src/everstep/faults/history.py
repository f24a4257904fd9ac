"""What happened to a job, as records.

Owns: the records of incidents, decisions, progress, results and an operator's words, and their form
as bytes. Never does: I/O, clocks, decisions. Called by: fold, budget, suspicion, decide; the agent
and the commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from everstep.core.history import BODY_BYTES, Entry, Kind
from everstep.core.ids import Point
from everstep.faults.limits import Limits
from everstep.faults.records import Action, Evidence, Verdict
from everstep.faults.redact import redacted

FORMAT = 1
"""Of the bodies below. A body of a later one is refused by name, never guessed at."""

_TEXT_LIMIT = 2000

_TEXTS = frozenset(
    {
        "message", "frame", "advice", "text", "why", "why_not", "reason", "alerts", "ended",
    }
)  # fmt: skip
"""Fields that hold what a program, a library or a person has said. What names something (ids,
agents, nodes) is left as it is: it is compared."""

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
    replicas agreed, and old enough for what is detected late; ``sound`` but for its age."""

    point: Point
    tier: str = "store"
    healthy: bool = False
    sound: bool = False


class AttemptFacts(msgspec.Struct, frozen=True):
    """What is known of an attempt that has ended, or is asked about. Steps are -1 where unknown.

    ``restored`` is the step it went on from, ``reached`` the newest step that a snapshot of it is
    complete for, ``finished`` the newest that all workers have finished, ``committed`` the newest
    that is committed in the store. ``lasted`` is its length in seconds, ``useful`` the part spent
    on steps that no attempt before had committed and this one has. ``offline``: the store could
    not be asked, so that nothing is refilled by it. ``told`` is false where the script tells no
    steps, so that two failures cannot be said to have come at the same one."""

    restored: int = -1
    reached: int = -1
    finished: int = -1
    committed: int = -1
    lasted: float = 0.0
    useful: float = 0.0
    offline: bool = False
    told: bool = True

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
    open. ``replay``: an exact replay, as a diagnosis. ``skip`` are steps whose batches are left
    out. ``advice`` is what would have been done, where it was only to be said. ``budget`` is what
    is left then of ``limits``, by which it was made."""

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
    replay: bool = False
    skip: tuple[int, ...] = ()
    alerts: tuple[str, ...] = ()
    advice: str = ""
    budget: Mapping[str, int] = {}
    limits: Limits | None = None

    @property
    def action(self) -> Action:
        return self.rung.action

    @property
    def stops(self) -> bool:
        return self.rung.action == "stop"


class ProgressRecord(
    msgspec.Struct, frozen=True, tag="progress", tag_field="what", forbid_unknown_fields=True
):
    """What an attempt has come to: so that a lost agent's work still counts.

    ``ended``: why it ended, where that was no incident (the job finished, a scheduler took the
    nodes, a person stopped it); empty while it runs. ``cause`` is who ended it so. ``finished``:
    the job came to its own end, and what it had is committed."""

    attempt: int
    at: Stamp
    facts: AttemptFacts
    sequence: int = 0
    ended: str = ""
    cause: Cause = "person"
    finished: bool = False


class ResultRecord(
    msgspec.Struct, frozen=True, tag="result", tag_field="what", forbid_unknown_fields=True
):
    """How an incident ended. Times are seconds of each phase, one after the other, None where it
    was not come to: until the failure was noticed (``detect``), the decision made, the survivors
    stopped, the next processes started, the state restored, the first new step done, and the first
    checkpoint past the failing step committed (``commit``). ``success``: that was so.
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
    commit: float | None = None
    new_step: int | None = None
    repeated: int = 0
    tier: str = ""
    replay_differed: bool = False
    node: str = ""


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

MODES: dict[str, Mode] = {"act": "act", "advise": "advise", "off": "off"}
_KINDS: dict[type, Kind] = {
    IncidentRecord: "incident",
    DecisionRecord: "decision",
    ProgressRecord: "progress",
    ResultRecord: "result",
    WordRecord: "word",
}


def pack(record: Record) -> Entry:
    """The record's form for the store. Equal records give equal bytes. Secrets go out of its texts,
    wherever they came from, and evidence is cut where it would be larger than ``BODY_BYTES``."""
    record = redacted(record, _TEXTS)
    if isinstance(record, IncidentRecord):
        record = _bounded(record)
    return Entry(_KINDS[type(record)], record.attempt, record.sequence, FORMAT, encode(record))


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


# bytes


def encode(record: Record) -> bytes:
    """Equal records give equal bytes."""
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
    while len(encode(record)) > BODY_BYTES and (verdict.discarded or verdict.evidence):
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
