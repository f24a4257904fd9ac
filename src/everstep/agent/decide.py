"""After an attempt's end: go on, or stop with which code.

Owns: the rules of DESIGN section 9 about progress, and the meaning of the workers' exit codes.
Pure: records in, a record out; no clock, no process. Called by: the loop.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from everstep.core import exits

STUCK_LIMIT = 3
"""Attempts in a row that restored no later step than the one before: then the job is stopped."""

STUCK_HARD_LIMIT = 6
"""The same, for attempts that did complete a later snapshot which the next could not restore."""

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
    newest step a snapshot of it is complete for (-1: none). ``fatal`` is (exit code, reason) of a
    worker's last word. ``attached`` says that its workers use everstep.
    """

    workers: tuple[WorkerEnd, ...] = ()
    restored: int = -1
    reached: int = -1
    attached: bool = False
    finished: bool = False
    fatal: tuple[int, str] | None = None
    stopped_by: int | None = None
    members_changed: bool = False
    lost_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class History:
    """The attempts of this agent so far: restarts made, how many in a row made no progress, and
    the step that the attempt before restored."""

    restarts: int = 0
    stuck: int = 0
    last_restored: int = -1


@dataclass(frozen=True)
class Decision:
    """``history`` is what the next attempt is judged by. ``warning`` is said, whatever is done."""

    action: Literal["restart", "stop"]
    exit_code: int
    reason: str
    history: History
    warning: str = ""


def decide(end: AttemptEnd, history: History, max_restarts: int | None) -> Decision:
    """What follows an attempt. ``max_restarts`` None: the rule of progress limits restarts."""
    stopped = _stop_for_good(end, history)
    if stopped is not None:
        return stopped
    if end.members_changed and not _failures(end):
        # A node that came or went is nobody's failure: torchrun does not count it either.
        return Decision("restart", 0, "the nodes of the job changed", history)
    judged = _judge(end, history)
    if max_restarts is not None:
        if history.restarts >= max_restarts:
            reason = f"{_first(end)}, and --max-restarts {max_restarts} is used up"
            return Decision("stop", exits.FAILED, reason, judged)
    elif _stuck(end, judged):
        reason = f"{_first(end)}, and {judged.stuck} attempts in a row made no progress (EVS-502)"
        return Decision("stop", exits.NO_PROGRESS, reason, judged)
    return Decision("restart", 0, _first(end), replace(judged, restarts=history.restarts + 1))


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


def _stop_for_good(end: AttemptEnd, history: History) -> Decision | None:
    """The ends after which no restart is wanted or can help."""

    def stop(code: int, reason: str, warning: str = "") -> Decision:
        return Decision("stop", code, reason, history, warning)

    failures = _failures(end)
    if end.fatal is not None:
        return stop(*end.fatal)
    for code in _RANKED:
        if any(worker.code == code for worker in end.workers):
            return stop(code, exits.MEANING[code])
    if end.finished:
        warning = f"{_first(end)}, after the job had finished" if failures else ""
        return stop(exits.FINISHED, "the job finished", warning)
    if end.stopped_by is not None:
        return stop(*_stopped_by(end, end.stopped_by))
    done = bool(end.workers) and all(worker.code == 0 for worker in end.workers)
    if done and not end.lost_nodes and not end.members_changed:
        return stop(exits.FINISHED, "all workers ended with exit code 0")
    return None


def _stopped_by(end: AttemptEnd, number: int) -> tuple[int, str]:
    name = signal.Signals(number).name
    if number != signal.SIGTERM:
        return exits.SIGNALLED + number, f"stopped by {name}"
    if end.attached and end.workers and all(worker.code == 0 for worker in end.workers):
        return exits.FINISHED, "all workers ended with exit code 0"
    return exits.PREEMPTED, f"stopped by {name}"


def _failures(end: AttemptEnd) -> list[WorkerEnd]:
    return [worker for worker in end.workers if worker.code != 0 and not worker.by_everstep]


def _first(end: AttemptEnd) -> str:
    failures = _failures(end)
    if failures:
        return f"rank {failures[0].rank} ended with {describe(failures[0].code)}"
    if end.lost_nodes:
        return f"node {end.lost_nodes[0]} was lost"
    return "the attempt ended early"


def _judge(end: AttemptEnd, history: History) -> History:
    progress = end.restored > history.last_restored
    return replace(history, stuck=0 if progress else history.stuck + 1, last_restored=end.restored)


def _stuck(end: AttemptEnd, judged: History) -> bool:
    # The next attempt can go on from a snapshot that this one completed: that is not the end,
    # unless the attempts before said so too and each time it could not be restored.
    limit = STUCK_HARD_LIMIT if end.reached > end.restored else STUCK_LIMIT
    return judged.stuck >= limit
