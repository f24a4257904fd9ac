"""Which store, job and checkpoints a command looks at.

Owns: the arguments that ``ls``, ``show``, ``verify`` and ``doctor`` share, and finding what they
name. Called by: those commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click

from everstep.core.ids import Point, parse_point
from everstep.core.settings import DEFAULT_STORE
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing, StoreError, UsageError
from everstep.store import Job, Store

STORE_ENVIRONMENT = "EVERSTEP_STORE"
JOB_ENVIRONMENT = "EVERSTEP_JOB"


def store_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """``STORE``: a path or URL; from EVERSTEP_STORE, else ``./everstep-store``."""
    argument = click.argument("store", envvar=STORE_ENVIRONMENT, default=DEFAULT_STORE)
    return argument(command)


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--store STORE``, where the argument is something else; its defaults are the same."""
    option = click.option(
        "--store", envvar=STORE_ENVIRONMENT, default=DEFAULT_STORE, metavar="STORE",
        help="Path or URL of the store (default: EVERSTEP_STORE, else ./everstep-store).",
    )  # fmt: skip
    return option(command)


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

    Raises :class:`UsageError` for a text that names none, ``ObjectMissing`` where there is none,
    ``NewerFormat`` where a restart would stop at one.
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


class Next(NamedTuple):
    """``point`` is what a restart would load as far as is known, None where it would find nothing
    or stop at a checkpoint of a newer format; ``errors`` say why those before it cannot be opened.
    """

    point: Point | None
    errors: dict[Point, StoreError]


def next_to_load(job: Job) -> Next:
    """Open the candidates, newest first, to the first that is sound (S6)."""
    damaged = {info.point for info in job.checkpoints() if info.verified == "damaged"}
    errors: dict[Point, StoreError] = {}
    for point in job.candidates():
        try:
            job.open_checkpoint(point)
        except NewerFormat as error:
            errors[point] = error
            return Next(None, errors)
        except (CorruptObject, ObjectMissing) as error:
            errors[point] = error
            continue
        if point not in damaged:
            return Next(point, errors)
    return Next(None, errors)


def branch_problems(job: Job) -> tuple[str, ...]:
    """Why branches of the job cannot be read, and what to do."""
    found = sorted(job.branches().items())
    return tuple(branch.problem for _, branch in found if branch.problem)


def _newest(job: Job) -> Point:
    point, errors = next_to_load(job)
    if point is not None:
        return point
    for error in errors.values():
        if isinstance(error, NewerFormat):
            raise error
    damaged = [each for each in job.candidates() if each not in errors]
    if damaged:
        return damaged[0]  # it opens at least, and its records can be shown
    why = "".join(f" {problem}" for problem in branch_problems(job))
    raise ObjectMissing(
        f"job {job.name} has no sound checkpoint on its lineage.{why}",
        hint="`everstep ls` shows what is there.",
    )


def _loose(text: str) -> Point:
    """``40`` or ``40-2``; attempt 0 stands for any."""
    step, _, attempt = text.partition("-")
    if not step.isdigit() or (attempt and not attempt.isdigit()):
        raise UsageError(f"--at {text!r} is not STEP or STEP-ATTEMPT.")
    return Point(int(step), int(attempt or 0))


def _matches(point: Point, wanted: Point) -> bool:
    return point.step == wanted.step and wanted.attempt in (0, point.attempt)
