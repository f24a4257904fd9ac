"""Claims, branches and the owner of a job (S6, spec section 8).

Owns: who may run the job, and what each attempt went on from. Never does: decide whether a process
lives (the caller passes that in). Called by: job.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import msgspec

from everstep.core import points
from everstep.core.ids import MAX_ATTEMPT, Point
from everstep.errors import (
    CommitRefused,
    CorruptObject,
    JobOwned,
    ObjectMissing,
    StaleVersion,
    StoreError,
    StoreFull,
    StoreNotWritable,
    UsageError,
)
from everstep.store import keys, records, settings
from everstep.store.backends import Version
from everstep.store.folder import Folder
from everstep.store.records import BranchRecord, Claim, OwnerRecord, Source

RENEW_SECONDS = 10.0
STALE_SECONDS = 30.0


class OwnerIdentity(msgspec.Struct, frozen=True):
    """An agent's process, exactly: a pid alone is reused.

    ``boot`` is the machine's boot id, ``started`` the process's start in clock ticks since boot.
    """

    agent: str
    host: str
    boot: str
    pid: int
    started: int


class Branch(msgspec.Struct, frozen=True):
    """What an attempt went on from. ``restored`` None means from nothing, for ``fresh_reason``.

    Of a branch that cannot be read nothing is known: its ``source`` is ``unknown``, its ``world``
    0, and ``problem`` says why, and what a person can do. Such a one cannot be written.
    """

    restored: Point | None
    source: Source | Literal["unknown"]
    fresh_reason: str = ""
    world: int = 1
    environment: dict[str, str] = {}
    problem: str = ""


IsAlive = Callable[[OwnerIdentity], bool]
"""Asked only about a process of this host and boot."""


def claim(folder: Folder, identity: OwnerIdentity) -> int:
    """Allocate the next attempt number by a create that only one agent can win."""
    attempt = highest_claim(folder) + 1
    while attempt <= MAX_ATTEMPT:
        points.reach("store.claim.before_create")
        record = Claim(
            folder.job,
            attempt,
            identity.agent,
            identity.host,
            identity.boot,
            identity.pid,
            identity.started,
            secrets.token_hex(8),
        )
        if folder.create(keys.claim(attempt), record):
            return attempt
        attempt += 1
    raise UsageError(f"job {folder.job} has used all attempts.", hint="Take another --job name.")


def highest_claim(folder: Folder) -> int:
    """The newest attempt's number, 0 before the first."""
    return max(_attempts(folder), default=0)


def check_store(folder: Folder) -> None:
    """Raise a retryable ``StoreError`` where the store that was opened is not there any more: an
    unmounted file system leaves an empty folder, in which nothing is held by anybody."""
    try:
        found = settings.read(folder.backend)
    except ObjectMissing as missing:
        raise StoreError(
            f"the store of job {folder.job} has gone: {missing.what}",
            hint="Mount it again. Until then what is made is kept in memory.",
        ) from missing
    if found.store_id != folder.settings.store_id:
        raise StoreError(
            f"another store ({found.store_id}) is at {folder.backend.url}; job {folder.job} runs "
            f"in store {folder.settings.store_id}.",
            hint="Put the right one back. Until then what is made is kept in memory.",
        )


def check_claim(folder: Folder, allowed: int, agents: Collection[str] = ()) -> None:
    """Raise ``CommitRefused`` where an attempt above ``allowed`` was claimed by a stranger.

    ``agents`` are agent ids whose higher claims are no strangers': the agents that this process
    serves. Raises a retryable ``StoreError`` where the store is not there.
    """
    known = _attempts(folder)
    if allowed not in known:
        check_store(folder)  # the claim that this process serves is missing
    for attempt in sorted((a for a in known if a > allowed), reverse=True):
        try:
            holder = folder.read(keys.claim(attempt), Claim)
        except ObjectMissing:
            continue  # an attempt's folder without a claim fences nobody
        if holder.agent not in agents:
            raise CommitRefused(
                f"attempt {attempt} of job {folder.job} was claimed by agent {holder.agent} on "
                f"{holder.host}; this process serves attempts up to {allowed}.",
                hint="The job runs elsewhere now. What is in memory here is not written.",
            )


