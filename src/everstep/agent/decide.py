"""How an attempt ended, and whether that was the job's last word.

Owns: the meaning of the workers' exit codes, and the ends after which no restart is wanted or can
help. Pure: records in, a record out; no clock, no process. Never does: judge a failure
(:mod:`everstep.faults`). Called by: respond.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from everstep.core import exits
from everstep.faults.history import DecisionRecord, IncidentRecord

_RANKED = (exits.REFUSED, exits.NO_RECOVERY_POINT, exits.NOT_DURABLE, exits.PREEMPTED)
"""Final codes of workers, the most telling first."""


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended: ``code`` is negative for a signal; ``by_everstep`` says that the
    agent sent it, so that it tells nothing about the worker."""

    rank: int
    code: int
    by_everstep: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """What is known of an attempt that has ended.

    ``restored`` is the step it went on from (-1: from nothing, or unknown), ``reached`` the
    newest step a snapshot of it is complete for (-1: none), ``finished_step`` the newest step that
    all workers are known to have finished (-1: none, or unknown), ``committed`` the newest that it
    committed. ``fatal`` is (exit code, reason) of a worker's last word. ``attached`` says that its
    workers use everstep. ``hang`` says why all of them were ended, where they hung; ``hung`` are
    the ranks that stood still.
    """

    workers: tuple[WorkerEnd, ...] = ()
    restored: int = -1
    reached: int = -1
    finished_step: int = -1
    committed: int = -1
    attached: bool = False
    finished: bool = False
    fatal: tuple[int, str] | None = None
    stopped_by: int | None = None
    members_changed: bool = False
    lost_nodes: tuple[int, ...] = ()
    hang: str = ""
    hung: tuple[int, ...] = ()

    @property
    def furthest(self) -> int:
        """The furthest step that is known of it."""
        return max(self.finished_step, self.reached, self.restored)

    @property
    def failures(self) -> list[WorkerEnd]:
        """The workers that failed by themselves."""
        return [worker for worker in self.workers if worker.code != 0 and not worker.by_everstep]


@dataclass(frozen=True)
class LastWord:
    """An end after which no restart is wanted or can help: the agent's exit code, and why.
    ``warning`` is said with it. ``failed``: something was wrong, for a person to look at."""

    exit_code: int
    reason: str
    warning: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Decision:
    """What the agent does next. ``record`` is the decision that the history has of it, None where
    nothing had to be decided, ``incident`` what it is about. ``delay`` (seconds) comes before the
    next attempt."""

    action: Literal["restart", "stop"]
    exit_code: int
    reason: str
    warning: str = ""
    delay: float = 0.0
    record: DecisionRecord | None = None
    incident: IncidentRecord | None = None


def last_word(end: AttemptEnd) -> LastWord | None:
    """Whether, and how, the job ends with this attempt whatever failed in it; None where that is
    to be judged."""
    if end.fatal is not None:
        return LastWord(*end.fatal, failed=True)
    for code in _RANKED:
        if any(worker.code == code for worker in end.workers):
            return LastWord(code, exits.MEANING[code], failed=code != exits.PREEMPTED)
    if end.finished:
        warning = f"{first(end)}, after the job had finished" if end.failures else ""
        at = f": step {end.furthest} is committed" if end.furthest >= 0 else ""
        return LastWord(exits.FINISHED, f"the job finished{at}", warning)
    if end.stopped_by is not None:
        return LastWord(*_stopped_by(end, end.stopped_by))
    done = bool(end.workers) and all(worker.code == 0 for worker in end.workers)
    if done and not end.lost_nodes and not end.members_changed:
        reason = "all workers ended with exit code 0"
        return LastWord(exits.FINISHED, reason, _unprotected(end))
    return None


def peaceful(code: int) -> bool:
    """Whether a worker that ended so lets the others come to their end by themselves."""
    return code in (exits.FINISHED, exits.PREEMPTED, exits.NOT_DURABLE)


def describe(code: int) -> str:
    """An exit code in words: ``SIGKILL``, ``exit code 1``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def first(end: AttemptEnd) -> str:
    """The first failure in words."""
    if end.hang:
        return end.hang
    if end.failures:
        return f"rank {end.failures[0].rank} ended with {describe(end.failures[0].code)}"
    if end.lost_nodes:
        return f"node {end.lost_nodes[0]} was lost"
    if end.members_changed:
        return "the nodes of the job changed"
    return "the attempt ended early"


def _unprotected(end: AttemptEnd) -> str:
    """The warning for a script that looks protected and is not."""
    if end.attached:
        return ""
    return (
        "the script never called everstep.attach, or ended no step after it: nothing was saved, "
        "and a restart would have begun anew"
    )


def _stopped_by(end: AttemptEnd, number: int) -> tuple[int, str]:
    name = signal.Signals(number).name
    if number != signal.SIGTERM:
        again = "start the job again and it goes on from its newest state"
        return exits.SIGNALLED + number, f"stopped by {name}; {again}"
    if end.attached and end.workers and all(worker.code == 0 for worker in end.workers):
        return exits.FINISHED, "all workers ended with exit code 0"
    return exits.PREEMPTED, f"stopped by {name}"
