"""Deleting, in the order that no death can turn into a half checkpoint (S2, spec section 9).

Owns: the order, and finishing what another began. Never does: decide what goes (retention does).
Called by: job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from everstep.core import points
from everstep.core.ids import Point
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing
from everstep.store import catalog, history, keys
from everstep.store.backends import ObjectInfo
from everstep.store.folder import Folder
from everstep.store.records import Index, Manifest, Swept, Tombstone
from everstep.store.retention import RetentionPlan

TOMBSTONE_SECONDS = 24 * 3600.0
"""How long a tombstone stays after its packs are gone: longer than any writer can be asleep."""


class SweepReport(msgspec.Struct, frozen=True):
    """What one execution did. ``skipped`` are points that the plan named and a fresh look kept."""

    tombstoned: tuple[Point, ...] = ()
    skipped: tuple[Point, ...] = ()
    packs_deleted: int = 0
    bytes_freed: int = 0
    tombstones_removed: tuple[Point, ...] = ()
    history_removed: int = 0


def execute(
    folder: Folder,
    plan: RetentionPlan,
    look_again: Callable[[], RetentionPlan],
    now: float | None = None,
) -> SweepReport:
    """Carry out a plan and go on with earlier ones. ``look_again`` plans afresh from the store;
    ``now`` is in the store's time, None asks the store.
    """
    still = {ruling.point for ruling in look_again().remove} if plan.remove else set()
    going = [ruling for ruling in plan.remove if ruling.point in still]
    for ruling in going:
        points.reach("store.sweep.before_tombstone")
        # False means that another sweep's tombstone stands there: the same to everyone.
        folder.create(
            keys.tombstone(ruling.point), Tombstone(folder.job, ruling.point, ruling.reason)
        )
    now = folder.store_time() if now is None else now
    grace = plan.policy.grace_seconds
    removed, freed, gone = _finish_all(folder, now, grace)
    orphans, orphan_bytes = _delete_unreferenced(folder, now, grace)
    folder.backend.sweep_temporaries(now - grace)
    return SweepReport(
        tuple(ruling.point for ruling in going),
        tuple(ruling.point for ruling in plan.remove if ruling.point not in still),
        removed + orphans,
        freed + orphan_bytes,
        gone,
        history.expire(folder, now),
    )


def _finish_all(folder: Folder, now: float, grace: float) -> tuple[int, int, tuple[Point, ...]]:
    by_pack = catalog.packs(folder)
    removed = freed = 0
    gone: list[Point] = []
    for point, objects in catalog.steps(folder).items():
        tombstone = _find(objects, keys.tombstone(point))
        if tombstone is None:
            continue
        _delete_records(folder, point, objects)
        if now - tombstone.modified < grace:
            continue
        for pack in by_pack.get(point, []):
            points.reach("store.sweep.before_pack")
            folder.delete(pack.key)
            removed, freed = removed + 1, freed + pack.size
        if _bury(folder, point, objects, now):
            gone.append(point)
    return removed, freed, tuple(gone)


def _delete_records(folder: Folder, point: Point, objects: Sequence[ObjectInfo]) -> None:
    """The manifest first: from then on nothing names the indexes."""
    if _find(objects, keys.manifest(point)) is not None:
        points.reach("store.sweep.before_manifest")
        folder.delete(keys.manifest(point))
    for info in objects:
        if info.key.endswith(".index"):
            points.reach("store.sweep.before_index")
            folder.delete(info.key)


def _bury(folder: Folder, point: Point, objects: Sequence[ObjectInfo], now: float) -> bool:
    """Remove the tombstone once its packs have been gone for long; True when it was removed."""
    swept = _find(objects, keys.swept(point))
    if swept is None:
        folder.create(keys.swept(point), Swept(folder.job, point))
        return False
    if now - swept.modified < TOMBSTONE_SECONDS:
        return False
    folder.delete(keys.swept(point))
    folder.delete(keys.tombstone(point))
    return True


def _delete_unreferenced(folder: Folder, now: float, grace: float) -> tuple[int, int]:
    """Packs of committed points that their indexes do not name: leftovers of a second writer.

    Their indexes exist and are create-only, so nobody can come to name them. Packs of points
    without a manifest are left to the tombstone's way.
    """
    removed = freed = 0
    committed = set(catalog.manifests_and_tombstones(folder)[0])
    for point, packs in catalog.packs(folder).items():
        old = [pack for pack in packs if now - pack.modified >= grace]
        if point not in committed or not old:
            continue
        named = _named_packs(folder, point)
        for pack in old:
            if named is not None and pack.key not in named:
                folder.delete(pack.key)
                removed, freed = removed + 1, freed + pack.size
    return removed, freed


def _named_packs(folder: Folder, point: Point) -> set[str] | None:
    """Keys of the packs that the point's indexes name; None where one cannot be read."""
    try:
        manifest = folder.read(keys.manifest(point), Manifest)
        wanted = [keys.index(point, rank, manifest.world) for rank in range(manifest.world)]
        return {pack.key for key in wanted for pack in folder.read(key, Index).packs}
    except (CorruptObject, NewerFormat, ObjectMissing):
        return None


def _find(objects: Sequence[ObjectInfo], key: str) -> ObjectInfo | None:
    return next((info for info in objects if info.key == key), None)
