"""The agent's line to its node's keeper.

Owns: starting or adopting the keeper, seeing its death at once, and giving a new one what the old
one held. Never does: decide what an event means. Called by: the loop.

The agent holds a descriptor of every slot and of the control page, so that memory outlives the
keeper; workers hold their own. A new keeper gets them back (:class:`AdoptSlots`).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from everstep.core.settings import Settings
from everstep.errors import EverstepError, KeeperError
from everstep.keeper.address import connect, keeper_name, peer_of, try_connect
from everstep.keeper.client import error_of
from everstep.keeper.control import Beat, ControlPage
from everstep.keeper.identity import cpu_ticks
from everstep.keeper.pulse import LOOK_SECONDS
from everstep.keeper.spawn import log_path, start_keeper
from everstep.keeper.wire import (
    MAX_DESCRIPTORS,
    AdoptSlots,
    AnyMessage,
    AttemptBegun,
    BeginAttempt,
    Fatal,
    Hello,
    Leave,
    Link,
    Message,
    Preempt,
    Refused,
    Release,
    Report,
    SlotName,
    SlotsHeld,
    Welcome,
    WorkersEnded,
    WorkersStarted,
)

CONNECT_SECONDS = 30.0
DEATH_SECONDS = 2.0
"""From a broken connection to the process's end."""
RECOVER_SECONDS = 2.0
"""For each step of a keeper's way back; it takes tenths of a second, else it is tried again."""
WORD_SECONDS = 10.0
"""For a message that has begun to arrive."""
BEGIN_SECONDS = 300.0
"""For BeginAttempt: the keeper may still be writing what an earlier attempt left."""

Hear = Callable[[Report | Fatal], None]
Answer = TypeVar("Answer", bound=Message)


