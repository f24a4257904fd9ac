"""How well the job was kept alive: what became of each incident, and the figures over all of them.

Owns: what success is. It is the first newly committed step past the failing one, within 30 minutes
and with no human in between, over all incidents that were not meant to stop. Never does: I/O,
clocks, decide; nothing is charged or refilled by it. Called by: tell and standing,
for the commands; lead and proof in the agent, which ends its incidents by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean, median
from typing import Literal, NamedTuple, get_args

import msgspec

from everstep.core import exits
from everstep.faults.budget import fingerprint_of
from everstep.faults.fold import History
from everstep.faults.history import (
    DecisionRecord,
    IncidentRecord,
    ProgressRecord,
    Record,
    ResultRecord,
    WordRecord,
)
from everstep.faults.records import Domain

RESUME_WITHIN = 1800.0
"""Seconds from the failure to the first newly committed step past it."""

Ending = Literal["recovered", "stopped", "failed", "open"]
"""``stopped``: as meant, by the evidence or by a person, so that it counts in no rate. ``open``:
not over yet."""

_LOST_WORK = (exits.NO_RECOVERY_POINT, exits.NOT_DURABLE, exits.NO_STORE)
"""Ends that everstep is there to prevent."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one incident. ``resumed_in`` is seconds from the failure to the first new
    step, ``committed_in`` to the first commit past the failing step (at most: the time at which a
    record tells of it), None where they are not known. ``repeated`` are steps computed twice,
    ``tier`` where the state came from. ``human``: an operator said something before such a commit.
    """

    incident: str
    attempt: int
    fault: str = msgspec.field(name="class")
    domain: Domain
    ending: Ending
    why: str = ""
    resumed_in: float | None = None
    committed_in: float | None = None
    new_step: int | None = None
    repeated: int = 0
    tier: str = ""
    human: bool = False


class Figures(msgspec.Struct, frozen=True):
    """Counts, and what they give. ``rate`` is recovered of recovered and failed; it and the times
    (seconds until the first new step, of those recovered) are None where there is none."""

    incidents: int = 0
    recovered: int = 0
    failed: int = 0
    stopped: int = 0
    open: int = 0
    rate: float | None = None
    mean_resume: float | None = None
    median_resume: float | None = None
    repeated: int = 0


class Outcomes(msgspec.Struct, frozen=True):
    """``each`` in the order of the incidents; ``by_class`` the figures of each class."""

    figures: Figures
    by_class: dict[str, Figures]
    each: tuple[Outcome, ...]

    def of(self, incident: str) -> Outcome | None:
        return next((item for item in self.each if item.incident == incident), None)


def outcomes(history: History) -> Outcomes:
    """What became of every incident, at the history's ``now``."""
    index = _Index(history)
    each = tuple(_Judge(index, name).outcome() for name in index.first)
    classes = sorted({item.fault for item in each})
    return Outcomes(
        figures=figures(each),
        by_class={name: figures(i for i in each if i.fault == name) for name in classes},
        each=each,
    )


def outcome_of(history: History, incident: str) -> Outcome | None:
    """What became of one of them; None where the history has none of that id."""
    index = _Index(history)
    return _Judge(index, incident).outcome() if incident in index.first else None


def figures(each: Iterable[Outcome]) -> Figures:
    """The figures over some outcomes."""
    found = tuple(each)
    counts = {name: sum(item.ending == name for item in found) for name in get_args(Ending)}
    judged = counts["recovered"] + counts["failed"]
    times = [
        item.resumed_in
        for item in found
        if item.ending == "recovered" and item.resumed_in is not None
    ]
    return Figures(
        incidents=len(found),
        **counts,
        rate=counts["recovered"] / judged if judged else None,
        mean_resume=fmean(times) if times else None,
        median_resume=median(times) if times else None,
        repeated=sum(item.repeated for item in found),
    )


