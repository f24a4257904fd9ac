"""Opening a checkpoint and reading tensors out of it (S3, spec section 10).

Owns: the checks on opening, the plan of which bytes go where, parallel verified reads. Never does:
choose a checkpoint, change the store. Called by: job; the train room through :class:`Checkpoint`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from everstep.core import points
from everstep.core.clock import Clock
from everstep.core.health import together
from everstep.core.ids import Point
from everstep.core.layout import ITEMSIZE, SHARED, Box, RankState
from everstep.errors import CorruptObject, ObjectMissing, StateMismatch, UsageError
from everstep.store import boxes, check, digests, keys, records
from everstep.store.fetch import Fetch, Piece, fetches, run
from everstep.store.folder import Folder
from everstep.store.records import ChunkEntry, ExtentEntry, Index, Manifest, RankEntry
from everstep.store.write import ref_entry

DEFAULT_THREADS = 4


@dataclass(frozen=True)
class ReadRequest:
    """A box of a tensor and where its bytes go.

    ``rank_scope`` is ``core.layout.SHARED`` or the rank that owns the tensor. ``out`` is writable,
    contiguous, and takes the box row-major: ``box.numel * itemsize`` bytes.
    """

    fqn: str
    rank_scope: int
    box: Box
    out: memoryview


class LoadReport(msgspec.Struct, frozen=True):
    """Raw bytes delivered, chunks verified, and seconds it took."""

    bytes: int
    chunks: int
    seconds: float


@dataclass(frozen=True)
class _Stored:
    """An extent with its rank's packs and chunks, and where each chunk begins in its bytes."""

    entry: ExtentEntry
    index: Index
    chunks: tuple[ChunkEntry, ...]
    starts: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint: its manifest and indexes are checked, its chunks are not yet."""

    def __init__(
        self, folder: Folder, manifest: Manifest, indexes: Sequence[Index], clock: Clock
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._digest = digests.digester(folder.settings.digest)
        self._stored: Mapping[tuple[str, int], list[_Stored]] | None = None
        self.manifest = manifest
        self.indexes = tuple(indexes)

    @property
    def point(self) -> Point:
        return self.manifest.point

    @property
    def world(self) -> int:
        return self.manifest.world

    @property
    def facts(self) -> Mapping[str, str]:
        """What rank 0 ran with: torch version, threads, ISA, ... (R4)."""
        return self.manifest.facts

    def rank_state(self, rank: int) -> RankState:
        """The state of one rank, verified. Raises ``CorruptObject``, ``UsageError``."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} of a checkpoint of {self.world} ranks.")
        index = self.indexes[rank]
        key = self._folder.key(keys.index(self.point, rank, self.world))
        data = bytearray(index.state_bytes)
        pieces, at = [], 0
        for chunk in index.state_chunks:
            end = at + chunk.raw_length
            pieces.append(self._piece("the rank's state", index, chunk, memoryview(data)[at:end]))
            at = end
        for fetch in fetches(pieces):
            run(fetch, self._folder.backend, self._digest)
        return _decode_state(data, index, key)

    def load(
        self, requests: Sequence[ReadRequest], *, threads: int = DEFAULT_THREADS
    ) -> LoadReport:
        """Fill every request, or raise; every chunk used is verified whole before this returns.

        Raises ``StateMismatch`` for a tensor or box that the checkpoint does not hold,
        ``CorruptObject`` naming key, offset and tensor for bytes that do not match their digest.
        After an error the buffers hold anything.
        """
        started = self._clock.mono()
        pieces = [piece for request in requests for piece in self._pieces(request)]
        work = fetches(pieces)
        points.reach("store.load.before_read")
        self._run_all(work, threads)
        total = sum(request.out.nbytes for request in requests)
        return LoadReport(total, len(pieces), self._clock.mono() - started)

    def _run_all(self, work: Sequence[Fetch], threads: int) -> None:
        backend, digest = self._folder.backend, self._digest
        if threads <= 1 or len(work) <= 1:
            for fetch in work:
                run(fetch, backend, digest)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="everstep-load") as pool:
            futures = [pool.submit(run, fetch, backend, digest) for fetch in work]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _pieces(self, request: ReadRequest) -> list[Piece]:
        stored = self._find(request)
        itemsize = ITEMSIZE[stored[0].entry.dtype] if stored else 1
        out = _check_out(request, itemsize) if stored else request.out.cast("B")
        pieces, have = [], 0
        for extent in stored:
            copies = _copies(extent, request.box, itemsize)
            for number, runs in copies.items():
                chunk = extent.chunks[number]
                pieces.append(self._piece(request.fqn, extent.index, chunk, out, runs))
                have += sum(copy.length for copy in runs)
        if have != len(out):
            raise StateMismatch(
                f"{request.fqn}: the checkpoint {self.point} holds {have} of the {len(out)} bytes "
                f"of {request.box}.",
                hint="The model is split or shaped differently from the one that was saved.",
            )
        return pieces

    def _piece(
        self,
        fqn: str,
        index: Index,
        chunk: ChunkEntry,
        out: memoryview,
        runs: Sequence[boxes.Run] | None = None,
    ) -> Piece:
        copies = runs if runs is not None else (boxes.Run(0, 0, chunk.raw_length),)
        pack = self._folder.key(index.packs[chunk.pack].key)
        return Piece(pack, chunk, fqn, out, tuple(copies))

    def _find(self, request: ReadRequest) -> list[_Stored]:
        if self._stored is None:
            self._stored = _by_tensor(self.indexes)
        found = self._stored.get((request.fqn, request.rank_scope), [])
        empty = request.box.sizes and request.box.numel == 0
        if not found and not empty:
            scope = "" if request.rank_scope == SHARED else f" of rank {request.rank_scope}"
            raise StateMismatch(
                f"{request.fqn}{scope} is not in the checkpoint {self.point}.",
                hint="Its name is new, or the object it belongs to was not attached before.",
            )
        if found and not boxes.inside(request.box, found[0].entry.shape):
            raise StateMismatch(
                f"{request.fqn} has the shape {found[0].entry.shape} in the checkpoint "
                f"{self.point}; {request.box} was asked for.",
                hint="The model's shapes changed since the checkpoint was made.",
            )
        return found


