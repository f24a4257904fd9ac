"""Where a run stands, folded from its events as they come.

Owns: :class:`Progress` and :class:`Kept`. Never does: I/O. Called by: the drill's loop and judge.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.events import Event
from everstep.drill import kinds
from everstep.drill.kinds import fact_int, fact_ints


class Kept:
    """What memory (``snapshot``: a step, 0 for none) and the store (``commits``) hold.

    A restore cuts off what is newer than the step restored; a commit that an older attempt makes
    late is on the lineage only up to there.
    """

    def __init__(self) -> None:
        self.snapshot = 0
        self.commits: set[int] = set()
        self._attempt = self._branch = 0

    def feed(self, event: Event) -> None:
        step = event.step or 0
        if event.kind == kinds.ELECTED and event.attempt > self._attempt:
            self._attempt, self._branch, self.snapshot = event.attempt, step, step
            self.commits = {commit for commit in self.commits if commit <= step}
        elif event.kind == kinds.SNAPSHOT and event.attempt >= self._attempt:
            self.snapshot = max(self.snapshot, step)
        elif event.kind == kinds.COMMITTED and self._on_lineage(event):
            self.commits.add(step)

    def newest_commit(self, *, without: int | None = None) -> int:
        """The newest committed step, 0 for none, leaving out a damaged one."""
        return max(self.commits - {without}, default=0)

    def _on_lineage(self, event: Event) -> bool:
        # The keeper may commit for an attempt before its own; the facts name the checkpoint's.
        attempt = fact_int(event, "attempt") or event.attempt
        return attempt >= self._attempt or (event.step or 0) <= self._branch


def kept_of(events: Iterable[Event]) -> Kept:
    """What is kept after ``events``, in their order."""
    kept = Kept()
    for event in events:
        kept.feed(event)
    return kept


class Progress:
    """``step``: the newest step seen of the current attempt; ``workers``: process id by rank of
    the processes that run now; ``keeper``: its process id, 0 while there is none."""

    def __init__(self) -> None:
        self.attempt = 0
        self.step = 0
        self.workers: dict[int, int] = {}
        self.keeper = 0
        self.kept = Kept()

    def feed(self, event: Event) -> None:
        self.kept.feed(event)
        if event.kind == kinds.WORKERS_STARTED:
            self._begin(event.attempt)
            self.workers = fact_ints(event, "pids")
        elif event.kind == kinds.WORKER_EXITED and event.rank is not None:
            self.workers.pop(event.rank, None)
        elif event.kind == kinds.KEEPER_STARTED:
            self.keeper = fact_int(event, "pid") or 0
        elif event.kind == kinds.KEEPER_LOST:
            self.keeper = 0
        elif event.kind in kinds.PROGRESS and event.attempt == self.attempt:
            self.step = max(self.step, event.step or 0)

    def _begin(self, attempt: int) -> None:
        self.attempt = max(self.attempt, attempt)
        self.step = 0
