"""What this node has to say of a failure, in bounds and without secrets.

Owns: the node's watch over its sources, and the order redact, date, bound. Never does: judge.
Called by: the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from everstep.agent.watch.node import NodeWatch, timed
from everstep.agent.watch.registry import Around, paths_of, sources
from everstep.core.settings import Settings
from everstep.faults.cap import BEFORE, MOST_BYTES, capped
from everstep.faults.catalog import Catalog
from everstep.faults.records import Signal
from everstep.faults.redact import redacted
from everstep.keeper.spawn import state_dir

LOOK_SECONDS = 0.1
"""For every source to look once more, after the workers have ended."""

ALL_BYTES, LEAST_BYTES = 8 << 20, 16 << 10
"""Of the evidence of all nodes together, and of one node all the same."""


class Evidence:
    """``catalog`` tells which lines are worth keeping. Sources are watched from now on."""

    def __init__(self, settings: Settings, catalog: Callable[[], Catalog]) -> None:
        store = None if "://" in settings.store else Path(settings.store)
        around = Around(settings, paths_of(store, state_dir(settings, os.environ)))
        self._catalog = catalog
        self._watch = NodeWatch(sources(around), None)

    def look(self) -> None:
        """Have every source look now."""
        self._watch.gather(LOOK_SECONDS)

    def of(
        self, said: Iterable[Signal], began: float, failed: float, *, nodes: int = 1
    ) -> tuple[Signal, ...]:
        """All that was seen of the failure at ``failed`` of the attempt that began at ``began``
        (CLOCK_MONOTONIC): what the node's sources gave, and what workers ``said``. Of many
        ``nodes`` each says less: all of it goes through the leader."""
        seen = timed((*map(redacted, said), *self._watch.since(failed - BEFORE)), began)
        most = max(LEAST_BYTES, min(MOST_BYTES, ALL_BYTES // nodes))
        return capped(seen, failed, self._catalog(), most_bytes=most)

    def late(self, began: float, failed: float, node: str) -> tuple[Signal, ...]:
        """What came since, under the name of the node."""
        self.look()
        seen = timed(self._watch.since(failed), began)
        named = (msgspec.structs.replace(signal, node=signal.node or node) for signal in seen)
        return capped(named, failed, self._catalog(), node=node)

    def telling(self, since: float, began: float) -> tuple[Signal, ...]:
        """What the node's sources gave after ``since`` that a signature speaks of."""
        seen = timed(self._watch.since(since), began)
        catalog = self._catalog()
        return tuple(signal for signal in seen if catalog.found_in(signal.text))

    def close(self) -> None:
        self._watch.close()
