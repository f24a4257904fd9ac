"""The tries to cut a step: which ranks took part in which, so that no snapshot mixes two.

Owns: the sequence numbers, the tries in the making, those that were dropped. Never does: decide
what becomes of a try, touch slots. Called by: cuts.

A step may be cut more than once: a published cut is dropped and the step is the one at which all
stop, the last step's cut fails and is taken again, a user asks for a checkpoint of a step that was
just cut. Every try has a number, which the ranks write into their slots: a straggler of a dropped
try is known by it, and what ranks hold of two tries is never one snapshot (R2, S2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.keeper.facts import CutMade

KEPT_TRIES = 8
"""Tries in the making that are remembered; explicit cuts of some ranks alone must not pile up."""

KEPT_DROPPED = 64

SEQUENCES_PER_SECOND = 1000


@dataclass
class Try:
    """``cuts`` by rank is what was said of it; ``since`` when the first rank had cut.
    ``published`` ones are taken at the boundary, the others when the ranks ask for a slot."""

    sequence: int
    step: int
    published: bool
    cuts: dict[int, CutMade] = field(default_factory=dict)
    since: float | None = None


@dataclass
class Tries:
    """``live`` by sequence, oldest first."""

    live: dict[int, Try] = field(default_factory=dict)
    dropped: dict[int, None] = field(default_factory=dict)
    newest: int = 0

    def begin(self, now: float) -> None:
        """A new attempt, or a new keeper of one: no number is given that an earlier keeper gave,
        because slots and workers still name those. ``now`` is monotonic on this host."""
        self.live, self.dropped = {}, {}
        self.newest = max(self.newest, int(now * SEQUENCES_PER_SECOND))

    def open(self, step: int, *, published: bool) -> Try:
        self.newest += 1
        made = Try(self.newest, step, published)
        self.live[made.sequence] = made
        return made

    def join(self, rank: int, step: int) -> Try:
        """The try that the rank's own cut of ``step`` belongs to: the oldest that it has no part
        in, so that the first checkpoint() of one rank meets the first of the others."""
        for one in self.live.values():
            if one.step == step and not one.published and rank not in one.cuts:
                return one
        return self.open(step, published=False)

    def take(self, fact: CutMade, now: float) -> Try | None:
        """A rank has cut; None for a straggler of a dropped try. A number that is not known is
        an earlier keeper's: its ranks may still come together."""
        if fact.sequence in self.dropped:
            return None
        one = self.live.get(fact.sequence)
        if one is None:
            one = Try(fact.sequence, fact.step, published=not fact.persist)
            self.live[one.sequence] = one
        one.cuts[fact.rank] = fact
        one.since = now if one.since is None else one.since
        return one

    def missed(self, rank: int, step: int, sequence: int) -> Try | None:
        """The try that the rank speaks of; without a ``sequence`` the oldest that it could mean."""
        if sequence:
            return self.live.get(sequence)
        could = (t for t in self.live.values() if t.step == step and rank not in t.cuts)
        return next(could, None)

    @property
    def making(self) -> list[Try]:
        """Tries that a rank has cut for, oldest step first."""
        return sorted((t for t in self.live.values() if t.cuts), key=lambda t: t.step)

    def drop(self, one: Try) -> None:
        self.live.pop(one.sequence, None)
        self.dropped[one.sequence] = None
        for old in list(self.dropped)[:-KEPT_DROPPED]:
            del self.dropped[old]

    def complete(self, one: Try) -> None:
        """The try has become a snapshot: nobody waits for older ones any more."""
        for other in list(self.live.values()):
            older = other.step < one.step
            if older or (other.step == one.step and other.sequence <= one.sequence):
                del self.live[other.sequence]

    def others_of(self, rank: int, one: Try) -> bool:
        """Whether the rank has cut the same step for another try as well."""
        return any(t.step == one.step and rank in t.cuts for t in self.live.values() if t != one)
