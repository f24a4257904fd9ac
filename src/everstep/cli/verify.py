"""``everstep verify``: reads checkpoints back and says exactly what that proved."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from everstep.cli.places import at_option, find_point, job_option, jobs_of, one_job, store_argument
from everstep.cli.report import json_option, mark, reported, reporter, size
from everstep.core.events import counted
from everstep.core.ids import Point
from everstep.errors import ObjectMissing
from everstep.store import Job, Store, VerifyReport, open_store

FORMAT = "everstep.verify/1"
DAMAGED = 1
"""Exit code where anything does not verify."""

SHALLOW = (
    "The manifest and every rank index match their checksums and each other, every pack exists "
    "with its length, and its footer lists the same chunks; the job's claims, branches and refs "
    "and the store's settings are sound. The data itself was not read: --deep."
)
DEEP = (
    "Every bit was read: each chunk matches its digest, all padding is zero, every record matches "
    "its checksum, also of what is incomplete or being deleted, and the job's claims, branches and "
    "refs and the store's settings are sound."
)
ONE = "Other checkpoints of the job were not read."


class Verified(msgspec.Struct, frozen=True):
    """One checkpoint. ``ok`` iff ``problems`` is empty; ``newer_format``: there is something in it
    that only a later everstep can read, and so verify; ``recorded``: the proof stands in the store
    now."""

    job: str
    step: int
    attempt: int
    ok: bool
    objects: int
    chunks: int
    bytes_read: int
    problems: tuple[str, ...]
    newer_format: bool
    recorded: bool
    note: str = ""


class Around(msgspec.Struct, frozen=True):
    """What a job has besides its sound checkpoints: the store's settings, the job's attempts and
    refs, with ``--deep`` also all that is incomplete, deleted or damaged."""

    job: str
    ok: bool
    objects: int
    bytes_read: int
    problems: tuple[str, ...]


class Verification(msgspec.Struct, frozen=True):
    """What ``everstep verify --json`` prints. ``proved`` says it in words where ``ok``."""

    store: str
    deep: bool
    ok: bool
    proved: str
    checkpoints: tuple[Verified, ...]
    around: tuple[Around, ...]
    format: str = FORMAT


@click.command("verify")
@store_argument
@job_option
@at_option
@click.option("--deep", is_flag=True, help="Read every bit, not only the records.")
@json_option
@reported
def command(store: str, job: str | None, at: str | None, deep: bool, as_json: bool) -> int:
    """Read checkpoints of STORE back: every committed one, or the one that --at names.

    Exit code 0: all verified; 1: something is damaged or of a newer format, or there is nothing to
    verify.
    """
    opened = open_store(store)
    chosen = _chosen(opened, job, at)
    talk = reporter(as_json=as_json)
    jobs = jobs_of(opened, job) if at is None else [each for each, _, _ in chosen]
    # Before the proofs are written down, which makes a damaged record of them anew.
    around = tuple(_around(each, deep) for each in jobs)
    found: list[Verified] = []
    with talk.progress("verify", sum(nbytes for _, _, nbytes in chosen)) as advance:
        for each, point, nbytes in chosen:
            found.append(_verified(each, each.verify(point, deep=deep)))
            advance(nbytes)
    ok = all(item.ok for item in found) and all(other.ok for other in around)
    proved = (DEEP if deep else SHALLOW) + (f" {ONE}" if at is not None else "")
    result = Verification(opened.url, deep, ok, proved if ok else "", tuple(found), around)
    talk.result(result, lambda console: _render(result, console))
    return 0 if ok else DAMAGED


def _chosen(store: Store, name: str | None, at: str | None) -> list[tuple[Job, Point, int]]:
    """What is to be verified, with its size in bytes."""
    if at is not None:
        job = one_job(store, name)
        point = find_point(job, at)
        sizes = {info.point: info.bytes for info in job.checkpoints()}
        return [(job, point, sizes.get(point, 0))]
    chosen = [
        (job, info.point, info.bytes)
        for job in jobs_of(store, name)
        for info in job.checkpoints()
        if info.state == "committed"
    ]
    if not chosen:
        raise ObjectMissing(
            f"there is no committed checkpoint to verify in {store.url}.",
            hint="`everstep ls` shows what is there.",
        )
    return chosen


def _verified(job: Job, report: VerifyReport) -> Verified:
    return Verified(
        job=job.name,
        step=report.point.step,
        attempt=report.point.attempt,
        ok=report.ok,
        objects=report.objects,
        chunks=report.chunks,
        bytes_read=report.bytes_read,
        problems=report.problems,
        newer_format=bool(report.unknown),
        recorded=report.proof is not None and not report.not_recorded,
        note=report.not_recorded,
    )


def _around(job: Job, deep: bool) -> Around:
    report = job.verify_around(deep=deep)
    return Around(job.name, report.ok, report.objects, report.bytes_read, report.problems)


def _render(result: Verification, console: Console) -> None:
    for item in result.checkpoints:
        console.print(
            f"{mark('ok' if item.ok else 'fail')} {item.job} step {item.step} attempt "
            f"{item.attempt}: {counted(item.objects, 'object')}, {counted(item.chunks, 'chunk')}, "
            f"{size(item.bytes_read)} read"
        )
        _list(item.problems, console)
        if item.note:
            console.print(f"     not recorded in the store: {item.note}", markup=False)
    said = {problem for item in result.checkpoints for problem in item.problems}
    for other in result.around:
        console.print(
            f"{mark('ok' if other.ok else 'fail')} {other.job} besides: "
            f"{counted(other.objects, 'object')}, {size(other.bytes_read)} read"
        )
        _list(tuple(problem for problem in other.problems if problem not in said), console)
    console.print(result.proved or _verdict(result))


def _list(problems: tuple[str, ...], console: Console) -> None:
    for problem in problems:
        console.print(f"     {problem}", markup=False)


def _verdict(result: Verification) -> str:
    told = []
    if any(not item.ok and not item.newer_format for item in result.checkpoints):
        told.append(
            "Damaged checkpoints are kept. A restore takes the newest one whose tensors all match "
            "their digests, and stops where there is none."
        )
    if any(item.newer_format for item in result.checkpoints):
        told.append(
            "A checkpoint of a newer format is neither verified nor skipped: use the everstep that "
            "wrote it, or a later one."
        )
    if any(not other.ok for other in result.around):
        told.append("What is damaged besides the checkpoints is named above.")
    return " ".join(told)
