"""The branches of this attempt and of those before it: known, owed to the store, refused by it.

Owns: what attempts went on from, as far as it is known, and in which order the store gets to know
it (S6). Never does: I/O; choose what an attempt goes on from (elect). Called by: elect.

A branch that the store cannot take now is owed: training goes on, and nothing of the attempt is
stored before it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from everstep.core.ids import Point
from everstep.errors import CommitRefused
from everstep.keeper.commands import WriteBranch
from everstep.keeper.facts import BranchWritten
from everstep.keeper.owed import bridged, missing_link
from everstep.keeper.situation import Situation
from everstep.keeper.wire import WentOn
from everstep.store.lineage import on_lineage

PENDING_SECONDS = 5.0
"""Between tries of a branch that is owed."""
REPAIR_SECONDS = 60.0
"""Between tries of a branch that only a person can make possible (a store that is not writable)."""


@dataclass
class Branches:
    """``owed`` are the branches that the store did not take yet, oldest first: they are written
    before anything else is, the next try at ``due``. ``known`` is what nodes and ranks said,
    ``inherited`` the attempts of it that this keeper did not owe itself: one before it may have
    written their branches. ``refused`` are those of which it was told that the store refuses them,
    ``reread`` those after whose refusal the store was read."""

    at: Situation
    owed: list[WentOn] = field(default_factory=list)
    due: float | None = None
    known: dict[int, WentOn] = field(default_factory=dict)
    inherited: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    reread: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """A new attempt: what is owed stays owed."""
        self.reread = set()
        self.due = self.at.now if self.owed else None
        self.known.pop(self.at.attempt, None)  # the nodes say again what is of this life

    # -- what is known

    def learn(self, told: tuple[WentOn, ...]) -> WentOn | None:
        """Take what nodes and ranks say that lived through it; what is known of this very attempt,
        whose election an earlier keeper held then, and may not have written the branch."""
        owed = {one.attempt for one in self.owed}
        for election in told:
            if election.attempt <= self.at.attempt and _goes_back(election):
                self.known.setdefault(election.attempt, election)
                self.inherited |= {election.attempt} - owed
        return self.known.get(self.at.attempt)

    def stored(self, found: dict[int, Point | None], unreadable: Collection[int]) -> None:
        """These are in the store. What the ``unreadable`` name may be known here nevertheless."""
        known = {one.attempt: one.point for one in (*self.known.values(), *self.owed)}
        self.at.branches.update(found)
        self.at.branches.update({n: known[n] for n in unreadable if n in known})
        self.owed = [one for one in self.owed if one.attempt not in found]
        if self.owed:
            self.due = self.at.now  # the answer to an earlier try may be about another one

    def origins(self) -> dict[int, Point | None]:
        """What attempts went on from: those of which the store has a branch, or will have."""
        known = {attempt: one.point for attempt, one in self.known.items()}
        known |= {one.attempt: one.point for one in self.owed}
        return known | self.at.branches

    def missing(self, attempt: int) -> int | None:
        """The attempt at which the chain back from ``attempt`` is broken, None if it is whole."""
        return missing_link(attempt, self.origins(), self.at.branches)

    def on_lineage(self, point: Point) -> bool:
        return bool(on_lineage(self.origins(), [point]))

    # -- what is owed

    def owe(self, mine: WentOn, why: str) -> None:
        """The store does not take this attempt's branch."""
        others = [one for one in self.owed if one.attempt != mine.attempt]
        self.owed = bridged([*others, mine], self._needed(mine.point))
        if self.due is None:
            self.due = self.at.now + PENDING_SECONDS
        self.at.tell(
            "branch.owed",
            f"the store does not take the branch of attempt {mine.attempt}; training goes on, "
            f"no checkpoint is written before it: {why}",
            level="warning", reason=why,
        )  # fmt: skip

    def owe_missing(self, attempt: int) -> None:
        """Owe the branches of ``attempt`` and of those before it that the store does not have:
        the keeper that held them died before it could write them. The oldest comes first."""
        owed = {one.attempt: one for one in self.owed}
        said = self.known | owed  # what is owed may be bridged already
        missing: list[WentOn] = []
        election = said.get(attempt)
        while election is not None and election.attempt not in self.at.branches:
            if election.attempt not in owed:
                missing.append(election)
            election = said.get(election.point.attempt) if election.point else None
        self._owe_too(missing)

    def mend(self, point: Point | None) -> None:
        """Make what is owed writable, now that it is known what the store has. ``point``, which the
        job goes on from, gets a root where its chain is broken; what is of no use to the job is
        not owed any more."""
        broken = self.missing(point.attempt) if point is not None else None
        if broken is not None and self.at.attempt not in self.at.branches:
            self._root(broken)
        self.owed = [one for one in self.owed if self.missing(one.attempt) is None]

    def before(self, attempt: int) -> tuple[WentOn, ...]:
        """What is owed of other attempts, for the ranks of this one to keep."""
        return tuple(one for one in self.owed if one.attempt != attempt)

    def _needed(self, origin: Point | None) -> Collection[int]:
        """Attempts whose own branch is needed: a snapshot of theirs may be stored, or it may have
        been written by an earlier keeper, and a checkpoint with it."""
        points = [origin, *(entry.point for entry in self.at.table.entries.values())]
        return {point.attempt for point in points if point is not None} | self.inherited

    def _owe_too(self, elections: list[WentOn]) -> None:
        if elections:
            self.owed = sorted([*self.owed, *elections], key=lambda election: election.attempt)
            self.due = self.at.now

    def _root(self, attempt: int) -> None:
        """Say of ``attempt`` that nothing came before it, or nothing that follows from it could
        ever be stored."""
        self.at.tell(
            "branch.rooted",
            f"what attempt {attempt} went on from is known to nobody any more, and the store has "
            "no branch of it: it is taken for the beginning of this state of the job. Checkpoints "
            "of earlier attempts stay in the store, but the job does not go back to them.",
            level="error", rooted=attempt,
        )  # fmt: skip
        self._owe_too([WentOn(attempt, "rooted", None, self.at.world)])

    # -- into the store

    def write_first(self) -> None:
        """Try the oldest that is owed."""
        if self.owed:
            first = self.owed[0]
            self.at.say(WriteBranch(0, first.attempt, first.point, first.source, first.world))

    def written(self, fact: BranchWritten) -> str:
        """The answer to :meth:`write_first`: "" where it was none, "reread" where the store must
        be read before the next try, else "taken"."""
        if not self.owed or fact.attempt != self.owed[0].attempt:
            return ""
        if not fact.error:
            first = self.owed.pop(0)
            self.at.branches[first.attempt] = first.point
            self.write_first()
        elif fact.retryable:
            self.due = self.at.now + PENDING_SECONDS
        else:
            return self._take_refusal(fact)
        return "taken"

    def _take_refusal(self, fact: BranchWritten) -> str:
        """What contradicts the store is not tried again before the store was read, and not again
        in this attempt where that has changed nothing."""
        if fact.attempt not in self.refused:
            self.refused.add(fact.attempt)
            self.at.tell(
                "branch.refused",
                f"the store refuses the branch of attempt {fact.attempt}, and nothing of it is "
                f"stored before it: {fact.error}",
                level="error", code=fact.error_code, reason=fact.error,
            )  # fmt: skip
        if fact.error_code != CommitRefused.code:
            self.due = self.at.now + REPAIR_SECONDS
        elif fact.attempt not in self.reread:
            return "reread"
        return "taken"


def _goes_back(election: WentOn) -> bool:
    return election.point is None or election.point.attempt < election.attempt
