"""What the keeper asks of the store: blocking calls that run in threads.

Owns: the opened store and the order of a persist's steps. Never does: decide, retry. Called by:
node and server, through background.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection

from everstep.core.ids import Point
from everstep.core.points import reach
from everstep.errors import CommitRefused, CorruptObject, NewerFormat, ObjectMissing, StoreError
from everstep.keeper.facts import Candidate, StoreRead
from everstep.keeper.holdings import known_digests
from everstep.keeper.identity import is_alive
from everstep.keeper.slot import Slot
from everstep.store import (
    DEFAULT_CHUNK_BYTES,
    Branch,
    Job,
    OwnerIdentity,
    Retention,
    Store,
    open_store,
)


class Storing:
    """One job of one store, opened when it is first needed. Safe to use from several threads.

    ``exists`` says that the job has been here before: a store that is missing then is one that is
    not mounted, and is not made anew in its place (R5)."""

    def __init__(self, url: str, job: str) -> None:
        self._url = url
        self._name = job
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._same_digest = False
        self.exists = False

    def job(self) -> Job:
        """Raises :class:`StoreError` where the store cannot be reached or made."""
        with self._lock:
            if self._job is None:
                store = self._open()
                self._same_digest = store.settings.digest == "xxh3-128"
                self._job = store.job(self._name)
            return self._job

    def _open(self) -> Store:
        if not self.exists:
            return open_store(self._url, create=True)
        try:
            return open_store(self._url)
        except ObjectMissing as missing:
            raise StoreError(
                f"the store of job {self._name} has gone: {missing.what}",
                hint="Mount it again. Until then what is made is kept in memory.",
            ) from missing

    @property
    def chunk_bytes(self) -> int:
        """The store's chunk size, or the default where it was not reached yet."""
        job = self._job
        return job.chunk_bytes if job is not None else DEFAULT_CHUNK_BYTES

    # -- restore

    def read(self, attempt: int, upto: Point | None = None) -> StoreRead:
        """What there is to go on from; with ``upto`` nothing newer, and the health of each."""
        reach("keeper.read.before_list")
        job = self.job()
        branches = dict(job.branches())
        if self.exists and not branches:
            self._open()  # an empty folder in its place is no job that begins
        branch = branches.get(attempt)
        damaged = [one.problem for one in branches.values() if one.problem]
        if upto is None:
            candidates = _openable(job, damaged)
        else:
            candidates = _openable_upto(job, upto, damaged)
        return StoreRead(
            attempt=attempt,
            candidates=tuple(candidates),
            expected=job.expected(),
            branched=branch is not None,
            branch=branch.restored if branch else None,
            branch_source=_source(branch) if branch else "",
            branches={number: one.restored for number, one in branches.items()},
            unreadable=tuple(number for number, one in branches.items() if one.problem),
            damaged=tuple(damaged),
        )

    def keep_promise(self, attempt: int, identity: OwnerIdentity, agents: Collection[str]) -> None:
        """Claim ``attempt``, which an agent has promised while the store was away (S6).

        Raises :class:`Superseded` where a stranger has claimed it or a later one.
        """
        job = self.job()
        self._check_claim(job, attempt - 1, agents)
        while job.highest_claim() < attempt:
            reach("keeper.promise.before_claim")
            job.claim(identity)
        self._check_claim(job, attempt - 1, agents)

    def write_branch(
        self, attempt: int, point: Point | None, source: str, world: int, facts: dict[str, str]
    ) -> None:
        """``source`` "rooted": a root, because nobody knows any more what it went on from."""
        reach("keeper.branch.before_write")
        lost = "what it went on from is not known any more"
        fresh = "" if point else lost if source == "rooted" else "no recovery point exists"
        kind = source if source in ("memory", "store") else "fresh"
        branch = Branch(
            restored=point, source=kind,  # type: ignore[arg-type]  # narrowed above
            fresh_reason=fresh, world=world, environment=facts,
        )  # fmt: skip
        try:
            self.job().write_branch(attempt, branch)
        except CommitRefused:
            # A keeper before this one may have written it, from another environment.
            there = self.job().branches().get(attempt)
            if there is None or (there.restored, there.world) != (point, world):
                raise
        reach("keeper.branch.after_write")

    # -- persist

    def persist(
        self,
        slot: Slot,
        point: Point,
        allowed: int,
        agents: Collection[str],
        facts: dict[str, str],
        digested: Callable[[], None],
    ) -> int:
        """Store one rank's part; bytes of it. ``allowed`` is the highest attempt served;
        ``digested`` returns once nobody is digesting the slot, which goes on beside the write.

        Raises :class:`Superseded` where a stranger claimed a higher one.
        """
        reach("keeper.persist.before_claim_check")
        job = self.job()
        self._check_claim(job, allowed, agents)
        snapshot = slot.snapshot()
        try:
            if Point(snapshot.step, snapshot.attempt) != point:
                raise CorruptObject(f"the slot does not hold {point} any more.")

            def known() -> list[bytes] | None:
                digested()
                return known_digests(slot, job.chunk_bytes) if self._same_digest else None

            reach("keeper.persist.before_pack")
            job.write_rank(snapshot, facts=facts, unique=secrets.token_hex(8), digests=known)
            reach("keeper.persist.after_index")
            return snapshot.layout.persist_bytes + snapshot.state.nbytes
        finally:
            snapshot.payload.release()
            snapshot.state.release()

    def commit(self, point: Point, world: int, allowed: int, agents: Collection[str]) -> None:
        """Complete the checkpoint. Raises :class:`StoreError` where an index is missing still."""
        reach("keeper.commit.before_claim_check")
        job = self.job()
        self._check_claim(job, allowed, agents)
        reach("keeper.commit.before_manifest")
        if job.try_commit(point, world) != "committed":
            raise StoreError(f"not all {world} rank indexes of step {point.step} can be seen yet.")
        reach("keeper.commit.after_manifest")

    def retain(self, policy: Retention) -> tuple[int, int]:
        """Delete what S7 allows; how many checkpoints and bytes went."""
        reach("keeper.retain.before_plan")
        job = self.job()
        plan = job.retain(policy)
        report = job.execute(plan)
        return len(report.tombstoned), report.bytes_freed

    # -- a job without an agent

    def claim(self, identity: OwnerIdentity) -> int:
        """Own the job and allocate an attempt. Raises :class:`JobOwned`."""
        job = self.job()
        job.acquire_owner(identity, is_alive=is_alive)
        return job.claim(identity)

    def own(self, identity: OwnerIdentity, attempt: int) -> None:
        self.job().acquire_owner(identity, is_alive=is_alive, attempt=attempt)

    def renew(self, identity: OwnerIdentity, attempt: int) -> None:
        self.job().renew_owner(identity, attempt=attempt)
        self._check_claim(self.job(), attempt, (identity.agent,))

    def release(self, identity: OwnerIdentity) -> None:
        self.job().release_owner(identity)

    def _check_claim(self, job: Job, allowed: int, agents: Collection[str]) -> None:
        try:
            job.check_claim(allowed, agents=agents)
        except CommitRefused as stranger:
            raise Superseded(stranger.what, hint=stranger.hint) from stranger


