"""How the nodes of a job meet, learn their ranks, and tell each other how an attempt ended.

Owns: torch's rendezvous handler and the keys everstep keeps in its store. Never does: start
workers, decide. Called by: the loop.

torch's store stands in one of the agents: where there are several, it is asked through a
:class:`~everstep.agent.line.Line` alone, so that an agent that hangs does not stop the others.

One round is one attempt. All of a round's keys stand under a prefix of their own, so nothing that
an earlier attempt wrote is ever read. The node of group rank 0 leads: it alone claims and decides.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not re-exported
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from everstep.agent.aside import aside
from everstep.agent.decide import WorkerEnd
from everstep.agent.line import Keys, Line, StoreSilent
from everstep.core.ids import Point
from everstep.errors import AgentError, RendezvousLost
from everstep.faults.records import Signal

POLL_SECONDS = 0.005
GATHER_SECONDS = 60.0
"""For the agents of a round to say what they are: each has just come out of the rendezvous."""
AGAIN_SECONDS = 20.0
"""The same, where each has just heard the leader's decision."""
PLAN_SECONDS = 300.0
"""For the leader to claim the attempt in the store and to begin it at its keeper."""
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 0.2
DEFAULT_PORT = 29400
"""torch's, where the endpoint names none."""
JOIN_SECONDS = 600.0
"""torch's own limit, where ``join_timeout`` is not given."""
LEADER_SECONDS = 60.0
"""For the leader's decision, once this node's workers have ended and a failure is known."""

_NODE, _PLAN, _FAILED, _END, _DECISION = "node/", "plan", "failed", "end/", "decision"
_PARTED, _ALIVE, _LATE = "parted/", "alive/", "late/"
_HANGS, _STANDINGS = " hangs", "standings"
_STATIC_ROUND = "everstep/round"
_LEFT: list[RendezvousHandler] = []
"""Handlers that were in use: collected, one would join its heartbeat, which hangs where the store
does."""

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")


class NotNeeded(Exception):
    """The job has ended while this agent waited for a place in it."""


class NodeEntry(msgspec.Struct, frozen=True):
    """What an agent says of its node when it enters a round. ``number`` tells the agents of one
    host apart: it is that of their keeper. ``name`` is what the platform calls the node (default:
    the host's name), ``pod`` the rack, switch or pod that it stands in, ``address`` its IP
    address, empty where it is not known."""

    role: str
    workers: int
    host: str
    number: int = 0
    name: str = ""
    pod: str = ""
    address: str = ""


class Asked(msgspec.Struct, frozen=True):
    """What was decided of an attempt besides where it runs
    (:class:`~everstep.keeper.wire.BeginAttempt` says what each means)."""

    recover: Point | None = None
    skip: tuple[int, ...] = ()
    replay_until: int | None = None
    hold: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """What the leader says to all nodes before workers start. ``nodes`` is in group rank order;
    ``coordinator`` is (host, port) of its keeper, ``claimant`` the id that claimed the attempt.
    With ``exit_code`` the round ends instead, and with ``wait`` it is met again after so many
    seconds. The nodes ``leave`` have no part in the job any more."""

    nodes: tuple[NodeEntry, ...] = ()
    attempt: int = 0
    claimant: str = ""
    restarts: int = 0
    expected: bool = False
    master_addr: str = ""
    master_port: int = 0
    coordinator: tuple[str, int] | None = None
    token: str = ""
    exit_code: int | None = None
    reason: str = ""
    wait: float | None = None
    leave: tuple[int, ...] = ()
    asked: Asked = Asked()

    def ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks, node by node: consecutive, in group rank order."""
        found, first = [], 0
        for entry in self.nodes:
            found.append(tuple(range(first, first + entry.workers)))
            first += entry.workers
        return tuple(found)

    def names(self) -> tuple[str, ...]:
        """What each node is called in verdicts and in the history: its name, and its number
        where several agents run on it."""
        given = [entry.name or entry.host for entry in self.nodes]
        return tuple(
            name if given.count(name) == 1 else f"{name}/{entry.number}"
            for name, entry in zip(given, self.nodes, strict=True)
        )

    def role_ranks(self, node: int) -> tuple[tuple[int, ...], int]:
        """The role ranks of a node's workers, and the size of their role in the job."""
        role = self.nodes[node].role
        before = sum(entry.workers for entry in self.nodes[:node] if entry.role == role)
        size = sum(entry.workers for entry in self.nodes if entry.role == role)
        return tuple(range(before, before + self.nodes[node].workers)), size


