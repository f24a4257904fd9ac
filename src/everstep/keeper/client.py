"""A worker's line to its keeper.

Owns: one connection, the mapped control page, the mapped slots, and getting all of them back
after the keeper died. Never does: decide, touch tensors, raise from a save (R3). Called by: train.

Answers come in the order of the questions, because a worker asks one thing at a time. Where an
answer does not come in time the connection is given up, so that a late answer can never be taken
for the answer to another question.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec

from everstep.core.events import Event
from everstep.errors import EverstepError, KeeperError
from everstep.keeper.address import try_connect
from everstep.keeper.control import ControlPage
from everstep.keeper.identity import cpu_ticks
from everstep.keeper.pulse import LOOK_SECONDS, Pulse, told
from everstep.keeper.slot import Geometry, Slot
from everstep.keeper.wire import (
    AdoptSlots,
    AnyMessage,
    Arrived,
    AskDemoted,
    AskOffer,
    AskSlot,
    AttemptBegun,
    AwaitDurable,
    BeginAttempt,
    CutDone,
    CutSkipped,
    Demoted,
    DurableResult,
    Elected,
    Fatal,
    Goodbye,
    Hello,
    Link,
    Message,
    Offer,
    OpenSlots,
    Preempt,
    Refused,
    Report,
    SlotGranted,
    SlotName,
    SlotsOpen,
    Vote,
    Welcome,
    WentOn,
    file_of,
)

RETRY_SECONDS = 0.05
RESTART_SECONDS = 2.0
CRASHES = 3
"""Keepers in a row that end at their start before no other is waited for."""
_ANSWER_MARGIN = 5.0
"""Seconds that an answer may be late over the timeout that the question names."""

Answer = TypeVar("Answer", bound=Message)
Restart = Callable[[], "subprocess.Popen[bytes] | None"]
"""Starts a keeper; gives its process where the caller is to see it end."""


def error_of(refused: Refused) -> EverstepError:
    """The exception that a :class:`Refused` stands for, by its code."""
    for kind in _classes(EverstepError):
        if kind.code == refused.code:
            return kind(refused.what, hint=refused.hint)
    return KeeperError(refused.what, hint=refused.hint)


class Grant(NamedTuple):
    """The index of a slot for a cut that the worker asked for, and the number to cut it under."""

    slot: int
    sequence: int


class Offered:
    """A candidate with the memory that holds it.

    ``slots`` maps (rank, index) to the mapped slots of the point on this node, for ``memory``
    alone. Read them before the vote: :meth:`WorkerLink.vote` closes them.
    """

    def __init__(self, offer: Offer, fds: list[int]) -> None:
        self.source = offer.source
        self.point = offer.point
        self.slots: dict[SlotName, Slot] = {}
        try:
            for name, fd in zip(offer.slots, fds, strict=True):
                self.slots[name] = Slot(fd, populate=False)
        finally:
            _close_all(fds)

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        self.slots = {}


class WorkerLink:
    """The connection of one rank. ``crashes`` counts keepers in a row that this rank has started
    and that ended at their start.

    ``attempt`` and ``world`` are the keeper's words, ``page`` the control page, ``slots`` the two
    slots, ``skip`` the steps whose batches are left out, ``replay_until`` the step that is
    replayed, ``refused`` why the last try to connect failed. Page and slots may be other objects
    after :meth:`reconnect_if_needed`: never keep them.
    """

    def __init__(
        self,
        name: str,
        hello: Hello,
        *,
        begin: BeginAttempt | None = None,
        restart: Restart | None = None,
        log: str = "",
    ) -> None:
        self._name = name
        self._log = f"Its log is {log}." if log else "Its log is named at the start of the run."
        self._started: subprocess.Popen[bytes] | None = None
        self.crashes = 0
        self._hello = hello
        self._begin = begin
        self._restart = restart
        self._link: Link | None = None
        self._pending: Link | None = None
        self._retry_at = self._restart_at = 0.0
        self._geometry: Geometry | None = None
        self._fds: dict[int, tuple[int, int]] = {}
        self._pulse = Pulse()
        self._notice = ""
        self._missing: set[type[Message]] = set()
        self._offered: Offered | None = None
        self._went_on: WentOn | None = None
        self._page: ControlPage | None = None
        self._slots: tuple[Slot, Slot] | None = None
        self._pid = os.getpid()
        self.attempt = self.world = 0
        self.store = self.job = ""
        self.skip: frozenset[int] = frozenset()
        self.replay_until: int | None = None
        self.begun: AttemptBegun | None = None
        self.refused: EverstepError | None = None

    @classmethod
    def connect(
        cls,
        name: str,
        hello: Hello,
        *,
        begin: BeginAttempt | None = None,
        restart: Restart | None = None,
        log: str = "",
        timeout: float = 60.0,
    ) -> WorkerLink:
        """Connect and wait until the attempt of ``hello.launch`` has begun.

        ``begin`` is said by local rank 0 where no agent runs (``attempt=0``: the keeper claims),
        ``restart`` starts a keeper again after it died (the same rank's duty), ``log`` is where
        that keeper writes. Raises what the keeper refuses with (:class:`JobOwned`, ...), or
        :class:`KeeperError` after ``timeout`` s or where keepers end at their start.
        """
        link = cls(name, hello, begin=begin, restart=restart, log=log)
        link._await_connection(time.monotonic() + timeout)
        return link

    # -- at every boundary

    @property
    def page(self) -> ControlPage:
        """The control page; the old one stays valid while the keeper is away."""
        assert self._page is not None, "read before connect"
        return self._page

    @property
    def slots(self) -> tuple[Slot, Slot] | None:
        return self._slots

    @property
    def connected(self) -> bool:
        return self._link is not None

    def reconnect_if_needed(self, now: float) -> bool:
        """Whether the keeper can be talked to. Costs one system call while it is there; while it
        is not, at most one step of the way back, none of which waits (R3). ``now`` is seconds of
        CLOCK_MONOTONIC. Where it has parted from this rank, :attr:`refused` says why."""
        if self._link is not None:
            if not self._link.readable(0.0):
                self._tend(self._link, now)
                return True
            self._hear_parting(self._link)
            if self.refused is not None:
                return False
        try:
            return self._step_back(now)
        except EverstepError as refused:
            self.refused = refused
            self._abandon(now)
            return False

    def take_notice(self) -> str:
        """What was seen of a keeper that does not move, once; else empty."""
        notice, self._notice = self._notice, ""
        return notice

    # -- slots and cuts

    def open_slots(self, geometry: Geometry, *, timeout: float = 120.0) -> tuple[Slot, Slot]:
        """The rank's two slots, mapped and pre-faulted; those that exist are given again.

        Raises :class:`MemoryTooSmall` where they do not fit into the memory that is allowed,
        :class:`KeeperError` where the keeper does not answer. Sizes in bytes.
        """
        answer, fds = self._ask(_open_message(geometry), (SlotsOpen,), timeout)
        assert isinstance(answer, SlotsOpen)
        self._take_slots(geometry, fds)
        assert self._slots is not None
        return self._slots

    def ask_slot(self, step: int, *, timeout: float) -> Grant | None:
        """The slot for a cut at ``step`` that the worker itself wants, or None where none came
        free within ``timeout`` s or the keeper is away. Never raises (R3)."""
        try:
            answer, _ = self._ask(AskSlot(step, timeout), (SlotGranted,), timeout)
        except KeeperError:
            return None
        assert isinstance(answer, SlotGranted)
        return Grant(answer.index, answer.sequence) if answer.index >= 0 else None

    def cut_done(self, done: CutDone) -> bool:
        """Tell of a committed snapshot. False where the keeper is away: the next one reads the
        slot's own header, so nothing is lost but the comparison of replicas."""
        return self._say(done)

    def cut_skipped(self, step: int, reason: str, *, sequence: int = 0) -> bool:
        """Tell that a cut was missed or has failed; ``sequence`` is that of the cut, if known."""
        return self._say(CutSkipped(step, reason, sequence))

    def await_durable(self, step: int, *, timeout: float) -> DurableResult:
        """Wait until the checkpoint of ``step`` is committed. Never raises (R3): a keeper that
        stays away for ``timeout`` s is ``DurableResult(False, reason)``."""
        deadline = time.monotonic() + timeout
        try:
            answer, _ = self._ask_until(
                lambda left: AwaitDurable(step, left), (DurableResult,), deadline
            )
        except EverstepError as away:
            return DurableResult(durable=False, reason=str(away))
        assert isinstance(answer, DurableResult)
        return answer

    # -- restore

    def ask_offer(self, *, timeout: float) -> Offered:
        """The candidate to restore. Raises :class:`NoRecoveryPoint`, :class:`WorldChanged` or
        what else the keeper refuses with."""
        deadline = time.monotonic() + timeout
        answer, fds = self._ask_until(lambda _: AskOffer(self.world), (Offer,), deadline)
        assert isinstance(answer, Offer)
        self._offered = Offered(answer, fds)
        return self._offered

    def vote(self, ok: bool, reason: str = "", *, timeout: float) -> Elected | Offered:
        """Say whether this rank holds the offered tensors: :class:`Elected` when all do, else the
        next candidate. Where the keeper died in between, the candidate is offered once more.

        Closes the slots of the offer that is voted on.
        """
        if self._offered is not None:
            self._offered.close()
            self._offered = None
        deadline = time.monotonic() + timeout
        try:
            answer, fds = self._ask(Vote(ok, reason), (Elected, Offer), timeout)
        except KeeperError:
            return self.ask_offer(timeout=max(0.0, deadline - time.monotonic()))
        if isinstance(answer, Elected):
            self._went_on = WentOn(self.attempt, answer.source, answer.point, self.world)
            return answer
        assert isinstance(answer, Offer)
        self._offered = Offered(answer, fds)
        return self._offered

    # -- the rest

    def arrived(self, step: int) -> bool:
        """Tell that the rank stands at ``step`` and watches the page for the final stop."""
        return self._say(Arrived(step))

    def ask_demoted(self, *, timeout: float = 5.0) -> tuple[str, ...]:
        """FQNs whose replicas were found to differ (R8); empty where the keeper is away."""
        try:
            answer, _ = self._ask(AskDemoted(), (Demoted,), timeout)
        except KeeperError:
            return ()
        assert isinstance(answer, Demoted)
        return answer.fqns

    def preempt(self, grace: float) -> bool:
        """Pass on a SIGTERM that this worker got (no agent runs): all ranks stop at one step."""
        self._pulse.hurry()
        return self._say(Preempt(grace))

    def report(self, event: Event) -> bool:
        return self._say(Report(event))

    def fatal(self, fatal: Fatal) -> bool:
        """Tell that the job must end; the agent does not restart after it."""
        return self._say(fatal)

    def goodbye(self, *, finished: bool) -> None:
        """Part from the keeper and close everything. In a forked child nothing is said: the
        connection is the parent's."""
        if os.getpid() == self._pid:
            self._say(Goodbye(finished))
        self.close()

    def close(self) -> None:
        """Close connection, mappings and descriptors; the keeper keeps the memory."""
        self._drop()
        self._abandon(0.0)
        if self._offered is not None:
            self._offered.close()
            self._offered = None
        self._release_slots()
        if self._page is not None:
            self._page.close()
            self._page = None

    # -- asking

    def _say(self, message: Message) -> bool:
        if self._link is None:
            return False
        try:
            self._link.send(message, timeout=1.0)
        except KeeperError:
            self._drop()
            return False
        return True

    def _ask(
        self, message: Message, kinds: tuple[type[Message], ...], timeout: float
    ) -> tuple[AnyMessage, list[int]]:
        """One question, one answer. Raises :class:`KeeperError` where the keeper is away."""
        if self._link is None:
            raise KeeperError("the keeper is away.")
        try:
            self._link.send(message)
            answer, fds = self._await_answer(self._link, timeout + _ANSWER_MARGIN)
        except KeeperError:
            self._drop()
            raise
        return _expect(answer, fds, kinds)

    def _await_answer(self, link: Link, timeout: float) -> tuple[AnyMessage, list[int]]:
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if link.readable(max(0.0, min(deadline - now, LOOK_SECONDS))) or now >= deadline:
                return link.receive(timeout=max(0.0, deadline - now))
            self._tend(link, now)

    def _ask_until(
        self,
        question: Callable[[float], Message],
        kinds: tuple[type[Message], ...],
        deadline: float,
    ) -> tuple[AnyMessage, list[int]]:
        """Ask, and ask again after the keeper died, until ``deadline``."""
        while True:
            self._await_connection(deadline)
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._ask(question(left), kinds, left)
            except KeeperError:
                if self._link is not None or time.monotonic() >= deadline:
                    raise

    # -- the way back

    def _hear_parting(self, link: Link) -> None:
        """Nothing was asked: the keeper has died, or its last words are why it parts."""
        self.refused = None
        try:
            answer, fds = link.receive(timeout=1.0)
        except KeeperError:
            self._drop()
            return
        _close_all(fds)
        self._drop()
        if isinstance(answer, Refused):
            self.refused = error_of(answer)

    def _tend(self, link: Link, now: float) -> None:
        """Where no agent runs, the rank that starts the keeper looks after it."""
        if self._restart is None or not link.peer or now < self._pulse.due:
            return
        need = self._pulse.feel(now, (self.page.beats(), cpu_ticks(link.peer)))
        if need != "nothing":
            self._notice = told(link.peer, need, self._pulse.silent)
            _signal(link.peer, signal.SIGCONT if need == "rouse" else signal.SIGKILL)

    def _await_connection(self, deadline: float) -> None:
        while not self.reconnect_if_needed(time.monotonic()):
            left = deadline - time.monotonic()
            hopeless = self.crashes >= CRASHES
            if self.refused is not None and (hopeless or not self.refused.retryable):
                raise self.refused
            if left <= 0:
                raise self._unanswered()
            pause = min(left, RETRY_SECONDS)
            if self._pending is None:
                time.sleep(pause)  # nothing exists yet that could be waited on
            else:
                self._pending.readable(pause)

    def _unanswered(self) -> EverstepError:
        """Why there is no connection, as well as it is known here."""
        refused = self.refused
        if refused is not None and type(refused) is not KeeperError:
            return refused  # the keeper's own words, and not a connection that broke
        if self._pending is not None and self._begin is None and Welcome in self._missing:
            return KeeperError(
                f"the keeper answers, but local rank 0 has not begun this start of the job, for "
                f"which rank {self._hello.rank} waits.",
                hint="See what local rank 0 printed; it may have ended before it attached.",
            )
        if self._pending is not None:
            slow = "The store may be slow." if not self._hello.node else "It waits for node 0's."
            return KeeperError(
                f"the keeper answers at @{self._name}, but did not begin the attempt in time.",
                hint=f"{slow} {self._log}",
            )
        if refused is not None and self.crashes:
            return refused
        last = f" The last one: {refused.what}" if refused is not None else ""
        who = "" if self._begin is not None else " Local rank 0 starts it where no agent runs."
        return KeeperError(f"no keeper answers at @{self._name}.{last}", hint=self._log + who)

    def _step_back(self, now: float) -> bool:
        if self._pending is None and not self._dial(now):
            return False
        assert self._pending is not None
        while self._pending.readable(0.0):
            answer, fds = self._pending.receive(timeout=1.0)
            if self._greeted(answer, fds):
                self._link, self._pending, self.refused = self._pending, None, None
                self._started, self.crashes = None, 0
                return True
        return False

    def _dial(self, now: float) -> bool:
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_SECONDS
        self._pending = try_connect(self._name)
        if self._pending is None:
            self._start_keeper(now)
            return False
        if self._restart is not None and self._pending.peer:
            _signal(self._pending.peer, signal.SIGCONT)  # a stopped one would never answer
        hello = msgspec.structs.replace(self._hello, attempt=self.attempt, went_on=self._went_on)
        self._pending.send(hello, timeout=1.0)
        self._missing = {Welcome} if self._begin is None else {Welcome, AttemptBegun}
        if self._begin is not None:
            self._pending.send(self._begin_again(), timeout=1.0)
        return True

    def _start_keeper(self, now: float) -> None:
        code = self._started.poll() if self._started is not None else None
        if code:  # one that finds the name taken ends with 0
            self._started = None
            self.crashes += 1
            self.refused = KeeperError(
                f"the keeper ended with exit code {code} at its start, {self.crashes} times in a "
                "row.",
                hint=self._log,
            )
        elif self._restart is not None and now >= self._restart_at:
            self._restart_at = now + RESTART_SECONDS
            self._started = self._restart()

    def _begin_again(self) -> BeginAttempt:
        assert self._begin is not None
        attempt = self.attempt or self._begin.attempt
        return msgspec.structs.replace(self._begin, attempt=attempt)

    def _greeted(self, answer: AnyMessage, fds: list[int]) -> bool:
        """Take one answer of the greeting; True when it was the last."""
        assert self._pending is not None, "an answer without a question"
        if isinstance(answer, SlotsOpen) and self._geometry is not None:
            self._take_slots(self._geometry, fds)
            return True
        if isinstance(answer, AttemptBegun):
            self.begun = answer
        else:
            answer, fds = _expect(answer, fds, (Welcome,))
            assert isinstance(answer, Welcome), "expected above"
            self._welcomed(answer, fds)
        self._missing.discard(type(answer))
        if self._missing:
            return False
        if self._geometry is None:
            return True
        mine = tuple(fd for fd, file in self._fds.items() if file_of(fd) == file)
        own = tuple(SlotName(self._hello.rank, index) for index in range(len(self._fds)))
        if len(mine) == len(own):
            self._pending.send(AdoptSlots(own), mine, timeout=1.0)
        self._pending.send(_open_message(self._geometry), timeout=1.0)
        return False

    def _welcomed(self, welcome: Welcome, fds: list[int]) -> None:
        try:
            page = ControlPage(fds[0])
        finally:
            _close_all(fds)
        if self._page is not None:
            self._page.close()
        self._page = page
        self.attempt, self.world = welcome.attempt, welcome.world
        self.store, self.job = welcome.store, welcome.job
        self.skip, self.replay_until = frozenset(welcome.skip), welcome.replay_until

    def _take_slots(self, geometry: Geometry, fds: list[int]) -> None:
        known = {fd: file for fd in fds if (file := file_of(fd)) is not None}
        if self._fds and list(self._fds.values()) == list(known.values()):
            _close_all(fds)
        else:
            self._release_slots()
            self._fds = known
            first, second = fds
            self._slots = (Slot(first), Slot(second))
        self._geometry = geometry

    def _release_slots(self) -> None:
        for slot in self._slots or ():
            slot.close()
        self._slots = None
        # A script may have closed all that it found open, and opened something else since.
        _close_all(fd for fd, file in self._fds.items() if file_of(fd) == file)
        self._fds = {}

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _abandon(self, now: float) -> None:
        if self._pending is not None:
            self._pending.close()
            self._pending = None
        refused = self.refused is not None and not self.refused.retryable
        self._retry_at = now + (RESTART_SECONDS if refused else RETRY_SECONDS)


def _expect(
    answer: AnyMessage, fds: list[int], kinds: tuple[type[Message], ...]
) -> tuple[AnyMessage, list[int]]:
    if isinstance(answer, kinds):
        return answer, fds
    _close_all(fds)
    if isinstance(answer, Refused):
        raise error_of(answer)
    raise KeeperError(f"the keeper answered {type(answer).__name__} to another question.")


def _open_message(geometry: Geometry) -> OpenSlots:
    return OpenSlots(geometry.payload, geometry.state, geometry.layout, geometry.digests)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _classes(kind: type[EverstepError]) -> Iterable[type[EverstepError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _classes(below)
