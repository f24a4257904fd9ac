"""What the settings of a run say of faults.

Owns: turning them into limits and a catalogue. Never does: decide. Called by: the loop.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import msgspec

from everstep.agent.aside import aside
from everstep.agent.flags import Launch
from everstep.core.settings import Settings
from everstep.faults.catalog import Catalog, load
from everstep.faults.limits import limits_of
from everstep.faults.sieve import Sieve
from everstep.faults.situation import Policy


def policy_of(launch: Launch) -> Policy:
    """The budgets and deadlines of this run. ``--max-restarts`` may be used up in one start of the
    job: the rules that count attempts leave it as many, and hold over the starts (F3). A failure
    that is deterministic stops the job all the same (F4)."""
    limits = limits_of(launch.settings)
    if (most := launch.max_restarts) is not None:
        limits = msgspec.structs.replace(
            limits, per_fingerprint=_at_least(limits.per_fingerprint, most + 1),
            no_progress=_at_least(limits.no_progress, most + 2),
            unrestored=_at_least(limits.unrestored, most + 2), max_restarts=most,
        )  # fmt: skip
    settings = launch.settings
    resume = settings.resume_deadline
    return Policy(
        limits=limits, skip_batches=settings.skip_batches,
        in_place=resume, elsewhere=resume, wait=resume, rollback=resume,
    )  # fmt: skip


def _at_least(limit: int | None, least: int) -> int | None:
    return None if limit is None else max(limit, least)


def catalog_of(settings: Settings) -> Future[Catalog]:
    """The patterns of failures. everstep's own are read in a thread from now on, which takes a
    part of a second. Raises :class:`~everstep.errors.BadCatalog` at once where the user's own file
    is not one."""
    if settings.catalog:
        loaded: Future[Catalog] = Future()
        loaded.set_result(load(Path(settings.catalog)))
        return loaded

    def read() -> Catalog:
        whole = load()
        Sieve(whole)  # compiles what every search of a log shares
        return whole

    return aside(read, "everstep-catalog")