def open_checkpoint(folder: Folder, point: Point, clock: Clock) -> Checkpoint:
    """Read and check the manifest and all indexes.

    Raises ``ObjectMissing`` where it does not exist (or has a tombstone), ``CorruptObject``,
    ``NewerFormat``.
    """
    if folder.exists(keys.tombstone(point)):
        raise ObjectMissing(
            f"the checkpoint {point} of job {folder.job} was deleted (it has a tombstone).",
            hint="`everstep ls` shows those that exist.",
        )
    manifest = folder.read(keys.manifest(point), Manifest)
    key = folder.key(keys.manifest(point))
    _check_manifest(folder, point, manifest, key)
    indexes = [
        _open_index(folder, manifest, rank, entry) for rank, entry in enumerate(manifest.ranks)
    ]
    try:
        check.check_together(indexes)
    except check.Unsound as error:
        raise _corrupt(key, str(error)) from error
    if manifest.facts != indexes[0].facts:
        raise _corrupt(key, "other facts than rank 0's")
    if manifest.health != together(index.health for index in indexes):
        raise _corrupt(key, "another health than its indexes together")
    return Checkpoint(folder, manifest, indexes, clock)


def _check_manifest(folder: Folder, point: Point, manifest: Manifest, key: str) -> None:
    settings = folder.settings
    for what, found, wanted in (
        ("job", manifest.job, folder.job),
        ("point", manifest.point, point),
        ("digest", manifest.digest, settings.digest),
        ("chunk_bytes", manifest.chunk_bytes, settings.chunk_bytes),
        ("number of ranks", len(manifest.ranks), manifest.world),
    ):
        if found != wanted:
            raise _corrupt(key, f"the {what} {found} where {wanted} belongs")
    if not 1 <= manifest.world <= keys.MAX_WORLD:
        raise _corrupt(key, f"a world of {manifest.world} ranks")


