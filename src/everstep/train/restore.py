"""Putting a recovery point back: load, vote, and only then tell the user's objects (R6).

Owns: the order of a restore on one rank. Never does: choose the candidate (the coordinator does),
read bytes (sources do), know what a tensor belongs to (state does). Called by: run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from everstep.core.layout import RankState
from everstep.core.points import reach
from everstep.core.settings import Settings
from everstep.errors import (
    CorruptObject,
    EverstepError,
    RestoreError,
    StateMismatch,
    StoreError,
)
from everstep.keeper.client import Offered
from everstep.keeper.wire import Elected
from everstep.train.connect import Connection
from everstep.train.place import Place
from everstep.train.session import Loaded, Session
from everstep.train.sources import MemorySource, Source, StoreSource
from everstep.train.voice import how_to_start_afresh

_PATIENCE = 600.0
"""Seconds to wait for an offer or the others' votes: as long as torchrun's rendezvous."""


@dataclass(frozen=True)
class _Candidate:
    """What this rank has loaded of an offer; ``loaded`` is None for a fresh start."""

    loaded: Loaded | None
    source: str
    nbytes: int = 0


class Restorer:
    """One restore of one rank; ``durable`` says afterwards whether the store holds the step."""

    def __init__(
        self, session: Session, connection: Connection, settings: Settings, place: Place
    ) -> None:
        self._session = session
        self._connection = connection
        self._settings = settings
        self._place = place
        self.durable = False

    def restore(self) -> int:
        """Load the elected recovery point and give its step; 0 for a fresh start.

        Raises :class:`~everstep.errors.NoRecoveryPoint` (R5), ``WorldChanged``, ``StateMismatch``.
        """
        began = time.monotonic()
        candidate = self._elect()
        loaded = candidate.loaded
        self._say_where(candidate)
        if loaded is None:
            return 0
        reach("train.restore.before_apply")
        changed = self._session.apply(loaded)
        if changed:
            self._connection.say(
                "train.environment_changed",
                f"rank {self._place.rank}: {'; '.join(changed)}: the state is exact, but from "
                "here on the run may differ from an undisturbed one in the last bits",
                step=loaded.step,
                level="warning",
                loud=True,
            )
        self.durable = candidate.source == "store"
        self._connection.say(
            "train.restored",
            f"rank {self._place.rank} restored step {loaded.step} from {candidate.source}",
            step=loaded.step,
            source=candidate.source,
            seconds=round(time.monotonic() - began, 4),
            nbytes=candidate.nbytes,
        )
        return loaded.step

    def _say_where(self, candidate: _Candidate) -> None:
        """What an agent says by itself: the job, its store, and what this attempt goes on from."""
        loaded, settings = candidate.loaded, self._settings
        begins = (
            "begins at step 0; started again, it goes on from its newest state"
            if loaded is None
            else f"goes on from step {loaded.step} ({candidate.source}); to start afresh: "
            f"{how_to_start_afresh(settings)}"
        )
        named = " (named after the script and its arguments)" if "job" in settings.assumed else ""
        self._connection.say(
            "train.started",
            f"job {settings.job}{named} in {settings.store} {begins}",
            step=None if loaded is None else loaded.step,
            loud=True,
            source=candidate.source,
        )

    def _elect(self) -> _Candidate:
        """Load candidate after candidate until all ranks hold the same one."""
        link = self._connection.link
        offered = link.ask_offer(timeout=_PATIENCE)
        while True:
            candidate, reason = self._try(offered)
            answer = link.vote(candidate is not None, reason, timeout=_PATIENCE)
            if isinstance(answer, Elected):
                if candidate is None:
                    raise RestoreError(
                        f"rank {self._place.rank}: {answer.point} was elected, but this rank could "
                        f"not load it: {reason}"
                    )
                return candidate
            offered = answer

    def _try(self, offered: Offered) -> tuple[_Candidate | None, str]:
        if offered.source == "fresh":
            return _Candidate(None, "fresh"), ""
        reach("train.restore.before_load")
        try:
            return self._load(offered), ""
        except StateMismatch:
            raise
        except (StoreError, OSError) as bad:
            reason = f"rank {self._place.rank}: {bad}"
            self._connection.say(
                "restore.candidate_failed",
                f"{offered.point} from {offered.source} cannot be loaded: {bad}",
                step=offered.point.step if offered.point else None,
                level="warning",
                code=bad.code if isinstance(bad, EverstepError) else "",
            )
            return None, reason

    def _load(self, offered: Offered) -> _Candidate:
        source = self._open(offered)
        try:
            state: RankState = source.rank_state(self._place.rank)
            loaded = self._session.prepare(state)
            _check_step(loaded, offered)
            reach("train.restore.in_load")
            nbytes = source.read(loaded.wanted())
            loaded.finish_tensors()
            return _Candidate(loaded, offered.source, nbytes)
        finally:
            source.close()

    def _open(self, offered: Offered) -> Source:
        if offered.source == "memory":
            return MemorySource(offered.slots)
        if offered.point is None:
            raise RestoreError(f"the keeper offered the {offered.source} without a point.")
        return StoreSource(self._settings, offered.point)


def _check_step(loaded: Loaded, offered: Offered) -> None:
    """F7: a state says itself of which step it is."""
    if offered.point is not None and loaded.step != offered.point.step:
        raise CorruptObject(
            f"{offered.point} from {offered.source} holds the state of step {loaded.step}.",
            hint="It is passed over; run `everstep verify`.",
        )
