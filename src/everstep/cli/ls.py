"""``everstep ls``: the jobs of a store and their checkpoints."""

from __future__ import annotations

import time

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from everstep.cli.places import (
    branch_problems,
    job_option,
    jobs_of,
    next_to_load,
    store_argument,
)
from everstep.cli.report import age, json_option, mark, reported, reporter, size, table
from everstep.core.events import counted
from everstep.core.health import Health
from everstep.errors import NewerFormat, StoreError
from everstep.store import CheckpointInfo, Job, open_store

FORMAT = "everstep.ls/1"


class Listed(msgspec.Struct, frozen=True):
    """One checkpoint. ``state``: ``verified`` (a committed one whose every byte was proved),
    ``committed``, ``damaged``, ``newer format`` (only a later everstep can read it), ``incomplete``
    or ``tombstoned``; ``age_s`` since its commit, by this machine's clock; ``loads``: it is the one
    that a restart would load; ``error``: why it cannot be opened; ``undecided``: a damaged branch
    hides whether it is on the current lineage. ``health``: ``sound`` (its values were finite and
    its replicas agreed), ``unsound``, or empty where that was not written down; it counts as
    healthy once it is old enough for what is found late."""

    step: int
    attempt: int
    state: str
    age_s: float
    bytes: int
    world: int
    on_lineage: bool
    loads: bool
    error: str = ""
    undecided: bool = False
    health: str = ""


class ListedJob(msgspec.Struct, frozen=True):
    """A job: who runs it now (empty: nobody that is known), and its checkpoints, newest first.
    ``problems`` are damaged records that the lineage needs."""

    job: str
    owner: str
    attempts: int
    checkpoints: tuple[Listed, ...]
    problems: tuple[str, ...] = ()


class Listing(msgspec.Struct, frozen=True):
    """What ``everstep ls --json`` prints."""

    store: str
    jobs: tuple[ListedJob, ...]
    format: str = FORMAT


@click.command("ls")
@store_argument
@job_option
@json_option
@reported
def command(store: str, job: str | None, as_json: bool) -> int:
    """List the jobs of STORE and their checkpoints.

    STORE is a path or URL (default: EVERSTEP_STORE, else ./everstep-store). Exit code 1 where a
    record of a job is damaged.
    """
    opened = open_store(store)
    now = time.time()
    listing = Listing(opened.url, tuple(list_job(each, now) for each in jobs_of(opened, job)))
    reporter(as_json=as_json).result(listing, lambda console: _render(listing, console))
    return 1 if any(each.problems for each in listing.jobs) else 0


def list_job(job: Job, now: float) -> ListedJob:
    """One job as it stands. ``now`` in seconds since the epoch."""
    first, errors = next_to_load(job)
    owner = job.owner()
    who = "" if owner is None or owner.released else f"pid {owner.pid} on {owner.host}"
    return ListedJob(
        job=job.name,
        owner=who,
        attempts=job.highest_claim(),
        checkpoints=tuple(
            _listed(info, now, info.point == first, errors.get(info.point))
            for info in job.checkpoints()
        ),
        problems=branch_problems(job),
    )


def _state_of(info: CheckpointInfo, error: StoreError | None) -> str:
    """What is known of a checkpoint, in a word or two."""
    if info.state != "committed":
        return info.state
    if info.newer_format or isinstance(error, NewerFormat):
        return "newer format"
    if error is not None or info.error or info.verified == "damaged":
        return "damaged"
    return "verified" if info.verified == "bytes" else "committed"


def _listed(info: CheckpointInfo, now: float, loads: bool, error: StoreError | None) -> Listed:
    return Listed(
        step=info.point.step,
        attempt=info.point.attempt,
        state=_state_of(info, error),
        age_s=round(max(0.0, now - (info.committed_at or info.modified)), 3),
        bytes=info.bytes,
        world=info.world,
        on_lineage=info.on_lineage,
        loads=loads,
        error=str(error) if error is not None else info.error,
        undecided=info.undecided,
        health=health_of(info.health),
    )


def health_of(health: Health | None) -> str:
    """In a word; empty where it was not written down."""
    if health is None:
        return ""
    return "sound" if health.sound else "unsound"


def _lineage(item: Listed) -> str:
    if item.undecided:
        return "not known"
    return "current" if item.on_lineage else "left behind"


def _render(listing: Listing, console: Console) -> None:
    if not listing.jobs:
        console.print(f"no job in {listing.store} yet")
    for job in listing.jobs:
        running = f", run by {job.owner}" if job.owner else ""
        console.print(
            f"[bold]{job.job}[/] in {listing.store}: {counted(job.attempts, 'attempt')}{running}"
        )
        for problem in job.problems:
            console.print(f"  {mark('fail')} {escape(problem)}")
        if not job.checkpoints:
            console.print("  no checkpoint yet")
            continue
        rows = table("step", "attempt", "state", "health", "age", "size", "world", "lineage", "",
                     right=("step", "attempt", "size", "world"))  # fmt: skip
        for item in job.checkpoints:
            rows.add_row(
                str(item.step), str(item.attempt), item.state, item.health or "-",
                age(item.age_s), size(item.bytes),
                str(item.world or "?"), _lineage(item),
                "loads next" if item.loads else Text(item.error),
            )  # fmt: skip
        console.print(rows)
