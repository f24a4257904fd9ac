"""``everstep bench recover``: a worker is killed; how long until training goes on?

Owns: the pairs of runs, the moment of the kill, the table's rows. Never does: anything while a
phase is measured but wait for a descriptor. Called by: :mod:`everstep.bench.main`, tests.

Both launchers run the same script (:mod:`everstep.bench.recover_job`) and make checkpoints at the
same cadence: torchrun every N steps, everstep in the seconds that this took torchrun, with the
snapshots in between that it takes by itself. Kills are spread evenly over the time between two
saves, the same place for both systems of a pair, in turn on both ranks; the order within pairs
alternates. The floor of each pair is what two fresh processes at once take to import torch and
build the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from everstep.bench import figures, processes
from everstep.bench.figures import spread
from everstep.bench.machine import read_machine
from everstep.bench.marks import Mark
from everstep.bench.phases import (
    PHASES,
    Recovery,
    everstep_detected,
    recovery,
    torchrun_detected,
)
from everstep.bench.result import Figure, Goal, Result, report
from everstep.bench.scratch import scratch
from everstep.bench.watch import WatchedJob
from everstep.core.events import Event, decode_line
from everstep.core.settings import variable
from everstep.errors import BenchError, UsageError

System = Literal["everstep", "torchrun"]
SYSTEMS: tuple[System, System] = ("torchrun", "everstep")
WORLD = 2
PEER_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun keeps one store for all restarts by default, in which restarted gloo workers find the
addresses of dead ones and connect to them until a timeout. A store of each restart avoids that."""
TIMEOUT = 120.0
"""Seconds for anything that is waited for."""

FASTER_THAN_TORCHRUN, ABOVE_FLOOR = 0.9, 0.3

Say = Callable[[str], None]


@dataclass(frozen=True)
class RecoverSetup:
    """``pairs`` of runs. ``every``: steps between saves of both. ``width``, ``layers``, ``batch``:
    of the GPT. ``folder``: where stores and checkpoints are written."""

    pairs: int = 5
    every: int = 20
    width: int = 128
    layers: int = 2
    batch: int = 16
    folder: Path = Path()

    def __post_init__(self) -> None:
        if min(self.pairs, self.every, self.width, self.layers, self.batch) < 1:
            raise UsageError("every number of `bench recover` must be at least 1.")


@dataclass(frozen=True)
class Pair:
    """One round: both systems and the floor."""

    everstep: Recovery
    torchrun: Recovery
    floor: float


def measure(setup: RecoverSetup, say: Say) -> Result:
    """Run all pairs; ``say`` is told of progress. Raises :class:`BenchError` where a run fails."""
    with scratch(setup.folder) as folder:
        machine = read_machine(setup.folder.resolve())
        pairs = _pairs(setup, folder, say)
    parameters: dict[str, float | int | str] = {
        "pairs": setup.pairs, "ranks": WORLD, "save every": f"{setup.every} steps",
        "width": setup.width, "layers": setup.layers, "batch": setup.batch,
    }  # fmt: skip
    return Result(
        "recover", machine, parameters, tuple(_rows(pairs)), report(goals(pairs)), _NOTES,
        _samples(pairs),
    )  # fmt: skip


# -- one pair


def _pairs(setup: RecoverSetup, folder: Path, say: Say) -> list[Pair]:
    pairs: list[Pair] = []
    for index in range(setup.pairs):
        # torchrun begins the first pair, so that its cadence is known.
        seconds = pairs[-1].torchrun.between_saves if pairs else 0.0
        pairs.append(_pair(setup, index, seconds, folder, say))
    return pairs


def _pair(setup: RecoverSetup, index: int, seconds: float, folder: Path, say: Say) -> Pair:
    place = figures.spaced(setup.pairs)[index]
    order = SYSTEMS if index % 2 == 0 else SYSTEMS[::-1]
    floor = _floor(setup, folder / f"{index}-floor")
    say(f"pair {index + 1}/{setup.pairs}: floor {floor:.2f} s")
    done: dict[System, Recovery] = {}
    for system in order:
        one = one_recovery(setup, system, index, place, folder / f"{index}-{system}", seconds)
        done[system] = one
        seconds = one.between_saves if system == "torchrun" else seconds
        say(f"  {system:<8} {one.total:.2f} s to the first step, {one.repeated} steps repeated")
    return Pair(done["everstep"], done["torchrun"], floor)


