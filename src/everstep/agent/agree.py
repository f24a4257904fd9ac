"""How the nodes agree, after an attempt, on what follows: all say, one decides, all obey.

Owns: the waiting for each other. Never does: decide (:mod:`everstep.agent.decide`). Called by:
the loop, where a job has several nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TypeVar

from everstep.agent.decide import AttemptEnd, Decision, History
from everstep.agent.rendezvous import LEADER_SECONDS, NodeEnd, Round, Verdict, poll
from everstep.errors import AgentError

ENDS_SECONDS = 20.0
"""For the agents of all nodes to say how their workers ended, once one has failed."""
REPLACED_SECONDS = 3.0
"""The same, where a node waits to join: it most likely takes the place of one that is dead."""
PARTING_SECONDS = 5.0

T = TypeVar("T")


def gather_ends(round_: Round) -> dict[int, NodeEnd]:
    """The leader: what the nodes said, once all have, or one failed and the rest had their time."""
    while not _all_ended(round_) and not round_.failed():
        poll(lambda: _all_ended(round_) or round_.failed(), LEADER_SECONDS)
    replaced = any(end.members_changed for end in round_.ended().values())
    poll(lambda: _all_ended(round_), REPLACED_SECONDS if replaced else ENDS_SECONDS)
    return round_.ended()


def announce(round_: Round, decision: Decision, *, same_nodes: bool) -> None:
    """The leader: tell the decision. ``same_nodes``: the next round is one of those here."""
    code = decision.exit_code if decision.action == "stop" else None
    round_.say_decision(Verdict(code, decision.reason, decision.warning, same_nodes))


def hear_verdict(round_: Round, history: History) -> tuple[Decision, bool]:
    """Every other node: the leader's decision, and whether the same nodes go on.

    Raises :class:`AgentError` where it does not come once a failure is known.
    """
    while not round_.failed() and round_.decision() is None:
        poll(lambda: round_.failed() or round_.decision() is not None, LEADER_SECONDS)
    poll(lambda: round_.decision() is not None, LEADER_SECONDS)
    verdict = round_.decision()
    if verdict is None:
        raise AgentError(
            "the leader of the job (node 0) did not say what comes next.",
            hint="Its agent hangs; start the job again on all nodes.",
        )
    if verdict.exit_code is None:
        return Decision("restart", 0, verdict.reason, history), verdict.same_nodes
    stop = Decision("stop", verdict.exit_code, verdict.reason, history, verdict.warning)
    return stop, verdict.same_nodes


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
        attached=any(end.attached for end in said),
        finished=any(end.finished for end in said),
        fatal=_first(end.fatal for end in said),
        stopped_by=_first(end.stopped_by for end in said),
        members_changed=any(end.members_changed for end in said),
        lost_nodes=tuple(node for node in range(nodes) if node not in ends),
    )


def _all_ended(round_: Round) -> bool:
    return len(round_.ended()) == round_.nodes


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)
