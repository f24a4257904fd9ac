"""What all parts of the coordinator know: the attempt, its ranks, the slots, the time.

Owns: the shared state and the list of commands that one fact leads to. Never does: I/O, clocks.
Called by: coordinate and its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.cadence.policy import Policy
from everstep.core.events import Level
from everstep.core.ids import Point
from everstep.keeper.commands import Command, Forget, Tell
from everstep.keeper.table import Key, SlotTable


@dataclass
class Situation:
    """``now`` is the time of the fact at hand; ``out`` collects the commands it leads to.

    ``alone`` says that no agent runs. ``registered`` are ranks whose workers are attached, ``gone``
    those whose workers have ended in this attempt and not come again, ``joined`` nodes whose
    keepers are attached. ``elected`` is true once the attempt's recovery point is settled, which is
    then ``origin``, ``start`` its step. ``branches`` are those that are known to be in the store.
    ``lived`` says that this keeper saw a complete snapshot of the lineage (R5). ``recover`` is the
    checkpoint that a rollback goes back to, ``replay_until`` the step that is replayed.
    """

    table: SlotTable = field(default_factory=SlotTable)
    policy: Policy = field(default_factory=Policy)
    now: float = 0.0
    out: list[Command] = field(default_factory=list)
    attempt: int = 0
    resume: str = "auto"
    expected: bool = False
    alone: bool = False
    began: float = 0.0
    registered: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    elected: bool = False
    origin: Point | None = None
    start: int = 0
    branches: dict[int, Point | None] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    lived: bool = False
    recover: Point | None = None
    replay_until: int | None = None

    @property
    def world(self) -> int:
        return len(self.table.home)

    @property
    def nodes(self) -> list[int]:
        return sorted(set(self.table.home.values()))

    @property
    def assembled(self) -> bool:
        """Whether every rank's worker and every node's keeper is attached."""
        return (
            self.world > 0
            and len(self.registered) == self.world
            and self.joined.issuperset(self.nodes)
        )

    def node_of(self, rank: int) -> int:
        return self.table.home.get(rank, 0)

    def point(self, step: int) -> Point:
        return Point(step, self.attempt)

    def beyond(self, point: Point) -> bool:
        """Whether the attempt, once elected, has left ``point`` behind (S6)."""
        if point.attempt == self.attempt:
            return False
        return self.origin is None or point.step > self.origin.step

    def say(self, command: Command) -> None:
        self.out.append(command)

    def tell(
        self,
        kind: str,
        text: str,
        *,
        level: Level = "info",
        rank: int | None = None,
        step: int | None = None,
        **facts: object,
    ) -> None:
        """An event into node 0's journal."""
        self.say(Tell(0, kind, text, level, rank, step, facts))

    def forget(self, key: Key) -> None:
        """Make a slot's contents unusable now, or when its last reader is done."""
        if self.table.forget(key):
            self.say(Forget(key.node, key.rank, key.index))

    def release(self, key: Key, why: str) -> None:
        if self.table.release(key, why):
            self.say(Forget(key.node, key.rank, key.index))
