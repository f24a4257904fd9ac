"""Proving a checkpoint, and saying exactly what was proved.

Owns: the walk over every object of a point, shallow (structure) or deep (every byte). Never does:
repair. Called by: job, for ``everstep verify`` and the drill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from everstep.core.clock import Clock
from everstep.core.ids import Point
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing, StoreError
from everstep.store import attempts, catalog, digests, history, keys, records, settings
from everstep.store.backends import ObjectInfo
from everstep.store.folder import Folder
from everstep.store.read import Checkpoint, open_checkpoint
from everstep.store.records import (
    TRAILER_BYTES,
    ChunkEntry,
    Claim,
    ClockProbe,
    Footer,
    FooterChunk,
    Index,
    Newest,
    OwnerRecord,
    Proof,
    Record,
    Verified,
)

_WINDOW = 8 << 20
_THREADS = 4


class VerifyReport(msgspec.Struct, frozen=True):
    """What was proved of a checkpoint. ``problems`` are of the checkpoint itself,
    ``around`` of the job's other records and the store's settings; ``proof`` is what
    ``refs/verified`` now says (None where the checkpoint does not exist any more).
    """

    point: Point
    deep: bool
    objects: int
    bytes_read: int
    chunks: int
    problems: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    proof: Proof | None = None
    not_recorded: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.around


class _Tally:
    """Counts of one thread's walk."""

    def __init__(self) -> None:
        self.objects = self.bytes = self.chunks = 0
        self.problems: list[str] = []

    def catch(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (CorruptObject, ObjectMissing) as error:
            self.problems.append(str(error))


def verify(folder: Folder, point: Point, *, deep: bool, clock: Clock) -> VerifyReport:
    """Walk the checkpoint. Damage is reported, not raised; a store that fails is raised."""
    around = _Tally()
    if deep:
        _walk_surroundings(folder, around)
    try:
        checkpoint = open_checkpoint(folder, point, clock)
    except (CorruptObject, ObjectMissing) as error:
        return _damaged(folder, point, deep, around, error)
    tallies = _walk_packs(folder, checkpoint, deep)
    problems = tuple(problem for tally in tallies for problem in tally.problems)
    proof: Proof = "damaged" if problems else ("bytes" if deep else "structure")
    records_bytes = sum(entry.length for entry in checkpoint.manifest.ranks)
    return VerifyReport(
        point=point,
        deep=deep,
        objects=1 + checkpoint.world + sum(t.objects for t in (*tallies, around)),
        bytes_read=records_bytes + sum(t.bytes for t in (*tallies, around)),
        chunks=sum(t.chunks for t in tallies),
        problems=problems,
        around=tuple(around.problems),
        proof=proof,
        not_recorded=_record(folder, point, proof),
    )


def _damaged(
    folder: Folder, point: Point, deep: bool, around: _Tally, error: StoreError
) -> VerifyReport:
    exists = folder.exists(keys.manifest(point)) and not folder.exists(keys.tombstone(point))
    note = _record(folder, point, "damaged") if exists else ""
    return VerifyReport(
        point=point,
        deep=deep,
        objects=around.objects,
        bytes_read=around.bytes,
        chunks=0,
        problems=(str(error),),
        around=tuple(around.problems),
        proof="damaged" if exists else None,
        not_recorded=note,
    )


def _record(folder: Folder, point: Point, proof: Proof) -> str:
    """Empty, or why ``refs/verified`` was not written: a read-only store can be verified too."""
    try:
        catalog.record_proof(folder, point, proof)
    except StoreError as error:
        return str(error)
    return ""


def _walk_packs(folder: Folder, checkpoint: Checkpoint, deep: bool) -> Sequence[_Tally]:
    def walk(index: Index) -> _Tally:
        tally = _Tally()
        for number in range(len(index.packs)):
            tally.catch(partial(_walk_pack, folder, index, number, deep, tally))
        return tally

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-verify") as pool:
        return list(pool.map(walk, checkpoint.indexes))


def _walk_pack(folder: Folder, index: Index, number: int, deep: bool, tally: _Tally) -> None:
    key, length = folder.key(index.packs[number].key), index.packs[number].length
    tally.objects += 1
    tail = folder.backend.get(key, length - TRAILER_BYTES, TRAILER_BYTES)
    footer_at, footer_length = records.decode_trailer(tail, length, key)
    footer_bytes = folder.backend.get(key, footer_at, footer_length)
    _check_footer(records.decode(footer_bytes, Footer, key), index, number, key)
    tally.bytes += TRAILER_BYTES + footer_length
    if deep:
        _walk_bytes(folder, index, number, footer_at, tally)


def _check_footer(footer: Footer, index: Index, number: int, key: str) -> None:
    wanted = (
        (index.job, index.point, index.layout, index.world, index.rank, index.state_bytes),
        _directory(index.chunks, number),
        _directory(index.state_chunks, number),
    )
    found = (
        (footer.job, footer.point, footer.layout, footer.world, footer.rank, footer.state_bytes),
        footer.chunks,
        footer.state_chunks,
    )
    if found != wanted:
        raise CorruptObject(
            f"the footer of {key} differs from its index.",
            hint="The checkpoint is kept; another one has to be used.",
        )


def _directory(chunks: Sequence[ChunkEntry], number: int) -> tuple[FooterChunk, ...]:
    return tuple(
        FooterChunk(c.digest, c.offset, c.stored_length) for c in chunks if c.pack == number
    )


def _walk_bytes(folder: Folder, index: Index, number: int, end: int, tally: _Tally) -> None:
    """Every byte before the footer: chunks against their digests, all others against zero."""
    key = folder.key(index.packs[number].key)
    digest = digests.digester(folder.settings.digest)
    at = 0
    every = (c for c in (*index.chunks, *index.state_chunks) if c.pack == number)
    for chunk in sorted(every, key=lambda c: c.offset):
        for start, stop in _windows(at, chunk.offset):
            tally.catch(partial(_check_zero, folder, key, start, stop))
        data = folder.backend.get(key, chunk.offset, chunk.stored_length)
        if digest(data) != chunk.digest:
            tally.problems.append(
                f"{key} at byte {chunk.offset} ({chunk.stored_length} bytes) does not match its "
                "digest."
            )
        tally.chunks += 1
        at = max(at, chunk.offset + chunk.stored_length)
    for start, stop in _windows(at, end):
        tally.catch(partial(_check_zero, folder, key, start, stop))
    tally.bytes += end


def _windows(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _WINDOW):
        yield at, min(at + _WINDOW, stop)


def _check_zero(folder: Folder, key: str, start: int, stop: int) -> None:
    if folder.backend.get(key, start, stop - start).strip(b"\0"):
        raise CorruptObject(f"{key} has padding that is not zero at {start} to {stop}.")


def _walk_surroundings(folder: Folder, tally: _Tally) -> None:
    """The store's settings, the job's attempts, its history and its refs."""
    tally.catch(partial(_check_settings, folder))
    tally.objects += 1
    tally.catch(partial(_check_branches, folder))
    for info in folder.list(keys.ATTEMPTS):
        tally.objects += 1
        tally.bytes += info.size
        if info.key.endswith("/claim"):
            tally.catch(partial(_check_record, folder, info.key, Claim))
    for info in folder.list(keys.HISTORY):
        tally.objects += 1
        tally.bytes += info.size
        tally.catch(partial(_check_history, folder, info))
    refs: dict[str, type[Record]] = {
        keys.OWNER: OwnerRecord,
        keys.NEWEST: Newest,
        keys.VERIFIED: Verified,
        keys.CLOCK: ClockProbe,
    }
    for info in folder.list("refs/"):
        tally.objects += 1
        tally.bytes += info.size
        if info.key in refs:
            tally.catch(partial(_check_record, folder, info.key, refs[info.key]))


def _check_settings(folder: Folder) -> None:
    found = settings.read(folder.backend)
    if found != folder.settings:
        raise CorruptObject(
            f"{keys.SETTINGS} changed since the store was opened.",
            hint="Put it back from a copy.",
        )


def _check_branches(folder: Folder) -> None:
    attempts.branches(folder)  # reading is the check


def _check_history(folder: Folder, info: ObjectInfo) -> None:
    named = keys.parse_history(info.key)
    if named is None:
        raise CorruptObject(
            f"{folder.key(info.key)} is no name of a history record.", hint="Move it elsewhere."
        )
    try:
        history.read_one(folder, info, named)  # reading is the check
    except NewerFormat as error:
        # It says nothing against the checkpoint: another everstep has run the job.
        raise CorruptObject(error.what, hint=error.hint) from error


def _check_record(folder: Folder, key: str, record: type[Record]) -> None:
    folder.read(key, record)  # reading is the check