def write_branch(folder: Folder, attempt: int, branch: Branch) -> None:
    """Create the attempt's branch; the same again is success, another is ``CommitRefused``."""
    restored, source = branch.restored, branch.source
    if source == "unknown" or (restored is None) != (source == "fresh"):
        raise UsageError(f"a branch with source {source!r} and restored {restored}.")
    if restored is not None and not 1 <= restored.attempt < attempt:
        raise UsageError(f"attempt {attempt} cannot have restored attempt {restored.attempt}.")
    if restored is not None and not folder.exists(keys.branch(restored.attempt)):
        raise CommitRefused(
            f"attempt {restored.attempt} of job {folder.job}, which attempt {attempt} went on "
            "from, has no branch, so its checkpoints would leave the lineage.",
            hint="Write the branch of the earlier attempt first.",
        )
    record = BranchRecord(
        folder.job,
        attempt,
        restored,
        source,
        branch.fresh_reason,
        branch.world,
        branch.environment,
    )
    points.reach("store.branch.before_create")
    if not folder.create(keys.branch(attempt), record):
        raise CommitRefused(
            f"attempt {attempt} of job {folder.job} has another branch already.",
            hint="Two agents restored under one attempt number: stop this one.",
        )


def branches(folder: Folder) -> dict[int, Branch]:
    """All branches by attempt, those that cannot be read with their ``problem``.

    Raises ``NewerFormat``: a version that knows less than the job's must not decide for it.
    """
    found = {attempt: read_branch(folder, attempt) for attempt in _attempts(folder)}
    return {attempt: branch for attempt, branch in found.items() if branch is not None}


def read_branch(folder: Folder, attempt: int) -> Branch | None:
    """One attempt's branch, None where it has none. Raises ``NewerFormat``."""
    try:
        record = folder.read(keys.branch(attempt), BranchRecord)
        _check_branch(folder, attempt, record)
    except ObjectMissing:
        return None
    except CorruptObject as error:
        return Branch(None, "unknown", world=0, problem=_problem(attempt, error))
    return Branch(
        record.restored, record.source, record.fresh_reason, record.world, record.environment
    )


def _problem(attempt: int, error: CorruptObject) -> str:
    return (
        f"{error.code}: {error.what} It says at which step attempt {attempt} left those before it: "
        f"where the job went on from attempt {attempt}, no checkpoint of an earlier one is loaded "
        "or deleted. Put the file back from a backup. Only if no checkpoint of attempt "
        f"{attempt} or a later one matters, remove it and the branches of all later attempts: the "
        "job then goes on from the newest checkpoint of the attempts before."
    )


def _check_branch(folder: Folder, attempt: int, record: BranchRecord) -> None:
    earlier = record.restored is None or 1 <= record.restored.attempt < attempt
    if (record.job, record.attempt) != (folder.job, attempt) or not earlier:
        raise CorruptObject(
            f"{folder.key(keys.branch(attempt))} tells of attempt {record.attempt} of job "
            f"{record.job}, restored {record.restored}.",
        )


def _attempts(folder: Folder) -> list[int]:
    names = folder.backend.list_folders(folder.key(keys.ATTEMPTS))
    return [attempt for name in names if (attempt := keys.parse_attempt(name)) is not None]


class _Held(NamedTuple):
    record: OwnerRecord | None
    version: Version
    age: float


def acquire_owner(
    folder: Folder,
    identity: OwnerIdentity,
    *,
    is_alive: IsAlive,
    attempt: int = 0,
    now: float | None = None,
) -> None:
    """Become the job's owner, or raise ``JobOwned`` where a fresh other one holds it.

    ``now`` is the store's time; None asks the store.
    """
    for _ in range(8):
        held = _held(folder, now)
        if held is not None and not _free(held, identity, is_alive):
            raise _owned(folder, held)
        record = _record(folder, identity, attempt, now)
        if _replace(folder, record, held.version if held else "absent"):
            return
    raise StoreError(f"{folder.key(keys.OWNER)} changes too often to be taken.", hint="Try again.")


