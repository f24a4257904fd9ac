"""A job's history: records that are written once and read by everyone (spec section 12).

Owns: their names, writing, reading, merging and expiry. Never does: know what a record says, or
decide. Called by: job, sweep, verify.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.core import points
from everstep.core.history import BODY_BYTES, Entry
from everstep.errors import (
    CorruptObject,
    NewerFormat,
    ObjectMissing,
    UsageError,
)
from everstep.store import keys, records
from everstep.store.backends import ObjectInfo
from everstep.store.digests import digest
from everstep.store.folder import Folder
from everstep.store.records import KINDS, HistoryRecord

KEEP_SECONDS = 180 * 24 * 3600.0
KEEP_BYTES = 64 << 20
"""A record goes only where it is older than the one and the job's records exceed the other."""


class Listing(msgspec.Struct, frozen=True):
    """A job's history as far as it can be read. ``entries`` are in the order of the spec, ``keys``
    theirs; ``problems`` names each record that was left out, and why; ``highest`` is the newest
    attempt that any key tells of, of records that cannot be read as well."""

    entries: tuple[Entry, ...] = ()
    keys: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    highest: int = 0


class MergeReport(msgspec.Struct, frozen=True):
    """What one merge did: records written, those that were there already, and those that cannot
    be read and stay where they are, each with its reason."""

    written: int = 0
    known: int = 0
    problems: tuple[str, ...] = ()


def record(folder: Folder, entry: Entry) -> str:
    """Create the record; the same again is success. Its key, relative to the job.

    Raises ``UsageError`` for a body that is too large, ``StoreError`` where the store fails.
    """
    if len(entry.body) > BODY_BYTES:
        raise UsageError(
            f"a history record of attempt {entry.attempt} has {len(entry.body)} bytes; at most "
            f"{BODY_BYTES} are stored.",
            hint="Leave out evidence.",
        )
    found = HistoryRecord(
        folder.job, entry.kind, entry.attempt, entry.sequence, entry.format, entry.body
    )
    key = keys.history(entry.attempt, entry.sequence, entry.kind, _name(records.encode(found)))
    points.reach("store.history.before_create")
    if not folder.create(key, found):
        raise CorruptObject(
            f"{folder.key(key)} is there with other bytes than its name tells of.",
            hint="It was damaged after it was written. Remove it, or put it back from a copy.",
        )
    return key


def read(folder: Folder, known: Listing | None = None) -> Listing:
    """All records that can be read, and the names of those that cannot.

    What an earlier listing has is not read again: a key tells the content. Raises ``StoreError``
    where the store itself fails: a history that is only partly listed is none.
    """
    had = dict(zip(known.keys, known.entries, strict=True)) if known is not None else {}
    found: dict[str, Entry] = {}
    problems: list[str] = []
    highest = 0
    for info in folder.list(keys.HISTORY):
        named = keys.parse_history(info.key)
        if named is None:
            problems.append(f"{folder.key(info.key)} is no name of a history record.")
            continue
        highest = max(highest, named.attempt)
        try:
            found[info.key] = had.get(info.key) or read_one(folder, info, named)
        except ObjectMissing:
            continue  # it has expired, or was merged, since it was listed
        except (CorruptObject, NewerFormat) as error:
            problems.append(str(error))
    ordered = sorted(found, key=lambda key: _place(found[key]))
    return Listing(tuple(found[key] for key in ordered), tuple(ordered), tuple(problems), highest)


def _place(entry: Entry) -> tuple[int, int, bytes]:
    return entry.attempt, entry.sequence, entry.body


def read_one(folder: Folder, info: ObjectInfo, named: keys.HistoryName) -> Entry:
    """The record that ``info`` lists, checked against its name. Raises ``CorruptObject``,
    ``NewerFormat``, ``ObjectMissing``."""
    key = folder.key(info.key)
    if info.size > KINDS[HistoryRecord].bound:
        raise CorruptObject(
            f"{key} has {info.size} bytes, more than any history record has.",
            hint="It is passed over; put it back from a copy.",
        )
    data = folder.backend.get(key, 0, info.size)
    found = records.decode(data, HistoryRecord, key)
    told = (found.job, found.attempt, found.sequence, found.kind, _name(data))
    if told != (folder.job, named.attempt, named.sequence, named.kind, named.name):
        raise CorruptObject(
            f"{key} holds {found.kind} {found.sequence} of attempt {found.attempt} of "
            f"job {found.job}.",
            hint="It was moved or damaged; put it back from a copy.",
        )
    return Entry(found.kind, found.attempt, found.sequence, found.format, found.body)


def merge(source: Folder, target: Folder) -> MergeReport:
    """Bring what was recorded in ``source`` while ``target`` was away there, and remove it from
    ``source`` once it is durable. Dying anywhere and doing it again is doing it once."""
    present = {info.key for info in target.list(keys.HISTORY)}
    written = known = 0
    problems: list[str] = []
    for info in list(source.list(keys.HISTORY)):
        named = keys.parse_history(info.key)
        if named is None:
            problems.append(f"{source.key(info.key)} is no name of a history record.")
            continue
        there = info.key in present
        try:
            record(target, read_one(source, info, named))
        except (CorruptObject, NewerFormat) as error:
            problems.append(str(error))  # it stays where it is, for a person
            continue
        known, written = known + there, written + (not there)
        points.reach("store.history.before_forget")
        source.delete(info.key)
    return MergeReport(written, known, tuple(problems))


def expire(folder: Folder, now: float) -> int:
    """Remove the oldest records that are past their age, while the history is past its size;
    how many."""
    found = list(_expired(list(folder.list(keys.HISTORY)), now))
    for info in found:
        points.reach("store.sweep.before_history")
        folder.delete(info.key)
    return len(found)


def _expired(found: list[ObjectInfo], now: float) -> Iterator[ObjectInfo]:
    """In the order of the records: their keys sort by attempt and sequence."""
    size = sum(info.size for info in found)
    for info in sorted(found):
        old = now - info.modified >= KEEP_SECONDS
        if size <= KEEP_BYTES or not old or keys.parse_history(info.key) is None:
            continue
        size -= info.size
        yield info


def _name(data: bytes) -> str:
    return digest(data).hex()
