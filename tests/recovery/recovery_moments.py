"""Random moments of death: a seed picks named points, ranks and numbers of passes.

Pure. What a process does between two named points it may also be doing when it is killed by a
signal; the points are the places where that matters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from everstep.core.points import Fault

IN_SNAPSHOT = (
    "train.cut.before",
    "state.capture.before_copy",
    "train.cut.begun",
    "train.cut.copied",
    "train.cut.committed",
)
"""A rank dies while it copies its state."""

IN_RESTORE = ("train.restore.before_load", "train.restore.in_load", "train.restore.before_apply")
"""A rank dies while it loads; the last one after all have voted."""

AT_LOADER = "train.data.prepare.before_open"
"""A rank dies between its objects' records and its data position; only where a loader is."""

IN_PERSIST = (
    "keeper.persist.before_claim_check",
    "keeper.persist.before_pack",
    "store.write.before_pack",
    "store.write.before_index",
    "keeper.persist.after_index",
)
"""The keeper dies while it writes a rank's part."""

IN_COMMIT = (
    "keeper.commit.before_claim_check",
    "keeper.commit.before_manifest",
    "store.commit.before_manifest",
    "store.commit.before_last_look",
    "keeper.commit.after_manifest",
)
"""The keeper dies between the last index and the manifest, and right after it."""

IN_ELECTION = (
    "keeper.read.before_list",
    "keeper.restore.before_check",
    "keeper.branch.before_write",
    "store.branch.before_create",
    "keeper.branch.after_write",
)
"""The keeper dies while the ranks wait for what they shall load."""

IN_KEEPER = ("keeper.cut.before_take", "keeper.digest.before_write", "keeper.retain.before_plan")
"""The keeper dies at its other work."""

IN_AGENT = (
    "agent.workers.before_start",
    "agent.workers.after_start",
    "store.claim.before_create",
    "store.owner.before_put",
    "store.history.before_create",
    "agent.decision.after_write",
    "agent.claim.after_write",
    "agent.late.after_write",
    "agent.result.before_write",
)
"""The agent dies, and the job is started again."""

ONCE_A_FAILURE = ("agent.late.after_write", "agent.result.before_write")
"""Of those, what an agent passes once for each failure, and never without one."""

IN_DISK = ("store.local.before_link", "store.local.before_fsync")
"""Whoever comes first in touching the disk so often dies: the keeper, or the agent."""


def moments(
    seed: int, world: int, *, count: int = 3, loader: bool = True, nodes: int = 1
) -> list[Fault]:
    """``count`` deaths of one run: a rank in a snapshot, the keeper in a persist or commit,
    somebody in a restore, somebody at other work, then more of any kind.

    At most one rank dies in a restore: three attempts in a row that restore nothing new end a
    job by rule. With several nodes no agent dies: its node is then lost, which is another test's.
    """
    rng = random.Random(f"moments/{seed}")
    at_other_work = IN_KEEPER + (IN_AGENT + IN_DISK if nodes == 1 else ())
    faults = [
        _of(rng, IN_SNAPSHOT, world),
        _of(rng, IN_PERSIST + IN_COMMIT, world),
        _in_restore(rng, seed, world, loader),
        _of(rng, at_other_work[seed % len(at_other_work) :][:1], world),
    ]
    chosen = {fault.point: fault for fault in faults[:count]}
    rest = [IN_SNAPSHOT, IN_PERSIST, IN_COMMIT, IN_ELECTION, at_other_work]
    while len(chosen) < count:
        fault = _of(rng, rng.choice(rest), world)
        chosen.setdefault(fault.point, fault)
    return list(chosen.values())


def with_marks(faults: Sequence[Fault], folder: Path) -> str:
    """The value of ``EVERSTEP_FAULTS``: each fault goes off once in the whole run and leaves the
    file of :func:`mark`."""
    told = [
        msgspec.structs.replace(fault, once=str(mark(folder, number)))
        for number, fault in enumerate(faults)
    ]
    return msgspec.json.encode(told).decode()


def mark(folder: Path, number: int) -> Path:
    """The file whose existence says that this fault went off."""
    return folder / f"went-off-{number}"


def _in_restore(rng: random.Random, seed: int, world: int, loader: bool) -> Fault:
    points = (*IN_RESTORE, *IN_ELECTION, *((AT_LOADER,) if loader else ()))
    point = points[seed % len(points)]
    # A keeper passes these once an attempt, the first of which finds nothing to restore.
    passes = 0 if point not in IN_ELECTION or point == "keeper.restore.before_check" else 1
    return Fault(point, "kill", passes, None if point in IN_ELECTION else rng.randrange(world))


def _of(rng: random.Random, points: Sequence[str], world: int) -> Fault:
    point = rng.choice(points)
    if point in IN_SNAPSHOT:
        return Fault(point, "kill", rng.randint(1, 3), rng.randrange(world))
    most = 12 if point in IN_DISK else 1 if point in IN_AGENT + IN_ELECTION else 3
    return Fault(point, "kill", 0 if point in ONCE_A_FAILURE else rng.randint(0, most))
