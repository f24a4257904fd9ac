"""The keeper's part for its own node: workers and slots on one side, facts and commands on the
other.

Owns: the control page, the node's slots, which worker is attached and what it waits for. Never
does: decide about cuts, persists or restores (coordinate), sockets (server). Called by: server.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from everstep.core.ids import Point
from everstep.core.points import reach
from everstep.errors import CorruptObject, KeeperError, MemoryTooSmall
from everstep.keeper import commands, facts
from everstep.keeper.background import Background
from everstep.keeper.commands import AnyCommand
from everstep.keeper.connection import Connection
from everstep.keeper.control import MAX_LOCAL_RANKS, ControlPage, create_page
from everstep.keeper.facts import AnyFact, Boundary
from everstep.keeper.holdings import Holdings
from everstep.keeper.identity import Process, may_run
from everstep.keeper.journal import Journal
from everstep.keeper.memory import Limit, check_room
from everstep.keeper.slot import Geometry
from everstep.keeper.slotwork import SlotWork, Writer
from everstep.keeper.storing import Storing
from everstep.keeper.wire import (
    AdoptSlots,
    AnyMessage,
    Arrived,
    AskDemoted,
    AskOffer,
    AskSlot,
    AwaitDurable,
    BeginAttempt,
    CutDone,
    CutSkipped,
    Demoted,
    DurableResult,
    Elected,
    Goodbye,
    Hello,
    Offer,
    OpenSlots,
    Refused,
    SlotGranted,
    SlotName,
    SlotsHeld,
    SlotsOpen,
    Vote,
    Welcome,
    WentOn,
)
from everstep.store import OwnerIdentity


class Node:
    """``tell`` takes facts to the coordinator, wherever it runs; ``hold`` takes the message that
    names all slots to whoever keeps them for the next keeper."""

    def __init__(
        self,
        storing: Storing,
        journal: Journal,
        background: Background,
        *,
        store: str,
        job: str,
        tell: Callable[[AnyFact], None],
        hold: Callable[[SlotsHeld, tuple[int, ...]], None],
        limits: Callable[[], list[Limit]],
    ) -> None:
        self._journal = journal
        self._store, self._job = store, job
        self._tell, self._hold, self._limits = tell, hold, limits
        self._page_fd = create_page()
        self._page = ControlPage(self._page_fd)
        self._demoted: tuple[str, ...] = ()
        self._workers: dict[int, Connection] = {}
        self._asking: dict[int, AnyFact] = {}
        self._elected: dict[int, Process] = {}
        self._writers: dict[Process, int] = {}
        self._reported_busy: set[SlotName] = set()
        self.holdings = Holdings(job)
        self._work = SlotWork(
            self.holdings, storing, journal, background, tell=tell, idle=self._unbusy
        )
        self.node = 0
        self.attempt = 0
        self.launch = ""
        self.world = 0
        self.ranks: tuple[int, ...] = ()
        self.agents: set[str] = set()
        self.promised: dict[int, OwnerIdentity] = {}
        self.environment: dict[str, str] = {}
        self.keep_last = 3
        self.detection_delay = 0.0
        self._skip: tuple[int, ...] = ()
        self._replay_until: int | None = None

    # -- the attempt

    @property
    def allowed(self) -> int:
        """The highest attempt that this node serves by a claim of which it needs no proof: what
        stands above it in the store must be of :attr:`agents`, or nothing is written."""
        return min(self.promised) - 1 if self.promised else self.attempt

    def begin(
        self, begin: BeginAttempt, attempt: int, *, promised_by: OwnerIdentity | None = None
    ) -> None:
        """Serve ``attempt`` from now on; an adopted page of this very attempt goes on.
        ``promised_by``: the agent whose claim of it the store does not have yet."""
        if promised_by is not None:
            self.promised[attempt] = promised_by
        self._page.clear_cut()  # a worker of an earlier attempt may still read the old page
        if attempt == self.attempt:
            self._page.forget_election(attempt)  # another start under the same number
        if self._page.served() not in (0, attempt):
            self._replace_page()
        self._page.serve(attempt)
        self.node, self.attempt, self.launch = begin.node, attempt, begin.launch
        self.ranks = begin.ranks_of_node[begin.node]
        self.world = sum(len(ranks) for ranks in begin.ranks_of_node)
        self.environment, self.keep_last = begin.environment, begin.keep_last
        self.detection_delay = begin.detection_delay
        self._skip, self._replay_until = begin.skip, begin.replay_until
        if begin.agent:
            self.agents.add(begin.agent)
        self._asking.clear()
        self._elected.clear()
        self._journal.attempt, self._journal.node = attempt, begin.node
        self._hand_over()

    def inventory(self) -> tuple[facts.Held, ...]:
        return self.holdings.inventory()

    def elections(self) -> tuple[WentOn, ...]:
        """What this node's attempts went on from, also before this keeper."""
        return self._page.elections()

    def asked_again(self) -> list[AnyFact]:
        """What workers still wait for: said again to a new coordinator."""
        found: list[AnyFact] = [facts.Registered(rank) for rank in self._workers]
        for rank, fact in self._asking.items():
            found.append(
                facts.OfferAsked(rank, self.world) if isinstance(fact, facts.Voted) else fact
            )
        return found

    # -- workers come and go

    @property
    def attached(self) -> bool:
        return bool(self._workers)

    def admitted(self, connection: Connection) -> bool:
        return connection in self._workers.values()

    def worker_pids(self) -> list[int]:
        return [connection.peer for connection in self._workers.values()]

    def part_workers(self) -> list[Connection]:
        """Part from all workers: their attempt is over."""
        parted = list(self._workers.values())
        for connection in parted:
            self.gone(connection)
        return parted

    def is_new_life(self, connection: Connection) -> bool:
        """Whether the connection's rank was elected in this attempt already, and this is another
        process than that, or one that begins anew: it must not go on from where the attempt did."""
        hello = connection.hello
        assert hello is not None, "asked before its hello"
        elected = self._elected.get(hello.rank)
        return elected is not None and (elected != connection.process or not hello.attempt)

    def elected(self, rank: int) -> Process | None:
        """The process that went on as that rank in this attempt."""
        return self._elected.get(rank)

    def holds_snapshot(self) -> bool:
        """Whether this node's ranks all hold a snapshot of one step of the attempt."""
        held: dict[Point, set[int]] = {}
        for slot in self.holdings.inventory():
            if slot.point is not None and slot.point.attempt == self.attempt:
                held.setdefault(slot.point, set()).add(slot.rank)
        return any(ranks.issuperset(self.ranks) for ranks in held.values())

    def writers(self) -> dict[Process, int]:
        """Processes (and their ranks) that map slots and may still run, attached or not."""
        self._writers = {p: rank for p, rank in self._writers.items() if may_run(p)}
        return dict(self._writers)

    def retire(self, rank: int) -> None:
        """Give the rank's slots to nobody any more: a process that could not be ended maps them."""
        self.holdings.retire(rank)

    def workers_ended(self) -> None:
        """The agent has seen all its workers end."""
        self._writers.clear()

    def close(self) -> None:
        """Close page and slots; others that hold descriptors keep the memory."""
        self._close_page()
        self.holdings.close()

    def admit(self, connection: Connection) -> Connection | None:
        """Welcome a worker of this attempt; the older connection of its rank, if there is one."""
        hello = connection.hello
        assert hello is not None, "admitted before its hello"
        if hello.rank not in self.ranks or not 0 <= hello.local_rank < MAX_LOCAL_RANKS:
            connection.send(
                Refused(
                    KeeperError.code,
                    f"rank {hello.rank} (local {hello.local_rank}) is not one of this node's "
                    f"ranks {list(self.ranks)}.",
                )
            )
            return None
        older = self._workers.get(hello.rank)
        self._workers[hello.rank] = connection
        self._asking.pop(hello.rank, None)
        welcome = Welcome(
            os.getpid(), self.attempt, self.world, self._store, self._job,
            skip=self._skip, replay_until=self._replay_until,
        )  # fmt: skip
        connection.send(welcome, (self._page_fd,))
        self._take_choices(hello)
        if hello.went_on is not None and hello.went_on.attempt == self.attempt:
            self._page.note_election(hello.went_on)
            self._tell(facts.ElectionKnown(hello.went_on))
        return older

    def _take_choices(self, hello: Hello) -> None:
        """What the script chose: said before rank 0 asks for an offer, so before any cut."""
        if hello.keep_last is not None:
            self.keep_last = hello.keep_last
        if hello.policy is not None:
            self._tell(facts.PolicySaid(hello.policy))

    def gone(self, connection: Connection, *, finished: bool = False) -> None:
        """The worker's connection ended. It may have committed a slot without saying so."""
        hello = connection.hello
        if hello is None or self._workers.get(hello.rank) is not connection:
            return
        del self._workers[hello.rank]
        self._asking.pop(hello.rank, None)
        held = self._seen(hello.rank)
        self._tell(facts.RankGone(self.node, hello.rank, held, finished))

    # -- what workers say

    def hear(self, connection: Connection, message: AnyMessage) -> bool:
        """Take a worker's message. False where it is none of a worker's."""
        assert connection.hello is not None, "heard before its hello"
        rank = connection.hello.rank
        match message:
            case OpenSlots():
                self._elected[rank] = connection.process
                self._open(connection, rank, message)
            case AdoptSlots():
                self.adopt(connection, message)
            case CutDone():
                self._cut_done(rank, message)
            case CutSkipped():
                self._tell(facts.CutMissed(rank, message.step, message.reason, message.sequence))
            case AskSlot():
                self._ask(rank, facts.SlotAsked(rank, message.step, message.timeout))
            case AwaitDurable():
                self._ask(rank, facts.DurableAsked(rank, message.step, message.timeout))
            case AskOffer():
                self._tell(facts.Registered(rank))
                self._ask(rank, facts.OfferAsked(rank, message.world))
            case Vote():
                self._ask(rank, facts.Voted(rank, message.ok, message.reason))
            case Arrived():
                self._tell(facts.RankArrived(rank, message.step))
            case AskDemoted():
                connection.send(Demoted(self._demoted))
            case Goodbye():
                self._writers.pop(connection.process, None)
                self.gone(connection, finished=message.finished)
            case _:
                return False
        return True

    def adopt(self, connection: Connection, message: AdoptSlots) -> int:
        """Take over slots of an earlier keeper; how many were new."""
        fds = connection.take_fds(len(message.names))
        slots = []
        for name, fd in zip(message.names, fds, strict=True):
            if name.index == -1:
                self._adopt_page(fd)
            else:
                slots.append((name, fd))
        added = self.holdings.adopt(tuple(name for name, _ in slots), [fd for _, fd in slots])
        if added:
            self._hand_over()
            for rank in sorted({name.rank for name in added}):
                self._tell(facts.SlotsSeen(self.node, rank, self._seen(rank)))
        return len(added)

    # -- the control page

    def beat(self) -> None:
        """Say that this process moves."""
        self._page.move()

    def hold_until(self, moment: float) -> None:
        """Let the workers' first batch wait until ``moment`` (seconds of CLOCK_MONOTONIC); 0
        releases them."""
        self._page.hold_until(int(moment * 1e9))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Where the attached ranks stand."""
        found = []
        for rank, connection in self._workers.items():
            assert connection.hello is not None, "attached before its hello"
            step, _, nanos, _ = self._page.boundary(connection.hello.local_rank)
            if step is not None:
                found.append(Boundary(rank, step, nanos / 1e9))
        return tuple(found)

    # -- commands

    def carry_out(self, command: AnyCommand) -> None:
        """Do what the coordinator says."""
        match command:
            case commands.PublishCut():
                self._publish_cut(command)
            case commands.ClearCut():
                self._page.clear_cut()
            case commands.PublishStop():
                self._page.publish_stop(command.step, final=command.final)
            case commands.Forget():
                self.holdings.forget(SlotName(command.rank, command.index))
            case commands.DropSlots():
                for index in command.indexes:
                    self.holdings.drop(SlotName(command.rank, index))
                self._hand_over()
            case commands.DemoteFqns():
                self._demoted = command.fqns
                self._page.publish_demoted(self._page.demoted() + 1)
            case commands.Tell():
                self._journal.say(
                    command.kind, command.text, level=command.level, rank=command.rank,
                    step=command.step, facts=command.facts,
                )  # fmt: skip
            case _:
                self._carry_out_more(command)

    def _carry_out_more(self, command: AnyCommand) -> None:
        match command:
            case commands.Digest():
                self._work.digest(command)
            case commands.Persist():
                about = Writer(self.allowed, frozenset(self.agents), dict(self.environment))
                self._work.persist(command, about)
            case commands.CheckMemory():
                self._work.check(command)
            case commands.GrantSlot():
                index = command.index
                if index >= 0:
                    index = self.holdings.visible(command.rank, index)
                self._answer(command.rank, SlotGranted(index, command.sequence))
            case commands.AnswerDurable():
                self._answer(command.rank, DurableResult(command.durable, command.reason))
            case commands.OfferTo():
                self._offer(command)
            case commands.ElectTo():
                # Before any rank can go on: the keeper after this one must know of it.
                mine = WentOn(self.attempt, command.source, command.point, self.world)
                self._page.note_elections((*command.before, mine))
                if command.rank in self._workers:
                    self._elected[command.rank] = self._workers[command.rank].process
                self._answer(command.rank, Elected(command.point, command.source))
            case commands.RefuseTo():
                self._answer(command.rank, Refused(command.code, command.what, command.hint))
            case _:
                raise AssertionError(f"{type(command).__name__} is not for a node")

    # -- slots

    def _open(self, connection: Connection, rank: int, message: OpenSlots) -> None:
        geometry = Geometry.fitting(
            payload=message.payload, state=message.state, layout=message.layout,
            digests=message.digests,
        )  # fmt: skip
        try:
            needed = self.holdings.needs(rank, geometry)
            if needed:
                check_room(needed, self._limits())
            self._writers[connection.process] = rank
            fds = self.holdings.open(rank, geometry)
        except KeeperError as refused:
            small = isinstance(refused, MemoryTooSmall)
            kind = "memory.too_small" if small else "memory.refused"
            self._journal.say(kind, refused.what, level="error", rank=rank)
            connection.send(Refused(refused.code, refused.what, refused.hint))
            return
        if needed:
            self._hand_over()
        connection.send(SlotsOpen(), fds)
        self._tell(facts.SlotsSeen(self.node, rank, self._seen(rank)))
        self._tell(facts.Registered(rank))

    def _cut_done(self, rank: int, message: CutDone) -> None:
        reach("keeper.cut.before_take")
        index = self.holdings.real(rank, message.index)
        slot = self.holdings.slot(SlotName(rank, index))
        about = slot.described() if slot is not None else None
        if about is None or about.point != Point(message.step, self.attempt):
            why = "the slot does not hold that step"
            self._tell(facts.CutMissed(rank, message.step, why, message.sequence))
            return
        self._tell(
            facts.CutMade(
                rank, message.step, index, message.layout, message.seconds, message.nbytes,
                message.replicas, message.persist, message.sequence,
            )
        )  # fmt: skip

    def _seen(self, rank: int) -> tuple[facts.Held, ...]:
        held = self.holdings.held(rank)
        self._reported_busy |= {SlotName(h.rank, h.index) for h in held if h.busy}
        return held

    def _unbusy(self, names: tuple[SlotName, ...]) -> None:
        """Slots that were reported as busy are reported again when nobody reads them."""
        idle = {name for name in names if name not in self.holdings.reading}
        for rank in sorted({name.rank for name in idle & self._reported_busy}):
            self._reported_busy -= idle
            self._tell(facts.SlotsSeen(self.node, rank, self._seen(rank)))

    def _hand_over(self) -> None:
        """Give all descriptors to whoever will hold them for a keeper after this one."""
        names = self.holdings.names()
        page = SlotName(self.ranks[0] if self.ranks else 0, -1)
        fds = (self._page_fd, *(self.holdings.fd(name) for name in names))
        self._hold(SlotsHeld((page, *names)), fds)

    def hand_over(self) -> None:
        """The same to an agent that has just come."""
        if self._page.served() or self.holdings.names():
            self._hand_over()

    def _publish_cut(self, command: commands.PublishCut) -> None:
        local = {
            connection.hello.local_rank: self.holdings.visible(rank, index)
            for rank, index in command.slots
            if (connection := self._workers.get(rank)) is not None and connection.hello
        }
        self._page.publish_cut(command.sequence, command.step, local)

    def _offer(self, command: commands.OfferTo) -> None:
        source = command.source
        if source == "memory":
            fds = tuple(self.holdings.fd(name) for name in command.slots)
            self._answer(command.rank, Offer("memory", command.point, command.slots), fds)
        else:
            kept = "store" if source == "store" else "fresh"
            self._answer(command.rank, Offer(kept, command.point))  # type: ignore[arg-type]

    # -- answers

    def _ask(self, rank: int, fact: AnyFact) -> None:
        self._asking[rank] = fact
        self._tell(fact)

    def _answer(
        self,
        rank: int,
        message: SlotGranted | DurableResult | Offer | Elected | Refused,
        fds: tuple[int, ...] = (),
    ) -> None:
        connection = self._workers.get(rank)
        if connection is not None and self._asking.pop(rank, None) is not None:
            connection.send(message, fds)

    # -- page

    def _adopt_page(self, fd: int) -> None:
        if self._page.served():
            os.close(fd)
            return
        try:
            page = ControlPage(fd)
        except CorruptObject:
            os.close(fd)
            raise
        self._close_page()
        self._page_fd, self._page = fd, page

    def _replace_page(self) -> None:
        """A fresh page for a new attempt: a worker of the old one that still lives keeps the old
        one and cannot be taken for a rank of this one."""
        elections = self._page.elections()
        self._close_page()
        self._page_fd = create_page()
        self._page = ControlPage(self._page_fd)
        self._page.note_elections(elections)
        if self._demoted:
            self._page.publish_demoted(1)

    def _close_page(self) -> None:
        self._page.close()
        os.close(self._page_fd)
