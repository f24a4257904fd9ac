"""What the settings of a run say of faults.

Owns: turning them into limits and a catalogue. Never does: decide. Called by: the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from everstep.agent.flags import Launch
from everstep.core.settings import Settings
from everstep.faults.budget import Limits
from everstep.faults.catalog import Catalog, load
from everstep.faults.situation import Policy


def policy_of(launch: Launch) -> Policy:
    """The budgets and deadlines of this run. ``--max-restarts`` takes the place of the rules that
    count attempts; a failure that is deterministic stops the job all the same (F4)."""
    settings, counted = launch.settings, launch.max_restarts is None
    limits = Limits(
        per_fingerprint=(settings.per_fingerprint or None) if counted else None,
        no_progress=(settings.no_progress or None) if counted else None,
        unrestored=Limits().unrestored if counted else None,
        window_restarts=settings.window_restarts or None,
        window_seconds=settings.window,
        useful_share=settings.useful_share,
        max_restarts=launch.max_restarts,
    )
    return Policy(limits=limits, hold=settings.verdict_deadline)


def catalog_of(settings: Settings) -> Callable[[], Catalog]:
    """The patterns of failures. everstep's own are read in a thread from now on, which takes a
    part of a second; the call waits for it. Raises :class:`~everstep.errors.BadCatalog` at once
    where the user's own file is not one."""
    if settings.catalog:
        whole = load(Path(settings.catalog))
        return lambda: whole
    loaded: Future[Catalog] = Future()

    def read() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised again where it is needed
            loaded.set_exception(error)

    threading.Thread(target=read, name="everstep-catalog", daemon=True).start()
    return loaded.result
