"""A job's past, as commands read it; and an operator's word, as they write it.

Owns: reading the history (through the cache beside the store), who runs the job now, and who
speaks. Called by: ``explain``, ``incidents``, ``status``, ``retry``, ``node``, ``mode``.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape

from everstep.cli.places import one_job
from everstep.cli.report import mark, reporter
from everstep.core.settings import from_environment
from everstep.faults.budget import last_limits
from everstep.faults.fold import History, fold
from everstep.faults.history import Record, Stamp, Word, pack, unpack
from everstep.faults.limits import Limits, limits_of
from everstep.faults.standing import Present
from everstep.faults.words import needless, odd_node, word_of
from everstep.keeper.identity import host_name, identity_of, is_alive
from everstep.keeper.spawn import state_dir
from everstep.store import STALE_SECONDS, Job, OwnerIdentity, open_store

FORMAT = "everstep.word/1"


class Past(NamedTuple):
    """``highest`` is the newest attempt that is known of, ``problems`` names the records that
    cannot be read; ``limits`` are those of the job's newest decision, where there is one, else what
    this environment's settings give."""

    job: Job
    url: str
    records: tuple[Record, ...]
    history: History
    highest: int
    problems: tuple[str, ...]
    present: Present
    limits: Limits


class Said(msgspec.Struct, frozen=True):
    """What a command that records a word prints with ``--json``. ``recorded``: false where it had
    been said already, and ``note`` says so. ``next`` is the command to try."""

    store: str
    job: str
    word: str
    subject: str
    reason: str
    by: str
    at: float
    recorded: bool
    note: str
    warning: str
    next: str
    format: str = FORMAT


def past_of(store: str, name: str | None) -> Past:
    """The past of the job of that name, or of the only one in the store. Raises ``UsageError`` for
    settings that are none."""
    opened = open_store(store)
    job = one_job(opened, name)
    found = job.history(cache=cache_place())
    told = unpack(found.entries)
    claims = job.highest_claim()
    highest = max(claims, found.highest)
    history = fold(told.records, highest_claim=highest, now=stamp(time.time()))
    options = f"--store {shlex.quote(opened.url)} --job {job.name}"
    return Past(
        job=job,
        url=opened.url,
        records=told.records,
        history=history,
        highest=highest,
        problems=(*found.problems, *told.problems),
        present=Present(_owner(job), claims, options),
        limits=last_limits(history) or limits_of(from_environment(os.environ)),
    )


def cache_place() -> Path | None:
    """The folder for what can be made anew; None where there is no home for it."""
    try:
        return state_dir(from_environment(os.environ), os.environ)
    except RuntimeError:  # a user without a home directory
        return None


def stamp(wall: float) -> Stamp:
    """Now, by this process."""
    me = identity_of(os.getpid(), f"cli-{host_name()}-{os.getpid()}-{secrets.token_hex(4)}")
    return Stamp(me.agent, wall, time.monotonic(), me.boot)


def say(past: Past, word: Word, subject: str, reason: str, following: str) -> Said:
    """Record the word, or say why it need not be. Raises ``UsageError``, ``StoreError``."""
    at, by = stamp(past.job.store_time()), _speaker()
    record = word_of(past.records, past.highest, word, subject, reason, by, at)
    note = needless(past.history, word, subject)
    if not note:
        past.job.record_history(pack(record))
    return Said(
        store=past.url,
        job=past.job.name,
        word=word,
        subject=record.subject,
        reason=record.reason,
        by=record.by,
        at=at.wall,
        recorded=not note,
        note=note,
        warning=odd_node(past.history, subject) if word in ("exclude", "pardon") else "",
        next=following,
    )


def print_said(said: Said, *, as_json: bool) -> None:
    """The warning on stderr, what was recorded on stdout."""
    talk = reporter(as_json=as_json)
    if said.warning:
        talk.say(f"warning: {said.warning}")
    talk.result(said, lambda console: _render(said, console))


def render_problems(problems: tuple[str, ...], console: Console) -> None:
    """Records that are left out of everything above them."""
    for problem in problems:
        console.print(f"{mark('fail')} {escape(problem)}")


def _render(said: Said, console: Console) -> None:
    subject = f" {said.subject}" if said.subject else ""
    if said.recorded:
        reason = f" ({said.reason})" if said.reason else ""
        text = f"recorded for {said.job}: {said.word}{subject}{reason}, by {said.by}"
    else:
        text = f"nothing to record for {said.job}: {said.note}"
    console.print(text, markup=False)
    if said.next:
        console.print(f"next: {said.next}", markup=False)


def _owner(job: Job) -> str:
    """Who runs the job now, empty where nobody is known to. Asking the store's time would write
    to it, so a stranger's age is by this machine's clock."""
    owner = job.owner()
    if owner is None:
        return ""
    who = OwnerIdentity(owner.agent, owner.host, owner.boot, owner.pid, owner.started)
    if (owner.host, owner.boot) == (host_name(), identity_of(os.getpid(), "").boot):
        fresh = is_alive(who)
    else:
        fresh = time.time() - owner.renewed <= STALE_SECONDS
    return f"pid {owner.pid} on {owner.host}" if fresh else ""


def _speaker() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no entry
        user = f"uid {os.getuid()}"
    return f"{user}@{host_name()}"
