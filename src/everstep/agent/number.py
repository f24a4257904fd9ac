"""Which agent of its host this one is.

Owns: the rule by which agents get their numbers; keepers are found by them. Called by: the loop.
"""

from __future__ import annotations

import socket

from everstep.agent.flags import Launch
from everstep.agent.keeper import claim_index, hold_index, holder_of
from everstep.errors import JobOwned


def own_index(launch: Launch) -> tuple[int, socket.socket]:
    """This agent's number on its host, and the socket that holds it for as long as it is open.

    Raises :class:`JobOwned` where another living agent of the job has the number that this one
    must have."""
    settings = launch.settings
    config = launch.config
    if config.max_nodes == 1:
        only = 0
    elif config.rdzv_backend == "static":
        only = int(config.rdzv_configs["rank"])
    else:
        return claim_index(settings)
    lock = hold_index(settings, only)
    if lock is None:
        raise JobOwned(
            f"another agent on this host ({holder_of(settings, only)}) runs node {only} of "
            f"job {settings.job} in {settings.store}.",
            hint="Stop it first, or give this run another --job.",
        )
    return only, lock