class NodeKeeper:
    """The keeper number ``index`` of the job on this host.

    ``hear`` gets the events and last words that workers and keeper send; ``waiting`` is called
    every :data:`LOOK_SECONDS` while an answer is waited for; ``unlogged`` is told where a keeper
    cannot write its log. ``name`` is that of its
    socket, as workers get it in EVERSTEP_KEEPER: made once, so that a link that is moved while
    the job runs does not hide the keeper. Not thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        index: int,
        hear: Hear,
        *,
        listening: bool,
        waiting: Callable[[], None] = lambda: None,
        unlogged: Callable[[str], object] = str,
    ) -> None:
        self._waiting = waiting
        self._unlogged = unlogged
        self._settings = settings
        self._index = index
        self.name = keeper_name(settings.store, settings.job, index)
        self._hear = hear
        self._listener = _listen() if listening else None
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._held: dict[SlotName, int] = {}
        self._begun: BeginAttempt | None = None
        self._stop_by = math.inf
        self._started = 0.0
        self._workers: WorkersStarted | None = None
        self.pid = 0

    @property
    def log(self) -> str:
        return str(log_path(self._settings, self._index))

    @property
    def descriptors(self) -> list[int]:
        """Readable when the keeper said something, or died."""
        return [] if self._link is None else [self._link.fileno(), self._pidfd]

    @property
    def holds_memory(self) -> bool:
        """Whether slots exist: a snapshot may be in this node's memory."""
        return any(slot.index >= 0 for slot in self._held)

    def finished_steps(self, attempt: int, ranks: Sequence[int]) -> dict[int, int]:
        """The newest step that each of this node's ``ranks`` (in local order) has finished in
        ``attempt``, -1 for none; empty where none of them tells. Known whatever the keeper's
        fate."""
        for page in self._pages():
            with contextlib.closing(page):
                if page.served() == attempt:
                    steps = (page.boundary(local_rank)[0] for local_rank in range(len(ranks)))
                    found = (-1 if step is None else step for step in steps)
                    return dict(zip(ranks, found, strict=True))
        return {}

    def beats(self, attempt: int, workers: int) -> tuple[Beat, ...]:
        """What each of this node's ``workers`` posts in ``attempt``; empty where no page is."""
        for page in self._pages():
            with contextlib.closing(page):
                if page.served() == attempt:
                    return tuple(page.beat(local_rank) for local_rank in range(workers))
        return ()

    def launch(self) -> None:
        """Start the process where none answers. Returns at once: it imports while we meet."""
        link = try_connect(self.name)
        if link is not None:
            link.close()
        elif not self._is_starting():
            fd = None if self._listener is None else self._listener.fileno()
            self._process = start_keeper(
                self._settings, self._index, listen_fd=fd, unlogged=self._unlogged
            )
            self._started = time.monotonic()

    def attach(self, timeout: float = CONNECT_SECONDS) -> bool:
        """Connect to it, and give it the memory that is held here, which a keeper before it has
        left. True where it was there before this agent: adopted."""
        self._link = connect(self.name, timeout=timeout, started=self._process, log=self.log)
        self.pid = self._link.peer
        if self._link.peer:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._link.peer, signal.SIGCONT)  # else a stopped one is never adopted
        answer = self._ask(Hello("agent", os.getpid()), Welcome, timeout)
        self.pid = answer.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._hand_memory()
        return self._process is None or self._process.pid != self.pid

    def begin(self, begin: BeginAttempt) -> AttemptBegun:
        """Begin an attempt. Raises what the keeper refuses with."""
        self._begun, self._workers, self._stop_by = begin, None, math.inf
        return self._ask(begin, AttemptBegun, BEGIN_SECONDS)

    def workers_started(self, pids: dict[int, int]) -> None:
        self._workers = WorkersStarted(pids)
        self._say(self._workers)

    def workers_ended(self, attempt: int) -> None:
        self._workers = None
        self._say(WorkersEnded(attempt))

    def release(self) -> None:
        """The verdict is there: the first batch of the attempt waits no more (``hold``)."""
        if self._begun is not None:
            self._say(Release(self._begun.attempt))

    def preempt(self, grace: float) -> None:
        """All ranks are to stop at one step within ``grace`` s."""
        self._stop_by = time.monotonic() + grace
        self._say(Preempt(grace))

    def pump(self) -> None:
        """Hear everything that was said. Raises :class:`KeeperError` where the keeper is gone."""
        while self._link is not None and _readable(self._link):
            self._take(*self._link.receive(timeout=WORD_SECONDS))

    def signs(self) -> tuple[int, ...]:
        """What changes while the keeper moves: the turns of its loop, and the CPU time it took,
        for a turn that makes much memory can be long."""
        turns = []
        for page in self._pages():
            with contextlib.closing(page):
                turns.append(page.beats())
        return (*turns, cpu_ticks(self.pid))

    def rouse(self) -> None:
        """Let it go on where it was stopped."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End it; its death is seen like any other."""
        self._signal(signal.SIGKILL)

    def lost(self) -> None:
        """Let go of a keeper that is dead or does not speak; what it held stays held. One that
        lives is met again: it may hold memory that nobody else does."""
        if self._pidfd >= 0:
            # Its connections close one by one while it dies: the listening one last would take us
            # in once more, and nobody would answer.
            select.select([self._pidfd], [], [], DEATH_SECONDS)
        self._drop()

    def part(self) -> None:
        """Let go of a keeper that has refused, and so closed the connection."""
        self._drop()

    def recover(self) -> bool:
        """A new keeper with the old one's memory, or a few seconds of waiting for it: workers and
        signals are not seen meanwhile. False where none came up yet: worth trying again later, and
        no error of training (R3)."""
        try:
            self.launch()
            self.attach(RECOVER_SECONDS)
            self._begin_again()
        except (EverstepError, OSError):
            self._drop()
            return False
        return True

    @property
    def attached(self) -> bool:
        return self._link is not None

    def leave(self) -> None:
        """The job is over for this agent: the keeper ends when its work is durable."""
        self.rouse()  # nobody tends it any more
        self._say(Leave())
        self.close()

    def close(self) -> None:
        """Close everything; the keeper goes on."""
        self._drop()
        for fd in self._held.values():
            os.close(fd)
        self._held = {}
        if self._listener is not None:
            self._listener.close()

    def _hand_memory(self) -> None:
        assert self._link is not None, "handed over before the connection"
        names = list(self._held)
        for at in range(0, len(names), MAX_DESCRIPTORS):
            part = tuple(names[at : at + MAX_DESCRIPTORS])
            self._link.send(AdoptSlots(part), tuple(self._held[name] for name in part))

    def _begin_again(self) -> None:
        if self._begun is not None:
            # A keeper that dies has released the workers: the next one holds nobody.
            released = msgspec.structs.replace(self._begun, hold=0.0)
            self._ask(released, AttemptBegun, RECOVER_SECONDS)
        if self._workers is not None and self._link is not None:
            self._link.send(self._workers)
        if self._stop_by < math.inf and self._link is not None:
            self._link.send(Preempt(max(0.0, self._stop_by - time.monotonic())))

    def _is_starting(self) -> bool:
        """Whether the process that was started last may still come up; one that takes too long
        is ended."""
        if self._process is None or self._process.poll() is not None:
            return False
        if time.monotonic() - self._started < CONNECT_SECONDS:
            return True
        self._process.kill()
        self._process.wait()
        return False

    def _ask(self, question: Message, kind: type[Answer], timeout: float) -> Answer:
        if self._link is None:
            raise KeeperError("the keeper is away.", hint=f"Its log is {self.log}.")
        self._link.send(question)
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not _readable(self._link, min(left, LOOK_SECONDS)) and left:
                self._waiting()
                continue
            message, fds = self._link.receive(timeout=min(left, WORD_SECONDS))
            if isinstance(message, kind):
                return message
            if isinstance(message, Refused):
                raise error_of(message)
            self._take(message, fds)

    def _say(self, message: Message) -> None:
        # A keeper that is gone is seen through its pidfd and gets this again in recover().
        if self._link is not None:
            with contextlib.suppress(KeeperError):
                self._link.send(message)

    def _take(self, message: AnyMessage, fds: list[int]) -> None:
        if isinstance(message, SlotsHeld):
            for name, fd in zip(message.names, fds, strict=True):
                old = self._held.pop(name, None)
                if old is not None:
                    os.close(old)
                self._held[name] = fd
        elif isinstance(message, Report | Fatal):
            self._hear(message)
        else:
            raise KeeperError(f"the keeper said {type(message).__name__} unasked.")

    def _pages(self) -> list[ControlPage]:
        """The control pages that are held here, mapped anew: for the caller to close."""
        return [ControlPage(fd) for slot, fd in self._held.items() if slot.index < 0]

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._process is not None and self._process.poll() is not None:
            self._process = None


