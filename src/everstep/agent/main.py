"""``everstep run`` from its arguments to its exit code.

Owns: reading the command line, and saying an error that prevents the run. Called by: cli.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from everstep.agent.ending import exit_code_of
from everstep.agent.flags import Launch, parse
from everstep.agent.loop import Agent
from everstep.agent.record import Recorder
from everstep.agent.script import check_script
from everstep.agent.signals import Signals
from everstep.core.settings import Settings, misspelt, variable
from everstep.core.shown import shown
from everstep.errors import EverstepError, ObjectMissing, StoreError
from everstep.store import open_store


def run(arguments: Sequence[str]) -> int:
    """Run a job as the command line says; its exit code (:mod:`everstep.core.exits`)."""
    try:
        launch = _with_absolute_events(parse(arguments, os.environ))
        check_script(launch.name, launch.kind, os.environ)
    except EverstepError as error:
        print(shown(f"everstep run: {error}"), file=sys.stderr)
        return exit_code_of(error)
    # Workers inherit this from torchrun's agent too.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = launch.config.signals_to_handle
    settings = launch.settings
    lines = _take_stdout() if launch.json else None
    record = Recorder(settings.job, settings.events, lines=lines)
    with contextlib.closing(record), Signals(launch.config.signals_to_handle) as signals:
        try:
            agent = Agent(launch, signals, record)
            _greet(launch, record)
            return agent.run()
        except EverstepError as error:
            code = exit_code_of(error)
            record.say("job.stopped", str(error), level="error", exit_code=code, error=error.code)
            return code


def _take_stdout() -> BinaryIO:
    """Standard output, for events alone: what workers print to it goes to standard error."""
    sys.stdout.flush()
    taken = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return taken


def _greet(launch: Launch, record: Recorder) -> None:
    settings = launch.settings
    made = "" if launch.job_given else " (named after the script and its arguments)"
    record.say(
        "job.started", f"job {settings.job}{made} in {settings.store}{_outlook(settings)}",
        store=settings.store, resume=settings.resume, agent_pid=os.getpid(),
    )  # fmt: skip
    if wrong := misspelt(os.environ):
        record.say("job.warning", wrong, level="warning")


def _outlook(settings: Settings) -> str:
    """What the job begins with, as far as it is known before its claim; nothing is made for it."""
    afresh = "to start afresh: --resume never, or another --job."
    if settings.resume == "never":
        return ". It starts afresh (--resume never)."
    again = f"Started again, it goes on from its newest state; {afresh}"
    try:
        if open_store(settings.store).job(settings.job).expected():
            return f". It goes on from its newest state; {afresh}"
        return f": a new job. {again}"
    except ObjectMissing:
        # Said by name: a path that is not mounted looks like this too (R5).
        return "." if settings.resume == "require" else f": a new job in a new store. {again}"
    except StoreError:
        return "."  # it cannot be read: the claim, which comes next, says why


def _with_absolute_events(launch: Launch) -> Launch:
    # The keeper stands in the agent's folder, but a worker may change its own.
    events = launch.settings.events
    if not events:
        return launch
    settings = replace(launch.settings, events=os.path.abspath(events))
    os.environ[variable("events")] = settings.events
    return replace(launch, settings=settings)