class NodeEnd(msgspec.Struct, frozen=True):
    """How a node's workers ended, and what its agent learnt from its keeper. ``finished`` is the
    newest step that all its workers have finished (-1: unknown), ``steps`` that of each rank,
    ``signals`` what was seen of the failure here, ``age`` for how many seconds a hang had lasted
    when it was acted on (0: it was no hang)."""

    workers: tuple[tuple[int, int, bool], ...] = ()
    restored: int = -1
    reached: int = -1
    finished: int = -1
    committed: int = -1
    useful: float = 0.0
    attached: bool = False
    job_finished: bool = False
    signals: tuple[Signal, ...] = ()
    steps: dict[int, int] = {}
    fatal: tuple[int, str] | None = None
    stopped_by: int | None = None
    members_changed: bool = False
    hang: str = ""
    hung: tuple[int, ...] = ()
    age: float = 0.0

    def worker_ends(self) -> tuple[WorkerEnd, ...]:
        return tuple(WorkerEnd(*worker) for worker in self.workers)


class Announcement(msgspec.Struct, frozen=True):
    """The leader's decision, as it tells the others: ``exit_code`` None means the next round,
    ``same_nodes`` that it is one of the nodes that are here (see :meth:`Meeting.again`), after
    ``delay`` seconds. The nodes ``leave`` have no part in it."""

    exit_code: int | None
    reason: str
    warning: str = ""
    same_nodes: bool = False
    delay: float = 0.0
    leave: tuple[int, ...] = ()


def order(entries: Sequence[NodeEntry]) -> tuple[int, ...]:
    """Node number of each entry. Entries come in the rendezvous' order, which between agents of
    one host is that of their pids; there the keepers' numbers count, so that a rank finds its
    memory again after all agents were started anew. Hosts keep their places."""
    by_host: dict[str, list[int]] = {}
    for place, entry in enumerate(entries):
        by_host.setdefault(entry.host, []).append(place)
    numbers = [0] * len(entries)
    for places in by_host.values():
        in_order = sorted(places, key=lambda place: (entries[place].number, place))
        for place, member in zip(places, in_order, strict=True):
            numbers[member] = place
    return tuple(numbers)


