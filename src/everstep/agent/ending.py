"""What people are told at the end of a run, and in which order.

Owns: that workers' last words are shown first, which failures are told how, and the exit code of
an error that prevents a run. Never does: decide. Called by: the loop, begin, main.
"""

from __future__ import annotations

import shlex
import time

from everstep.agent import report
from everstep.agent.decide import Decision
from everstep.agent.flags import Launch
from everstep.agent.output import Output
from everstep.agent.record import Recorder
from everstep.agent.signals import Interrupted, Signals
from everstep.core import exits
from everstep.errors import (
    EverstepError,
    JobOwned,
    NoRecoveryPoint,
    RestoreError,
    StoreError,
)

SHOW_SECONDS = 5.0
"""At the end of a job that did not finish: for a slow console to take what workers printed."""
STOPPED_SECONDS = 0.5
"""Without a byte taken: then the console is one that nobody reads."""


def show_output(output: Output, signals: Signals, record: Recorder, decision: Decision) -> None:
    """What workers printed comes before what is said of it. A job that ended by itself waits for
    its console, as its workers did before there was an agent between; a signal ends it."""
    began, waits = time.monotonic(), decision.exit_code == exits.FINISHED
    try:
        with signals.interruptible():
            while not output.flush(STOPPED_SECONDS):
                now = time.monotonic()
                moves = now - output.moved < STOPPED_SECONDS
                if not waits and (now - began > SHOW_SECONDS or not moves):
                    break
    except Interrupted:
        signals.take()
    if output.lost:
        record.say(
            "output.lost", f"not all that workers printed could be shown: {output.lost}",
            level="warning",
        )  # fmt: skip


def tell_end(
    launch: Launch, record: Recorder, decision: Decision, failures: list[report.Failure]
) -> None:
    """The workers' errors as torchrun's users know them, and the exit code with its reason."""
    if decision.warning:
        record.say("job.warning", decision.warning, level="warning")
    wanted = decision.exit_code in (exits.FINISHED, exits.PREEMPTED)
    quiet = wanted or decision.exit_code > exits.SIGNALLED
    told = decision.reason
    if decision.exit_code in exits.FINAL and report.tell_refusals(failures):
        told = "the job cannot go on: see the error above; a restart would not help"
    elif not quiet and any(not failure.ours for failure in failures):
        report.tell(launch.name, failures)
    where = f"--store {shlex.quote(launch.settings.store)} --job {shlex.quote(launch.settings.job)}"
    told = told.replace("everstep retry ", f"everstep retry {where} ")
    record.say(
        "job.stopped", f"exit code {decision.exit_code}: {told}",
        level="info" if quiet else "error", exit_code=decision.exit_code,
        reason=decision.reason, errors=report.messages(failures),
    )  # fmt: skip


def exit_code_of(error: EverstepError) -> int:
    """The exit code of a run that ``error`` prevents."""
    if isinstance(error, JobOwned):
        return exits.OWNED
    if isinstance(error, NoRecoveryPoint):
        return exits.NO_RECOVERY_POINT
    if isinstance(error, RestoreError):
        return exits.REFUSED
    if error.blame == "user":
        return exits.USAGE
    return exits.NO_STORE if isinstance(error, StoreError) else exits.FAILED
