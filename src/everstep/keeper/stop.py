"""Stopping all ranks at one step (SIGTERM; DESIGN section 5).

Owns: the step at which all stop, who has arrived, and how it ends. Never does: I/O. Called by:
coordinate.

The step is the largest boundary known plus one. A rank may be further when it learns of it: then
its step takes the place, and the ranks below run on to it. Final is said when all stand there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.core.ids import Point
from everstep.keeper.commands import PublishStop
from everstep.keeper.facts import Boundary
from everstep.keeper.situation import Situation


@dataclass
class Stop:
    """``began`` is called when a stop is published: nothing else may be."""

    at: Situation
    began: Callable[[], None]
    deadline: float | None = None
    grace: float = 0.0
    step: int | None = None
    final: bool = False
    over: bool = False
    arrived: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        """A new attempt; a stop that was asked for stays asked for."""
        self.step, self.final, self.arrived = None, False, {}

    @property
    def asked(self) -> bool:
        return self.deadline is not None

    def preempt(self, grace: float) -> None:
        if not self.asked:
            self.deadline = self.at.now + grace
            self.grace = grace
            self.at.tell(
                "job.preempting", f"SIGTERM: all ranks stop at one step within {grace:g} s",
                grace=grace,
            )  # fmt: skip

    def rank_arrived(self, rank: int, step: int) -> None:
        self.arrived[rank] = step

    def rank_gone(self, rank: int) -> None:
        self.arrived.pop(rank, None)

    def committed(self, point: Point) -> None:
        if self.final and point == self.at.point(self.step or 0):
            self._end(durable=True)

    def settle(self, boundaries: dict[int, Boundary]) -> None:
        """Called after each fact."""
        if not self.asked or self.over:
            return
        if self.at.elected and not self.final:
            self._raise_to(boundaries)
        if self.deadline is not None and self.at.now >= self.deadline:
            self._end(durable=False)

    def _raise_to(self, boundaries: dict[int, Boundary]) -> None:
        if self.step is None:
            newest = max((b.step for b in boundaries.values()), default=self.at.start)
            self.began()
            self._publish(newest + 1, final=False)
        furthest = max(self.arrived.values(), default=0)
        if self.step is not None and furthest > self.step:
            self._publish(furthest, final=False)
        there = [rank for rank, step in self.arrived.items() if step == self.step]
        if self.step is not None and len(there) == self.at.world:
            self._publish(self.step, final=True)

    def _publish(self, step: int, *, final: bool) -> None:
        self.step, self.final = step, final
        for node in self.at.nodes:
            self.at.say(PublishStop(node, step, final))

    def _end(self, *, durable: bool) -> None:
        self.over = True
        how = "its checkpoint is committed" if durable else "the grace period ended before that"
        self.at.tell(
            "job.preempted", f"stopped at step {self.step}: {how}",
            level="info" if durable else "warning", step=self.step, durable=durable,
        )  # fmt: skip
