"""What is done to slots beside the loop: digest, store, verify.

Owns: which slots threads read now. Never does: decide, answer workers. Called by: node.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import NamedTuple

from everstep.core.points import reach
from everstep.errors import EverstepError, KeeperError
from everstep.keeper import commands, facts
from everstep.keeper.background import Background, Result
from everstep.keeper.facts import AnyFact
from everstep.keeper.holdings import Holdings, check_digests, write_digests
from everstep.keeper.journal import Journal
from everstep.keeper.slot import Slot
from everstep.keeper.storing import Storing, Superseded
from everstep.keeper.wire import SlotName

PERSIST_LANES = 2
"""Ranks whose parts are written at the same time: background CPU time is training time."""


class Writer(NamedTuple):
    """In whose name parts are stored: the highest attempt served, the agents served, and what
    the checkpoint is to say about its environment."""

    allowed: int
    agents: frozenset[str]
    facts: dict[str, str]


class SlotWork:
    """``tell`` takes the facts that come of it, ``idle`` the slots that a thread let go."""

    def __init__(
        self,
        holdings: Holdings,
        storing: Storing,
        journal: Journal,
        background: Background,
        *,
        tell: Callable[[AnyFact], None],
        idle: Callable[[tuple[SlotName, ...]], None],
    ) -> None:
        self._holdings = holdings
        self._storing = storing
        self._journal = journal
        self._background = background
        self._tell = tell
        self._idle = idle
        self._digesting: dict[SlotName, Event] = {}

    def digest(self, command: commands.Digest) -> None:
        name = SlotName(command.rank, command.index)
        over = facts.Digested(command.node, command.rank, command.index)
        chunk_bytes = self._storing.chunk_bytes
        ended = self._digesting[name] = Event()

        def work(slots: list[Slot]) -> None:
            try:
                write_digests(slots[0], chunk_bytes)
            finally:
                ended.set()

        def failed(error: EverstepError) -> None:
            ended.set()
            self._journal.say(
                "digest.failed",
                f"rank {command.rank}'s newest snapshot could not be digested, damage of its "
                f"memory would not be found: {error}",
                level="warning", rank=command.rank,
            )  # fmt: skip
            self._tell(over)

        self._read("digest", (name,), work, lambda _: self._tell(over), failed)

    def persist(self, command: commands.Persist, writer: Writer) -> None:
        rank, index, point, node = command.rank, command.index, command.point, command.node
        name = SlotName(rank, index)
        digesting = self._digesting.get(name)

        def digested() -> None:
            if digesting is not None:
                digesting.wait()

        def failed(error: EverstepError) -> None:
            superseded = isinstance(error, Superseded)
            self._tell(
                facts.PersistFailed(node, rank, index, point, error.code, error.what, superseded)
            )

        self._read(
            f"persist-{rank % PERSIST_LANES}",
            (name,),
            lambda slots: self._storing.persist(
                slots[0], point, writer.allowed, writer.agents, writer.facts, digested
            ),
            lambda nbytes: self._tell(facts.RankPersisted(node, rank, index, point, nbytes)),
            failed,
        )

    def check(self, command: commands.CheckMemory) -> None:
        chunk_bytes, node, point = self._storing.chunk_bytes, command.node, command.point
        ranks = [name.rank for name in command.slots]

        def check(slots: list[Slot]) -> list[str]:
            reach("keeper.restore.before_check")
            return [check_digests(slot, chunk_bytes) for slot in slots]

        def done(found: list[str]) -> None:
            bad = tuple(rank for rank, why in zip(ranks, found, strict=True) if why)
            whys = " ".join(why for why in found if why)
            self._tell(facts.MemoryChecked(node, point, bad, whys))

        def failed(error: EverstepError) -> None:
            self._tell(facts.MemoryChecked(node, point, tuple(ranks), error.what))

        self._read("check", command.slots, check, done, failed)

    def _read(
        self,
        lane: str,
        names: tuple[SlotName, ...],
        work: Callable[[list[Slot]], Result],
        done: Callable[[Result], None],
        failed: Callable[[EverstepError], None],
    ) -> None:
        """Run ``work`` on slots in a thread; they count as read until it is over."""
        slots = [self._holdings.slot(name) for name in names]
        present = [slot for slot in slots if slot is not None]
        if len(present) < len(slots):
            failed(KeeperError(f"of the slots {list(names)} some are gone."))
            return
        for name in names:
            self._holdings.reading[name] = self._holdings.reading.get(name, 0) + 1

        def over() -> None:
            for name in names:
                self._holdings.reading[name] -= 1
                if not self._holdings.reading[name]:
                    del self._holdings.reading[name]

        def after(result: Result) -> None:
            over()
            done(result)
            self._idle(names)

        def after_failure(error: EverstepError) -> None:
            over()
            failed(error)
            self._idle(names)

        self._background.submit(lane, lambda: work(present), after, after_failure)
