"""What checkpoints a job has, and what was proved of them.

Owns: the listing of steps and packs, and ``refs/verified``. Never does: read tensors. Called by:
job, retention's execution, verify.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from everstep.core.ids import Point, parse_point
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing, StaleVersion, StoreError
from everstep.store import attempts, keys, lineage, records
from everstep.store.backends import Condition, ObjectInfo
from everstep.store.folder import Folder
from everstep.store.records import Manifest, Proof, Verified
from everstep.store.retention import CheckpointInfo

_MOST_PROOFS = 256
"""Points remembered in ``refs/verified``; older ones are long deleted."""


def lineage_branches(folder: Folder) -> tuple[dict[int, Point | None], frozenset[int]]:
    """What each attempt with a branch restored, and which of the branches cannot be read."""
    found = attempts.branches(folder)
    restored = {attempt: branch.restored for attempt, branch in found.items()}
    return restored, frozenset(attempt for attempt, branch in found.items() if branch.problem)


def manifests_and_tombstones(folder: Folder) -> tuple[list[Point], list[Point]]:
    """(points with a manifest and no tombstone, points with a tombstone)."""
    committed, tombstoned = [], []
    for point, objects in steps(folder).items():
        names = _names(point, objects)
        if "tombstone" in names:
            tombstoned.append(point)
        elif "manifest" in names:
            committed.append(point)
    return committed, tombstoned


def candidates(folder: Folder) -> list[Point]:
    """Committed points on the current lineage, newest first (S6)."""
    branches, _ = lineage_branches(folder)
    return lineage.on_lineage(branches, manifests_and_tombstones(folder)[0])


def expected(folder: Folder) -> bool:
    """Whether a recovery point must exist (R5)."""
    committed, tombstoned = manifests_and_tombstones(folder)
    branches, unread = lineage_branches(folder)
    return lineage.expected(branches, [*committed, *tombstoned], unread)


def steps(folder: Folder) -> dict[Point, list[ObjectInfo]]:
    """Objects of each step folder; a point known only by its packs has an empty list."""
    found: dict[Point, list[ObjectInfo]] = defaultdict(list)
    for info in folder.list(keys.STEPS):
        point = parse_point(info.key.split("/")[1])
        if point is not None:
            found[point].append(info)
    return dict(found)


def packs(folder: Folder) -> dict[Point, list[ObjectInfo]]:
    found: dict[Point, list[ObjectInfo]] = defaultdict(list)
    for info in folder.list(keys.PACKS):
        point = keys.parse_pack(info.key)
        if point is not None:
            found[point].append(info)
    return dict(found)


def checkpoints(folder: Folder) -> list[CheckpointInfo]:
    """Every point with anything stored, newest first."""
    by_step, by_pack = steps(folder), packs(folder)
    known = {**dict.fromkeys(by_pack), **dict.fromkeys(by_step)}
    proofs = read_proofs(folder)[0] or {}
    branches, unread = lineage_branches(folder)
    current = frozenset(lineage.on_lineage(branches, known))
    undecided = frozenset(lineage.undecided(branches, known, unread))
    return [
        msgspec.structs.replace(
            _info(folder, point, by_step.get(point, []), by_pack.get(point, [])),
            verified=proofs.get(str(point)),
            on_lineage=point in current,
            undecided=point in undecided,
        )
        for point in sorted(known, reverse=True)
    ]


def _info(
    folder: Folder,
    point: Point,
    objects: Sequence[ObjectInfo],
    packed: Sequence[ObjectInfo],
) -> CheckpointInfo:
    named = _names(point, objects)
    newest = max(info.modified for info in (*objects, *packed))
    size = sum(info.size for info in packed)
    if "tombstone" in named:
        modified = named["tombstone"].modified
        return CheckpointInfo(point, "tombstoned", modified, 0, size)
    if "manifest" not in named:
        world = max((w for name in named if (w := _world(name))), default=0)
        return CheckpointInfo(point, "incomplete", newest, world, size)
    manifest, error = _read_manifest(folder, point)
    return CheckpointInfo(
        point, "committed", newest, manifest.world if manifest else 0, size,
        health=manifest.health if manifest else None,
        error=str(error) if error is not None else "",
        newer_format=isinstance(error, NewerFormat),
        committed_at=named["manifest"].modified,
    )  # fmt: skip


def _read_manifest(folder: Folder, point: Point) -> tuple[Manifest | None, StoreError | None]:
    try:
        return folder.read(keys.manifest(point), Manifest), None
    except (CorruptObject, NewerFormat, ObjectMissing) as error:
        return None, error


def _names(point: Point, objects: Iterable[ObjectInfo]) -> dict[str, ObjectInfo]:
    cut = len(keys.step_prefix(point))
    return {info.key[cut:]: info for info in objects}


def _world(name: str) -> int:
    parsed = keys.parse_index(name)
    return parsed[1] if parsed else 0


def read_proofs(folder: Folder) -> tuple[dict[str, Proof] | None, Condition]:
    """What was proved by point text (None where the ref cannot be read), and its version."""
    key = folder.key(keys.VERIFIED)
    try:
        data, version = folder.backend.get_versioned(key)
    except ObjectMissing:
        return {}, "absent"
    try:
        return records.decode(data, Verified, key).proofs, version
    except CorruptObject:
        return None, version


def record_proof(folder: Folder, point: Point, proof: Proof) -> None:
    """Write down what was proved, and no more: a proof of structure leaves one of bytes alone."""
    key = folder.key(keys.VERIFIED)
    for _ in range(16):
        proofs, version = read_proofs(folder)
        merged = _merge(proofs or {}, str(point), proof)
        if merged == proofs:
            return
        try:
            folder.backend.put(key, records.encode(Verified(merged)), version)
        except StaleVersion:
            continue
        return
    raise StoreError(f"{key} changes too often to be updated.", hint="Verify again later.")


def _merge(proofs: dict[str, Proof], point: str, proof: Proof) -> dict[str, Proof]:
    if proof == "structure" and proofs.get(point) in ("bytes", "damaged"):
        return proofs
    merged = {**proofs, point: proof}
    return {text: merged[text] for text in sorted(merged)[-_MOST_PROOFS:]}
