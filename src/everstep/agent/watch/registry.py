"""The sources of a node.

Owns: the list of them. Never does: threads. Called by: the agent, before it makes a
:class:`~everstep.agent.watch.node.NodeWatch`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.agent.watch.cgroup import Cgroup
from everstep.agent.watch.disk import SHM, Disk
from everstep.agent.watch.kernel import kernel
from everstep.agent.watch.mounts import Mounts
from everstep.agent.watch.notices import notice_file, slurm_end
from everstep.agent.watch.source import Source
from everstep.agent.watch.wallclock import WallClock
from everstep.core.clock import Clock, SystemClock
from everstep.core.settings import Settings


@dataclass(frozen=True)
class Around:
    """What sources are made from. ``paths`` are the folders that the job depends on: what each is
    to the job, and where it is; :func:`paths_of` gives the usual ones."""

    settings: Settings
    paths: tuple[tuple[str, Path], ...]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    clock: Clock = field(default_factory=SystemClock)


MAKERS: tuple[Callable[[Around], Iterable[Source | None]], ...] = (
    lambda around: [kernel(around.settings.kernel_log, around.clock)],
    lambda around: [Cgroup(around.clock)],
    lambda around: [Disk(what, path) for what, path in around.paths],
    lambda around: [Mounts(around.paths, around.clock)],
    lambda around: [WallClock(around.clock)],
    lambda around: [notice_file(around.settings.termination_notice)],
    lambda around: [slurm_end(around.environment, around.clock)],
)
"""A line for each file; one that does not apply on this node gives None or nothing."""


def sources(around: Around) -> list[Source]:
    """Every source of this node. Nothing is opened or asked before the first look."""
    return [source for make in MAKERS for source in make(around) if source is not None]


def paths_of(store: Path | None, state_dir: Path) -> tuple[tuple[str, Path], ...]:
    """The folders that every job depends on; ``store`` is None where it is on no file system."""
    paths = [
        ("the temporary folder", Path(tempfile.gettempdir())),
        ("shared memory", SHM),
        ("the state folder", state_dir),
    ]
    return (*([("the store", store)] if store is not None else ()), *paths)
