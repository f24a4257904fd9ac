"""Stopping all ranks at one step (SIGTERM).

Owns: the step at which all stop, who has arrived, and how it ends. Never does: I/O. Called by:
coordinate.

The step is the largest boundary known plus one. A rank may be further when it learns of it: then
its step takes the place, and the ranks below run on to it. Final is said when all stand there.
Where a rank is gone, or the time is over before that, they cannot meet any more: then the step 0
is said to be final, which tells each rank to leave at its next boundary.
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
    """``began`` is called when a stop is published: nothing else may be; ``failed`` when it is
    over and its step is not durable."""

    at: Situation
    began: Callable[[], None]
    failed: Callable[[], None]
    deadline: float | None = None
    grace: float = 0.0
    step: int | None = None
    final: bool = False
    over: bool = False
    arrived: dict[int, int] = field(default_factory=dict)

    def begin(self, *, fresh: bool) -> None:
        """An attempt begins; where it is a ``fresh`` one, whoever asked for a stop is gone."""
        self.step, self.final, self.arrived = None, False, {}
        if fresh:
            self.deadline, self.over = None, False

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
            self._end(durable=True, how="its checkpoint is committed")

    def settle(self, boundaries: dict[int, Boundary]) -> None:
        """Called after each fact."""
        if not self.asked or self.over:
            return
        lost = self._lost()
        if lost:
            self._end(durable=False, how=f"ranks {lost} are gone, so the others cannot meet them")
            return
        if self.at.elected and not self.final:
            self._raise_to(boundaries)
        if self.deadline is not None and self.at.now >= self.deadline:
            self._end(durable=False, how="the grace period ended before that")

    def _lost(self) -> list[int]:
        """Ranks that ended and have no part in the cut at which all stop."""
        point = self.at.point(self.step) if self.step is not None else None
        return [
            rank
            for rank in sorted(self.at.gone)
            if point is None or not self.at.table.holds(rank, point)
        ]

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

    def _end(self, *, durable: bool, how: str) -> None:
        self.over = True
        where = f"at step {self.step}" if self.step else "without a common step"
        self.at.tell(
            "job.preempted", f"stopped {where}: {how}",
            level="info" if durable else "warning", step=self.step, durable=durable,
        )  # fmt: skip
        if durable:
            return
        if not self.final or self._lost():
            self._publish(0, final=True)
        self.failed()
