"""The attempt that the keeper serves: how it begins, who belongs to it, where its facts go.

Owns: the begin of an attempt (with or without an agent), workers and keepers that wait for it, the
way to the coordinator here or on node 0. Never does: decide. Called by: server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from everstep.core.clock import Clock
from everstep.errors import AttemptLived, EverstepError, JobOwned, KeeperError, RestoreError
from everstep.keeper import commands, facts, wire
from everstep.keeper.background import Background
from everstep.keeper.connection import Connection
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.facts import AnyFact
from everstep.keeper.identity import (
    Process,
    end_processes,
    host_name,
    identity_of,
    may_run,
    process_of,
)
from everstep.keeper.journal import Journal
from everstep.keeper.lead import Lead
from everstep.keeper.node import Node
from everstep.keeper.owner import Owner
from everstep.keeper.parted import Parted
from everstep.keeper.storing import Storing
from everstep.keeper.uplink import Uplink
from everstep.keeper.wire import AnyMessage, AttemptBegun, BeginAttempt, Goodbye, Refused, Welcome
from everstep.store import OwnerIdentity

END_SECONDS = 5.0
"""For killed processes of an earlier start to be gone: one that waits for a device is slow."""


class Starter(NamedTuple):
    """Who begins an attempt: an agent, or a worker where none runs."""

    process: Process
    agent: bool


class Attempt:
    """``listen`` opens the TCP port and gives its number, ``watch`` takes a connection into the
    loop, ``obey`` hears whose agent's attempt is served from now on. ``adopted`` counts slots taken
    over since the last begin; ``finished`` says that a job without an agent has reached its end
    here."""

    def __init__(
        self,
        node: Node,
        storing: Storing,
        background: Background,
        journal: Journal,
        *,
        clock: Clock,
        tell: Callable[[AnyFact], None],
        listen: Callable[[], int],
        watch: Callable[[Connection], None],
        obey: Callable[[Connection], None],
    ) -> None:
        self._node = node
        self._storing = storing
        self._background = background
        self._journal = journal
        self._clock = clock
        self._tell = tell
        self._listen = listen
        self._watch = watch
        self._obey = obey
        self._lead: Lead | None = None
        self._uplink: Uplink | None = None
        self._owner = Owner(
            storing, background, clock=clock, say=journal.say,
            lost=self._taken_over,
        )  # fmt: skip
        self._beginning: BeginAttempt | None = None
        self._beginner = self._begun_by = Starter(Process(0, None), agent=False)
        self._lived = False
        self._askers: list[Connection] = []
        self._lobby: list[Connection] = []
        self._parted = Parted(clock)
        self._dismissed: set[Connection] = set()
        self._begun: AttemptBegun | None = None
        self._token = ""
        self._fenced = ""
        self.adopted = 0
        self.finished = False

    @property
    def coordinator(self) -> Coordinator | None:
        return self._lead.coordinator if self._lead is not None else None

    @property
    def pending(self) -> bool:
        """Whether work must be finished before the process may end. Another node's work is
        finished when node 0's keeper has ended."""
        if self._lead is not None:
            return self._lead.coordinator.pending
        return self._uplink is not None and self._uplink.welcomed

    def begun_by(self, agent: Process) -> bool:
        """Whether that agent's attempt is served."""
        return self._begun_by == Starter(agent, agent=True)

    # -- the begin

    def begin(self, connection: Connection, message: BeginAttempt) -> None:
        """Begin an attempt, or confirm the one that is served. Answers when it has begun."""
        self._check_promise(connection, message)
        self._check_not_over(message.attempt)
        if self._confirms(connection, message):
            assert self._begun is not None, "a launch without a begin"
            self._obey_agents([connection])
            connection.send(self._begun)
            return
        if self._beginning is not None and self._beginning.launch == message.launch:
            if connection.process == self._beginner.process:
                self._askers.append(connection)
                return
            if may_run(self._beginner.process):
                raise JobOwned(
                    f"process {self._beginner.process.pid} begins the job at this moment.",
                    hint="Stop one of the two, or give this run another --job name.",
                )
        self._askers.append(connection)
        assert connection.hello is not None, "heard before its hello"
        self._beginner = Starter(connection.process, connection.hello.role == "agent")
        self._beginning = message
        self._prepare(connection, message)

    def _check_not_over(self, attempt: int) -> None:
        if attempt and attempt < self._node.attempt:
            raise JobOwned(
                f"attempt {attempt} is over: this keeper serves {self._node.attempt}.",
                hint="A newer start runs the job; stop this one.",
            )
        if attempt and self._fenced:
            raise self._owned()

    def _taken_over(self, what: str) -> None:
        """Another owner runs the job, and no agent is here to end the workers: they hear it and
        stop, because nothing that they make would be kept."""
        self._tell(facts.Fenced(what))
        self._fenced = what
        error = self._owned()
        self._journal.say("job.taken_over", str(error), level="error")
        for connection in self._node.part_workers():
            connection.send(Refused(error.code, error.what, error.hint))
            connection.closed = True

    def _owned(self) -> JobOwned:
        return JobOwned(
            f"attempt {self._node.attempt} is over: another has taken the job over "
            f"({self._fenced}).",
            hint="What this attempt made since its last checkpoint is not stored.",
        )

    def _confirms(self, connection: Connection, message: BeginAttempt) -> bool:
        """Whether the attempt is served already. A launch's name alone does not say so: variables
        that a shell exports give the same one to every start (R5)."""
        assert connection.hello is not None, "heard before its hello"
        if message.launch != self._node.launch or message.attempt not in (0, self._node.attempt):
            return False
        if connection.hello.role == "agent":
            return True
        if connection.process == self._begun_by.process:
            return bool(message.attempt) or not self._node.is_new_life(connection)
        if message.attempt:
            raise JobOwned(
                f"attempt {message.attempt} was begun by process {self._begun_by.process.pid}; "
                f"process {connection.peer} says that it is its own.",
                hint="A process that was forked from a worker cannot take part in its run.",
            )
        return False

    def _check_promise(self, connection: Connection, message: BeginAttempt) -> None:
        """An agent died after it had promised attempts, and the store gave one of their numbers to
        the next one. The claim is as good as the first one's; the attempt has been lived."""
        another = connection.process != self._begun_by.process
        if another and message.agent and message.attempt in self._node.promised:
            self._node.agents.add(message.agent)
            raise AttemptLived(
                f"attempt {message.attempt} was lived through already, by an agent that died "
                "before it could claim it.",
                hint="The next number goes on from memory.",
            )

    def _prepare(self, connection: Connection, message: BeginAttempt) -> None:
        """What must be true before the attempt may begin here: it is claimed, or node 0 says so."""
        assert connection.hello is not None, "heard before its hello"
        if message.node > 0:
            self._dial(message)
            self._owner.forget()
            if message.attempt:
                self._start(message, message.attempt)
        elif connection.hello.role == "worker":
            self._owner.claim(
                connection.peer,
                message.attempt,
                lambda attempt: self._start(message, attempt),
                self._refuse,
            )
        else:
            self._owner.forget()
            self._start(message, message.attempt)

    def _refuse(self, error: EverstepError) -> None:
        """The attempt cannot begin: everybody who waits for it hears why."""
        self._beginning = None
        for connection in [*self._askers, *self._lobby]:
            connection.send(Refused(error.code, error.what, error.hint))
        self._askers, self._lobby = [], []
        self._journal.say("attempt.refused", str(error), level="error")

    def _start(self, message: BeginAttempt, attempt: int) -> None:
        if self._beginning is not message:
            return  # another launch has begun in the meantime
        self._part_workers()
        orphans = self._orphans()

        def serve(left: set[Process]) -> None:
            if self._beginning is message:
                self._retire(left, orphans)
                self._serve(message, attempt)

        if orphans:
            self._background.submit(
                "end", lambda: end_processes(orphans, END_SECONDS), serve,
                lambda _: serve(set(orphans)),
            )  # fmt: skip
        else:
            serve(set())

    def _part_workers(self) -> None:
        for older in self._node.part_workers():
            self._dismiss(older)

    def _dismiss(self, connection: Connection) -> None:
        """End a connection that another has replaced: it says nothing of its rank any more."""
        connection.closed = True
        self._dismissed.add(connection)

    def _orphans(self) -> dict[Process, int]:
        """Processes of an earlier launch that map slots still, and their ranks. A cut that one of
        them has read may be written at any time, into a slot that is given away anew."""
        if self._beginner == self._begun_by and not self._beginner.agent:
            return {}  # the same processes attach once more
        ours = (self._beginner.process, process_of(os.getpid()))
        return {p: rank for p, rank in self._node.writers().items() if p not in ours}

    def _retire(self, left: set[Process], orphans: dict[Process, int]) -> None:
        ended = set(orphans) - left
        if ended:
            self._journal.say(
                "workers.orphaned", f"{len(ended)} workers of an earlier start are ended",
                level="warning", facts={"pids": sorted(process.pid for process in ended)},
            )  # fmt: skip
        for process in left:
            self._node.retire(orphans[process])

    def _serve(self, message: BeginAttempt, attempt: int) -> None:
        message = self._judged(message)
        self._beginning, self.finished, self._fenced = None, False, ""
        self._begun_by = self._beginner
        self._obey_agents(self._askers)
        self._part_workers()
        several = len(message.ranks_of_node) > 1
        if self._owner.agent:
            message = msgspec.structs.replace(message, agent=self._owner.agent)
        self._storing.exists = self._storing.exists or attempt > 1
        self._node.begin(message, attempt, promised_by=self._promised_by(message))
        self._node.hold_until(self._clock.mono() + message.hold if message.hold else 0.0)
        port = self._listen() if several and message.node == 0 else 0
        self._token = message.token or (secrets.token_hex(16) if port else "")
        self._begun = AttemptBegun(attempt, port, self._token)
        self._lead_or_follow(message, attempt)
        self._say_adopted()
        for connection in self._askers:
            connection.send(self._begun)
        self._askers = []
        waiting, self._lobby = self._lobby, []
        for connection in waiting:
            self._greet_at_last(connection)

    def _promised_by(self, message: BeginAttempt) -> OwnerIdentity | None:
        if message.claimed:
            return None
        pid = self._begun_by.process.pid
        try:
            return identity_of(pid, message.agent)
        except ProcessLookupError:  # it has died: its claim is a promise nevertheless
            return OwnerIdentity(message.agent, host_name(), "", pid, 0)

    def _obey_agents(self, connections: list[Connection]) -> None:
        for connection in connections:
            if connection.hello is not None and connection.hello.role == "agent":
                self._obey(connection)

    def _judged(self, message: BeginAttempt) -> BeginAttempt:
        """What another launcher's restart expects (R5): the start that ``--resume never`` was said
        for is over. Where this keeper has not seen that start the store alone knows of it."""
        node = self._node
        known = bool(node.attempt)
        self._lived = message.again and known and (self._lived or node.holds_snapshot())
        if message.again and not known and message.resume == "never":
            return msgspec.structs.replace(message, resume="auto")
        return msgspec.structs.replace(message, expected=message.expected or self._lived)

    def _lead_or_follow(self, message: BeginAttempt, attempt: int) -> None:
        if message.node > 0:
            self._lead = None
            self._join()
            return
        if self._uplink is not None:
            self._uplink.close()
            self._uplink = None
        if self._lead is None:
            self._lead = Lead(
                self._node, self._storing, self._background, clock=self._clock, tell=self._tell,
                say=self._journal.say,
            )  # fmt: skip
        self._lead.part()
        self._tell(
            facts.Begun(
                attempt,
                message.ranks_of_node,
                message.resume,
                message.expected,
                message.policy,
                alone=not self._begun_by.agent,
                recover=message.recover,
                replay_until=message.replay_until,
            )
        )
        self._tell(facts.NodeJoined(0, self._node.inventory(), self._node.elections()))

    def _say_adopted(self) -> None:
        if self.adopted:
            self._journal.say(
                "keeper.adopted", f"{self.adopted} slots of an earlier keeper are held again",
                facts={"slots": self.adopted, "bytes": self._node.holdings.nbytes},
            )  # fmt: skip
        self.adopted = 0

    # -- who belongs to it

    def greet(self, connection: Connection) -> None:
        """Welcome a worker or another node's keeper, now or when its attempt begins."""
        hello = connection.hello
        assert hello is not None, "greeted before its hello"
        if connection.closed:
            return
        self._parted.back(connection)
        self._check_not_over(hello.attempt)
        beginning = self._beginning is not None and self._beginning.launch == hello.launch
        if hello.role == "keeper" and self._knows_token(hello):
            # Its launch may be named otherwise: torchrun is another process on every node.
            self._greet_keeper(connection, hello)
        elif beginning or not self._node.launch or hello.launch != self._node.launch:
            self._lobby.append(connection)
        elif hello.role == "keeper":
            raise KeeperError(f"the keeper of node {hello.node} does not know the job's token.")
        elif self._node.is_new_life(connection) and not self._begun_by.agent:
            self._lobby.append(connection)  # its launch is about to begin under the same name
        else:
            self._admit(connection, hello)

    def _greet_at_last(self, connection: Connection) -> None:
        """Greet one that waited; what is wrong with it is no fault of who is heard now."""
        try:
            self.greet(connection)
        except EverstepError as error:
            connection.send(Refused(error.code, error.what, error.hint))
            connection.closed = True

    def _admit(self, connection: Connection, hello: wire.Hello) -> None:
        elected = self._node.elected(hello.rank)
        if elected is not None and elected != connection.process:
            raise JobOwned(
                f"rank {hello.rank} of attempt {self._node.attempt} is process {elected.pid}; "
                f"process {connection.peer} cannot go on in its place from where it began.",
                hint="Let the worker end: its agent starts the next attempt from the newest state.",
            )
        self._owner.back()
        older = self._node.admit(connection)
        if older is not None:
            self._dismiss(older)

    def _knows_token(self, hello: wire.Hello) -> bool:
        return bool(self._token) and secrets.compare_digest(hello.token, self._token)

    def _greet_keeper(self, connection: Connection, hello: wire.Hello) -> None:
        if self._lead is None:
            raise KeeperError("this is not the keeper of node 0.")
        self._lead.join(hello.node, connection)
        node = self._node
        connection.send(Welcome(os.getpid(), node.attempt, node.world, "", ""))

    def hear_worker(self, connection: Connection, message: AnyMessage) -> bool:
        """Take a worker's message; one that was not welcomed has nothing to say yet."""
        if connection in self._lobby:
            return False
        hello = connection.hello
        first = hello is not None and hello.rank == 0
        alone = bool(self._owner.agent)
        heard = self._node.hear(connection, message)
        if isinstance(message, Goodbye):
            # A child that the worker forked may have said it: then the worker comes again.
            connection.closed = True
            if not message.finished and hello is not None:
                self._tell(facts.RankEnded(hello.rank, "it has left before that"))
        if isinstance(message, Goodbye) and alone:
            self.finished = message.finished and not self._node.attached
            if first and message.finished:
                self._owner.release()
            elif first:
                self._owner.part()
        return heard

    def left(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection in self._dismissed:
            self._dismissed.remove(connection)
        else:
            self._parted.add(connection)
        if connection in self._lobby:
            self._lobby.remove(connection)
        if connection in self._askers:
            self._askers.remove(connection)
        if self._uplink is not None and self._uplink.connection is connection:
            self._uplink.lost()
        if self._lead is not None:
            self._lead.left(connection)

    # -- facts and commands

    def decide(self, fact: AnyFact) -> None:
        """Take a fact to the coordinator, here or on node 0."""
        if self._lead is not None:
            self._lead.decide(fact)
        elif self._uplink is not None and not isinstance(fact, facts.Tick):
            self._uplink.say(wire.Relayed(facts.encode(fact)))

    def hear_uplink(self, connection: Connection, message: AnyMessage) -> bool:
        """Take what node 0's keeper says. False where it is not that connection."""
        uplink = self._uplink
        if uplink is None or uplink.connection is not connection:
            return False
        if isinstance(message, Welcome):
            uplink.welcomed = True
            if self._beginning is not None and not self._beginning.attempt:
                self._start(self._beginning, message.attempt)
            else:
                self._join()
        elif isinstance(message, wire.Command):
            self._node.carry_out(commands.decode(message.command))
        elif isinstance(message, Refused):
            self._journal.say("coordinator.refused", message.what, level="error")
        return True

    def _join(self) -> None:
        """Say to node 0 what this node holds and what its workers wait for."""
        uplink = self._uplink
        if uplink is None or not uplink.welcomed or not self._node.attempt:
            return
        node = self._node
        self._tell(facts.NodeJoined(node.node, node.inventory(), node.elections()))
        for fact in node.asked_again():
            self._tell(fact)

    def _dial(self, message: BeginAttempt) -> None:
        if message.coordinator is None:
            raise KeeperError(f"node {message.node} was not told where node 0's keeper is.")
        if self._uplink is not None:
            self._uplink.close()
        self._uplink = Uplink(message, self._background, clock=self._clock, connected=self._watch)

    # -- timers

    def wait(self) -> float:
        """Seconds until something is due here."""
        dial = self._uplink.wait() if self._uplink is not None else 3600.0
        return min(dial, self._owner.wait(), self._parted.wait())

    def turn(self) -> None:
        """Do what is due."""
        self._owner.renew()
        self._look_at_parted()
        if self._uplink is not None:
            self._uplink.dial()

    def _look_at_parted(self) -> None:
        """Where no agent runs nobody else sees a worker end that others wait for."""
        beginning = self._beginning
        if beginning is None:
            for worker in self._parted.ended(self._node.launch):
                self._tell(facts.RankEnded(worker.rank))
        elif not (self._beginner.agent or may_run(self._beginner.process)):
            self._refuse(
                RestoreError(
                    f"the process (pid {self._beginner.process.pid}) that begins the job for all "
                    f"ranks of node {beginning.node} has ended before it was begun.",
                    hint="What it printed says why; start all ranks again.",
                )
            )

    def close(self) -> None:
        if self._uplink is not None:
            self._uplink.close()