def goal_of(incident: IncidentRecord, committed_before: int = -1) -> int:
    """The first step whose commit is success: the failing one, once it is done, or, where that is
    later, the one behind what was committed before, or what the keeper still may commit of the
    attempt that failed."""
    held = incident.facts.reached if incident.fatal else -1
    return max(incident.where, committed_before + 1, held + 1)


def seconds(result: ResultRecord, *, commit: bool = False) -> float | None:
    """From the failure to the first new step, or with ``commit`` to the first commit past the
    failing one; None where it was not come to. A phase that was not measured took no time."""
    last = result.commit if commit else result.first_step
    if last is None:
        return None
    phases = [result.detect, result.decide, result.stop, result.start, result.restore]
    if commit:
        phases.append(result.first_step)
    return sum(phase for phase in phases if phase is not None) + last


class _Passed(NamedTuple):
    """At which place in the order of records, ``after`` how many seconds since the failure;
    ``human``: somebody spoke before."""

    place: int
    after: float
    human: bool


class _Ended(NamedTuple):
    """``taken``: from outside, so that it may still be proved that the job recovered."""

    ending: Ending
    why: str
    taken: bool = False


class _Index:
    """What is asked of the history for every incident, looked up once."""

    def __init__(self, history: History) -> None:
        self.records = history.records
        self.now = history.now
        self.lives = {life.attempt: life for life in history.lives}
        self.first: dict[str, int] = {}
        self.latest: dict[str, IncidentRecord] = {}
        self.results: dict[str, list[ResultRecord]] = {}
        self.decided: dict[str, tuple[int, DecisionRecord]] = {}
        self.last_of: dict[int, int] = {}
        self.committed: list[int] = []
        for place, (_, record) in enumerate(self.records):
            self._add(place, record)

    def _add(self, place: int, record: Record) -> None:
        self.last_of[record.attempt] = place
        newest = self.committed[-1] if self.committed else -1
        if isinstance(record, IncidentRecord | ProgressRecord):
            # Be it told by one that could not ask the store.
            newest = max(newest, record.facts.committed)
        self.committed.append(newest)
        if isinstance(record, IncidentRecord):
            self.first.setdefault(record.id, place)
            known = self.latest.get(record.id)
            if known is None or record.revision > known.revision:
                self.latest[record.id] = record
        elif isinstance(record, ResultRecord):
            self.results.setdefault(record.incident, []).append(record)
        elif isinstance(record, DecisionRecord) and (record.begins is not None or record.stops):
            self.decided[record.incident] = place, record


