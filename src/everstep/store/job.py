"""One job in a store: the door that every room above uses.

Owns: putting the store's modules together. Never does: decide when to save, which candidate to
take, or whether a process lives. Called by: keeper, train, agent, cli, drill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path

from everstep.core.clock import Clock
from everstep.core.health import DETECTION_DELAY
from everstep.core.history import Entry
from everstep.core.ids import Point
from everstep.core.layout import Snapshot
from everstep.store import (
    attempts,
    catalog,
    commit,
    history,
    read,
    retention,
    surroundings,
    sweep,
    verify,
    write,
)
from everstep.store.attempts import Branch, OwnerIdentity
from everstep.store.folder import Folder
from everstep.store.history import Listing, MergeReport
from everstep.store.read import Checkpoint
from everstep.store.records import OwnerRecord, Proof
from everstep.store.retention import CheckpointInfo, Recoverable, Retention, RetentionPlan
from everstep.store.surroundings import AroundReport
from everstep.store.sweep import SweepReport
from everstep.store.verify import VerifyReport


def _no_progress(_: int) -> None:
    return None


class Job:
    """Made by ``Store.job``. Holds no state of its own: every call asks the store.

    All calls raise ``StoreError`` or a subclass where the store fails; only more is said below.
    Safe to use from several threads.
    """

    def __init__(self, folder: Folder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    @property
    def name(self) -> str:
        return self._folder.job

    @property
    def chunk_bytes(self) -> int:
        return self._folder.settings.chunk_bytes

    # who runs it

    def claim(self, identity: OwnerIdentity) -> int:
        """Allocate the next attempt number (from 1) for this agent (S6)."""
        return attempts.claim(self._folder, identity)

    def highest_claim(self) -> int:
        """The newest claimed attempt, 0 before the first."""
        return attempts.highest_claim(self._folder)

    def check_claim(self, allowed_attempt: int, *, agents: Collection[str] = ()) -> None:
        """Raise ``CommitRefused`` where an agent not in ``agents`` claimed a higher attempt."""
        attempts.check_claim(self._folder, allowed_attempt, agents)

    def acquire_owner(
        self,
        identity: OwnerIdentity,
        *,
        is_alive: Callable[[OwnerIdentity], bool],
        attempt: int = 0,
        now: float | None = None,
    ) -> None:
        """Own the job, or raise ``JobOwned``. ``is_alive`` is asked about a process of this host
        and boot only. ``now`` is in the store's time; None asks the store.
        """
        attempts.acquire_owner(self._folder, identity, is_alive=is_alive, attempt=attempt, now=now)

    def renew_owner(
        self, identity: OwnerIdentity, *, attempt: int = 0, now: float | None = None
    ) -> None:
        """Call every 10 s. Raises ``JobOwned`` where another has taken over: stop at once."""
        attempts.renew_owner(self._folder, identity, attempt=attempt, now=now)

    def release_owner(self, identity: OwnerIdentity) -> None:
        """Let the job go; nothing happens where another owns it."""
        attempts.release_owner(self._folder, identity)

    def owner(self) -> OwnerRecord | None:
        """The last owner's record, fresh or stale; None where it was let go."""
        return attempts.owner(self._folder)

    # what it went on from

    def write_branch(self, attempt: int, branch: Branch) -> None:
        """Create-only. The same again is success; raises ``CommitRefused`` for another one, or
        where the branch of the attempt that was restored is missing (write that first).
        """
        attempts.write_branch(self._folder, attempt, branch)

    def branches(self) -> Mapping[int, Branch]:
        """All branches by attempt; those that cannot be read have a ``problem``."""
        return attempts.branches(self._folder)

    def candidates(self) -> Sequence[Point]:
        """Committed points of the current lineage, newest first (S6). Not yet verified."""
        return catalog.candidates(self._folder)

    def expected(self) -> bool:
        """Whether a recovery point must exist, so that starting afresh would lose work (R5)."""
        return catalog.expected(self._folder)

    # writing

    def write_rank(
        self,
        snapshot: Snapshot,
        *,
        facts: Mapping[str, str],
        unique: str,
        digests: Callable[[], Sequence[bytes] | None] | None = None,
        on_progress: Callable[[int], None] = _no_progress,
    ) -> str:
        """Write one rank's pack and index; the index's key. Done already is success.

        ``unique`` is drawn anew for each try (letters and digits). ``digests`` gives
        those of ``chunk_extents(snapshot.layout, chunk_bytes)``, or None, once the payload is
        written: they may be taken meanwhile. Without it they are taken here. ``on_progress`` gets
        the bytes of each slice (8 MiB) when it was written. Check the claim before.
        """
        return write.write_rank(
            self._folder,
            snapshot,
            facts=facts,
            unique=unique,
            digests_known=digests,
            on_progress=on_progress,
        )

    def try_commit(
        self, point: Point, world: int, *, report: Callable[[str], None] | None = None
    ) -> commit.State:
        """``committed``, or ``waiting`` while an index is missing. Anyone may call it, often.

        Raises ``CommitRefused`` where it must not be committed. ``report`` gets a text where the
        commit succeeded and only its hint could not be written.
        """
        return commit.try_commit(self._folder, point, world, report)

    # what happened to it

    def record_history(self, entry: Entry) -> str:
        """Write a record of the job's history, durably; the same again is success. Its key.

        Of an incident, a decision, progress, a result or an operator's word, as
        ``everstep.faults.history.pack`` makes it. Do what a decision says only afterwards.
        """
        return history.record(self._folder, entry)

    def history(
        self, known: Listing | None = None, *, cache: PathLike[str] | None = None
    ) -> Listing:
        """All records that can be read, in order, and the names of those that cannot. What
        ``known``, an earlier answer, has is not read again, nor what lies below ``cache``, a folder
        for what can be lost at any time; where both are given, ``known`` counts.
        """
        if cache is None or known is not None:
            return history.read(self._folder, known)
        # Few processes read a history, and sqlite3 is not loaded in those that do not.
        from everstep.store import cache as beside

        return beside.read(self._folder, Path(cache))

    def store_time(self) -> float:
        """Seconds since the epoch by the clock that stamps this store's objects; asking it writes
        a small object."""
        return self._folder.store_time()

    def merge_history(self, local: Job) -> MergeReport:
        """Bring here what was recorded in ``local``, the same job in a store on a local disk,
        while this store was away. Call it before a claim, and again after any failure.
        """
        return history.merge(local._folder, self._folder)

    # reading

    def checkpoints(self) -> Sequence[CheckpointInfo]:
        """Everything there is, newest first: committed, incomplete and tombstoned."""
        return catalog.checkpoints(self._folder)

    def recovery_points(
        self, *, now: float | None = None, detection_delay: float = DETECTION_DELAY
    ) -> Sequence[Recoverable]:
        """What the job could go back to, oldest first: the checkpoints of the current lineage that
        are not known to be damaged, and which of them are healthy. ``now`` is in the store's time;
        None asks the store.
        """
        folder = self._folder
        at = folder.store_time() if now is None else now
        return retention.recoverable(catalog.checkpoints(folder), now=at, delay=detection_delay)

    def open_checkpoint(self, point: Point) -> Checkpoint:
        """Manifest and indexes read and checked. Raises ``ObjectMissing``, ``CorruptObject``,
        ``NewerFormat``.
        """
        return read.open_checkpoint(self._folder, point, self._clock)

    def verify(self, point: Point, *, deep: bool = False) -> VerifyReport:
        """Prove a checkpoint's structure, or with ``deep`` its every bit. Damage is reported, not
        raised, and written down (``refs/verified``).
        """
        return verify.verify(self._folder, point, deep=deep, clock=self._clock)

    def verify_around(self, *, deep: bool = False) -> AroundReport:
        """Check what is no part of a sound checkpoint: the store's settings, the job's attempts and
        refs, and with ``deep`` every bit of what is incomplete, deleted or damaged. Damage is
        reported, not raised.
        """
        return surroundings.verify_around(self._folder, deep=deep, clock=self._clock)

    def record_proof(self, point: Point, proof: Proof) -> None:
        """Write down what a complete restore proved (``bytes``) or found (``damaged``)."""
        catalog.record_proof(self._folder, point, proof)

    # deleting

    def retain(self, policy: Retention, now: float | None = None) -> RetentionPlan:
        """What may go (S7). ``now`` is in the store's time; None asks the store."""
        folder = self._folder
        return retention.plan(
            catalog.checkpoints(folder),
            policy,
            now=folder.store_time() if now is None else now,
            highest_attempt=attempts.highest_claim(folder),
            proofs_known=catalog.read_proofs(folder)[0] is not None,
        )

    def execute(self, plan: RetentionPlan, now: float | None = None) -> SweepReport:
        """Carry a plan out in the order of S2, and finish earlier ones. ``now`` as in
        :meth:`retain`. What a fresh look would keep is kept.
        """
        return sweep.execute(self._folder, plan, lambda: self.retain(plan.policy, now), now)

    def exists(self) -> bool:
        """Whether anyone ever claimed or wrote under this name."""
        return next(iter(self._folder.list("")), None) is not None
