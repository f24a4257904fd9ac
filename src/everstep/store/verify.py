"""Proving a checkpoint, and saying exactly what was proved.

Owns: the walk over every object of a point, shallow (structure) or deep (every byte), and over a
pack by its footer. Never does: repair. Called by: job, for ``everstep verify`` and the drill;
surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from everstep.core.clock import Clock
from everstep.core.ids import Point
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing, StoreError
from everstep.store import catalog, digests, keys, records
from everstep.store.folder import Folder
from everstep.store.read import Checkpoint, open_checkpoint
from everstep.store.records import TRAILER_BYTES, ChunkEntry, Footer, FooterChunk, Index, Proof

_WINDOW = 8 << 20
_THREADS = 4


class VerifyReport(msgspec.Struct, frozen=True):
    """What was proved of a checkpoint. ``damage`` is what is wrong with it, ``unknown`` what only a
    later version of everstep can read, and so verify. ``proof`` is what ``refs/verified`` now says
    (None where that is nothing: the checkpoint does not exist any more, or is not known).
    """

    point: Point
    deep: bool
    objects: int
    bytes_read: int
    chunks: int
    damage: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    proof: Proof | None = None
    not_recorded: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.damage, *self.unknown)

    @property
    def ok(self) -> bool:
        return not self.problems


class Tally:
    """Counts of one thread's walk, and what it met: damage, and what this version cannot read."""

    def __init__(self) -> None:
        self.objects = self.bytes = self.chunks = 0
        self.damage: list[str] = []
        self.unknown: list[str] = []

    def catch(self, what: Callable[[], None]) -> None:
        try:
            what()
        except NewerFormat as error:
            self.unknown.append(str(error))
        except (CorruptObject, ObjectMissing) as error:
            self.damage.append(str(error))


def verify(folder: Folder, point: Point, *, deep: bool, clock: Clock) -> VerifyReport:
    """Walk the checkpoint. Damage is reported, not raised; a store that fails is raised."""
    opening = Tally()
    opened: list[Checkpoint] = []
    opening.catch(lambda: opened.append(open_checkpoint(folder, point, clock)))
    tallies = [opening, *(tally for each in opened for tally in _walk_packs(folder, each, deep))]
    for each in opened:
        opening.objects = 1 + each.world
        opening.bytes = sum(entry.length for entry in each.manifest.ranks)
    damage = tuple(what for tally in tallies for what in tally.damage)
    unknown = tuple(what for tally in tallies for what in tally.unknown)
    proof = _proof(folder, point, deep, damage, unknown)
    return VerifyReport(
        point=point,
        deep=deep,
        objects=sum(tally.objects for tally in tallies),
        bytes_read=sum(tally.bytes for tally in tallies),
        chunks=sum(tally.chunks for tally in tallies),
        damage=damage,
        unknown=unknown,
        proof=proof,
        not_recorded=_record(folder, point, proof) if proof is not None else "",
    )


def _proof(
    folder: Folder, point: Point, deep: bool, damage: Sequence[str], unknown: Sequence[str]
) -> Proof | None:
    if damage:
        exists = folder.exists(keys.manifest(point)) and not folder.exists(keys.tombstone(point))
        return "damaged" if exists else None
    if unknown:
        return None  # not damaged: a version that knows more may well prove it
    return "bytes" if deep else "structure"


def _record(folder: Folder, point: Point, proof: Proof) -> str:
    """Empty, or why ``refs/verified`` was not written: a read-only store can be verified too."""
    try:
        catalog.record_proof(folder, point, proof)
    except StoreError as error:
        return str(error)
    return ""


def _walk_packs(folder: Folder, checkpoint: Checkpoint, deep: bool) -> Sequence[Tally]:
    def walk(index: Index) -> Tally:
        tally = Tally()
        for number in range(len(index.packs)):
            tally.catch(partial(_walk_pack, folder, index, number, deep, tally))
        return tally

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-verify") as pool:
        return list(pool.map(walk, checkpoint.indexes))


def _walk_pack(folder: Folder, index: Index, number: int, deep: bool, tally: Tally) -> None:
    key = folder.key(index.packs[number].key)
    footer, footer_at = read_footer(folder, key, index.packs[number].length, tally)
    _check_footer(footer, index, number, key)
    if deep:
        walk_bytes(folder, key, footer, footer_at, tally)


def read_footer(folder: Folder, key: str, length: int, tally: Tally) -> tuple[Footer, int]:
    """The footer of the pack ``key`` (a whole key), ``length`` bytes long, and where it begins.
    Raises ``CorruptObject``, ``NewerFormat``."""
    tally.objects += 1
    if length < TRAILER_BYTES:
        raise CorruptObject(f"{key} has {length} bytes, fewer than any pack has.")
    tail = folder.backend.get(key, length - TRAILER_BYTES, TRAILER_BYTES)
    footer_at, footer_length = records.decode_trailer(tail, length, key)
    footer = records.decode(folder.backend.get(key, footer_at, footer_length), Footer, key)
    tally.bytes += TRAILER_BYTES + footer_length
    return footer, footer_at


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


def walk_bytes(folder: Folder, key: str, footer: Footer, end: int, tally: Tally) -> None:
    """Every byte before the footer: chunks against their digests, all others against zero."""
    digest = digests.digester(folder.settings.digest)
    every = sorted((*footer.chunks, *footer.state_chunks), key=lambda c: c.offset)
    if any(c.offset < 0 or not 0 <= c.stored_length <= end - c.offset for c in every):
        raise CorruptObject(f"the footer of {key} names chunks outside the pack.")
    at = 0
    for chunk in every:
        for start, stop in _windows(at, chunk.offset):
            _check_zero(folder, key, start, stop, tally)
        data = folder.backend.get(key, chunk.offset, chunk.stored_length)
        if digest(data) != chunk.digest:
            tally.damage.append(
                f"{key} at byte {chunk.offset} ({chunk.stored_length} bytes) does not match its "
                "digest."
            )
        tally.chunks += 1
        at = max(at, chunk.offset + chunk.stored_length)
    for start, stop in _windows(at, end):
        _check_zero(folder, key, start, stop, tally)
    tally.bytes += end


def _windows(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _WINDOW):
        yield at, min(at + _WINDOW, stop)


def _check_zero(folder: Folder, key: str, start: int, stop: int, tally: Tally) -> None:
    if folder.backend.get(key, start, stop - start).strip(b"\0"):
        tally.damage.append(
            f"{key} has padding that is not zero at {start} to {stop}; no tensor lies there."
        )
