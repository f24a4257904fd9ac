"""``everstep status``: where a job stands, and the next command to try."""

from __future__ import annotations

import time

import click
import msgspec
from rich.console import Console

from everstep.cli.past import past_of, render_problems
from everstep.cli.places import branch_problems, job_option, next_to_load, store_option
from everstep.cli.report import age, json_option, reported, reporter
from everstep.faults.standing import Standing, excluded_text, figures_text, standing
from everstep.store import Job

FORMAT = "everstep.status/1"


class LastCheckpoint(msgspec.Struct, frozen=True):
    """What a restart would load; ``age_s`` since its commit, by this machine's clock."""

    step: int
    attempt: int
    age_s: float


class Status(msgspec.Struct, frozen=True):
    """What ``everstep status --json`` prints. ``owner`` is empty where nobody is known to run the
    job. ``problems`` are damaged records of its history and branches."""

    store: str
    job: str
    owner: str
    attempts: int
    checkpoint: LastCheckpoint | None
    standing: Standing
    problems: tuple[str, ...]
    format: str = FORMAT


@click.command("status")
@job_option
@store_option
@json_option
@reported
def command(job: str | None, store: str, as_json: bool) -> int:
    """Say where a job stands: running, waiting, stopped, finished or never run; its last
    checkpoint, how many incidents it recovered from and how fast, what is left of its budgets,
    excluded nodes, and the next command to try.

    Exit code 1 where a record of the job cannot be read.
    """
    past = past_of(store, job)
    status = Status(
        store=past.url,
        job=past.job.name,
        owner=past.present.owner,
        attempts=past.present.attempts,
        checkpoint=_checkpoint(past.job, time.time()),
        standing=standing(past.history, past.present, past.limits),
        problems=(*past.problems, *branch_problems(past.job)),
    )
    reporter(as_json=as_json).result(status, lambda console: _render(status, console))
    return 1 if status.problems else 0


def _checkpoint(job: Job, now: float) -> LastCheckpoint | None:
    point = next_to_load(job).point
    if point is None:
        return None
    found = next((c for c in job.checkpoints() if c.point == point), None)
    since = now - (found.committed_at or found.modified) if found is not None else 0.0
    return LastCheckpoint(point.step, point.attempt, round(max(0.0, since), 3))


def _render(status: Status, console: Console) -> None:
    found = status.standing
    console.print(f"{status.job} in {status.store}: {found.state}: {found.why}",
                  markup=False, soft_wrap=True)  # fmt: skip
    for name, text in _lines(status):
        console.print(f"{name:<16}{text}", markup=False, soft_wrap=True)
    render_problems(status.problems, console)


def _lines(status: Status) -> list[tuple[str, str]]:
    found, at = status.standing, status.checkpoint
    where = "none" if at is None else f"step {at.step} of attempt {at.attempt}, {age(at.age_s)} old"
    lines = [("last checkpoint", where), ("incidents", figures_text(found.figures))]
    lines += [("budget", text) for text in found.budget]
    lines += [("excluded", excluded_text(item)) for item in found.excluded]
    if found.mode != "act":
        lines.append(("on fault", f"{found.mode}: verdicts are not acted on"))
    if found.last_incident:
        lines.append(("last incident", f"{found.last_incident}: everstep explain"))
    return [*lines, ("next", found.next or "nothing to do")]
