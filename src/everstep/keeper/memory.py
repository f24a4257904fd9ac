"""How much memory slots may take: told before the kernel kills for it.

Owns: the arithmetic on what the kernel says, and reading it. Called by: node, and the doctor.

Slots are shared memory: they count against the memory limit of the keeper's control group.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.errors import MemoryTooSmall

RESERVE = 64 * 1024 * 1024
"""Bytes that must stay free beside the slots."""


class Limit(NamedTuple):
    """``free`` bytes, ``total`` bytes, and whose limit it is, in words."""

    free: int
    total: int
    whose: str


def check_room(needed: int, limits: Iterable[Limit]) -> None:
    """Raise :class:`MemoryTooSmall` where ``needed`` bytes of slots do not fit into a limit."""
    for limit in limits:
        if needed + RESERVE > limit.free:
            raise MemoryTooSmall(
                f"two snapshot slots need {needed} bytes and {limit.whose} leaves {limit.free} of "
                f"{limit.total}.",
                hint="Raise the limit by the difference, or run fewer ranks on the node.",
            )


def read_limits(root: Path = Path("/")) -> list[Limit]:
    """The limits that hold for this process: the machine's memory and its control groups'."""
    found = [meminfo_limit((root / "proc/meminfo").read_text())]
    for group in _groups(_read(root / "proc/self/cgroup"), root / "sys/fs/cgroup"):
        limit = group_limit(group)
        if limit is not None:
            found.append(limit)
    return found


def meminfo_limit(text: str) -> Limit:
    """The machine's memory from the text of ``/proc/meminfo``."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    kilobytes = {name: int(value.split()[0]) for name, value in values.items() if value.split()}
    total = kilobytes["MemTotal"] * 1024
    available = kilobytes.get("MemAvailable", kilobytes.get("MemFree", 0)) * 1024
    return Limit(available, total, "the machine's memory")


def group_limit(group: Path) -> Limit | None:
    """The limit of a control group (version 2 or 1), or None where it has none."""
    for maximum, current in _FILES:
        text = _read(group / maximum).strip()
        if text.isdigit() and int(text) < 1 << 62:
            used = int(_read(group / current).strip() or 0)
            free = int(text) - used + _reclaimable(_read(group / "memory.stat"))
            return Limit(max(0, free), int(text), f"the memory limit of {group}")
    return None


_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _reclaimable(stat: str) -> int:
    """File pages that the kernel drops before it kills; shared memory is not among them."""
    values = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _groups(text: str, mount: Path) -> list[Path]:
    """The process's control groups that may limit memory, up to the root of each hierarchy."""
    found = []
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if number == "0" or "memory" in controllers.split(","):
            base = mount if number == "0" else mount / "memory"
            steps = [part for part in path.split("/") if part and part != ".."]
            found += [base.joinpath(*steps[:n]) for n in range(len(steps), -1, -1)]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
