"""After an attempt's end: go on, or stop with which code.

Owns: the rules of progress, and the meaning of the workers' exit codes.
Pure: records in, a record out; no clock, no process. Called by: the loop.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from everstep.core import exits
from everstep.errors import NoProgress

STUCK_LIMIT = 3
"""Attempts in a row that got no further: then the job is stopped."""

UNRESTORED_LIMIT = 6
"""Attempts in a row that restored no later step, however far they came: then the job is stopped,
because it computes the same steps again and again."""

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
    all workers of the node that decides have finished (-1: none, or unknown). ``fatal`` is (exit
    code, reason) of a worker's last word. ``attached`` says that its workers use everstep.
    """

    workers: tuple[WorkerEnd, ...] = ()
    restored: int = -1
    reached: int = -1
    finished_step: int = -1
    attached: bool = False
    finished: bool = False
    fatal: tuple[int, str] | None = None
    stopped_by: int | None = None
    members_changed: bool = False
    lost_nodes: tuple[int, ...] = ()

    @property
    def furthest(self) -> int:
        """The furthest step that is known of it."""
        return max(self.finished_step, self.reached, self.restored)


@dataclass(frozen=True)
class History:
    """The attempts of this agent so far: restarts made, how many attempts in a row got no further
    and how many restored no later step, the step that the attempt before restored, and the
    furthest one that any has come to."""

    restarts: int = 0
    stuck: int = 0
    unrestored: int = 0
    last_restored: int = -1
    furthest: int = -1


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
    elif (stuck := _stuck(judged)) is not None:
        return Decision(
            "stop", exits.NO_PROGRESS, f"{_first(end)}, and {stuck} ({NoProgress.code})", judged
        )
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
        at = f": step {end.furthest} is committed" if end.furthest >= 0 else ""
        return stop(exits.FINISHED, f"the job finished{at}", warning)
    if end.stopped_by is not None:
        return stop(*_stopped_by(end, end.stopped_by))
    done = bool(end.workers) and all(worker.code == 0 for worker in end.workers)
    if done and not end.lost_nodes and not end.members_changed:
        return stop(exits.FINISHED, "all workers ended with exit code 0", _unprotected(end))
    return None


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
    """Count the attempt.

    One that comes further than all before it, or restores a later step than the one before, is
    progress. One that ends at exactly the furthest step again is none, whatever it restored, and
    shows that the first to end there was none either: so a script that always fails at the same
    step gets three attempts, no matter when a snapshot came between.
    """
    later = end.restored > history.last_restored
    if end.furthest > history.furthest:
        stuck = 0
    elif end.furthest == history.furthest >= 0:
        stuck = max(history.stuck, 1) + 1
    else:
        stuck = 0 if later else history.stuck + 1
    return replace(
        history,
        stuck=stuck,
        unrestored=0 if later else history.unrestored + 1,
        # An attempt that ended before it restored anything says nothing of what can be restored.
        last_restored=end.restored if end.restored >= 0 else history.last_restored,
        furthest=max(end.furthest, history.furthest),
    )


def _stuck(judged: History) -> str | None:
    """Why no further attempt is made, None where one is."""
    if judged.stuck >= STUCK_LIMIT:
        at = f", not beyond step {judged.furthest}" if judged.furthest >= 0 else ""
        return f"{judged.stuck} attempts in a row got no further{at}"
    if judged.unrestored >= UNRESTORED_LIMIT:
        return f"{judged.unrestored} attempts in a row could not go on from a later step"
    return None
