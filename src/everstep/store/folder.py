"""One job's objects: the backend, the job's prefix and the store's settings, together.

Owns: reading and writing whole records with the rules every caller needs (bounded reads, create
or find the same, lost answers). Called by: the modules of the store that make up a :class:`Job`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.errors import (
    CorruptObject,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreNotWritable,
)
from everstep.store import keys, records
from everstep.store.backends import Backend, ObjectInfo
from everstep.store.records import KINDS, R, Record
from everstep.store.settings import Settings


@dataclass(frozen=True)
class Folder:
    """``key`` arguments are relative to the job's folder."""

    backend: Backend
    job: str
    settings: Settings

    def key(self, key: str) -> str:
        """The whole key, for the backend and for messages."""
        return keys.job_prefix(self.job) + key

    def read(self, key: str, record: type[R]) -> R:
        """The record under ``key``, checked. Raises ``ObjectMissing``, ``CorruptObject``."""
        return records.decode(self.read_bytes(key, record), record, self.key(key))

    def read_bytes(self, key: str, record: type[R]) -> bytes:
        """The unchecked bytes of an object, never more than its kind may have."""
        whole = self.key(key)
        size = self.backend.stat(whole).size
        if size > KINDS[record].bound:
            raise CorruptObject(
                f"{whole} has {size} bytes, more than any {record.__name__} has.",
                hint="It is kept; another one has to be used.",
            )
        return self.backend.get(whole, 0, size)

    def exists(self, key: str) -> bool:
        try:
            self.backend.stat(self.key(key))
        except ObjectMissing:
            return False
        return True

    def create(self, key: str, record: Record) -> bool:
        """Create the record; True if it is there now with these very bytes, False with others.

        An answer that was lost counts as what the store shows when it is read back (S1).
        """
        data = records.encode(record)
        whole = self.key(key)
        try:
            self.backend.create(whole, data)
        except (StoreFull, StoreNotWritable):
            raise
        except StoreError as error:
            return self._found_equal(whole, data, error)
        return True

    def _found_equal(self, whole: str, data: bytes, error: StoreError) -> bool:
        try:
            return self.backend.get(whole) == data
        except ObjectMissing:
            if isinstance(error, ObjectExists):
                return False  # deleted in between: certainly not ours
            raise error from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below ``prefix``, with keys relative to the job."""
        cut = len(self.key(""))
        for info in self.backend.list(self.key(prefix)):
            yield ObjectInfo(info.key[cut:], info.size, info.modified)

    def delete(self, key: str) -> None:
        self.backend.delete(self.key(key))

    def store_time(self) -> float:
        """Now, by the clock that stamps this store's objects (spec section 8)."""
        probe = records.encode(records.ClockProbe(secrets.token_hex(8)))
        self.backend.put(self.key(keys.CLOCK), probe)
        return self.backend.stat(self.key(keys.CLOCK)).modified