class _Judge:
    """One incident against all that was recorded after it."""

    def __init__(self, index: _Index, name: str) -> None:
        self._index = index
        self._name = name
        self._incident = index.latest[name]
        self._first = index.first[name]
        self._began = index.records[self._first][0]
        self._goal = goal_of(self._incident, index.committed[self._first])

    def outcome(self) -> Outcome:
        passed = self._passed()
        ending, why = self._ending(passed)
        last = self._result()
        incident = self._incident
        return Outcome(
            incident=self._name,
            attempt=incident.attempt,
            fault=incident.verdict.fault,
            domain=incident.verdict.domain,
            ending=ending,
            why=why,
            resumed_in=seconds(last) if last else None,
            committed_in=passed.after if passed else None,
            new_step=last.new_step if last else None,
            repeated=last.repeated if last else 0,
            tier=last.tier if last else "",
            human=passed.human if passed else self._spoken(),
        )

    def _ending(self, passed: _Passed | None) -> tuple[Ending, str]:
        ended = self._ended(len(self._index.records) if passed is None else passed.place)
        if ended is not None and ended.ending == "stopped" and not ended.taken:
            return "stopped", ended.why
        if passed is not None:
            ending, why = self._of_passed(passed)
            if ended is None or not ended.taken or ending == "recovered":
                return ending, why
        if ended is not None:
            return ended.ending, ended.why
        if self._index.now - self._began > RESUME_WITHIN:
            return "failed", f"step {self._goal} was not committed within 30 minutes"
        return "open", f"step {self._goal}, which would prove it, is not committed yet"

    def _of_passed(self, passed: _Passed) -> tuple[Ending, str]:
        if passed.human:
            return "failed", f"step {self._goal} was committed after a person had helped"
        if passed.after > RESUME_WITHIN:
            minutes = passed.after / 60
            return "failed", f"step {self._goal} was committed after {minutes:.0f} minutes"
        return "recovered", f"step {self._goal} is committed, with no human"

    # what is recorded after it

    def _later(self) -> Iterator[tuple[int, float, Record]]:
        records = self._index.records
        for place in range(self._first + 1, len(records)):
            at, record = records[place]
            yield place, at, record

    def _spoken(self) -> bool:
        return any(_helps(record) for _, _, record in self._later())

    def _result(self) -> ResultRecord | None:
        """The first that tells of success, else the last."""
        own = self._index.results.get(self._name, [])
        return next((r for r in own if r.success), own[-1] if own else None)

    def _passed(self) -> _Passed | None:
        """The first record that tells of a new commit past the goal."""
        human = False
        for place, at, record in self._later():
            human |= _helps(record)
            if not self._tells(record):
                continue
            measured = seconds(record, commit=True) if isinstance(record, ResultRecord) else None
            return _Passed(place, at - self._began if measured is None else measured, human)
        return None

    def _tells(self, record: Record) -> bool:
        if isinstance(record, ResultRecord):
            return record.incident == self._name and record.success
        if not isinstance(record, ProgressRecord | IncidentRecord):
            return False
        # What the keeper still commits of an attempt that has failed proves no recovery.
        if record.attempt < self._incident.attempt + self._incident.fatal:
            return False
        finished = isinstance(record, ProgressRecord) and record.finished
        return finished or (not record.facts.offline and record.facts.committed >= self._goal)

    # how the attempts that followed ended

    def _ended(self, before: int) -> _Ended | None:
        """None where they may still go on, or had not ended at that place in the history."""
        incident: IncidentRecord | None = self._incident
        while incident is not None:
            place, decision = self._index.decided.get(incident.id, (0, None))
            if decision is None or place >= before:
                return None
            if decision.stops:
                return self._of_stop(incident, decision)
            life = self._index.lives.get(decision.begins or 0)
            if life is None or life.ended is None:
                return None
            attempt = incident.attempt
            incident = next((i for i in life.incidents if i.attempt > attempt), None)
            early = self._index.last_of.get(life.attempt, place) < before
            if incident is None and early and life.cause in ("person", "external"):
                taken = life.cause == "external"
                who = "the job was taken away" if taken else "a person ended the job"
                return _Ended("stopped", f"{who} before a new step was committed", taken)
        return None

    def _of_stop(self, last: IncidentRecord, decision: DecisionRecord) -> _Ended:
        why = decision.rung.why or decision.reason
        if not meant(last, decision):
            return _Ended("failed", why)
        own = last.id == self._name or fingerprint_of(last) == fingerprint_of(self._incident)
        if own or last.cause == "person":
            return _Ended("stopped", why)
        why = f"the job was stopped for {last.verdict.fault} before it got past this"
        return _Ended("failed", why)


def _helps(record: Record) -> bool:
    """A mode is no help: every start of the job may say it anew."""
    return isinstance(record, WordRecord) and record.word != "on-fault"


def meant(incident: IncidentRecord, decision: DecisionRecord) -> bool:
    """Whether a stop is the right end: the evidence says that no restart helps, the failure came
    again identically (F4), or a person wanted it. A spent budget, or a state that is lost, is not.
    """
    word = incident.last_word
    if word is not None:
        return word.exit_code not in _LOST_WORK
    cancelled = incident.verdict.fault == "USER_CANCEL"
    return cancelled or decision.exit_code == exits.REPEATED or incident.verdict.action == "stop"
