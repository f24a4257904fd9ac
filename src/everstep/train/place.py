"""Where this worker stands in the job: ranks, nodes, and which start of the workers it is.

Owns: reading the launcher's variables out of a mapping. Never does: talk to anyone. Called by:
:mod:`everstep.train.connect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.core.settings import Settings
from everstep.errors import UsageError


@dataclass(frozen=True)
class Place:
    """``launch`` is equal on all workers of one start and on no other; ``ranks_of_node[k]`` are
    the global ranks on node k. ``agent_pid`` is 0 where no everstep agent started the worker."""

    rank: int
    world: int
    local_rank: int
    node: int
    ranks_of_node: tuple[tuple[int, ...], ...]
    launch: str
    agent_pid: int = 0

    @property
    def nodes(self) -> int:
        return len(self.ranks_of_node)

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        by_rank = {r: k for k, ranks in enumerate(self.ranks_of_node) for r in ranks}
        return tuple(by_rank[r] for r in range(self.world))


def read_place(
    environment: Mapping[str, str], settings: Settings, *, process: str, ppid: int, nth: int = 0
) -> Place:
    """The place that ``environment`` describes: everstep's agent, torchrun, or plain python.

    ``process`` names this process and ``ppid`` its parent; ``nth`` counts the runs that it has
    attached before, each of which is a start of its own.

    Raises :class:`UsageError` where torchrun's nodes hold different numbers of workers, because
    only an everstep agent says which rank stands where then.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    rank = int(environment.get("RANK", "0"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    node = int(environment.get("GROUP_RANK", "0"))
    if settings.attempt:
        launch = f"attempt-{settings.attempt}"
        ranks = _spans(settings.ranks) if settings.ranks else _uniform(world, local_world)
        return Place(rank, world, local_rank, node, ranks, launch, settings.agent_pid)
    return Place(
        rank, world, local_rank, node, _uniform(world, local_world),
        _launch(environment, process=process, ppid=ppid) + (f":{nth}" if nth else ""),
    )  # fmt: skip


def _launch(environment: Mapping[str, str], *, process: str, ppid: int) -> str:
    if "WORLD_SIZE" not in environment:
        return f"python-{process}"
    parts = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    named = [environment.get(part, "") for part in parts]
    # torchrun's workers of one node share their parent; nodes are told apart by their keepers.
    return ":".join([*named, str(ppid)])


def _spans(text: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of node 0, of node 1 and so on, of ``"0-3,4-5"``."""
    spans = [part.split("-") for part in text.split(",")]
    return tuple(tuple(range(int(first), int(last) + 1)) for first, last in spans)


def _uniform(world: int, local_world: int) -> tuple[tuple[int, ...], ...]:
    if world % local_world:
        raise UsageError(
            f"{world} ranks cannot stand on nodes of {local_world} each.",
            hint="Start the job with `everstep run`, which knows nodes of different sizes.",
        )
    starts = range(0, world, local_world)
    return tuple(tuple(range(start, start + local_world)) for start in starts)
