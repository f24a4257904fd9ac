"""This agent's right to run the job: owner, claims, and seeing that another took over (S6).

Owns: the agent's identity, its record in the store, and the thread that renews it. Never does:
stop the job (the loop does, when :attr:`Owner.lost` says why). Called by: the leading agent's loop.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time

from everstep.agent.record import Recorder
from everstep.core.settings import Settings
from everstep.errors import CommitRefused, JobOwned, NoRecoveryPoint, ObjectMissing, StoreError
from everstep.keeper.identity import host_name, identity_of, is_alive
from everstep.store import RENEW_SECONDS, Job, OwnerIdentity, open_store

RETRY_SECONDS = 1.0
PROMISE_SECONDS = 5.0
"""For the store to take a claim before a job that has its state in memory goes on without it."""


class Owner:
    """``lost`` says why this agent may not go on, empty while it may. :meth:`fileno` becomes
    readable at that moment."""

    def __init__(self, settings: Settings, record: Recorder) -> None:
        self._settings = settings
        self._record = record
        self._identity = identity(settings.job)
        self._job: Job | None = None
        self._attempt = self._claimed = 0
        self._own_claim = False
        self._known: Job | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        self.lost = ""

    def fileno(self) -> int:
        return self._event

    @property
    def id(self) -> str:
        """The id under which this agent claims."""
        return self._identity.agent

    @property
    def identity(self) -> OwnerIdentity:
        return self._identity

    @property
    def claimed(self) -> bool:
        """Whether the store has taken the claim of the attempt at hand, as far as is known here."""
        return self._attempt == self._claimed

    def claim(self, *, patience: float = 0.0, promise: bool = False) -> int:
        """Allocate the next attempt's number. Raises :class:`JobOwned` where another live agent
        runs the job, :class:`StoreError` where the store cannot be used at the first claim.
        ``patience`` is how many seconds to wait for an owner to let go: the leader before this
        one, whose node was lost.

        Later the store may be away for a while: then this waits for it, because nothing of an
        attempt may be written before its claim. With ``promise`` it waits ``PROMISE_SECONDS`` and
        gives the number that comes next, not :attr:`claimed`: the keeper claims it before it
        writes anything of it, or is refused where a stranger has it (S6).
        """
        if self._job is None or not self._own_claim:
            job = self.take(patience=patience)
            self._attempt = self._claimed = job.claim(self._identity)
            self._own_claim = True
        else:
            self._attempt = self._claim_again(self._job, promise=promise)
        self._record.attempt = self._attempt
        if self.claimed:
            self._record.say(
                "job.claimed", f"attempt {self._attempt} claimed", level="debug",
                agent=self._identity.agent,
            )  # fmt: skip
        return self._attempt

    def take(self, *, patience: float = 0.0) -> Job:
        """Own the job, which is what :meth:`claim` does first; nothing where it is owned already.
        Raises as :meth:`claim` does."""
        if self._job is None:
            job = _open(self._settings)
            self._acquire(job, time.monotonic() + patience)
            # Who claims above what there is now has taken over.
            self._attempt = self._claimed = job.highest_claim()
            self._own_claim = False
            self._job = self._known = job
            self._begin_renewing(job)
        return self._job

    @property
    def job(self) -> Job:
        """The job in its store, owned or not. A store that is away is never made anew in its place:
        what was owned before is still meant."""
        return self._job or self._known or open_store(self._settings.store).job(self._settings.job)

    def release(self) -> None:
        """Let the job go, so that the next agent (or the next leader) need not wait."""
        self._stop_renewing()
        job, self._job = self._job, None
        if job is not None and not self.lost:
            try:
                job.release_owner(self._identity)
            except StoreError as error:
                # Nothing is owed to anybody here: the record goes stale by itself.
                self._record.say("job.not_released", str(error), level="debug")

    def close(self) -> None:
        self._stop_renewing()
        os.close(self._event)

    def _acquire(self, job: Job, deadline: float) -> None:
        while True:
            try:
                job.acquire_owner(self._identity, is_alive=is_alive)
            except JobOwned:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _claim_again(self, job: Job, *, promise: bool) -> int:
        told = False
        deadline = time.monotonic() + (PROMISE_SECONDS if promise else math.inf)
        while True:
            try:
                job.renew_owner(self._identity, attempt=self._attempt)
                job.check_claim(self._claimed, agents=(self._identity.agent,))
                return self._claim_above(job, self._attempt)
            except CommitRefused as fenced:
                raise JobOwned(fenced.what, hint=fenced.hint) from fenced
            except StoreError as error:
                if not error.retryable:
                    raise
                if time.monotonic() >= deadline:
                    self._say_unreachable(error, "the job goes on from memory without it")
                    return self._attempt + 1
                if not told and not promise:
                    self._say_unreachable(error, "the restart waits for it")
                told = True
            time.sleep(RETRY_SECONDS)

    def _claim_above(self, job: Job, attempt: int) -> int:
        """Claim a number above ``attempt``; those that were promised are claimed on the way."""
        number = job.claim(self._identity)
        while number <= attempt:
            number = job.claim(self._identity)
        # A stranger may have claimed one of those that were promised, between two looks.
        job.check_claim(self._claimed, agents=(self._identity.agent,))
        self._claimed = number
        return number

    def _begin_renewing(self, job: Job) -> None:
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(
                target=self._renew_until_closed, args=(job,), name="everstep-owner", daemon=True
            )
            self._thread.start()

    def _stop_renewing(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def _renew_until_closed(self, job: Job) -> None:
        reachable = True
        while not self._closing.wait(RENEW_SECONDS):
            try:
                job.renew_owner(self._identity, attempt=self._attempt)
                job.check_claim(self._claimed, agents=(self._identity.agent,))
            except (JobOwned, CommitRefused) as fenced:
                self.lost = str(fenced)
                os.eventfd_write(self._event, 1)
                return
            except StoreError as error:
                if reachable:
                    self._say_unreachable(error, "training goes on")
                reachable = False
            else:
                reachable = True

    def _say_unreachable(self, error: StoreError, so: str) -> None:
        self._record.say(
            "store.unreachable", f"the store cannot be reached; {so}: {error}", level="warning",
            error=error.code,
        )  # fmt: skip


def identity(job: str) -> OwnerIdentity:
    """This process, exactly."""
    pid = os.getpid()
    return identity_of(pid, f"{job}-{host_name()}-{pid}-{secrets.token_hex(4)}")


def _open(settings: Settings) -> Job:
    """The job in its store, which is made where it is not there yet. Under ``--resume require``
    it is not: a store that is missing then is one that is not mounted (R5)."""
    required = settings.resume == "require"
    try:
        return open_store(settings.store, create=not required).job(settings.job)
    except ObjectMissing as missing:
        if not required:
            raise
        raise NoRecoveryPoint(
            f"--resume require was given, and {missing.what}",
            hint="Mount it, or check --store; --resume auto starts a new job.",
        ) from missing
