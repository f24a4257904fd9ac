"""Which store, job and checkpoints a command looks at.

Owns: the arguments that ``ls``, ``show``, ``verify`` and ``doctor`` share, and finding what they
name. Called by: those commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from everstep.core.ids import Point, parse_point
from everstep.core.settings import DEFAULT_STORE
from everstep.errors import ObjectMissing, UsageError
from everstep.store import Job, Store

STORE_ENVIRONMENT = "EVERSTEP_STORE"
JOB_ENVIRONMENT = "EVERSTEP_JOB"


def store_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """``STORE``: a path or URL; from EVERSTEP_STORE, else ``./everstep-store``."""
    argument = click.argument("store", envvar=STORE_ENVIRONMENT, default=DEFAULT_STORE)
    return argument(command)


def job_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--job NAME``; from EVERSTEP_JOB."""
    return click.option("--job", envvar=JOB_ENVIRONMENT, metavar="NAME", help="Name of the job.")(
        command
    )


def at_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--at STEP`` or ``--at STEP-ATTEMPT``: which checkpoint."""
    return click.option(
        "--at", metavar="STEP[-ATTEMPT]", help="The checkpoint of that step (newest attempt)."
    )(command)


def jobs_of(store: Store, name: str | None) -> list[Job]:
    """The job of that name, or all. Raises ``ObjectMissing`` where the name does not exist."""
    names = store.jobs()
    if name is None:
        return [store.job(each) for each in names]
    job = store.job(name)
    if name not in names:
        known = ", ".join(names) or "none"
        raise ObjectMissing(f"there is no job {name} in {store.url}.", hint=f"Jobs there: {known}.")
    return [job]


def one_job(store: Store, name: str | None) -> Job:
    """The job of that name, or the only one. Raises ``UsageError`` where several could be meant."""
    jobs = jobs_of(store, name)
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise ObjectMissing(f"there is no job in {store.url} yet.")
    names = ", ".join(job.name for job in jobs)
    raise UsageError(f"{store.url} holds several jobs.", hint=f"Say --job, one of: {names}.")


def find_point(job: Job, at: str | None) -> Point:
    """The committed checkpoint that ``at`` names; the one that would load where it is None.

    Raises :class:`UsageError` for a text that names none, ``ObjectMissing`` where there is none.
    """
    if at is None:
        return _newest(job)
    wanted = parse_point(at) or _loose(at)
    committed = [info.point for info in job.checkpoints() if info.state == "committed"]
    matching = [point for point in committed if _matches(point, wanted)]
    if not matching:
        known = ", ".join(str(point.step) for point in committed) or "none"
        raise ObjectMissing(
            f"job {job.name} has no committed checkpoint {at}.", hint=f"Steps there: {known}."
        )
    return max(matching)


def _newest(job: Job) -> Point:
    candidates: Sequence[Point] = job.candidates()
    if not candidates:
        raise ObjectMissing(
            f"job {job.name} has no committed checkpoint on its lineage.",
            hint="`everstep ls` shows what is there.",
        )
    return candidates[0]


def _loose(text: str) -> Point:
    """``40`` or ``40-2``; attempt 0 stands for any."""
    step, _, attempt = text.partition("-")
    if not step.isdigit() or (attempt and not attempt.isdigit()):
        raise UsageError(f"--at {text!r} is not STEP or STEP-ATTEMPT.")
    return Point(int(step), int(attempt or 0))


def _matches(point: Point, wanted: Point) -> bool:
    return point.step == wanted.step and wanted.attempt in (0, point.attempt)
