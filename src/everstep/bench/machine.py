"""Facts of the machine that stand above every table.

Owns: reading them. Called by: the benchmarks.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import everstep
from everstep.bench.result import Machine
from everstep.errors import UsageError


def read_machine(folder: Path) -> Machine:
    """The facts of this machine; ``folder`` is where the benchmark writes."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=version("torch"),
        everstep=everstep.__version__,
        folder=str(folder),
        filesystem=filesystem(folder, Path("/proc/self/mountinfo").read_text()),
        load=os.getloadavg()[0],
    )


def filesystem(folder: Path, mountinfo: str) -> str:
    """The type of the filesystem that holds ``folder``, of the text of a mountinfo file."""
    best, kind = -1, "unknown"
    place = folder.resolve()
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " "))
        # Of two mounts on one point the later one is seen.
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind


def require_disk(folder: Path, nbytes: int) -> None:
    """Raises :class:`UsageError` where ``folder`` has no room for ``nbytes``."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UsageError(
            f"{folder} has {free / 1e9:.1f} GB free; this benchmark writes up to "
            f"{nbytes / 1e9:.1f} GB there before it deletes it.",
            hint="Give another --folder, a smaller --state-mb or fewer --rounds.",
        )


def require_memory(nbytes: int) -> None:
    """Raises :class:`UsageError` where less memory than ``nbytes`` is available."""
    available = _available(Path("/proc/meminfo").read_text())
    if available < nbytes:
        raise UsageError(
            f"{available / 1e9:.1f} GB of memory is available; this benchmark needs about "
            f"{nbytes / 1e9:.1f} GB, because all methods stay loaded beside each other.",
            hint="Give a smaller --state-mb.",
        )


def _available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("every kernel since 3.14 says MemAvailable")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
