"""Writing one rank's part of a step: the pack, then the index (S2, spec section 7).

Owns: the order of the writes and the refusal of what must not be written. Never does: commit.
Called by: job, on behalf of the keeper.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec

from everstep.core import points
from everstep.core.ids import MAX_ATTEMPT, MAX_STEP, Point
from everstep.core.layout import RankLayout, RankState, Snapshot, TensorRef
from everstep.errors import CommitRefused, CorruptObject, ObjectMissing, UsageError
from everstep.store import check, digests, keys, pack, records
from everstep.store.folder import Folder
from everstep.store.records import ExtentEntry, Index, PackEntry, RefEntry


def write_rank(
    folder: Folder,
    snapshot: Snapshot,
    *,
    facts: Mapping[str, str],
    unique: str,
    digests_known: pack.Digests | None,
    on_progress: pack.Progress,
) -> str:
    """Write the rank's pack and index; the index's key (relative to the job).

    Done already is success. Raises ``CommitRefused`` where the step must not be written (no
    branch, a tombstone, or another content under this rank's name).
    """
    _check_shape(snapshot)
    point, layout = pack.point_of(snapshot), snapshot.layout
    _check_allowed(folder, point)
    key = keys.index(point, layout.rank, layout.world)
    part = _Part(folder, snapshot, facts, keys.pack(point, layout.rank, unique), digests_known)
    if _done_before(folder, key, part):
        return key
    pack.check_gaps(snapshot)
    points.reach("store.write.before_pack")
    folder.backend.create(
        folder.key(part.pack_key), pack.stream(snapshot, part.proven_footer, on_progress)
    )
    points.reach("store.write.before_index")
    if not folder.create(key, part.index) and not _done_before(folder, key, part):
        raise _conflict(folder, key)
    return key


class _Part:
    """A rank's records. What needs the digests is made when it is first asked for: the payload
    is on its way to the disk by then, and its digests are taken meanwhile."""

    def __init__(
        self,
        folder: Folder,
        snapshot: Snapshot,
        facts: Mapping[str, str],
        pack_key: str,
        known: pack.Digests | None,
    ) -> None:
        self._folder = folder
        self._snapshot = snapshot
        self._facts = dict(facts)
        self._known = known
        self._state = _decode_state(snapshot)
        self.pack_key = pack_key

    @cached_property
    def chunks(self) -> pack.Entries:
        settings = self._folder.settings
        known = self._known() if self._known is not None else None
        digest = digests.digester(settings.digest)
        return pack.entries(self._snapshot, settings.chunk_bytes, digest, known)

    @cached_property
    def footer(self) -> bytes:
        return records.encode(pack.footer_of(self._folder.job, self._snapshot, self.chunks))

    def proven_footer(self) -> bytes:
        """The footer, once the index is known to be sound: else no pack comes to be."""
        _check_own(self.index, self._folder)
        return self.footer

    @cached_property
    def index(self) -> Index:
        snapshot, layout = self._snapshot, self._snapshot.layout
        payload, state = self.chunks
        length = pack.length_of(pack.places(layout, len(snapshot.state)), self.footer)
        return Index(
            job=self._folder.job,
            point=pack.point_of(snapshot),
            layout=layout.layout,
            world=layout.world,
            rank=layout.rank,
            facts=self._facts,
            chunk_bytes=self._folder.settings.chunk_bytes,
            packs=(PackEntry(self.pack_key, length),),
            extents=_extents(layout),
            chunks=payload,
            state_chunks=state,
            state_bytes=len(snapshot.state),
            refs=tuple(ref_entry(ref) for ref in self._state.refs),
            health=self._state.health,
        )


def ref_entry(ref: TensorRef) -> RefEntry:
    return RefEntry(ref.fqn, ref.dtype, ref.shape, ref.box.offsets, ref.box.sizes, ref.rank)


def _extents(layout: RankLayout) -> tuple[ExtentEntry, ...]:
    return tuple(
        ExtentEntry(e.fqn, e.dtype, e.shape, e.box.offsets, e.box.sizes, e.rank, e.payload_offset)
        for e in layout.extents
        if e.persist
    )


def _check_shape(snapshot: Snapshot) -> None:
    layout = snapshot.layout
    if not (0 <= snapshot.step <= MAX_STEP and 1 <= snapshot.attempt <= MAX_ATTEMPT):
        raise UsageError(f"step {snapshot.step} of attempt {snapshot.attempt} has no key.")
    if snapshot.payload.nbytes < layout.persist_bytes:
        raise UsageError(
            f"rank {layout.rank} gave {snapshot.payload.nbytes} bytes of payload for "
            f"{layout.persist_bytes} to persist."
        )
    at = 0
    for extent in layout.extents:
        if extent.persist:
            if extent.payload_offset < at:
                raise UsageError(f"extents of {extent.fqn} overlap in the payload.")
            at = extent.payload_offset + extent.nbytes
    if at > layout.persist_bytes:
        raise UsageError(f"persisted extents reach {at}, beyond {layout.persist_bytes}.")


def _decode_state(snapshot: Snapshot) -> RankState:
    try:
        state = msgspec.msgpack.decode(snapshot.state, type=RankState)
    except msgspec.DecodeError as error:
        raise CorruptObject(
            f"the state of rank {snapshot.layout.rank} at step {snapshot.step} does not decode: "
            f"{error}.",
            hint="Its memory was overwritten: drop this snapshot and take a new one.",
        ) from error
    if state.step != snapshot.step:
        raise UsageError(f"a snapshot of step {snapshot.step} holds the state of {state.step}.")
    return state


def _check_own(index: Index, folder: Folder) -> None:
    try:
        check.check_index(index, folder.settings, "this rank's index")
    except check.Unsound as error:
        raise UsageError(f"rank {index.rank} of step {index.point.step}: {error}.") from error


def _check_allowed(folder: Folder, point: Point) -> None:
    if not folder.exists(keys.branch(point.attempt)):
        raise CommitRefused(
            f"attempt {point.attempt} of job {folder.job} has no branch yet.",
            hint="Write the branch, then the checkpoint.",
        )
    if folder.exists(keys.tombstone(point)):
        raise CommitRefused(
            f"step {point.step} of attempt {point.attempt} is being deleted.",
            hint="A later step will be written.",
        )


def _done_before(folder: Folder, key: str, part: _Part) -> bool:
    try:
        found = folder.read(key, Index)
    except ObjectMissing:
        return False
    if _content(found) != _content(part.index):
        raise _conflict(folder, key)
    return True


def _content(index: Index) -> Index:
    return msgspec.structs.replace(index, packs=(), facts={})


def _conflict(folder: Folder, key: str) -> CommitRefused:
    return CommitRefused(
        f"{folder.key(key)} exists with other content.",
        hint="Two writers took this step under one attempt; the first one's stands.",
    )