def renew_owner(
    folder: Folder, identity: OwnerIdentity, *, attempt: int = 0, now: float | None = None
) -> None:
    """Stay the owner. Raises ``JobOwned`` where another has taken over: stop at once. A record
    that is lost is written anew; one that cannot be read, or a store that is not there, is a
    retryable ``StoreError``: nobody has taken over by that."""
    while True:
        held = _held(folder, now)
        if held is None:
            check_store(folder)
        elif held.record is None and held.age <= STALE_SECONDS:
            raise StoreError(
                f"{folder.key(keys.OWNER)} cannot be read.",
                hint=f"It is replaced once it is {STALE_SECONDS:.0f} s old.",
            )
        elif held.record is not None and _identity(held.record) != identity:
            raise _owned(folder, held)
        version = held.version if held is not None else "absent"
        if _replace(folder, _record(folder, identity, attempt, now), version):
            return
        # Whoever was faster may be another thread of this very owner: it is looked at anew.


def release_owner(folder: Folder, identity: OwnerIdentity) -> None:
    """Let the job go, if this process still owns it; a later agent need not wait."""
    held = _held(folder, None)
    if held is not None and held.record is not None and _identity(held.record) == identity:
        _replace(folder, msgspec.structs.replace(held.record, released=True), held.version)


def owner(folder: Folder) -> OwnerRecord | None:
    """Who holds the job by the record, fresh or not; None where it was never held or let go."""
    held = _held(folder, 0.0)  # the age is not wanted: asking the store's time would write to it
    return held.record if held and held.record and not held.record.released else None


def _held(folder: Folder, now: float | None) -> _Held | None:
    try:
        data, version = folder.backend.get_versioned(folder.key(keys.OWNER))
        modified = folder.backend.stat(folder.key(keys.OWNER)).modified
    except ObjectMissing:
        return None
    age = (folder.store_time() if now is None else now) - modified
    try:
        return _Held(records.decode(data, OwnerRecord, folder.key(keys.OWNER)), version, age)
    except CorruptObject:
        return _Held(None, version, age)  # unreadable: respected until it is stale, then replaced


def _free(held: _Held, identity: OwnerIdentity, is_alive: IsAlive) -> bool:
    if held.age > STALE_SECONDS:
        return True
    record = held.record
    if record is None:
        return False
    other = _identity(record)
    if record.released or other == identity:
        return True
    if other.host != identity.host:
        return False
    return other.boot != identity.boot or not is_alive(other)


def _replace(folder: Folder, record: OwnerRecord, version: Version) -> bool:
    data = records.encode(record)
    key = folder.key(keys.OWNER)
    points.reach("store.owner.before_put")
    try:
        folder.backend.put(key, data, version)
    except (StoreFull, StoreNotWritable):
        raise
    except StoreError as error:
        # The answer to our own put may have been lost, by this try or by one inside the backend.
        if folder.backend.get(key) == data:
            return True
        if isinstance(error, StaleVersion):
            return False
        raise
    return True


def _record(
    folder: Folder, identity: OwnerIdentity, attempt: int, now: float | None
) -> OwnerRecord:
    renewed = folder.store_time() if now is None else now
    return OwnerRecord(
        folder.job,
        attempt,
        identity.agent,
        identity.host,
        identity.boot,
        identity.pid,
        identity.started,
        renewed,
        False,
    )


def _identity(record: OwnerRecord) -> OwnerIdentity:
    return OwnerIdentity(record.agent, record.host, record.boot, record.pid, record.started)


def _owned(folder: Folder, held: _Held) -> JobOwned:
    record = held.record
    if record is None:
        return JobOwned(
            f"job {folder.job} is held by an owner whose record cannot be read.",
            hint=f"An owner that is gone is replaced after {STALE_SECONDS:.0f} s: try again then.",
        )
    return JobOwned(
        f"job {folder.job} is run by agent {record.agent} (pid {record.pid} on {record.host}, "
        f"seen {max(0.0, held.age):.0f} s ago).",
        hint="Stop that one first, or give this run another --job name.",
    )
