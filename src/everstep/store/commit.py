"""Committing a step: all indexes in, one manifest out (S1, S2, S4, S5).

Owns: when a manifest may be created, and what it says. Called by: job; by anyone who believes that
all ranks are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from everstep.core import points
from everstep.core.health import together
from everstep.core.ids import Point
from everstep.core.layout import ITEMSIZE
from everstep.errors import CommitRefused, ObjectMissing, StoreError, UsageError
from everstep.store import check, digests, keys, records
from everstep.store.folder import Folder
from everstep.store.records import Index, Manifest, Newest, RankEntry
from everstep.store.settings import Settings

State = Literal["committed", "waiting"]
Report = Callable[[str], None]


def try_commit(folder: Folder, point: Point, world: int, report: Report | None) -> State:
    """Create the manifest if every rank's index is there."""
    if not 1 <= world <= keys.MAX_WORLD:
        raise UsageError(f"a world of {world} ranks.")
    _refuse_tombstone(folder, point)
    if not folder.exists(keys.manifest(point)):
        found = _indexes(folder, point, world)
        if found is None:
            return "waiting"
        manifest = _sound_manifest(folder, point, found)
        points.reach("store.commit.before_manifest")
        if not folder.create(keys.manifest(point), manifest):
            raise _other_manifest(folder, point)
    else:
        _check_existing(folder, point, world)
    points.reach("store.commit.before_last_look")
    _refuse_tombstone(folder, point)
    _refuse_buried(folder, point, world)
    _hint(folder, point, report)
    return "committed"


def build_manifest(indexes: Sequence[tuple[Index, bytes]], settings: Settings) -> Manifest:
    """The manifest of a step: a pure function of the ranks' indexes and their bytes (S1)."""
    digest = digests.digester(settings.digest)
    first = indexes[0][0]
    return Manifest(
        job=first.job,
        point=first.point,
        layout=first.layout,
        world=first.world,
        digest=settings.digest,
        chunk_bytes=settings.chunk_bytes,
        bytes=sum(_raw_bytes(index) for index, _ in indexes),
        facts=first.facts,
        ranks=tuple(
            RankEntry(keys.index(i.point, i.rank, i.world), len(data), digest(data))
            for i, data in indexes
        ),
        health=together(index.health for index, _ in indexes),
    )


def _raw_bytes(index: Index) -> int:
    tensors = sum(math.prod(e.sizes) * ITEMSIZE[e.dtype] for e in index.extents)
    return tensors + index.state_bytes


def _indexes(folder: Folder, point: Point, world: int) -> list[tuple[Index, bytes]] | None:
    """Every rank's index in rank order, or None where one is missing."""
    prefix = keys.step_prefix(point)
    names = {info.key[len(prefix) :] for info in folder.list(prefix)}
    for name in names:
        parsed = keys.parse_index(name)
        if parsed is not None and parsed[1] != world:
            raise _refused(folder, point, f"{name} belongs to a world of {parsed[1]}, not {world}")
    wanted = [keys.index(point, rank, world) for rank in range(world)]
    if any(key[len(prefix) :] not in names for key in wanted):
        return None
    found = []
    for key in wanted:
        try:
            data = folder.read_bytes(key, Index)
        except ObjectMissing:
            _refuse_tombstone(folder, point)
            return None  # deleted since it was listed
        found.append((records.decode(data, Index, folder.key(key)), data))
    return found


def _sound_manifest(folder: Folder, point: Point, found: Sequence[tuple[Index, bytes]]) -> Manifest:
    indexes = [index for index, _ in found]
    try:
        for index in indexes:
            key = folder.key(keys.index(point, index.rank, index.world))
            check.check_index(index, folder.settings, key)
        check.check_together(indexes)
    except check.Unsound as error:
        raise _refused(folder, point, str(error)) from error
    first = indexes[0]
    if (first.job, first.point) != (folder.job, point):
        raise _refused(folder, point, f"its indexes are of job {first.job}, {first.point}")
    for index in indexes:
        _check_packs(folder, index)
    return build_manifest(found, folder.settings)


def _check_packs(folder: Folder, index: Index) -> None:
    for entry in index.packs:
        try:
            length = folder.backend.stat(folder.key(entry.key)).size
        except ObjectMissing:
            raise _refused(folder, index.point, f"{entry.key} is gone") from None
        if length != entry.length:
            raise _refused(folder, index.point, f"{entry.key} has {length} bytes")


def _check_existing(folder: Folder, point: Point, world: int) -> None:
    try:
        manifest = folder.read(keys.manifest(point), Manifest)
    except ObjectMissing:
        raise _refused(folder, point, "its manifest was deleted") from None
    if (manifest.point, manifest.world) != (point, world):
        raise _refused(
            folder, point, f"its manifest is of {manifest.point}, {manifest.world} ranks"
        )


def _refuse_tombstone(folder: Folder, point: Point) -> None:
    if folder.exists(keys.tombstone(point)):
        raise _refused(folder, point, "it is being deleted")


def _refuse_buried(folder: Folder, point: Point, world: int) -> None:
    """A committer that was stopped for longer than a tombstone stays (a suspended machine) finds
    none; but the indexes that it has read are gone, too."""
    if not folder.exists(keys.index(point, 0, world)):
        raise _refused(folder, point, "it was deleted long ago")


def _hint(folder: Folder, point: Point, report: Report | None) -> None:
    """``refs/newest`` saves a listing, no more: losing it loses nothing (spec section 7)."""
    try:
        folder.backend.put(folder.key(keys.NEWEST), records.encode(Newest(point)))
    except StoreError as error:
        if report is not None:
            report(f"the checkpoint is committed; its hint was not written: {error}")


def _refused(folder: Folder, point: Point, why: str) -> CommitRefused:
    return CommitRefused(
        f"step {point.step} of attempt {point.attempt} of job {folder.job} is not committed: "
        f"{why}.",
        hint="Checkpoints committed before are not touched; a later step will be written.",
    )


def _other_manifest(folder: Folder, point: Point) -> CommitRefused:
    return _refused(folder, point, "its manifest exists with other bytes")
