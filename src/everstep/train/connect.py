"""This rank's line to its keeper, as the training side needs it: never in the way of a step.

Owns: finding or starting the keeper, events from this rank. Never does: touch tensors. Called by:
run, boundary, cut and restore of this room.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import subprocess
import time

from everstep import guard
from everstep.cadence.policy import Policy
from everstep.core import exits
from everstep.core.settings import Settings
from everstep.errors import EverstepError, JobOwned, NoRecoveryPoint
from everstep.keeper.address import keeper_of
from everstep.keeper.client import CRASHES, Grant, WorkerLink
from everstep.keeper.control import ControlPage
from everstep.keeper.slot import Geometry, Slot
from everstep.keeper.spawn import log_path, start_keeper
from everstep.keeper.wire import BeginAttempt, CutDone, Fatal, Hello
from everstep.train.phases import Pace, Phases
from everstep.train.place import Place
from everstep.train.voice import Voice

CONNECT_SECONDS = 60.0
_HOLD_POLL = 0.002
"""Seconds between two looks at the page, which wakes nobody."""


def connect(settings: Settings, place: Place, voice: Voice) -> Connection:
    """Find this node's keeper, or start it where no agent has (local rank 0 does).

    Raises what the keeper refuses with (:class:`~everstep.errors.JobOwned` and others), or
    :class:`~everstep.errors.KeeperError` where none answers.
    """
    hello = Hello(
        role="worker",
        pid=os.getpid(),
        launch=place.launch,
        rank=place.rank,
        local_rank=place.local_rank,
        node=place.node,
        policy=_policy(settings) if place.rank == 0 else None,
        keep_last=settings.keep_last if place.rank == 0 else None,
    )
    settings = dataclasses.replace(settings, node=place.node, nodes=place.nodes)
    alone = not settings.attempt
    begin = restart = None
    if alone and place.local_rank == 0:
        begin = _begin(settings, place)

        def restart() -> subprocess.Popen[bytes]:
            return start_keeper(settings, place.node, unlogged=voice.warn)

    link = WorkerLink.connect(
        keeper_of(settings), hello, begin=begin, restart=restart,
        log=str(log_path(settings, place.node)) if alone else "", timeout=CONNECT_SECONDS,
    )  # fmt: skip
    if begin is not None and place.nodes > 1 and place.node == 0:
        _publish_coordinator(link, begin.token)
    guard.begin(os.environ)  # begun by the import, but where an agent forked this process
    voice.link, voice.attempt = link, link.attempt
    return Connection(link, place, voice, alone=alone)


class Connection:
    """What the rest of the room asks and tells. Nothing here raises for a keeper that is away;
    what must be known to be said raises nothing either, because the journal has it. ``alone``: no
    agent runs, so this process itself ends where another takes the job over."""

    def __init__(
        self, link: WorkerLink, place: Place, voice: Voice, *, alone: bool = False
    ) -> None:
        self.link = link
        self.attempt = link.attempt
        self._place = place
        self._voice = voice
        self._alone = alone
        self._page: ControlPage | None = None
        self._posted: ControlPage | None = None
        self._pace = Pace()
        self.phases = Phases(self._post_phase)
        self._keepers = 0
        self._told_crashes = False
        self.say = voice.say

    # -- the control page

    def post_boundary(self, step: int, now_nanos: int, step_nanos: int) -> None:
        page, local_rank = self.link.page, self._place.local_rank
        page.post_boundary(local_rank, step, now_nanos, step_nanos)
        if page is not self._posted:
            self.phases.post()  # another keeper's page knows nothing

    def post_pace(self, step_nanos: int) -> None:
        """Count a step, which took so long without what was declared as something else."""
        longest = self._pace.pass_step(step_nanos)
        self.link.page.post_pace(self._place.local_rank, self._pace.steps, longest)

    def _post_phase(self, name: str, since_nanos: int, limit_nanos: int) -> None:
        self._posted = self.link.page
        self._posted.post_phase(self._place.local_rank, name, since_nanos, limit_nanos)

    def published_cut(self) -> tuple[int, int]:
        """(sequence, step); sequence 0 where none is published."""
        return self.link.page.cut()

    def keepers_met(self) -> int:
        """How many keepers this rank has had: each gives it a page of its own."""
        if self._page is not self.link.page:
            self._page = self.link.page
            self._keepers += 1
        return self._keepers

    def published_slot(self, step: int) -> int | None:
        """The slot of the cut that is published for ``step``, None where it was taken back."""
        found = self.link.page.cut_at(self._place.local_rank, step)
        return None if found is None else found[1]

    def published_stop(self) -> tuple[bool, int, bool]:
        return self.link.page.stop()

    def demoted(self) -> int:
        return self.link.page.demoted()

    def keep_alive(self) -> bool:
        """Notice a keeper that died and take one step of the way back; never waits.

        Raises :class:`~everstep.errors.JobOwned` where another owner has taken the job over and
        no agent ends this process: what it would still compute is kept by nobody.
        """
        here = self.link.reconnect_if_needed(time.monotonic())
        if self._alone and isinstance(self.link.refused, JobOwned):
            raise self.link.refused
        self._tell_crashes(here)
        if notice := self.link.take_notice():
            self.say("keeper.silent", notice, level="warning", loud=True)
        return here

    def _tell_crashes(self, here: bool) -> None:
        """Say once that no keeper comes up: what is computed meanwhile is not protected."""
        if here:
            self._told_crashes = False
        elif self.link.crashes >= CRASHES and not self._told_crashes:
            self._told_crashes = True
            text = (
                f"no keeper can be started: training goes on, nothing is saved. {self.link.refused}"
            )
            self.say("keeper.unreachable", text, level="error", loud=True)

    # -- what a decision asks of this attempt

    @property
    def skip(self) -> frozenset[int]:
        """Steps whose batches are left out."""
        return self.link.skip

    @property
    def replay_until(self) -> int | None:
        """The step that had failed, where it is replayed."""
        return self.link.replay_until

    def is_held(self) -> bool:
        """Whether the first batch has to wait now."""
        return time.monotonic_ns() < self.link.page.held_until()

    def await_release(self) -> float:
        """Wait as long as the keeper holds this attempt's first batch; how many seconds. A keeper
        that has died holds nobody."""
        began, page = time.monotonic(), self.link.page
        while self.keep_alive() and self.link.page is page and self.is_held():
            time.sleep(_HOLD_POLL)
        return time.monotonic() - began

    # -- cuts

    def open_slots(self, geometry: Geometry) -> tuple[Slot, Slot]:
        return self.link.open_slots(geometry)

    def slots(self) -> tuple[Slot, Slot] | None:
        return self.link.slots

    def ask_slot(self, step: int, timeout: float) -> Grant | None:
        return self.link.ask_slot(step, timeout=timeout)

    def cut_done(self, done: CutDone) -> None:
        self.link.page.post_cut(self._place.local_rank, int(done.seconds * 1e9))
        self.link.cut_done(done)

    def cut_skipped(self, step: int, reason: str, sequence: int) -> None:
        self.link.cut_skipped(step, reason, sequence=sequence)

    def cut_failed(self, step: int, failed: BaseException, sequence: int = 0) -> None:
        """A cut of this rank failed; training goes on, the event says why (R3)."""
        text = str(failed) if isinstance(failed, EverstepError) else _named(failed)
        self.say("cut.failed", f"no snapshot of step {step}: {text}", step=step, level="error")
        self.link.cut_skipped(step, text, sequence=sequence)

    def await_durable(self, step: int, timeout: float) -> str | None:
        """None where the checkpoint of ``step`` is committed, else why not (yet)."""
        result = self.link.await_durable(step, timeout=timeout)
        return None if result.durable else result.reason or "not in time"

    def arrived(self, step: int) -> bool:
        """Whether it could be said."""
        return self.link.arrived(step)

    def preempt(self, grace: float) -> None:
        self.link.preempt(grace)

    # -- ends

    def fatal(self, error: EverstepError) -> None:
        """Tell the agent that a restart cannot help."""
        code = exits.NO_RECOVERY_POINT if isinstance(error, NoRecoveryPoint) else exits.REFUSED
        self.link.fatal(Fatal(error.code, str(error), code, self._place.rank))

    def finished(self, step: int, *, told: bool = False) -> None:
        """The last step is committed; ``told``: a person knows."""
        text = f"the job finished: step {step} is committed"
        self.say("train.finished", text, step=step, loud=not told)

    def close(self, *, finished: bool) -> None:
        self.phases.close()
        self._voice.close()
        self.link.goodbye(finished=finished)


def _begin(settings: Settings, place: Place) -> BeginAttempt:
    """What local rank 0 says where no agent runs; the keeper claims the attempt itself."""
    coordinator, token = _find_coordinator() if place.node else (None, secrets.token_hex(16))
    return BeginAttempt(
        launch=place.launch,
        attempt=0,
        node=place.node,
        ranks_of_node=place.ranks_of_node,
        resume=settings.resume,
        again=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"),
        coordinator=coordinator,
        token=token,
        policy=_policy(settings),
        keep_last=settings.keep_last,
        detection_delay=settings.detection_delay,
    )


def _policy(settings: Settings) -> Policy:
    return Policy(settings.snapshot_every, settings.checkpoint_every)


_COORDINATOR_KEY = "everstep/coordinator"


def _publish_coordinator(link: WorkerLink, token: str) -> None:
    """Node 0's local rank 0 tells the other nodes' where its keeper listens."""
    from torch.distributed.distributed_c10d import _get_default_store

    port = link.begun.port if link.begun is not None else 0
    _get_default_store().set(_COORDINATOR_KEY, f"{socket.gethostname()} {port} {token}")


def _find_coordinator() -> tuple[tuple[str, int], str]:
    from torch.distributed.distributed_c10d import _get_default_store

    host, port, token = _get_default_store().get(_COORDINATOR_KEY).decode().split()
    return (host, int(port)), token


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
