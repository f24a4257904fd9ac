"""What only the keeper of node 0 does: run the coordinator, ask the store, command other nodes.

Owns: the coordinator, the connections of the other nodes' keepers. Never does: decide by itself.
Called by: server.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.core.clock import Clock
from everstep.core.ids import Point
from everstep.errors import EverstepError
from everstep.keeper import commands, facts, wire
from everstep.keeper.background import Background
from everstep.keeper.commands import Command
from everstep.keeper.connection import Connection
from everstep.keeper.coordinate import Coordinator
from everstep.keeper.facts import AnyFact
from everstep.keeper.node import Node
from everstep.keeper.storing import Storing, Superseded
from everstep.store import Retention


class Lead:
    """``tell`` takes the facts that come of the store's answers."""

    def __init__(
        self,
        node: Node,
        storing: Storing,
        background: Background,
        *,
        clock: Clock,
        tell: Callable[[AnyFact], None],
        say: Callable[..., None],
    ) -> None:
        self._node = node
        self._storing = storing
        self._background = background
        self._clock = clock
        self._tell = tell
        self._say = say
        self._others: dict[int, Connection] = {}
        self._retaining = False
        self.coordinator = Coordinator()

    def decide(self, fact: AnyFact) -> None:
        """One fact, and everything that it leads to."""
        for command in self.coordinator.handle(fact, self._clock.mono()):
            self._carry_out(command)

    # -- other nodes

    def join(self, node: int, connection: Connection) -> None:
        """Another node's keeper is there; its inventory follows."""
        older = self._others.get(node)
        self._others[node] = connection
        if older is not None:
            older.closed = True

    def left(self, connection: Connection) -> None:
        for node, other in list(self._others.items()):
            if other is connection:
                del self._others[node]
                self._tell(facts.NodeLeft(node))

    def part(self) -> None:
        """A new attempt: the other nodes come again."""
        for connection in self._others.values():
            connection.closed = True
        self._others = {}

    # -- commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case commands.ReadStore():
                self._read(command.attempt, command.upto)
            case commands.WriteBranch():
                self._write_branch(command)
            case commands.Commit():
                self._commit(command)
            case _ if command.node == self._node.node:
                self._node.carry_out(command)  # type: ignore[arg-type]  # all others are a node's
            case _:
                other = self._others.get(command.node)
                if other is not None:
                    other.send(wire.Command(commands.encode(command)))

    def _read(self, attempt: int, upto: Point | None) -> None:
        def failed(error: EverstepError) -> None:
            final = error.blame == "user" and not error.retryable
            self._tell(
                facts.StoreRead(attempt, error=error.what, error_code=error.code, final=final)
            )

        self._background.submit(
            "store", lambda: self._storing.read(attempt, upto), self._tell, failed
        )

    def _write_branch(self, command: commands.WriteBranch) -> None:
        about = dict(self._node.environment)
        attempt, agents = command.attempt, frozenset(self._node.agents)
        promised_by = self._node.promised.get(attempt)

        def failed(error: EverstepError) -> None:
            self._tell(
                facts.BranchWritten(attempt, error.what, error.code, retryable=error.retryable)
            )

        def work() -> None:
            if promised_by is not None:
                self._storing.keep_promise(attempt, promised_by, agents)
            self._storing.write_branch(attempt, command.point, command.source, command.world, about)

        self._background.submit(
            "store",
            work,
            lambda _: self._tell(facts.BranchWritten(attempt)),
            failed,
        )

    def _commit(self, command: commands.Commit) -> None:
        allowed, agents = self._node.allowed, frozenset(self._node.agents)
        point = command.point

        def failed(error: EverstepError) -> None:
            superseded = isinstance(error, Superseded)
            self._tell(facts.CommitFailed(point, error.code, error.what, superseded))

        def done(_: None) -> None:
            self._tell(facts.Committed(point))
            self._retain()

        self._background.submit(
            "commit",
            lambda: self._storing.commit(point, command.world, allowed, agents),
            done,
            failed,
        )

    def _retain(self) -> None:
        if self._retaining:
            return
        self._retaining = True
        keep = Retention(self._node.keep_last, detection_delay=self._node.detection_delay)

        def done(removed: tuple[int, int]) -> None:
            self._retaining = False
            if removed[0]:
                self._say(
                    "checkpoint.removed", f"{removed[0]} old checkpoints removed",
                    level="debug", facts={"checkpoints": removed[0], "bytes": removed[1]},
                )  # fmt: skip

        def failed(error: EverstepError) -> None:
            self._retaining = False
            self._say("retention.failed", str(error), level="warning")

        # In the lane of the commits: nothing is completed while it is being deleted.
        self._background.submit("commit", lambda: self._storing.retain(keep), done, failed)