def one_recovery(
    setup: RecoverSetup, system: System, index: int, place: float, folder: Path, seconds: float
) -> Recovery:
    """One run of ``system`` in ``folder`` (made here), killed at ``place`` (0 to 1) of the time
    between two saves, which are ``seconds`` for everstep; ``index`` chooses the rank. Raises
    :class:`BenchError`."""
    folder.mkdir()
    (folder / "saves").mkdir()
    victim = 1 - index % 2
    with (
        processes.marked() as mark,
        WatchedJob(
            system,
            _command(setup, system, folder),
            folder,
            _environment(system, folder, seconds),
            mark,
        ) as job,
    ):
        job.wait_until(lambda: _all_reached(job.marks, 3 * setup.every), "third save", TIMEOUT)
        between = _interval(job.marks, setup.every)
        job.wait_for_seconds(place * (between if system == "torchrun" else seconds))
        pids = {mark.rank: mark.pid for mark in job.of("began")}
        killed = processes.kill(pids[victim], mark)
        job.wait_until(lambda: _caught_up(job.marks, pids, killed), "step after the kill", TIMEOUT)
        old, new = _split(job.marks, pids)
        gone = max(job.ended.get(pid, killed) for pid in pids.values())
        detected = (
            everstep_detected(_events(folder / "events"), pids[victim])
            if system == "everstep"
            else torchrun_detected(job.said, killed)
        )
        found = recovery(
            killed=killed, detected=detected, survivors_gone=gone, old=old, new=new, world=WORLD
        )
        return msgspec.structs.replace(found, between_saves=between)


def _floor(setup: RecoverSetup, folder: Path) -> float:
    """Seconds in which two fresh processes at once import torch and build the model."""
    folder.mkdir()
    script = _script(setup, "none", folder)
    # One parent starts both, so that neither waits for this process.
    both = (
        "import subprocess, sys\n"
        f"a, b = [subprocess.Popen({script!r}) for _ in range({WORLD})]\n"
        "sys.exit(a.wait() or b.wait())\n"
    )
    command = [sys.executable, "-c", both]
    with processes.marked() as mark, WatchedJob("floor", command, folder, {}, mark) as job:
        job.wait_until(lambda: len(job.of("built")) == WORLD, "built model", TIMEOUT)
        began = min(mark.at for mark in job.of("began"))
        return max(mark.at for mark in job.of("built")) - began


def _command(setup: RecoverSetup, system: System, folder: Path) -> list[str]:
    processes_per_node = ["--nproc-per-node", str(WORLD), "-m"]
    if system == "everstep":
        script = _script(setup, "everstep", folder)[2:]
        return [sys.executable, "-m", "everstep.cli", "run", *processes_per_node, *script]
    script = _script(setup, "dcp", folder)[2:]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, "--standalone", "--max-restarts", "3", *processes_per_node, *script]


def _script(setup: RecoverSetup, keep: str, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "everstep.bench.recover_job",
        "--saver", keep, "--folder", str(folder / "saves"), "--every", str(setup.every),
        "--width", str(setup.width), "--layers", str(setup.layers), "--batch", str(setup.batch),
    ]  # fmt: skip


def _environment(system: System, folder: Path, seconds: float) -> dict[str, str]:
    if system == "torchrun":
        return PEER_ENVIRONMENT
    settings = {
        "store": str(folder / "store"),
        "job": "bench",
        "events": str(folder / "events"),
        "state_dir": str(folder / "state"),
        "checkpoint_every": f"{seconds:.3f}",
    }
    return {variable(name): value for name, value in settings.items()}


# -- what the marks say


def _all_reached(marks: list[Mark], step: int) -> bool:
    return {m.rank for m in marks if m.name == "step" and m.step == step} == set(range(WORLD))


def _interval(marks: list[Mark], every: int) -> float:
    """Seconds between the last two saves, on rank 0."""
    at = {m.step: m.at for m in marks if m.name == "step" and m.rank == 0}
    return at[3 * every] - at[2 * every]


def _split(marks: list[Mark], pids: dict[int, int]) -> tuple[list[Mark], list[Mark]]:
    old = set(pids.values())
    return [m for m in marks if m.pid in old], [m for m in marks if m.pid not in old]


def _caught_up(marks: list[Mark], pids: dict[int, int], killed: float) -> bool:
    old, new = _split(marks, pids)
    reached = max(m.step for m in old if m.name == "step" and m.at <= killed)
    return {m.rank for m in new if m.name == "step" and m.step > reached} == set(range(WORLD))


