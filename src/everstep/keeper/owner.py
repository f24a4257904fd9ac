"""A job that no agent owns: claimed by the keeper itself, for the worker that began it.

Owns: the claim, the owner's record and its renewal. Never does: stop anything. Called by: attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.core.clock import Clock
from everstep.errors import CommitRefused, EverstepError, JobOwned, KeeperError
from everstep.keeper.background import Background
from everstep.keeper.identity import identity_of, is_alive
from everstep.keeper.storing import Storing
from everstep.store import RENEW_SECONDS, OwnerIdentity

PARTED_SECONDS = 0.5
"""Between two looks at whether a worker that said goodbye has ended."""


class Owner:
    """``lost`` is called when another took the job over."""

    def __init__(
        self,
        storing: Storing,
        background: Background,
        *,
        clock: Clock,
        lost: Callable[[str], None],
        say: Callable[..., None],
    ) -> None:
        self._storing = storing
        self._background = background
        self._clock = clock
        self._lost = lost
        self._say = say
        self._identity: OwnerIdentity | None = None
        self._attempt = 0
        self._due: float | None = None
        self._parted = False
        self._unreachable = False

    @property
    def agent(self) -> str:
        return self._identity.agent if self._identity is not None else ""

    def claim(
        self,
        pid: int,
        attempt: int,
        done: Callable[[int], None],
        failed: Callable[[EverstepError], None],
    ) -> None:
        """Own the job for the worker ``pid``. ``done`` gets the attempt: a new one for 0, else
        the one that was claimed before this keeper came."""
        try:
            identity = identity_of(pid, f"worker-{pid}")
        except ProcessLookupError:
            failed(KeeperError(f"the worker (pid {pid}) that began the attempt has ended."))
            return

        def work() -> int:
            if attempt:
                self._storing.own(identity, attempt)
                return attempt
            return self._storing.claim(identity)

        def claimed(number: int) -> None:
            self._identity, self._attempt, self._parted = identity, number, False
            self._due = self._clock.mono() + RENEW_SECONDS
            done(number)

        self._background.submit("owner", work, claimed, failed)

    def forget(self) -> None:
        """An agent runs the job from now on: its worker's ownership is nobody's any more."""
        self._identity, self._due, self._parted = None, None, False

    def part(self) -> None:
        """The worker said goodbye. A child that it forked may have said so for it, so the job is
        let go when the process has ended, and until then only not renewed."""
        if self._identity is not None:
            self._parted, self._due = True, self._clock.mono()

    def back(self) -> None:
        """A worker of the attempt is there again."""
        if self._parted:
            self._parted, self._due = False, self._clock.mono()

    def wait(self) -> float:
        """Seconds until the next renewal is due."""
        return 3600.0 if self._due is None else max(0.0, self._due - self._clock.mono())

    def renew(self) -> None:
        """Renew when it is due, as long as the worker that owns the job lives."""
        identity = self._identity
        if self._due is None or identity is None or self._clock.mono() < self._due:
            return
        if not is_alive(identity):
            self._due = None
            if self._parted:
                self.release()
        elif self._parted:
            self._due = self._clock.mono() + PARTED_SECONDS
        else:
            self._submit(identity, self._attempt)

    def release(self) -> None:
        """Let the job go: it is finished, or its worker has ended by itself."""
        identity = self._identity
        self.forget()
        if identity is None:
            return

        def ignored(error: EverstepError) -> None:
            # Nothing is owed to anybody: the record goes stale by itself.
            self._say("job.not_released", str(error), level="debug")

        self._background.submit(
            "owner", lambda: self._storing.release(identity), lambda _: None, ignored
        )

    def _submit(self, identity: OwnerIdentity, attempt: int) -> None:
        self._due = None  # set again by the answer: renewals never pile up

        def renewed(_: None) -> None:
            if self._identity is identity:
                self._unreachable = False
                self._due = self._clock.mono() + RENEW_SECONDS

        def failed(error: EverstepError) -> None:
            if self._identity is identity:  # else the job has another owner here already
                self._failed(error)

        self._background.submit(
            "owner", lambda: self._storing.renew(identity, attempt), renewed, failed
        )

    def _failed(self, error: EverstepError) -> None:
        if isinstance(error, JobOwned | CommitRefused):
            self.forget()
            self._lost(str(error))
            return
        if not self._unreachable:
            self._say("store.unreachable", str(error), level="warning")
        self._unreachable = True
        self._due = self._clock.mono() + RENEW_SECONDS