def claim_index(settings: Settings) -> tuple[int, socket.socket]:
    """This agent's number on the host: the first whose agent is not alive, so that a new agent
    adopts the keeper of a dead one."""
    index = 0
    while (lock := hold_index(settings, index)) is None:
        index += 1
    return index, lock


def hold_index(settings: Settings, index: int) -> socket.socket | None:
    """Take that number for as long as the socket is open (the kernel frees the abstract name with
    the process), or None where a living agent has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_lock_name(settings, index))
    except OSError:
        lock.close()
        return None
    lock.listen(1)  # so that the kernel tells others whose it is
    # A forked worker outlives its agent by seconds, and would keep the number so long.
    os.register_at_fork(after_in_child=lock.close)
    return lock


def holder_of(settings: Settings, index: int) -> str:
    """The agent that has that number, in words."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_lock_name(settings, index))
        except OSError:
            return "its pid is not known"
        pid, uid = peer_of(asking)
    return f"pid {pid} of user {uid}" if pid else "in another pid namespace"


def _lock_name(settings: Settings, index: int) -> str:
    return f"\0{keeper_name(settings.store, settings.job, index)}/agent"


def _listen() -> socket.socket:
    """Where another node's keeper reaches this one; the agent keeps it over keepers' deaths."""
    listener = socket.create_server(("", 0), backlog=64)
    listener.set_inheritable(True)
    return listener


def _readable(link: Link, timeout: float = 0.0) -> bool:
    return bool(select.select([link], [], [], timeout)[0])
