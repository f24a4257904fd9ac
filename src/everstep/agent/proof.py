"""Proof of resume (F7): what became of each incident, with the time that every phase took.

Owns: the incidents that are not yet proved, and their times. Pure but for what it is told: times
come in as arguments (seconds of CLOCK_MONOTONIC on this host). Never does: I/O. Called by: lead,
which writes the records that it gives, and supervise, which tells it of restores and steps.

An incident is proved when a step past the failing one is committed in time
(:data:`~everstep.faults.outcomes.RESUME_WITHIN`); failures on the way belong to incidents of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.faults.history import IncidentRecord, ResultRecord, Stamp
from everstep.faults.outcomes import RESUME_WITHIN


@dataclass
class _Trial:
    """One incident on its way. Times are None until they are known."""

    incident: str
    attempt: int
    where: int
    finished: int
    failed: float
    since: float
    ended: float
    decided: float
    started: float | None = None
    restored: float | None = None
    stepped: float | None = None
    from_step: int = -1
    new_step: int | None = None
    tier: str = ""


@dataclass
class Proofs:
    """The incidents of this agent's job that wait for their proof."""

    _trials: list[_Trial] = field(default_factory=list)

    @property
    def waits_for_step(self) -> bool:
        """Whether the first new step of the attempt that runs has yet to be seen."""
        return any(t.restored is not None and t.stepped is None for t in self._trials)

    @property
    def any(self) -> bool:
        """Whether any incident waits for its proof."""
        return bool(self._trials)

    @property
    def has_stepped(self) -> bool:
        """Whether the newest of them has led to a new step."""
        return bool(self._trials) and self._trials[-1].stepped is not None

    def begin(
        self, incident: IncidentRecord, *, since: float, failed: float, ended: float, decided: float
    ) -> None:
        """A restart was decided for ``incident``: it failed at ``since`` (as near as that is
        known), was seen at ``failed``, all workers had ended at ``ended``. Once for each."""
        if any(trial.incident == incident.id for trial in self._trials):
            return
        self._trials.append(
            _Trial(
                incident.id, incident.attempt, incident.where, incident.facts.furthest,
                failed, since, ended, decided,
            )
        )  # fmt: skip

    def started(self, now: float) -> None:
        """The next attempt's workers were started."""
        for trial in self._trials:
            if trial.started is None:
                trial.started = now

    def restored(self, step: int, tier: str, now: float) -> None:
        """They hold the state of ``step`` (-1: they begin anew)."""
        for trial in self._trials:
            if trial.restored is None:
                # Of a start from nothing the first step is number 1, whatever is posted before it.
                trial.restored, trial.from_step, trial.tier = now, max(step, 0), tier

    def stepped(self, step: int, now: float) -> None:
        """All of them have finished ``step`` at ``now``."""
        for trial in self._trials:
            if trial.restored is not None and trial.stepped is None and step > trial.from_step:
                trial.stepped, trial.new_step = now, step

    def ended(self) -> None:
        """The attempt at hand has ended: what it did not come to is timed in the next one."""
        for trial in self._trials:
            if trial.stepped is None:
                trial.started = trial.restored = None

    def committed(self, step: int, now: float, at: Stamp) -> list[ResultRecord]:
        """``step`` is committed: the records of those that are proved by it."""
        proved = [t for t in self._trials if step >= t.where and _in_time(t, now)]
        self._trials = [t for t in self._trials if t not in proved]
        return [_result(t, at, success=True, committed=now) for t in proved]

    def overdue(self, now: float, at: Stamp) -> list[ResultRecord]:
        """The records of those whose time is over."""
        late = [t for t in self._trials if not _in_time(t, now)]
        self._trials = [t for t in self._trials if t not in late]
        return [_result(t, at, success=False) for t in late]

    def give_up(self, at: Stamp) -> list[ResultRecord]:
        """The job stops: the records of all that are not proved."""
        left, self._trials = self._trials, []
        return [_result(t, at, success=False) for t in left]


def _in_time(trial: _Trial, now: float) -> bool:
    return now - trial.failed <= RESUME_WITHIN


def _result(
    trial: _Trial, at: Stamp, *, success: bool, committed: float | None = None
) -> ResultRecord:
    return ResultRecord(
        id=f"{trial.incident}.result",
        incident=trial.incident,
        attempt=trial.attempt,
        at=at,
        success=success,
        detect=max(0.0, trial.failed - trial.since),
        stop=max(0.0, trial.ended - trial.failed),
        decide=max(0.0, trial.decided - trial.ended),
        start=_between(trial.decided, trial.started),
        restore=_between(trial.started, trial.restored),
        first_step=_between(trial.restored, trial.stepped),
        commit=_between(trial.stepped, committed),
        new_step=trial.new_step,
        repeated=max(0, trial.finished - max(0, trial.from_step)) if trial.tier else 0,
        tier=trial.tier,
    )


def _between(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else max(0.0, last - first)
