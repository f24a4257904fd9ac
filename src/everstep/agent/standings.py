"""How the ranks of the other nodes stand: a rank may wait for one of theirs, which says that it
takes its time.

Owns: what is told and asked through the rendezvous' store, and how old it may be. Never does: judge
a hang. Called by: supervise, in the thread that may wait for the store.

Each agent tells its own with its sign of life; the leader reads those of all, and tells all of them
in one key: so a job of many nodes does not ask for each one's from each one while it stands still.
"""

from __future__ import annotations

import msgspec

from everstep.agent.rendezvous import Round
from everstep.faults.hang import Standing

EVERY_SECONDS = 1.0


class _All(msgspec.Struct, frozen=True):
    """The standings by node, told for the ``turn``-th time in this attempt."""

    turn: int = 0
    nodes: dict[int, Standing] = {}


class Standings:
    """The standings of one attempt's nodes, as this node's agent knows them."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._next = 0.0
        self._turn = 0
        self._heard: int | None = None
        self._known: dict[int, Standing] = {}

    def tell(self, own: Standing) -> None:
        """Of this node, with its next sign of life."""
        self._round.standing = msgspec.json.encode(own).decode()

    def others(self) -> tuple[Standing, ...]:
        """One for each other node; of one that nothing is known of, that."""
        nodes = (node for node in range(self._round.nodes) if node != self._round.node)
        return tuple(self._known.get(node, Standing()) for node in nodes)

    def exchange(self, now: float, *, suspects: bool) -> None:
        """Ask, and as the leader tell; ``suspects``: this node wants to know. Raises what the store
        does."""
        if self._round.nodes == 1 or now < self._next:
            return
        self._next = now + EVERY_SECONDS
        if self._round.leads:
            self._collect(suspects)
        elif suspects:
            self._hear()
        else:
            self._heard, self._known = None, {}

    def _collect(self, suspects: bool) -> None:
        told = self._round.standings()
        self._known = {node: decoded(text) for node, text in told.items()}
        if suspects or any(one.still is not None for one in self._known.values()):
            self._turn += 1
            own = decoded(self._round.standing)
            everyone = _All(self._turn, {**self._known, self._round.node: own})
            self._round.say_standings(msgspec.json.encode(everyone).decode())

    def _hear(self) -> None:
        """What was told before this node began to suspect says nothing of now."""
        everyone = _everyone(self._round.all_standings())
        if self._heard is None:
            self._heard = everyone.turn
        if everyone.turn > self._heard:
            self._known = everyone.nodes


def decoded(text: str) -> Standing:
    """What a node says; one that says nothing readable is not known to stand still."""
    try:
        return msgspec.json.decode(text, type=Standing)
    except msgspec.DecodeError:
        return Standing()


def _everyone(text: str) -> _All:
    try:
        return msgspec.json.decode(text, type=_All)
    except msgspec.DecodeError:
        return _All()
