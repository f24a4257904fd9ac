"""The kinds of events that a drill reads and writes.

Owns: the names, and which of them say the same thing to a judge. Called by: judge, progress, run.
"""

from __future__ import annotations

from everstep.core.events import Event

INJECTED = "drill.injected"
NOTICED = "drill.noticed"
STARTED = "drill.started"
ORPHANS = "drill.orphans"
RELEASED = "drill.released"

WORKERS_STARTED = "workers.started"
WORKER_EXITED = "worker.exited"
KEEPER_STARTED = "keeper.started"
KEEPER_LOST = "keeper.lost"
SNAPSHOT = "snapshot.complete"
COMMITTED = "checkpoint.committed"
PERSIST_FAILED = "persist.failed"
ELECTED = "restore.elected"
LOGGED = "train.log"
RESUMED = "train.resumed"

DAMAGE = frozenset({"restore.candidate_failed", "restore.rejected", "checkpoint.damaged"})
"""Events by which a restore says that a checkpoint cannot be used."""
PROGRESS = frozenset({LOGGED, RESUMED, SNAPSHOT})
"""Events that prove that a step of the attempt was computed."""


def fact_int(event: Event, name: str) -> int | None:
    """An integer of the event's facts, or None."""
    value = event.facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def fact_text(event: Event, name: str) -> str:
    """A text of the event's facts, or the empty text."""
    value = event.facts.get(name)
    return value if isinstance(value, str) else ""


def fact_ints(event: Event, name: str) -> dict[int, int]:
    """A mapping of integers; JSON made its keys text."""
    value = event.facts.get(name)
    if not isinstance(value, dict):
        return {}
    return {int(key): int(number) for key, number in value.items()}
