"""torchrun's own event log (``--event-log-handler``), for those who listen to it.

Owns: the worker status events that torchrun's agent records. Never does: anything where the
handler is torchrun's default, ``null``. Called by: the loop.
"""

from __future__ import annotations

import json
import socket

from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource

from everstep.agent.decide import WorkerEnd
from everstep.agent.workers import Place


def workers_started(handler: str, place: Place, role: str, pids: dict[int, int]) -> None:
    """One ``START`` for each worker; ``pids`` by global rank."""
    for rank, pid in pids.items():
        _record(handler, place, role, rank, "START", pid, None)


def workers_ended(
    handler: str, place: Place, role: str, pids: dict[int, int], ends: list[WorkerEnd]
) -> None:
    """``SUCCEEDED``, ``FAILED``, or ``TERMINATED`` for those that the agent killed."""
    for end in ends:
        state = "TERMINATED" if end.by_everstep else "FAILED" if end.code else "SUCCEEDED"
        _record(handler, place, role, end.rank, state, pids[end.rank], end.code)


def _record(
    handler: str, place: Place, role: str, rank: int, state: str, pid: int, code: int | None
) -> None:
    if handler == "null":
        return
    local_rank = place.ranks.index(rank)
    about = {
        "group_world_size": place.nodes,
        "local_rank": local_rank,
        "role_rank": place.role_ranks[local_rank],
        "role_world_size": place.role_world_size,
        "exit_code": code,
        "worker_pid": pid,
    }
    record(
        Event(
            f"torchelastic.worker.status.{state}",
            source=EventSource.WORKER,
            metadata={
                "run_id": place.run_id,
                "global_rank": rank,
                "group_rank": place.node,
                "worker_id": str(pid),
                "role": role,
                "hostname": socket.getfqdn(),
                "state": state,
                "agent_restarts": place.restarts,
                "metadata": json.dumps(about),
            },
        ),
        handler,
    )
