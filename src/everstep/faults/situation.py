"""What a decision is made from besides the verdict and the history.

Owns: the records of what is possible now and of what is wanted. Never does: I/O. Called by: decide
and ladder; filled in by the agent, the fleet's server and the simulator.
"""

from __future__ import annotations

import msgspec

from everstep.faults.history import Mode, RecoveryPoint
from everstep.faults.limits import Limits
from everstep.faults.suspicion import Rules

_WAITING = "(waiting "


class Situation(msgspec.Struct, frozen=True):
    """What is possible.

    ``nodes`` are those of the attempt that ended, in order; ``spares`` stand ready; ``lost`` do
    not answer. ``can_shrink``: the state can be loaded on fewer nodes, down to ``min_nodes``.
    ``checkpoints`` are the recovery points there are, None where the store cannot be asked.
    ``highest_claim`` is the newest attempt that
    was claimed. ``jitter`` is drawn from [0, 1) for each decision."""

    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    min_nodes: int = 1
    can_shrink: bool = False
    checkpoints: tuple[RecoveryPoint, ...] | None = ()
    highest_claim: int = 0
    jitter: float = 0.0


class Policy(msgspec.Struct, frozen=True):
    """What is wanted. Times are seconds. ``mode`` None: as the operator said last. ``in_place`` to
    ``rollback``: how long each rung may take until the first new step. Waits grow from
    ``wait_first`` by ``wait_factor`` to ``wait_most``. ``skip_batches``: the user allows to leave
    out batches that give no finite values."""

    limits: Limits = Limits()
    rules: Rules = Rules()
    mode: Mode | None = None
    in_place: float = 180.0
    elsewhere: float = 600.0
    wait: float = 3600.0
    rollback: float = 600.0
    wait_first: float = 30.0
    wait_factor: float = 4.0
    wait_most: float = 1800.0
    skip_batches: bool = False


def waiting(count: int) -> tuple[str, ...]:
    """Spares of which nothing but their number is known: agents that wait to be let in do not say
    which nodes they are of."""
    return tuple(f"{_WAITING}{n})" for n in range(1, count + 1))


def is_waiting(node: str) -> bool:
    """Whether that is no node's name, but stands for an agent that waits."""
    return node.startswith(_WAITING)
