"""How the nodes agree, after an attempt, on what follows: all say, one decides, all obey.

Owns: the waiting for each other. Never does: decide (:mod:`everstep.agent.decide`). Called by:
the loop, where a job has several nodes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from everstep.agent.decide import AttemptEnd, Decision
from everstep.agent.line import SILENT_SECONDS, StoreSilent
from everstep.agent.rendezvous import LEADER_SECONDS, Announcement, NodeEnd, Round, poll
from everstep.core import exits, points
from everstep.errors import RendezvousLost

ENDS_SECONDS = 20.0
"""For the agents of all nodes to say how their workers ended, once one has failed."""
REPLACED_SECONDS = 3.0
"""The same, where a node waits to join: it most likely takes the place of one that is dead."""
PARTING_SECONDS = 5.0
BEAT_SECONDS = 2.0
"""Between two signs of life of an agent."""
T = TypeVar("T")
Clock = Callable[[], float]


@contextlib.contextmanager
def sign_of_life(round_: Round) -> Iterator[None]:
    """Show the other nodes that this agent lives, for as long as this lasts."""
    if round_.nodes == 1:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(round_, over), name="everstep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT_SECONDS)


def gather_ends(
    round_: Round,
    silence: Silence | None = None,
    *,
    clock: Clock = time.monotonic,
    beat: float = BEAT_SECONDS,
) -> dict[int, NodeEnd]:
    """The leader: what the nodes said, once all have, or one failed and the rest had their time.

    A node whose agent has shown no life for ``SILENT_SECONDS`` has failed: it died without a word.
    What its workers do is not bounded: an agent that lives is waited for. ``silence`` is what was
    seen of that while workers ran.
    """
    silence, lost = silence or Silence(round_, clock), set[int]()
    while not _all_ended(round_) and not round_.failed():
        poll(lambda: _all_ended(round_) or round_.failed(), beat)
        lost = silence.nodes() - set(round_.ended())
        if lost:
            round_.say_failed()  # those that live end their workers, which wait for the lost ones
    replaced = any(end.members_changed for end in round_.ended().values())
    until = clock() + (REPLACED_SECONDS if replaced else ENDS_SECONDS)
    while (left := until - clock()) > 0 and not _has_said(round_, lost):
        poll(partial(_has_said, round_, lost), min(beat, left))
        lost = silence.nodes()
    return round_.ended()


def _has_said(round_: Round, lost: set[int]) -> bool:
    """Whether all nodes but those that are lost have said how they ended."""
    return (set(range(round_.nodes)) - lost).issubset(round_.ended())


def announce(
    round_: Round, decision: Decision, *, same_nodes: bool, leave: tuple[int, ...] = ()
) -> None:
    """The leader: tell the decision. ``same_nodes``: the next round is one of those here.
    ``leave`` are the nodes that the next attempt does without."""
    code = decision.exit_code if decision.action == "stop" else None
    said = Announcement(
        code, decision.reason, decision.warning, same_nodes, delay=decision.delay, leave=leave
    )
    points.reach("agent.decision.before_announce")
    round_.say_decision(said)


def hear_decision(
    round_: Round,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    clock: Clock = time.monotonic,
    beat: float = BEAT_SECONDS,
) -> tuple[Decision, bool]:
    """Every other node: the leader's decision, and whether the same nodes go on.

    Raises :class:`RendezvousLost` where it does not come once a failure is known, or the leader
    shows no life for ``SILENT_SECONDS``. ``meanwhile`` is called again and again while it waits.
    """
    silence = Silence(round_, clock)
    while not round_.failed() and round_.decision() is None:
        poll(lambda: round_.failed() or round_.decision() is not None, beat)
        if 0 in silence.nodes() and round_.decision() is None:
            raise RendezvousLost(
                f"the agent of the leader (node 0) has shown no life for {SILENT_SECONDS:g} s.",
                hint="It died or hangs: start it again on that node, or another one in its place.",
            )

    def is_decided() -> bool:
        meanwhile()
        return round_.decision() is not None

    poll(is_decided, LEADER_SECONDS)
    said = round_.decision()
    if said is None:
        raise RendezvousLost(
            "the leader of the job (node 0) did not say what comes next.",
            hint="Its agent hangs: end it, and start it again.",
        )
    if said.exit_code is not None:
        return Decision("stop", said.exit_code, said.reason, said.warning), said.same_nodes
    if round_.node in said.leave:
        return Decision("stop", exits.LEFT_OUT, said.reason), False
    return Decision("restart", 0, said.reason, delay=said.delay), said.same_nodes


def part(round_: Round) -> None:
    """One of the agents holds the rendezvous' store: it must not go before all have read."""
    with contextlib.suppress(RuntimeError):  # it has gone, so all had read
        round_.say_parted()
        poll(round_.all_parted, PARTING_SECONDS)


def combine(ends: dict[int, NodeEnd], nodes: int) -> AttemptEnd:
    """The end of an attempt from what its nodes said; a node that said nothing is lost."""
    said = list(ends.values())
    return AttemptEnd(
        workers=tuple(worker for end in said for worker in end.worker_ends()),
        restored=max((end.restored for end in said), default=-1),
        reached=max((end.reached for end in said), default=-1),
        finished_step=min((end.finished for end in said if end.finished >= 0), default=-1),
        committed=max((end.committed for end in said), default=-1),
        attached=any(end.attached for end in said),
        finished=any(end.job_finished for end in said),
        fatal=_first(end.fatal for end in said),
        stopped_by=_first(end.stopped_by for end in said),
        members_changed=any(end.members_changed for end in said),
        lost_nodes=tuple(node for node in range(nodes) if node not in ends),
        hang=next((end.hang for end in said if end.hang), ""),
        hung=tuple(rank for end in said for rank in end.hung),
    )


class Silence:
    """Which agents show no life. Times are of this agent's ``clock`` alone: other hosts' differ."""

    def __init__(self, round_: Round, clock: Clock) -> None:
        self._round = round_
        self._clock = clock
        self._shown = {node: ("", clock()) for node in range(round_.nodes)}

    def nodes(self) -> set[int]:
        """The nodes whose agents have shown nothing new for ``SILENT_SECONDS``."""
        now, shown = self._clock(), self._round.signs_of_life()
        for node, (sign, _) in list(self._shown.items()):
            if shown.get(node, "") != sign:
                self._shown[node] = (shown[node], now)
        return {node for node, (_, at) in self._shown.items() if now - at >= SILENT_SECONDS}


def _beat(round_: Round, over: threading.Event) -> None:
    count = 0
    with contextlib.suppress(RuntimeError):  # the store has gone: the agent itself sees that
        while True:
            count += 1
            with contextlib.suppress(StoreSilent):  # training goes on, and the store may come back
                round_.say_alive(count)
            if over.wait(BEAT_SECONDS):
                return


def _all_ended(round_: Round) -> bool:
    return len(round_.ended()) == round_.nodes


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)
