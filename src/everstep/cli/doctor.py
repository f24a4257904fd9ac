"""``everstep doctor``: looks at the machine and the store's disk, and says what to do."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console

from everstep.cli.places import store_argument
from everstep.cli.probes import findings
from everstep.cli.probes.disk import look_at_place, measure_disk
from everstep.cli.probes.findings import Finding
from everstep.cli.probes.machine import measure_clock, measure_memory, read_masks, try_features
from everstep.cli.probes.pytorch import ask_torch
from everstep.cli.report import json_option, mark, reported, reporter
from everstep.core.events import counted
from everstep.core.settings import Settings
from everstep.errors import EverstepError, ObjectMissing
from everstep.store import open_store
from everstep.store.backends.local import path_of

FORMAT = "everstep.doctor/1"
FAILED = 1
"""Exit code where a finding is ``fail``; warnings alone give 0."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What ``everstep doctor --json`` prints. ``ok``: no finding is ``fail``."""

    store: str
    ok: bool
    findings: tuple[Finding, ...]
    format: str = FORMAT


@click.command("doctor")
@store_argument
@json_option
@reported
def command(store: str, as_json: bool) -> int:
    """Check this machine and the disk under STORE, and say what to do.

    Writes at most 64 MB beside the store, for at most about 5 s, and leaves nothing behind. Exit
    code 0: nothing that would fail a run; 1: something would.
    """
    talk = reporter(as_json=as_json)
    talk.say(f"looking at this machine and at {store}")
    found = diagnose(store)
    ok = all(finding.level != "fail" for finding in found)
    result = Diagnosis(store, ok, tuple(found))
    talk.result(result, lambda console: _render(result, console))
    return 0 if ok else FAILED


def diagnose(store: str) -> list[Finding]:
    """All findings, the store's first."""
    newest, about_store = newest_checkpoint(store)
    memory = measure_memory()
    return [
        *about_store,
        *_on_disk(store, newest),
        findings.on_memory(memory, newest),
        findings.on_shm(memory),
        findings.on_clock(measure_clock()),
        findings.on_signals(read_masks()),
        findings.on_features(try_features()),
        findings.on_torch(ask_torch()),
    ]


def newest_checkpoint(store: str) -> tuple[int, list[Finding]]:
    """Bytes of the largest job's newest checkpoint (0: none), and what the store itself shows."""
    try:
        opened = open_store(store)
        jobs = [opened.job(name) for name in opened.jobs()]
        newest = [
            next((info.bytes for info in job.checkpoints() if info.state == "committed"), 0)
            for job in jobs
        ]
    except ObjectMissing:
        return 0, [_on_absent(store)]
    except EverstepError as error:
        return 0, [Finding("store", "fail", error.what, error.hint or "Look at the store.")]
    what = f"{opened.url}: {counted(len(jobs), 'job')}"
    return max(newest, default=0), [Finding("store", "ok", what)]


def _on_absent(store: str) -> Finding:
    """Whether `everstep run` can make the store."""
    if not _is_local(store):
        return Finding("store", "ok", f"{store} does not exist yet; `everstep run` makes it")
    return findings.on_absent_store(store, look_at_place(Path(path_of(store))))


def _is_local(store: str) -> bool:
    return "://" not in store or store.startswith("file://")


def _on_disk(store: str, newest: int) -> list[Finding]:
    if not _is_local(store):
        return [Finding("disk", "warn", f"{store} is not on this machine's disk: not measured")]
    if look_at_place(Path(path_of(store))).file:
        return []  # another disk's figures would mislead
    try:
        disk = measure_disk(Path(path_of(store)))
    except OSError as error:
        advice = "Give this user the right to write there, or say another --store."
        return [Finding("disk", "fail", f"cannot write under {store}: {error}", advice)]
    return [
        findings.on_filesystem(disk),
        findings.on_fsync(disk),
        findings.on_write_speed(disk, newest),
        findings.on_space(disk, newest, Settings().keep_last),
        findings.on_inodes(disk),
    ]


def _render(result: Diagnosis, console: Console) -> None:
    for finding in result.findings:
        console.print(f"{mark(finding.level):<4} ", end="")
        console.print(f"{finding.check}: {finding.what}", markup=False)
        if finding.advice:
            console.print(f"       -> {finding.advice}", markup=False)