class Round:
    """One meeting of the nodes. ``node`` is this agent's number among them (GROUP_RANK), known
    after :meth:`enter`; ``rank`` is that of the rendezvous, ``nodes`` is how many met. Node 0
    leads. ``standing`` is what the others are told, with each sign of life, of how this node's
    ranks stand."""

    def __init__(self, store: Keys, rank: int, nodes: int, addr: str, port: int) -> None:
        self._store = store
        self.rank = rank
        self.node = rank
        self.nodes = nodes
        self.entries: tuple[NodeEntry, ...] = ()
        self.master_addr = addr
        self.master_port = port
        self.port_is_used = False
        self.standing = ""

    @property
    def leads(self) -> bool:
        return self.node == 0

    # -- before workers start

    def enter(self, entry: NodeEntry, *, keep_ranks: bool, timeout: float) -> None:
        """Say what this node is, and learn what all are (``entries``, in node order).
        ``keep_ranks``: the rendezvous' order is the user's own (``--node-rank``). Raises
        :class:`AgentError` where one says nothing for ``timeout`` s."""
        self._put(f"{_NODE}{self.rank}", entry)
        deadline = time.monotonic() + timeout
        met = [self._await(f"{_NODE}{k}", NodeEntry, deadline) for k in range(self.nodes)]
        numbers = tuple(range(self.nodes)) if keep_ranks else order(met)
        self.node = numbers[self.rank]
        self.entries = tuple(met[numbers.index(node)] for node in range(self.nodes))

    def publish(self, plan: Plan) -> None:
        self._put(_PLAN, plan)

    def plan(self) -> Plan:
        return self._await(_PLAN, Plan, time.monotonic() + PLAN_SECONDS)

    # -- while and after they run

    def say_failed(self, *, hangs: bool = False) -> None:
        """Tell the other nodes that this attempt is over; ``hangs``: because it stood still, so
        that they look at their own ranks before they end them."""
        self._store.set(_FAILED, f"{self.node}{_HANGS if hangs else ''}")

    def failed(self) -> bool:
        return bool(self._store.check([_FAILED]))

    def hangs(self) -> bool:
        """Of an attempt that has failed: whether a node found it hanging."""
        return self._store.get(_FAILED).decode().endswith(_HANGS)

    def say_alive(self, count: int) -> None:
        """Show that this agent lives; ``count`` is another one each time."""
        self._store.set(f"{_ALIVE}{self.node}", f"{count} {self.standing}")

    def standings(self) -> dict[int, str]:
        """How the ranks of the other nodes stand, as far as those have said it."""
        signs = self.signs_of_life()
        return {k: signs.get(k, "").partition(" ")[2] for k in range(self.nodes) if k != self.node}

    def signs_of_life(self) -> dict[int, str]:
        """What each node's agent has last shown, where it has."""
        keys = {k: f"{_ALIVE}{k}" for k in range(self.nodes)}
        return {
            k: self._store.get(key).decode() for k, key in keys.items() if self._store.check([key])
        }

    def say_standings(self, text: str) -> None:
        """The leader: tell all nodes how the ranks of each stand."""
        self._store.set(_STANDINGS, text)

    def all_standings(self) -> str:
        """What the leader has told last, empty where nothing."""
        if not self._store.check([_STANDINGS]):
            return ""
        return self._store.get(_STANDINGS).decode()

    def say_ended(self, end: NodeEnd) -> None:
        self._put(f"{_END}{self.node}", end)

    def ended(self) -> dict[int, NodeEnd]:
        """The nodes that said how they ended."""
        keys = {k: f"{_END}{k}" for k in range(self.nodes)}
        return {
            k: msgspec.json.decode(self._store.get(key), type=NodeEnd)
            for k, key in keys.items()
            if self._store.check([key])
        }

    def say_late(self, signals: tuple[Signal, ...]) -> None:
        """Tell the leader what was seen here of the failure after this node had ended."""
        self._store.set(f"{_LATE}{self.node}", msgspec.json.encode(signals).decode())

    def late(self) -> tuple[Signal, ...]:
        """What the other nodes have told so."""
        keys = [f"{_LATE}{k}" for k in range(self.nodes) if k != self.node]
        found = [self._store.get(key) for key in keys if self._store.check([key])]
        return tuple(
            one for said in found for one in msgspec.json.decode(said, type=tuple[Signal, ...])
        )

    def say_decision(self, said: Announcement) -> None:
        self._put(_DECISION, said)

    def say_parted(self) -> None:
        """Tell the leader, whose process holds the store, that this node has read everything."""
        self._store.set(f"{_PARTED}{self.node}", "")

    def all_parted(self) -> bool:
        return bool(self._store.check([f"{_PARTED}{k}" for k in range(self.nodes)]))

    def decision(self) -> Announcement | None:
        if not self._store.check([_DECISION]):
            return None
        return msgspec.json.decode(self._store.get(_DECISION), type=Announcement)

    def _put(self, key: str, record: msgspec.Struct) -> None:
        self._store.set(key, msgspec.json.encode(record).decode())

    def _await(self, key: str, record: type[R], deadline: float) -> R:
        # Polled and not waited for in C++, where the agent's signal handlers would not run.
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                raise RendezvousLost(
                    f"node {self.node}: no other agent wrote {key!r} into the rendezvous in time.",
                    hint="An agent of the job died or hangs; start the job again on all nodes.",
                )
            time.sleep(POLL_SECONDS)
        return msgspec.json.decode(self._store.get(key), type=record)


