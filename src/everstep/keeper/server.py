"""The keeper's loop: sockets, timers and the order in which things are done.

Owns: all connections, whose messages go where, and when the process ends. Never does: decide about
state (coordinate), touch slots (node), wait for a disk (background). Called by: ``__main__``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from everstep.core.clock import Clock
from everstep.core.events import Event
from everstep.errors import EverstepError, KeeperError
from everstep.keeper import facts
from everstep.keeper.address import keeper_name, peer_of
from everstep.keeper.attempt import Attempt
from everstep.keeper.background import Background
from everstep.keeper.connection import Connection
from everstep.keeper.coordinate import IDLE_TICK_SECONDS, POLL_SECONDS, TICK_SECONDS
from everstep.keeper.durable import GIVE_UP
from everstep.keeper.facts import AnyFact
from everstep.keeper.identity import Process
from everstep.keeper.journal import Journal
from everstep.keeper.memory import Limit, read_limits
from everstep.keeper.node import Node
from everstep.keeper.storing import Storing
from everstep.keeper.uplink import keep_alive
from everstep.keeper.wire import (
    AdoptSlots,
    AnyMessage,
    BeginAttempt,
    Fatal,
    Hello,
    Leave,
    Preempt,
    Refused,
    Relayed,
    Release,
    Report,
    SlotsHeld,
    Welcome,
    WorkersEnded,
    WorkersStarted,
)

IDLE_SECONDS = 120.0
BACKLOG = 128


@dataclass(frozen=True)
class Options:
    """How a keeper was started. ``listen_fd`` is an inherited listening TCP socket or None."""

    store: str
    job: str
    node: int
    events: str = ""
    listen_fd: int | None = None
    idle_seconds: float = IDLE_SECONDS


class NameTaken(Exception):
    """Another keeper serves this user, store, job and node."""


class Server:
    def __init__(
        self,
        options: Options,
        *,
        clock: Clock,
        limits: Callable[[], list[Limit]] = read_limits,
    ) -> None:
        """Raises :class:`NameTaken`."""
        self._options = options
        self._clock = clock
        self._listener = _listen(keeper_name(options.store, options.job, options.node))
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._pidfds: dict[int, int] = {}
        self._facts: deque[AnyFact] = deque()
        self._agent: Connection | None = None
        self._agent_process = Process(0, None)
        self._agent_pidfd = -1
        self._leaving = False
        self._deserted_at: float | None = None
        self._idle_since = clock.mono()
        self._told_at = 0.0
        self._background = Background()
        self._journal = Journal(
            options.events, source="keeper", job=options.job, clock=clock, listen=self._report
        )
        self._storing = Storing(options.store, options.job)
        self._node = Node(
            self._storing, self._journal, self._background, store=options.store,
            job=options.job, tell=self._facts.append, hold=self._hold, limits=limits,
        )  # fmt: skip
        self._attempt = Attempt(
            self._node, self._storing, self._background, self._journal, clock=clock,
            tell=self._facts.append, listen=self._listen_tcp, watch=self._watch,
            obey=self._obey,
        )  # fmt: skip
        self._tcp: socket.socket | None = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._background, selectors.EVENT_READ, self._deliver)
        if options.listen_fd is not None:
            self._serve_tcp(socket.socket(fileno=options.listen_fd))

    def run(self) -> int:
        """Serve until the work is done and nobody is attached; the exit code."""
        _install_signals(self._background.wake, self._terminate)
        while not self._over():
            self.turn()
        self.close()
        return 0

    # -- one turn of the loop

    def turn(self) -> None:
        """Wait for whatever comes first, and do all that is due."""
        ready = self._selector.select(self._wait())
        # What stands on the page now was posted after its messages were sent: with all sockets
        # read after this, a rank that is beyond a cut and has not spoken has missed it.
        before = self._node.boundaries()
        self._node.beat()
        for key, events in ready:
            key.data(key.fileobj, events)
        for connection in list(self._connections):
            if connection.hello is not None and connection.hello.role == "worker":
                self._read(connection)
        self._decide(before)
        self._attempt.turn()
        self._sweep()

    def _decide(self, before: tuple[facts.Boundary, ...]) -> None:
        now = self._clock.mono()
        due = now - self._told_at >= POLL_SECONDS
        if not self._facts and not due:
            return
        self._told_at = now
        fresh = self._node.boundaries()
        if fresh:
            self._facts.appendleft(facts.Boundaries(fresh, drained=False))
        if before:
            self._facts.append(facts.Boundaries(before, drained=True))
        self._facts.append(facts.Tick())
        while self._facts:
            self._attempt.decide(self._facts.popleft())

    def _wait(self) -> float:
        if self._facts:
            return 0.0
        coordinator = self._attempt.coordinator
        if coordinator is not None:
            decided = coordinator.wait()
        else:
            decided = TICK_SECONDS if self._node.attached else IDLE_TICK_SECONDS
        idle = self._options.idle_seconds - (self._clock.mono() - self._idle_since)
        return max(0.0, min(decided, self._attempt.wait(), idle if idle > 0 else TICK_SECONDS))

    # -- connections

    def _accept(self, listener: socket.socket, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            made, _address = listener.accept()
            if listener.family == socket.AF_UNIX:
                pid, uid = peer_of(made)
                if uid != os.getuid():
                    made.close()
                    return
                self._watch(Connection(made, peer=pid))
            else:
                keep_alive(made)
                self._watch(Connection(made))

    def _watch(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def _on_ready(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        if connection.closed:
            return
        try:
            for message in connection.read():
                self._hear(connection, message)
        except EverstepError as error:
            connection.send(Refused(error.code, error.what, error.hint))
            connection.closed = True

    def _sweep(self) -> None:
        """Part from closed connections, watch for room where much is to be sent."""
        for connection in list(self._connections):
            if connection.closed:
                self._part(connection)
            else:
                wanted = selectors.EVENT_READ
                if connection.wants_write:
                    wanted |= selectors.EVENT_WRITE
                if self._selector.get_key(connection).events != wanted:
                    self._selector.modify(connection, wanted, self._on_ready)
        if any(c.hello and c.hello.role in ("agent", "worker") for c in self._connections):
            self._idle_since = self._clock.mono()

    def _part(self, connection: Connection) -> None:
        self._connections.discard(connection)
        # Connections are closed here alone, or a new one could get the descriptor's number while
        # the selector still knows the old one.
        self._selector.unregister(connection)
        connection.close()
        if connection is self._agent:
            self._agent = None
        self._attempt.left(connection)
        self._node.gone(connection)

    # -- messages

    def _hear(self, connection: Connection, message: AnyMessage) -> None:
        if self._attempt.hear_uplink(connection, message):
            return
        hello = connection.hello
        if hello is None:
            if not isinstance(message, Hello):
                raise KeeperError(f"{type(message).__name__} was said before Hello.")
            self._greet(connection, message)
        elif isinstance(message, BeginAttempt):
            self._attempt.begin(connection, message)
        elif isinstance(message, Report):
            self._journal.append(message.event)
        elif isinstance(message, Preempt):
            if connection is self._agent or self._node.admitted(connection):
                self._facts.append(facts.PreemptAsked(message.grace))
        elif isinstance(message, Fatal):
            self._fatal(message)
            if hello.role == "worker":
                self._facts.append(facts.RankEnded(hello.rank, message.what))
        elif isinstance(message, AdoptSlots) and hello.role == "agent":
            self._attempt.adopted += self._node.adopt(connection, message)
        elif hello.role == "agent":
            if connection is self._agent:  # another one's attempt is over, or has not begun
                self._hear_agent(message)
        elif hello.role == "keeper" and isinstance(message, Relayed):
            self._facts.append(facts.decode(message.fact))
        elif hello.role != "worker" or not self._attempt.hear_worker(connection, message):
            raise KeeperError(f"{type(message).__name__} is not for a keeper to hear.")

    def _greet(self, connection: Connection, hello: Hello) -> None:
        connection.hello = hello
        if hello.role == "agent":
            self._welcome_agent(connection)
        else:
            self._attempt.greet(connection)

    def _hear_agent(self, message: AnyMessage) -> None:
        match message:
            case WorkersStarted():
                self._hold_pids(list(message.pids.values()))
            case WorkersEnded() if message.attempt == self._node.attempt:
                self._forget_pids()
                self._node.workers_ended()
                self._facts.append(facts.WorkersOver(self._node.node))
            case WorkersEnded():
                pass  # of an attempt that another has replaced
            case Release():
                if message.attempt == self._node.attempt:
                    self._node.hold_until(0.0)
            case Leave():
                self._leaving = True
                self._facts.append(facts.Left())
            case _:
                raise KeeperError(f"{type(message).__name__} is not for an agent to say.")

    def _fatal(self, message: Fatal) -> None:
        self._journal.say(
            "job.fatal", message.what, level="error", rank=message.rank,
            facts={"code": message.code, "exit_code": message.exit_code},
        )  # fmt: skip
        if self._agent is not None:
            self._agent.send(message)

    def _report(self, event: Event) -> None:
        if self._agent is not None:
            self._agent.send(Report(event))

    def _hold(self, message: SlotsHeld, fds: tuple[int, ...]) -> None:
        if self._agent is not None:
            self._agent.send(message, fds)

    # -- the agent and its workers

    def _welcome_agent(self, connection: Connection) -> None:
        """An agent takes the place of one that lives only when its own attempt begins."""
        node = self._node
        store, job = self._options.store, self._options.job
        gone = self._agent_pidfd < 0 or self._leaving
        if gone or connection.process == self._agent_process:
            self._take_agent(connection)
        connection.send(Welcome(os.getpid(), node.attempt, node.world, store, job))
        if connection is self._agent:
            node.hand_over()

    def _obey(self, connection: Connection) -> None:
        """The attempt of this agent is served from now on."""
        if connection is not self._agent:
            self._take_agent(connection)
            self._node.hand_over()

    def _take_agent(self, connection: Connection) -> None:
        self._agent, self._agent_process = connection, connection.process
        self._leaving = False
        self._drop_agent_pidfd()
        self._agent_pidfd = _pidfd(connection.peer)
        if self._agent_pidfd >= 0:
            self._selector.register(self._agent_pidfd, selectors.EVENT_READ, self._agent_died)

    def _agent_died(self, _: object, __: int) -> None:
        """Its workers must not go on without it: nobody would restart them.
        One that has begun nothing has none."""
        self._drop_agent_pidfd()
        if self._leaving or not self._attempt.begun_by(self._agent_process):
            return
        self._hold_pids(self._node.worker_pids())
        self._journal.say(
            "agent.lost", "the agent died: its workers are ended, what they made is kept",
            level="warning", facts={"pids": sorted(self._pidfds)},
        )  # fmt: skip
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._forget_pids()

    def _hold_pids(self, pids: list[int]) -> None:
        for pid in pids:
            pidfd = -1 if pid in self._pidfds else _pidfd(pid)
            if pidfd >= 0:
                self._pidfds[pid] = pidfd

    def _forget_pids(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds = {}

    def _drop_agent_pidfd(self) -> None:
        if self._agent_pidfd >= 0:
            self._selector.unregister(self._agent_pidfd)
            os.close(self._agent_pidfd)
            self._agent_pidfd = -1

    # -- other nodes

    def _listen_tcp(self) -> int:
        """The port on which other nodes' keepers are heard; opened where none was inherited."""
        if self._tcp is None:
            self._serve_tcp(socket.create_server(("", 0), backlog=BACKLOG))
        assert self._tcp is not None, "opened above"
        port: int = self._tcp.getsockname()[1]
        return port

    def _serve_tcp(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._tcp = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    # -- background and end

    def _deliver(self, _: object, __: int) -> None:
        self._background.deliver()

    def _terminate(self) -> None:
        self._leaving = True
        self._facts.append(facts.Left())

    def _over(self) -> bool:
        now = self._clock.mono()
        idle = now - self._idle_since >= self._options.idle_seconds
        if not (idle or self._leaving or self._attempt.finished):
            self._deserted_at = None
            return False
        if self._deserted_at is None:
            self._deserted_at = now
            self._facts.append(facts.Left())
        if self._facts:
            return False
        tired = now - self._deserted_at > GIVE_UP
        return tired or not (self._attempt.pending or self._background.running)

    def close(self) -> None:
        """Close everything; memory that others hold is theirs."""
        self._attempt.close()
        for connection in list(self._connections):
            connection.close()
        self._forget_pids()
        self._node.close()
        self._journal.close()
        self._listener.close()


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
    except OSError as taken:
        listener.close()
        raise NameTaken(name) from taken
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # dead already: nothing to watch or to end


def _install_signals(wake: Callable[[], None], terminate: Callable[[], None]) -> None:
    """SIGINT and SIGHUP are meant for the terminal's other processes; SIGTERM ends us in order."""

    def on_term(_number: int, _frame: object) -> None:
        terminate()
        wake()

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_term)
