"""The job's history as this agent reads and writes it: in the store, or beside it for a while.

Owns: where records go while the store is away, and bringing them there later; stamps. Never does:
know what a record means for the job (:mod:`everstep.agent.respond`). Called by: respond, lead.

A store may hang and not only fail, so it is asked in a thread and for a limited time: an agent that
has workers to stop never waits for a disk that does not answer. Writing a record again is harmless.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from everstep.agent.aside import answer
from everstep.agent.record import Recorder
from everstep.core import points
from everstep.core.clock import Clock
from everstep.core.history import Entry
from everstep.core.settings import Settings
from everstep.errors import EverstepError, StoreError
from everstep.faults.history import (
    AttemptFacts,
    Record,
    RecoveryPoint,
    ResultRecord,
    Stamp,
    encode,
    next_sequence,
    pack,
    unpack,
)
from everstep.keeper.spawn import log_path, state_dir
from everstep.store import Job, Listing, OwnerIdentity, open_store

ASK_SECONDS = 5.0
"""For the store to take or give the history; after it, it counts as away."""
T = TypeVar("T")


class Chronicle:
    """``identity`` is this agent's. ``opened`` gives the job in its store."""

    def __init__(
        self,
        settings: Settings,
        identity: OwnerIdentity,
        opened: Callable[[], Job],
        record: Recorder,
        clock: Clock,
        *,
        patience: float = ASK_SECONDS,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._opened = opened
        self._record = record
        self._clock = clock
        self._patience = patience
        self._asking = _Asking()
        self._listing: Listing | None = None
        self._own: dict[bytes, Record] = {}
        self._aside: Job | None = None
        self._highest = 0
        self._told: set[str] = set()
        self.offline = False

    @property
    def highest_claim(self) -> int:
        """The newest attempt that was claimed, as far as the store was last heard."""
        return self._highest

    def stamp(self) -> Stamp:
        """Now, and by whom."""
        who = self._identity
        return Stamp(who.agent, self._clock.wall(), self._clock.mono(), who.boot)

    def read(self) -> tuple[Record, ...]:
        """All that is known of the job's past. Where the store is away it is what was read last,
        and what this agent has recorded since; :attr:`offline` says so."""
        self._ask("read", self._read)
        found = unpack(self._entries())
        for problem in (*found.problems, *(self._listing.problems if self._listing else ())):
            self._warn("history.unreadable", f"a record of the job's history is passed over: "
                       f"{problem}")  # fmt: skip
        return self._known(found.records)

    def known(self) -> tuple[Record, ...]:
        """The same as it was read last: the store is not asked."""
        return self._known(unpack(self._entries()).records)

    def last_attempt(self) -> AttemptFacts | None:
        """What the store knows of the newest attempt that was claimed: what it restored, and the
        newest step that it committed. None where there was none, or the store is away."""
        found: list[AttemptFacts] = []
        self._ask("read", lambda: found.extend(_last_of(self._opened())))
        return found[0] if found else None

    def recovery_points(self) -> tuple[RecoveryPoint, ...] | None:
        """What the job could go back to; None where the store is away."""
        found: list[RecoveryPoint] = []
        delay = self._settings.detection_delay

        def look() -> None:
            points = self._opened().recovery_points(detection_delay=delay)
            found.extend(RecoveryPoint(p.point, p.tier, p.healthy, p.sound) for p in points)

        return tuple(found) if self._ask("read", look) else None

    def write(self, records: Iterable[Record]) -> None:
        """Record them, durably, before what they say is begun (F6): in the store, or where it is
        away on this host's disk, from where they come into the store later."""
        entries = []
        for record in records:
            entry = pack(record)
            self._own[entry.body] = record
            entries.append(entry)
        if entries and not self._ask("write", partial(self._write, entries)):
            self._write_aside(entries)

    def note(self, record: ResultRecord) -> None:
        """Record what nothing waits for: how an incident ended. In the background, and behind all
        that is known of its attempt: readers go by that order, not by clocks."""
        place = next_sequence(self.known(), record.attempt)
        record = msgspec.structs.replace(record, sequence=place)
        entry = pack(record)
        self._own[entry.body] = record
        points.reach("agent.result.before_write")
        self._asking.submit(partial(self._write_or_keep, [entry]))

    def close(self) -> None:
        """Bring what was kept aside into the store, where it can be had, and ask nothing more."""
        if self._aside is not None:
            self._ask("merge", self._read)
        else:
            self._asking.ask(lambda: None, self._patience)  # what was noted is written
        self._asking.close()

    def _entries(self) -> tuple[Entry, ...]:
        return self._listing.entries if self._listing else ()

    def _known(self, read: tuple[Record, ...]) -> tuple[Record, ...]:
        """What was read, and what this agent has recorded besides."""
        known = {encode(record) for record in read}
        return (*read, *(own for key, own in self._own.items() if key not in known))

    # -- in the thread that asks

    def _read(self) -> None:
        job = self._opened()
        self._merge(job)
        self._listing = job.history(self._listing, cache=state_dir(self._settings, os.environ))
        self._highest = max(job.highest_claim(), self._listing.highest)

    def _write(self, entries: Sequence[Entry]) -> None:
        job = self._opened()
        self._merge(job)
        for entry in entries:
            job.record_history(entry)

    def _write_or_keep(self, entries: Sequence[Entry]) -> None:
        try:
            self._write(entries)
        except (StoreError, OSError):
            self._write_aside(entries)

    def _merge(self, job: Job) -> None:
        """What this agent, or one before it on this host, has kept aside."""
        folder = self._folder()
        if not folder.exists():
            return
        try:
            aside = self._beside()
        except (EverstepError, OSError) as error:  # of this host: the store itself is there
            self._warn("history.unreadable", f"what was kept on this host cannot be read: {error}")
            return
        report = job.merge_history(aside)
        self._aside = None if not report.problems else self._aside

    # -- beside the store

    def _write_aside(self, entries: Sequence[Entry]) -> None:
        try:
            aside = self._beside()
            for entry in entries:
                aside.record_history(entry)
        except (EverstepError, OSError) as error:
            # It stays in this agent's memory: its budgets hold while it lives.
            self._warn(
                "history.not_written",
                f"what is decided can be recorded neither in the store nor on this host: {error}",
            )

    def _beside(self) -> Job:
        if self._aside is None:
            store = open_store(str(self._folder()), create=True)
            self._aside = store.job(self._settings.job)
        return self._aside

    def _folder(self) -> Path:
        return log_path(self._settings, 0).parent / "history"

    # -- the store's silence

    def _ask(self, what: str, call: Callable[[], None]) -> bool:
        error = self._asking.ask(call, self._patience)
        was, self.offline = self.offline, error is not None
        if error is not None:
            self._warn(
                "history.offline",
                f"the job's history cannot be reached in the store ({what}: {error}); it is kept "
                "on this host meanwhile, and refills no budget",
            )
        elif was:
            self._told.clear()
            self._record.say("history.online", "the job's history is in the store again")
        return error is None

    def _warn(self, kind: str, text: str) -> None:
        key = kind if kind == "history.offline" else text
        if key not in self._told:
            self._told.add(key)
            self._record.say(kind, text, level="warning")


def _last_of(job: Job) -> list[AttemptFacts]:
    attempt = job.highest_claim()
    branch = job.branches().get(attempt)
    if branch is None:
        return []
    restored = branch.restored.step if branch.restored is not None else -1
    committed = max((p.step for p in job.candidates() if p.attempt == attempt), default=-1)
    return [AttemptFacts(restored=restored, reached=committed, committed=committed)]


class _Asking:
    """A thread that asks one thing after the other: behind one that hangs nothing is waited for."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None

    def ask(self, call: Callable[[], None], seconds: float) -> str | None:
        """None once ``call`` has come back, else why it has not. One that hangs goes on, and what
        is asked after it waits behind it."""
        hangs = self._last is not None and not self._last.done()
        asked = self._last = self.submit(call)
        try:
            asked.result(0.1 if hangs else seconds)
        except TimeoutError:
            return "it does not answer" if hangs else f"no answer for {seconds:g} s"
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Have it asked; nothing is waited for."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="everstep-history", daemon=True
            )
            self._thread.start()
        found: Future[None] = Future()
        self._calls.put(partial(answer, call, found))
        return found

    def close(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
