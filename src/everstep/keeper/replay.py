"""Whether a step that had failed is passed when it is computed once more, bit for bit.

Owns: which ranks have finished that step. Never does: judge what that means (the decision core
does). Called by: coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.keeper.situation import Situation


@dataclass
class Replay:
    """Tells once, by the event ``replay.differed``, that all ranks have finished the step. One that
    fails again tells by failing."""

    at: Situation
    beyond: set[int] = field(default_factory=set)
    told: bool = False

    def begin(self) -> None:
        """A new attempt."""
        self.beyond, self.told = set(), False

    def passed(self, rank: int, step: int) -> None:
        """The rank has finished ``step``, and nothing was wrong with it."""
        until, at = self.at.replay_until, self.at
        if until is None or step < until or self.told or not at.elected:
            return
        if at.start >= until:
            return  # it went on from beyond the step: nothing was computed again
        self.beyond.add(rank)
        if self.beyond.issuperset(at.table.home):
            self.told = True
            at.tell(
                "replay.differed",
                f"step {until} was computed again from the same state and passed: what had failed "
                "there did not come from the program or its data alone",
                level="warning", step=until, attempt=at.attempt,
            )  # fmt: skip