class Meeting:
    """torch's rendezvous for as long as this agent lives."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._handler = _handler(config)
        self.alone = config.max_nodes == 1
        self.line = None if self.alone else Line(config.rdzv_endpoint)
        self.static = self._handler.get_backend() == "static"
        self._last: Round | None = None
        self._rounds = 0
        self._number = 0
        self._server: TCPStore | None = None
        self._base: Store | None = None

    @property
    def run_id(self) -> str:
        return str(self._handler.get_run_id())

    @property
    def use_agent_store(self) -> bool:
        return bool(self._handler.use_agent_store)

    def next(self) -> Round:
        """Meet the other nodes. Raises :class:`AgentError` where they do not come in time."""
        try:
            met = self._handler.next_rendezvous()
        except RendezvousGracefulExitError as over:
            raise NotNeeded from over
        except RendezvousConnectionError as gone:
            raise RendezvousLost(
                f"the rendezvous at {self._config.rdzv_endpoint} cannot be reached: {gone}.",
                hint="Start the agent that holds it (--rdzv-endpoint, --master-addr) again.",
            ) from gone
        except (RendezvousError, RuntimeError, TimeoutError) as bad:
            raise AgentError(
                f"the nodes could not meet at {self._config.rdzv_endpoint or 'the rendezvous'}: "
                f"{bad}.",
                hint="Check --rdzv-endpoint or --master-addr, and that all agents are started.",
            ) from bad
        info = met.bootstrap_store_info
        assert info is not None, "torch's handlers always give the bootstrap address"
        self._base = met.store
        self._count(met.store, met.rank)
        store = self._keys(PrefixStore(f"everstep/{self._number}", met.store))
        round_ = Round(store, met.rank, met.world_size, info.master_addr, info.master_port)
        if met.rank == 0:
            # torch writes these keys in its first round alone; a node that joins later waits for
            # them inside its own first round.
            addr, port = round_.master_addr, round_.master_port
            self._ask(lambda: RendezvousStoreInfo.build(0, met.store, addr, port))
        round_.port_is_used = self._rounds > 0 or not (self.alone or self.static)
        self._rounds += 1
        self._last = round_
        return round_

    def again(self) -> Round:
        """The next round of the very same nodes: all have just said how the last one ended, so
        nothing is gained by meeting anew, and it would cost seconds."""
        last, base = self._last, self._base
        assert last is not None, "met again before the first meeting"
        assert base is not None, "met again before the first meeting"
        self._number += 1
        if self.static and last.rank == 0:
            self._keys(base).set(_STATIC_ROUND, str(self._number))
        store = self._keys(PrefixStore(f"everstep/{self._number}", base))
        round_ = Round(store, last.rank, last.nodes, last.master_addr, last.master_port)
        round_.port_is_used = True
        self._last = round_
        return round_

    def members_wait(self) -> bool:
        """Whether a node waits to be let in."""
        return self.waiting() > 0

    def waiting(self) -> int:
        """How many agents wait to be let in; 0 where the rendezvous does not say."""
        return 0 if self.alone else max(0, self._ask(self._handler.num_nodes_waiting))

    def spares(self) -> int:
        """How many agents stand ready beside those of the round: they wait to be let in, or for
        one to leave. torch keeps the latter in its own list, where it has one."""
        if self.alone:
            return 0
        waiting = self.waiting()  # which asks the store; torch does so once a second
        holder = getattr(self._handler, "_state_holder", None)
        ready = len(getattr(getattr(holder, "state", None), "redundancy_list", ()))
        return waiting + ready

    def leave(self, *, for_good: bool) -> None:
        """Part. ``for_good`` closes the rendezvous for every other agent too."""
        if for_good:
            with contextlib.suppress(StoreSilent):  # nobody is there to be told
                self._ask(self._handler.shutdown)

    def close(self) -> None:
        """Let go of the store; it may hang."""
        if self.line is not None:
            self.line.submit(getattr(self._handler, "_stop_heartbeats", lambda: None))
            self.line.close()
            _LEFT.append(self._handler)

    @property
    def patience(self) -> float:
        """Seconds for which the nodes wait to meet."""
        given = self._config.rdzv_configs.get("join_timeout", JOIN_SECONDS)
        return float(given)

    def _keys(self, store: Store) -> Keys:
        return store if self.line is None else self.line.keys(store)

    def _ask(self, call: Callable[[], T]) -> T:
        return call() if self.line is None else self.line.ask(call)

    def _count(self, store: Store, rank: int) -> None:
        """Choose what tells this round's keys from those of the rounds before.

        torch's dynamic rendezvous gives each of its rounds a prefix already; the static one has a
        single store, so there node 0 counts in it.
        """
        if not self.static:
            self._number = 0
        elif rank == 0:
            self._number += self._rounds > 0
            self._keys(store).set(_STATIC_ROUND, str(self._number))
        else:
            self._number = self._number + 1 if self._rounds else self._rejoin(store, rank)

    def _rejoin(self, store: Store, node: int) -> int:
        """The round that a new agent of this node enters: an agent before it that was in the
        current round is dead, so that round is over."""
        keys = self._keys(store)
        current = int(keys.get(_STATIC_ROUND))
        entered = self._keys(PrefixStore(f"everstep/{current}", store))
        if not entered.check([f"{_NODE}{node}"]):
            return current
        entered.set(_FAILED, str(node))
        if not poll(lambda: int(keys.get(_STATIC_ROUND)) > current, PLAN_SECONDS):
            raise RendezvousLost(
                f"node {node}: the leader did not begin another attempt.",
                hint="Its agent died or hangs; start the job again on all nodes.",
            )
        return int(keys.get(_STATIC_ROUND))

    def refresh_port(self, round_: Round) -> None:
        """The leader's duty: a new store for the workers of this attempt. In the last one's,
        torch would find the addresses of processes that are dead."""
        if not round_.port_is_used:
            return
        self._server = None
        if self.use_agent_store:
            self._server = TCPStore(
                round_.master_addr, 0, is_master=True, multi_tenant=True,
                wait_for_workers=False, timeout=timedelta(seconds=60),
            )  # fmt: skip
            round_.master_port = self._server.port
        else:
            round_.master_port = _free_port()


def found_again(config: LaunchConfig) -> Future[Meeting]:
    """The rendezvous, looked for in a thread: where the host of its store hangs, torch waits for
    it in C++ with no limit, and no signal would be heard. Fails where nobody answers."""

    def look() -> Meeting:
        _check_answers(config)
        return Meeting(config)

    return aside(look, "everstep-meeting")


def _check_answers(config: LaunchConfig) -> None:
    """Raise :class:`AgentError` where no store listens, or a dying one does, unless it is this
    agent's part to have it. torch's client would try again ever more seldom, for minutes."""
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT)
    try:
        probe = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except OSError:
        answers = _is_host(config, host)
    else:
        with probe:
            # A living store waits for our word; one whose process is dying closes.
            answers = not select.select([probe], [], [], ANSWER_SECONDS)[0]
    if not answers:
        raise AgentError(f"nobody answers at {host}:{port}.")


def _is_host(config: LaunchConfig, host: str) -> bool:
    """Whether torch would make the store here."""
    if config.rdzv_backend == "static":
        return int(config.rdzv_configs["rank"]) == 0
    given = config.rdzv_configs.get("is_host")
    if given is not None:
        return str(given).lower() in ("1", "true", "t", "yes", "y")
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def poll(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``ready`` says so, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _handler(config: LaunchConfig) -> RendezvousHandler:
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend, endpoint=config.rdzv_endpoint,
                run_id=config.run_id, min_nodes=config.min_nodes, max_nodes=config.max_nodes,
                local_addr=config.local_addr, **config.rdzv_configs,
            )
        )  # fmt: skip
    except (RendezvousError, RuntimeError, ValueError) as bad:
        raise AgentError(
            f"the rendezvous {config.rdzv_backend!r} at {config.rdzv_endpoint!r} cannot be "
            f"used: {bad}.",
            hint="Check --rdzv-backend and --rdzv-endpoint (or --master-addr, --master-port).",
        ) from bad


def _free_port() -> int:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
