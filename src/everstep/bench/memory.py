"""``everstep bench memory``: what everstep adds to a job's memory, and what saves leave behind.

Owns: both measurements and their allowance. Called by: :mod:`everstep.bench.main`, soak tests
(:func:`added` and :func:`leaked` are made to be called by them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from everstep.bench import processes
from everstep.bench.child import Child
from everstep.bench.figures import spread
from everstep.bench.footprint import Footprint, Peak, at_rest, leaks
from everstep.bench.machine import read_machine, require_disk, require_memory
from everstep.bench.result import Figure, Goal, Result, report
from everstep.bench.rounds import Job, Method
from everstep.bench.scratch import scratch
from everstep.errors import UsageError

SLOTS = 2
SHARE_OF_STATE, FIXED = 0.15, 64_000_000
WARM_SAVES = 20
"""Saves before the first look: both slots, all threads and the allocators' pools are there."""
SIZE_SAVES = 5
SIZE_STEPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class MemorySetup:
    """``state_bytes``: of the job whose memory is compared. ``saves`` of ``leak_bytes`` each must
    leak nothing; every one of them stays on the disk until the end."""

    state_bytes: int = 500_000_000
    saves: int = 200
    leak_bytes: int = 16_000_000
    folder: Path = Path()

    def __post_init__(self) -> None:
        if min(self.state_bytes, self.leak_bytes) < 1 or self.saves <= WARM_SAVES:
            raise UsageError(
                f"`bench memory` needs sizes of at least 1 and --saves > {WARM_SAVES}."
            )


class Added(msgspec.Struct, frozen=True):
    """Bytes. ``alone``: PSS of the training without everstep; ``peak`` of worker and keeper while
    it saves; ``settled`` after the last save."""

    state: int
    alone: int
    peak: int
    settled: int

    @property
    def growth(self) -> int:
        return self.peak - self.alone

    @property
    def allowance(self) -> float:
        """Two slots, 15 % of the state, 64 MB."""
        return SLOTS * self.state + SHARE_OF_STATE * self.state + FIXED


class Leaked(msgspec.Struct, frozen=True):
    """Footprints of worker and keeper after the warm-up and after all ``saves``."""

    saves: int
    before: Footprint
    after: Footprint

    @property
    def found(self) -> list[str]:
        """What grew, as sentences; empty where nothing leaks."""
        return leaks(self.before, self.after)


def measure(setup: MemorySetup, say: Say) -> Result:
    """Both measurements. Raises :class:`~everstep.errors.BenchError` where a save fails."""
    with scratch(setup.folder) as folder:
        machine = read_machine(setup.folder.resolve())
        size = added(setup, folder)
        say(f"{setup.state_bytes / 1e6:.0f} MB of state: {size.growth / 1e6:.0f} MB added")
        leak = leaked(setup, folder)
        say(f"{leak.saves} saves: {'; '.join(leak.found) or 'nothing leaked'}")
    parameters: dict[str, float | int | str] = {
        "state MB": round(size.state / 1e6), "saves": setup.saves,
        "state MB of the saves": round(setup.leak_bytes / 1e6),
    }  # fmt: skip
    return Result(
        "memory", machine, parameters, tuple(_rows(size, leak)), report(goals(size, leak)),
        _notes(leak), _raw(size, leak),
    )  # fmt: skip


def added(setup: MemorySetup, folder: Path) -> Added:
    """Peak PSS of a job under everstep and of the same job without, in ``folder``."""
    require_memory(5 * setup.state_bytes)
    require_disk(folder, (SIZE_SAVES + 2) * setup.state_bytes)
    with processes.marked() as mark, _child("none", setup, folder / "alone", mark) as child:
        child.ask("open")
        state = child.ask("train", SIZE_STEPS).state_bytes
        with Peak(mark) as peak:
            child.ask("saves", SIZE_SAVES)
        alone = max(peak.bytes, child.footprint().pss)
    with processes.marked() as mark, _child("everstep", setup, folder / "size", mark) as child:
        child.ask("open")
        child.ask("train", SIZE_STEPS)
        with Peak(mark) as peak:
            child.ask("saves", SIZE_SAVES)
        settled = at_rest(child.footprint).pss
        child.ask("close")
    return Added(state, alone, max(peak.bytes, settled), settled)


def leaked(setup: MemorySetup, folder: Path) -> Leaked:
    """Footprint before and after ``setup.saves`` saves of one job, in ``folder``."""
    require_disk(folder, (setup.saves + 2) * setup.leak_bytes)
    small = replace(setup, state_bytes=setup.leak_bytes)
    with processes.marked() as mark, _child("everstep", small, folder / "leak", mark) as child:
        child.ask("open")
        child.ask("saves", WARM_SAVES)
        before = at_rest(child.footprint)
        child.ask("saves", setup.saves - WARM_SAVES, timeout=3600.0)
        after = at_rest(child.footprint)
        child.ask("close")
    return Leaked(setup.saves, before, after)


def _child(method: Method, setup: MemorySetup, folder: Path, mark: str) -> Child:
    folder.mkdir()
    return Child(Job(method, str(folder), setup.state_bytes, 0.2, 8, 1), mark)


# -- figures


def goals(size: Added, leak: Leaked) -> list[Goal]:
    """What is wanted, and what was measured (MB, and the number of things that grew)."""
    wanted = "two slots + 15 % of the state + 64 MB"
    return [
        Goal(f"at most {wanted}, in MB", size.growth / 1e6, size.allowance / 1e6),
        Goal(f"{leak.saves} saves leak nothing", float(len(leak.found)), 0.0),
    ]


def _rows(size: Added, leak: Leaked) -> list[Figure]:
    growth = spread([float(size.growth)])
    ratio = spread([size.growth / size.allowance])
    settled = spread([float(size.settled - size.alone)])
    rows = [
        Figure("training alone", "PSS", "bytes", spread([float(size.alone)])),
        Figure("everstep", "peak PSS added", "bytes", growth, "allowance", size.allowance, ratio),
        Figure("everstep", "PSS added, settled", "bytes", settled),
    ]
    before, after = leak.before, leak.after
    return [
        *rows,
        Figure("everstep", f"anonymous memory after {leak.saves} saves", "bytes",
               spread([float(after.anonymous)]), f"after {WARM_SAVES}", float(before.anonymous)),
        _count("file descriptors", before.fds, after.fds),
        _count("mappings", before.mappings, after.mappings),
        _count("threads", before.threads, after.threads),
    ]  # fmt: skip


def _count(what: str, before: int, after: int) -> Figure:
    value = spread([float(after)])
    return Figure("everstep", what, "count", value, f"after {WARM_SAVES}", float(before))


def _notes(leak: Leaked) -> tuple[str, ...]:
    return (
        "PSS: of the worker, its keeper and their children; a page shared by n counts for 1/n",
        *(f"leak: {found}" for found in leak.found),
    )


def _raw(size: Added, leak: Leaked) -> dict[str, list[dict[str, float | None]]]:
    def numbers(record: msgspec.Struct) -> dict[str, float | None]:
        return {name: float(value) for name, value in msgspec.structs.asdict(record).items()}

    return {"added": [numbers(size)], "leak": [numbers(leak.before), numbers(leak.after)]}
