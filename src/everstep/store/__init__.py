"""Durable checkpoints: format v1 (docs/spec/store-v1.md), its writers and readers.

Never does: torch, cadence, processes. Called by: keeper, train, agent, cli, drill. The names below
are the room's door; other modules of it are its own affair.

They are loaded when they are first used: a worker that restarts from memory needs the chunk edges
and nothing else of the store, and its imports are part of the time to resume.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.store.attempts import RENEW_SECONDS, STALE_SECONDS, Branch, OwnerIdentity
    from everstep.store.chunks import DEFAULT_CHUNK_BYTES, ChunkRange, chunk_extents
    from everstep.store.digests import digest
    from everstep.store.history import Listing, MergeReport
    from everstep.store.job import Job
    from everstep.store.read import Checkpoint, LoadReport, ReadRequest
    from everstep.store.records import OwnerRecord
    from everstep.store.retention import (
        CheckpointInfo,
        Recoverable,
        Retention,
        RetentionPlan,
        Ruling,
    )
    from everstep.store.settings import Settings
    from everstep.store.store import Store, open_store
    from everstep.store.surroundings import AroundReport
    from everstep.store.sweep import SweepReport
    from everstep.store.verify import VerifyReport

_HOMES = {
    "attempts": ("RENEW_SECONDS", "STALE_SECONDS", "Branch", "OwnerIdentity"),
    "chunks": ("DEFAULT_CHUNK_BYTES", "ChunkRange", "chunk_extents"),
    "digests": ("digest",),
    "history": ("Listing", "MergeReport"),
    "job": ("Job",),
    "read": ("Checkpoint", "LoadReport", "ReadRequest"),
    "records": ("OwnerRecord",),
    "retention": ("CheckpointInfo", "Recoverable", "Retention", "RetentionPlan", "Ruling"),
    "settings": ("Settings",),
    "store": ("Store", "open_store"),
    "surroundings": ("AroundReport",),
    "sweep": ("SweepReport",),
    "verify": ("VerifyReport",),
}

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "RENEW_SECONDS",
    "STALE_SECONDS",
    "AroundReport",
    "Branch",
    "Checkpoint",
    "CheckpointInfo",
    "ChunkRange",
    "Job",
    "Listing",
    "LoadReport",
    "MergeReport",
    "OwnerIdentity",
    "OwnerRecord",
    "ReadRequest",
    "Recoverable",
    "Retention",
    "RetentionPlan",
    "Ruling",
    "Settings",
    "Store",
    "SweepReport",
    "VerifyReport",
    "chunk_extents",
    "digest",
    "open_store",
]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