def _open_index(folder: Folder, manifest: Manifest, rank: int, entry: RankEntry) -> Index:
    wanted = keys.index(manifest.point, rank, manifest.world)
    key = folder.key(wanted)
    if entry.key != wanted:
        raise _corrupt(folder.key(keys.manifest(manifest.point)), f"the index key {entry.key!r}")
    data = _index_bytes(folder, wanted)
    digest = digests.digester(folder.settings.digest)
    if len(data) != entry.length or digest(data) != entry.digest:
        raise _corrupt(key, "other bytes than its manifest names")
    index = records.decode(data, Index, key)
    try:
        check.check_index(index, folder.settings, key)
    except check.Unsound as error:
        raise _corrupt(key, str(error)) from error
    for name in ("job", "point", "layout", "world"):
        if getattr(index, name) != getattr(manifest, name):
            raise _corrupt(key, f"the {name} {getattr(index, name)}, unlike its manifest")
    _check_packs(folder, index)
    return index


def _index_bytes(folder: Folder, key: str) -> bytes:
    try:
        return folder.read_bytes(key, Index)
    except ObjectMissing as error:
        # A manifest without one of its parts is damage, not absence.
        raise _corrupt(folder.key(key), "no bytes: it is missing") from error


def _check_packs(folder: Folder, index: Index) -> None:
    for entry in index.packs:
        key = folder.key(entry.key)
        try:
            length = folder.backend.stat(key).size
        except ObjectMissing as error:
            raise _corrupt(key, "no bytes: it is missing") from error
        if length != entry.length:
            raise _corrupt(key, f"{length} bytes where its index names {entry.length}")


def _by_tensor(indexes: Sequence[Index]) -> Mapping[tuple[str, int], list[_Stored]]:
    found: dict[tuple[str, int], list[_Stored]] = defaultdict(list)
    for index in indexes:
        at = 0
        for entry in index.extents:
            starts = tuple(start for start, _ in check.edges_of(entry, index.chunk_bytes))
            chunks = index.chunks[at : at + len(starts)]
            at += len(starts)
            found[entry.fqn, entry.rank].append(_Stored(entry, index, chunks, starts))
    return found


def _copies(extent: _Stored, box: Box, itemsize: int) -> dict[int, list[boxes.Run]]:
    """Chunk number to the runs of it that ``box`` wants: (offset in chunk, in the out, length)."""
    found: dict[int, list[boxes.Run]] = defaultdict(list)
    number = 0
    for whole in boxes.runs(check.box_of(extent.entry), box, itemsize):
        done = 0
        while done < whole.length:
            at = whole.source + done
            while at >= extent.starts[number] + extent.chunks[number].raw_length:
                number += 1
            inside = at - extent.starts[number]
            n = min(extent.chunks[number].raw_length - inside, whole.length - done)
            _append(found[number], boxes.Run(inside, whole.target + done, n))
            done += n
    return found


def _append(runs: list[boxes.Run], new: boxes.Run) -> None:
    if runs:
        last = runs[-1]
        if last.source + last.length == new.source and last.target + last.length == new.target:
            runs[-1] = boxes.Run(last.source, last.target, last.length + new.length)
            return
    runs.append(new)


def _check_out(request: ReadRequest, itemsize: int) -> memoryview:
    if request.out.readonly or not request.out.contiguous:
        raise UsageError(f"the buffer for {request.fqn} is not writable and contiguous.")
    out = request.out.cast("B")
    wanted = math.prod(request.box.sizes) * itemsize
    if len(out) != wanted:
        raise StateMismatch(
            f"{request.fqn}: {wanted} bytes are stored for {request.box}, and the buffer has "
            f"{len(out)}.",
            hint="The dtype changed since the checkpoint was made.",
        )
    return out


def _decode_state(data: bytearray, index: Index, key: str) -> RankState:
    try:
        state = msgspec.msgpack.decode(data, type=RankState)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _corrupt(key, f"a state that does not decode: {error}") from error
    if state.step != index.point.step or tuple(ref_entry(r) for r in state.refs) != index.refs:
        raise _corrupt(key, "a state of another step or of other tensors than it names")
    return state


def _corrupt(key: str, what: str) -> CorruptObject:
    return CorruptObject(
        f"{key} has {what}.", hint="The checkpoint is kept; another one has to be used."
    )