def _events(journal: Path) -> list[Event]:
    if not journal.exists():
        raise BenchError(f"the job wrote no journal at {journal}: EVERSTEP_EVENTS was not obeyed.")
    whole, _, _ = journal.read_bytes().rpartition(b"\n")  # the last line may still be written
    return [decode_line(line) for line in whole.splitlines()]


# -- figures

_NOTES = (
    "first step: kill to the end of the slowest rank's first step; phases end when the last rank "
    "has passed them and sum to it",
    "caught up: kill to the first step that had not been done before",
    "floor: two fresh processes at once, from their start to torch imported and the model built",
    "torchrun's detect is the arrival of its first log line about the failure; where there is none "
    "it is part of stop",
    "torchrun has a store of its own for each restart (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1); with "
    "its default, restarted workers may wait for the addresses of dead ones until a timeout",
    "steps repeated: the means over kills spread evenly over the time between two saves decide",
    "both make checkpoints equally often; everstep takes snapshots in memory in between, as many "
    "as its default allows (1 % of training time)",
)


def goals(pairs: list[Pair]) -> list[Goal]:
    """What is wanted of the pairs, and what was measured."""
    ours, theirs = [p.everstep.total for p in pairs], [p.torchrun.total for p in pairs]
    ratio = spread(figures.paired_ratios(ours, theirs)).median
    above = spread(figures.paired_differences(ours, [p.floor for p in pairs])).median
    repeated = sum(p.everstep.repeated for p in pairs) / len(pairs)
    peer = sum(p.torchrun.repeated for p in pairs) / len(pairs)
    return [
        Goal("first step in at most 0.9 of torchrun's time", ratio, FASTER_THAN_TORCHRUN),
        Goal("at most 0.3 s above the floor", above, ABOVE_FLOOR),
        Goal(f"fewer steps repeated than torchrun's {peer:g}", repeated, peer, strict=True),
    ]


def _rows(pairs: list[Pair]) -> list[Figure]:
    ours, theirs = [p.everstep for p in pairs], [p.torchrun for p in pairs]
    rows = [*against_floor("everstep", ours, pairs), *against_floor("torchrun", theirs, pairs)]
    rows.append(_beside("first step", [r.total for r in ours], [r.total for r in theirs]))
    rows += [row for phase in PHASES if (row := _phase(phase, ours, theirs)) is not None]
    rows.append(_beside("caught up", [r.caught_up for r in ours], [r.caught_up for r in theirs]))
    repeated = [float(r.repeated) for r in ours]
    peers = spread([float(r.repeated) for r in theirs]).median
    rows.append(
        Figure("everstep", "steps repeated", "steps", spread(repeated), "torchrun", peers, None)
    )
    return rows


def against_floor(of: str, runs: list[Recovery], pairs: list[Pair]) -> list[Figure]:
    """The rows of one system beside the floor of its pairs."""
    totals, floors = [run.total for run in runs], [pair.floor for pair in pairs]
    floor = spread(floors).median
    ratio = spread(figures.paired_ratios(totals, floors))
    above = spread(figures.paired_differences(totals, floors))
    return [
        Figure(of, "first step", "s", spread(totals), "floor", floor, ratio),
        Figure(of, "above the floor", "s", above),
    ]


def _beside(what: str, ours: list[float], theirs: list[float]) -> Figure:
    ratio = spread(figures.paired_ratios(ours, theirs))
    return Figure("everstep", what, "s", spread(ours), "torchrun", spread(theirs).median, ratio)


def _phase(phase: str, ours: list[Recovery], theirs: list[Recovery]) -> Figure | None:
    mine = [run.phases[phase] for run in ours if phase in run.phases]
    if not mine:
        return None
    peers = [run.phases[phase] for run in theirs if phase in run.phases]
    beside = spread(peers).median if peers else None
    return Figure("everstep", f"  {phase}", "s", spread(mine), "torchrun", beside)


def _samples(pairs: list[Pair]) -> dict[str, list[dict[str, float | None]]]:
    return {
        "everstep": [_sample(pair.everstep) for pair in pairs],
        "torchrun": [_sample(pair.torchrun) for pair in pairs],
        "floor": [{"total": pair.floor} for pair in pairs],
    }


def _sample(run: Recovery) -> dict[str, float | None]:
    whole: dict[str, float | None] = {
        "total": run.total, "caught_up": run.caught_up, "repeated": float(run.repeated),
        "between_saves": run.between_saves,
    }  # fmt: skip
    return whole | {phase: run.phases.get(phase) for phase in PHASES}
