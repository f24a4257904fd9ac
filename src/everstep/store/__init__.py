"""Durable checkpoints: format v1 (docs/spec/store-v1.md), its writers and readers.

Never does: torch, cadence, processes. Called by: keeper, train, agent, cli, drill. The names below
are the room's door; other modules of it are its own affair.
"""

from everstep.store.attempts import RENEW_SECONDS, STALE_SECONDS, Branch, OwnerIdentity
from everstep.store.chunks import DEFAULT_CHUNK_BYTES, ChunkRange, chunk_extents
from everstep.store.digests import digest
from everstep.store.job import Job
from everstep.store.read import Checkpoint, LoadReport, ReadRequest
from everstep.store.records import OwnerRecord
from everstep.store.retention import CheckpointInfo, Retention, RetentionPlan, Ruling
from everstep.store.settings import Settings
from everstep.store.store import Store, open_store
from everstep.store.sweep import SweepReport
from everstep.store.verify import VerifyReport

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "RENEW_SECONDS",
    "STALE_SECONDS",
    "Branch",
    "Checkpoint",
    "CheckpointInfo",
    "ChunkRange",
    "Job",
    "LoadReport",
    "OwnerIdentity",
    "OwnerRecord",
    "ReadRequest",
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
