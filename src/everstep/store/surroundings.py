"""Checking everything in a job's folder that is no part of a sound checkpoint.

Owns: the walk over the store's settings, the job's attempts, history and refs, and the steps and
packs that are incomplete, deleted or damaged. Never does: repair; prove a checkpoint (verify does).
Called by: job, for ``everstep verify``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from everstep.core.clock import Clock
from everstep.core.ids import Point
from everstep.errors import CorruptObject, NewerFormat, ObjectMissing
from everstep.store import attempts, catalog, history, keys, settings
from everstep.store.backends import ObjectInfo
from everstep.store.folder import Folder
from everstep.store.read import open_checkpoint
from everstep.store.records import (
    Claim,
    ClockProbe,
    Index,
    Manifest,
    Newest,
    OwnerRecord,
    Record,
    Swept,
    Tombstone,
    Verified,
)
from everstep.store.verify import Tally, read_footer, walk_bytes

_REFS: dict[str, type[Record]] = {
    keys.OWNER: OwnerRecord,
    keys.NEWEST: Newest,
    keys.VERIFIED: Verified,
    keys.CLOCK: ClockProbe,
}
_IN_STEP: dict[str, type[Record]] = {
    "manifest": Manifest,
    "tombstone": Tombstone,
    "swept": Swept,
}


class AroundReport(msgspec.Struct, frozen=True):
    """What was read of a job besides its sound checkpoints. ``damage`` is what is wrong with it,
    ``unknown`` what only a later version of everstep can read."""

    objects: int
    bytes_read: int
    damage: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.damage, *self.unknown)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_around(folder: Folder, *, deep: bool, clock: Clock) -> AroundReport:
    """Walk the surroundings; ``deep`` takes the steps and packs as well. Damage is reported, not
    raised; what is deleted meanwhile is not missed."""
    tally = Tally()
    tally.objects += 1
    tally.catch(partial(_check_settings, folder))
    _walk_attempts(folder, tally)
    for info in folder.list(keys.HISTORY):
        _count(tally, info, partial(_check_history, folder, info))
    for info in folder.list("refs/"):
        if info.key in _REFS:
            _count(tally, info, partial(_check_record, folder, info.key, _REFS[info.key]))
    if deep:
        _walk_steps(folder, clock, tally)
    return AroundReport(tally.objects, tally.bytes, tuple(tally.damage), tuple(tally.unknown))


def _walk_attempts(folder: Folder, tally: Tally) -> None:
    for info in folder.list(keys.ATTEMPTS):
        attempt = keys.parse_attempt(info.key.split("/")[1])
        if attempt is None:
            continue
        if info.key == keys.branch(attempt):
            _count(tally, info, partial(_check_branch, folder, attempt, tally))
        elif info.key == keys.claim(attempt):
            _count(tally, info, partial(_check_record, folder, info.key, Claim))


def _walk_steps(folder: Folder, clock: Clock, tally: Tally) -> None:
    """Steps first: a pack that comes to be named by an index meanwhile is walked all the same."""
    named: set[str] = set()
    opaque: set[Point] = set()
    for point, objects in catalog.steps(folder).items():
        sound = _parts_of_sound(folder, point, clock)
        named |= sound
        before = len(tally.unknown)
        for info in objects:
            record = _record_of(point, info.key)
            if record is not None and info.key not in sound:
                _count(tally, info, partial(_check_record, folder, info.key, record))
        if len(tally.unknown) > before:
            opaque.add(point)
    for point, packs in catalog.packs(folder).items():
        for pack in packs:
            if pack.key not in named:
                check = partial(_check_pack, folder, point, pack, point not in opaque, tally)
                tally.catch(partial(_unless_gone, check))


def _parts_of_sound(folder: Folder, point: Point, clock: Clock) -> set[str]:
    """Keys of the objects that a sound checkpoint is made of; none where it is not one."""
    try:
        checkpoint = open_checkpoint(folder, point, clock)
    except (CorruptObject, NewerFormat, ObjectMissing):
        return set()
    indexes = {keys.index(point, rank, checkpoint.world) for rank in range(checkpoint.world)}
    packs = {pack.key for index in checkpoint.indexes for pack in index.packs}
    return {keys.manifest(point), *indexes, *packs}


def _record_of(point: Point, key: str) -> type[Record] | None:
    name = key[len(keys.step_prefix(point)) :]
    return Index if keys.parse_index(name) is not None else _IN_STEP.get(name)


def _count(tally: Tally, info: ObjectInfo, check: Callable[[], None]) -> None:
    tally.objects += 1
    tally.bytes += info.size
    tally.catch(partial(_unless_gone, check))


def _unless_gone(check: Callable[[], None]) -> None:
    """What was listed and is not there any more was deleted by a sweep: no damage."""
    try:
        check()
    except ObjectMissing:
        return


def _check_settings(folder: Folder) -> None:
    found = settings.read(folder.backend)
    if found != folder.settings:
        raise CorruptObject(
            f"{keys.SETTINGS} changed since the store was opened.",
            hint="Put it back from a copy.",
        )


def _check_branch(folder: Folder, attempt: int, tally: Tally) -> None:
    branch = attempts.read_branch(folder, attempt)
    if branch is not None and branch.problem:
        tally.damage.append(branch.problem)


def _check_history(folder: Folder, info: ObjectInfo) -> None:
    named = keys.parse_history(info.key)
    if named is None:
        raise CorruptObject(
            f"{folder.key(info.key)} is no name of a history record.", hint="Move it elsewhere."
        )
    history.read_one(folder, info, named)  # reading is the check


def _check_record(folder: Folder, key: str, record: type[Record]) -> None:
    folder.read(key, record)  # reading is the check


def _check_pack(folder: Folder, point: Point, pack: ObjectInfo, plain: bool, tally: Tally) -> None:
    """A pack by itself. Where its index is of a later version its chunks may be stored in a way
    that this one does not know (``plain`` False): then its footer alone is checked."""
    key = folder.key(pack.key)
    footer, footer_at = read_footer(folder, key, pack.size, tally)
    if (footer.job, footer.point) != (folder.job, point):
        raise CorruptObject(f"{key} is the pack of {footer.point} of job {footer.job}.")
    if plain:
        walk_bytes(folder, key, footer, footer_at, tally)
