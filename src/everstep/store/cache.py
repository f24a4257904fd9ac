"""A job's history kept beside the store, so that a reader need not fetch again what it has read.

It stands in this room because the agent and the commands read through it, and because only the
store can tell whether an entry is what its key names. Owns: one SQLite file for a job, which may be
removed at any time. Never does: answer for the store: what the store does not list is dropped,
what does not match the digest in its key is read anew, and a file that is damaged, locked, of
another version or not writable costs time and nothing else. Called by: job.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from everstep.core.history import KINDS, Entry, Kind
from everstep.store import history, keys, records
from everstep.store.digests import digest
from everstep.store.folder import Folder
from everstep.store.history import Listing
from everstep.store.records import HistoryRecord

VERSION = 1
"""Of the table below (``user_version``); a file of another one is made anew."""

WAIT_SECONDS = 0.2
"""For another process that writes the file; then it is done without."""

_PASSING = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
)  # fmt: skip
"""Errors that say nothing of what is in the file."""

_COLUMNS = "key, kind, attempt, sequence, format, body"
_TABLE = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, attempt INTEGER NOT NULL, sequence INTEGER NOT NULL,
    format INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID
"""


def path_of(folder: Folder, place: Path) -> Path:
    """The file for this job of this store below ``place``, a folder for what can be lost."""
    return place / "history" / f"{folder.settings.store_id}-{folder.job}.sqlite3"


def read(folder: Folder, place: Path) -> Listing:
    """The job's history as the store has it now; only what is new is fetched.

    Raises ``StoreError`` where the store fails, never for the sake of the file.
    """
    path = path_of(folder, place)
    had = _load(folder, path)
    found = history.read(folder, _listing(had))
    now = dict(zip(found.keys, found.entries, strict=True))
    if now.keys() != had.keys():
        _save(path, had, now)
    return found


def _listing(entries: Mapping[str, Entry]) -> Listing:
    return Listing(tuple(entries.values()), tuple(entries))


def _load(folder: Folder, path: Path) -> dict[str, Entry]:
    """What the file holds and its keys vouch for; nothing where it cannot be used."""
    try:
        if not path.is_file():
            return {}
        with _opened(path) as database:
            if _version(database) != VERSION:
                return {}
            rows = database.execute(f"SELECT {_COLUMNS} FROM entries").fetchall()
    except (sqlite3.Error, OSError):
        return {}
    return {row[0]: _entry(row) for row in rows if _vouched_for(folder, row)}


def _entry(row: tuple[Any, ...]) -> Entry:
    _, kind, attempt, sequence, number, body = row
    return Entry(cast(Kind, kind), attempt, sequence, number, body)


def _vouched_for(folder: Folder, row: tuple[Any, ...]) -> bool:
    """Whether the entry, framed again as the store frames it, has the digest that its key names
    (S3)."""
    key, kind, *numbers, body = row
    named = keys.parse_history(key) if isinstance(key, str) else None
    if named is None or kind not in KINDS or not isinstance(body, bytes):
        return False
    if not all(isinstance(number, int) for number in numbers):
        return False
    attempt, sequence, number = numbers
    if (attempt, sequence, kind) != (named.attempt, named.sequence, named.kind):
        return False
    whole = HistoryRecord(folder.job, cast(Kind, kind), attempt, sequence, number, body)
    return digest(records.encode(whole)).hex() == named.name


def _save(path: Path, had: Mapping[str, Entry], now: Mapping[str, Entry]) -> None:
    """Make the file hold ``now``, of which ``had`` stands there already. One that cannot be used
    is removed and made anew."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(path, had, now)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in _PASSING:
                return  # the next reader may have more luck
            path.unlink()
            _write(path, {}, now)
    except (OSError, sqlite3.Error):
        return  # there is no place for it: the next reader asks the store for everything again


def _write(path: Path, had: Mapping[str, Entry], now: Mapping[str, Entry]) -> None:
    with _opened(path) as database, database:
        if _version(database) != VERSION:
            database.execute("DROP TABLE IF EXISTS entries")
            database.execute(f"PRAGMA user_version = {VERSION}")
        database.execute(_TABLE)
        there = {key for (key,) in database.execute("SELECT key FROM entries")}
        gone = [(key,) for key in there - now.keys()]
        database.executemany("DELETE FROM entries WHERE key IS ?", gone)
        # What stands there and was not vouched for is replaced.
        new = now.keys() - (there & had.keys())
        database.executemany(
            f"INSERT OR REPLACE INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            (_row(key, now[key]) for key in new),
        )


def _row(key: str, entry: Entry) -> tuple[object, ...]:
    return key, entry.kind, entry.attempt, entry.sequence, entry.format, entry.body


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as database:
        # What a crash of the machine tears is found by the digests, and read from the store again.
        database.execute("PRAGMA synchronous = OFF")
        yield database


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])