class Superseded(CommitRefused):
    """A stranger's higher claim: this process is the zombie."""


def _source(branch: Branch) -> str:
    """ "memory" without a point says that the ranks train, from what is not known any more."""
    return "memory" if branch.source == "unknown" else branch.source


def _openable(job: Job, damaged: list[str]) -> list[Candidate]:
    """The candidates from the first that opens on; why those before it do not, into ``damaged``."""
    points = list(job.candidates())
    for at, point in enumerate(points):
        try:
            world = job.open_checkpoint(point).manifest.world
        except (CorruptObject, ObjectMissing) as bad:
            damaged.append(f"checkpoint of step {point.step}: {bad}")
            continue
        rest = [Candidate(other, 0) for other in points[at + 1 :]]
        return [Candidate(point, world), *rest]
    return []


def _openable_upto(job: Job, upto: Point, damaged: list[str]) -> list[Candidate]:
    """The candidates that are not newer than ``upto`` and open, with what is known of their
    health: an unsound state is no place to go back to."""
    found: list[Candidate] = []
    for point in job.candidates():
        if point > upto:
            continue
        try:
            manifest = job.open_checkpoint(point).manifest
        except (CorruptObject, ObjectMissing) as bad:
            damaged.append(f"checkpoint of step {point.step}: {bad}")
            continue
        except NewerFormat:
            if not found:
                raise
            break  # it is not skipped: nothing beyond it is a candidate
        sound = None if manifest.health is None else manifest.health.sound
        found.append(Candidate(point, manifest.world, sound))
    return found
