"""``everstep bench save``: what one save costs a training that uses every core.

Owns: the rounds, the rows of the table. Never does: measure by itself (the training processes do).
Called by: :mod:`everstep.bench.main`, tests.

Each method has a training process of its own that lives through all rounds; one of them works at a
time, in an order that turns from round to round. A first save of each is not counted, and memory is
sampled in one more save that is not timed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.bench import figures, processes
from everstep.bench.child import Child
from everstep.bench.figures import spread
from everstep.bench.footprint import Peak
from everstep.bench.machine import read_machine, require_disk, require_memory
from everstep.bench.result import Figure, Goal, Result, Unit, report
from everstep.bench.rounds import Job, Limits, Method, Round
from everstep.bench.scratch import scratch
from everstep.errors import UsageError

PEERS: tuple[Method, ...] = ("dcp", "dcp-thread", "dcp-process", "torch-save")
NEEDED = frozenset(("dcp-thread", "torch-save"))
"""Peers that a goal names."""
WARM_STEPS = 5

BLOCKED_BY_COPY, HALF_OF_DCP, DURABLE_BY_WRITE = 1.5, 0.5, 1.6

COPIES_IN_MEMORY = 13
"""States in memory at once: one for each of 6 trainings, 2 slots, and what the peers stage."""
PROCESS_BYTES = 500 << 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class SaveSetup:
    """``rounds`` of about ``state_bytes`` of state, a share ``trained`` of it trained with
    ``batch`` samples a step on ``threads`` threads (0: all cores)."""

    rounds: int = 7
    state_bytes: int = 10**9
    trained: float = 0.2
    batch: int = 64
    threads: int = 0
    folder: Path = Path()
    peers: tuple[Method, ...] = PEERS

    @property
    def methods(self) -> tuple[Method, ...]:
        return ("limits", "everstep", *self.peers)

    def __post_init__(self) -> None:
        if min(self.rounds, self.state_bytes, self.batch) < 1 or self.threads < 0:
            raise UsageError("every number of `bench save` must be at least 1 (threads: 0).")
        if not 0 < self.trained <= 1:
            raise UsageError(f"--trained {self.trained:g} must lie in (0, 1].")
        if missing := NEEDED - set(self.peers):
            raise UsageError(f"the goals of `bench save` need the peers {sorted(missing)}.")


@dataclass
class Samples:
    """What was measured, round by round. ``peak`` is bytes of PSS over a training that saves
    nothing."""

    limits: list[Limits]
    rounds: dict[Method, list[Round]]
    peak: dict[Method, int]
    state_bytes: int = 0

    def blocked(self, of: Method) -> list[float]:
        return [one.blocked for one in self.rounds[of]]

    def drag(self, of: Method) -> list[float]:
        return [drag_of(one) for one in self.rounds[of]]

    def cost(self, of: Method) -> list[float]:
        """Blocked and drag: all that training loses."""
        return [a + b for a, b in zip(self.blocked(of), self.drag(of), strict=True)]

    def durable(self, of: Method) -> list[float]:
        return [one.durable for one in self.rounds[of]]

    def copy(self) -> list[float]:
        return [one.copy for one in self.limits]

    def write(self) -> list[float]:
        """The faster of both raw writes."""
        return [raw_write(one) for one in self.limits]


def measure(setup: SaveSetup, say: Say) -> Result:
    """Run all rounds. Raises :class:`~everstep.errors.BenchError` where a save fails, and
    :class:`UsageError` where disk or memory are too small."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(setup.folder))
        require_memory(COPIES_IN_MEMORY * setup.state_bytes + len(setup.methods) * PROCESS_BYTES)
        require_disk(folder, (setup.rounds + 6) * setup.state_bytes)
        machine = read_machine(setup.folder.resolve())
        children = {name: _child(stack, setup, name, folder) for name in setup.methods}
        samples = _measure(setup, children, say)
    parameters: dict[str, float | int | str] = {
        "rounds": setup.rounds, "state MB": round(samples.state_bytes / 1e6),
        "trained share": setup.trained, "batch": setup.batch,
        "threads": setup.threads or machine.cores,
    }  # fmt: skip
    return Result(
        "save", machine, parameters, tuple(_rows(samples)), report(goals(samples)),
        _notes(samples), _raw(samples),
    )  # fmt: skip


def drag_of(one: Round) -> float:
    """Seconds that the steps until the copy was durable took beyond undisturbed ones."""
    return figures.drag(one.during, [*one.before, *one.after])


def raw_write(limits: Limits) -> float:
    """Seconds of the faster raw write."""
    return limits.buffered if limits.direct is None else min(limits.buffered, limits.direct)


# -- measuring


def _child(stack: contextlib.ExitStack, setup: SaveSetup, name: Method, folder: Path) -> Child:
    place = folder / name
    place.mkdir()
    job = Job(name, str(place), setup.state_bytes, setup.trained, setup.batch, setup.threads)
    return stack.enter_context(Child(job, stack.enter_context(processes.marked())))


def _measure(setup: SaveSetup, children: dict[Method, Child], say: Say) -> Samples:
    samples = Samples([], {name: [] for name in setup.methods[1:]}, {})
    alone = _warm(children, samples, say)
    for number in range(setup.rounds):
        for name in figures.rotated(setup.methods, number):
            _one(children[name], name, samples)
        last = samples.rounds["everstep"][-1]
        say(
            f"round {number + 1}/{setup.rounds}: everstep blocked {last.blocked:.3f} s, "
            f"durable in {last.durable:.2f} s"
        )
    for name in samples.rounds:
        with Peak(children[name].mark) as peak:
            children[name].ask("round")
        samples.peak[name] = max(peak.bytes - alone, 0)
    for child in children.values():
        child.ask("close")
    return samples


def _warm(children: dict[Method, Child], samples: Samples, say: Say) -> int:
    """Open every method, train, save once each; PSS of the training where nothing saves."""
    alone = 0
    for name, child in children.items():
        if name == "limits":  # its copy needs the optimizer's tensors, which the first step makes
            samples.state_bytes = child.ask("train", WARM_STEPS).state_bytes
            alone = child.footprint().pss
            child.ask("open")
        else:
            child.ask("open")
            steps = child.ask("train", WARM_STEPS).steps
            say(f"{name} is ready; a step takes {min(steps) * 1e3:.0f} ms")
        child.ask("round")
    return alone


def _one(child: Child, name: Method, samples: Samples) -> None:
    os.sync()  # what the method before has left must not be written on this one's time
    answer = child.ask("round")
    if answer.limits is not None:
        samples.limits.append(answer.limits)
    elif answer.round is not None:
        samples.rounds[name].append(answer.round)


# -- figures


def goals(samples: Samples) -> list[Goal]:
    """What is wanted, and what was measured: medians of the ratios within each round."""

    def ratio(ours: list[float], theirs: list[float]) -> float:
        return spread(figures.paired_ratios(ours, theirs)).median

    blocked = ratio(samples.blocked("everstep"), samples.copy())
    thread = ratio(samples.cost("everstep"), samples.cost("dcp-thread"))
    plain = ratio(samples.cost("everstep"), samples.cost("torch-save"))
    durable = ratio(samples.durable("everstep"), samples.write())
    return [
        Goal("blocked at most 1.5 of a copy of the same tensors", blocked, BLOCKED_BY_COPY),
        Goal("blocked + drag at most 0.5 of DCP async (thread)", thread, HALF_OF_DCP),
        Goal("blocked + drag below torch.save + fsync", plain, 1.0, strict=True),
        Goal("durable within 1.6 of the raw write", durable, DURABLE_BY_WRITE),
    ]


def _rows(samples: Samples) -> list[Figure]:
    rows = [
        Figure("limit", "copy of the tensors", "s", spread(samples.copy())),
        Figure("limit", "raw write + fsync", "s", spread(samples.write())),
    ]
    for name in samples.rounds:
        blocked, cost = samples.blocked(name), samples.cost(name)
        rows.append(_beside(name, "blocked", blocked, "copy", samples.copy()))
        rows.append(Figure(name, "drag", "s", spread(samples.drag(name))))
        if name == "everstep":
            rows += [
                _beside(name, "blocked + drag", cost, peer, samples.cost(peer))
                for peer in samples.rounds
                if peer != name
            ]
        else:
            rows.append(Figure(name, "blocked + drag", "s", spread(cost)))
        rows.append(_beside(name, "durable", samples.durable(name), "raw write", samples.write()))
        peak = [float(samples.peak[name])]
        rows.append(
            _beside(name, "peak PSS added", peak, "state", [float(samples.state_bytes)], "bytes")
        )
    return rows


def _beside(
    of: Method, what: str, ours: list[float], name: str, theirs: list[float], unit: Unit = "s"
) -> Figure:
    # A cost can come out below zero where the drag is lost in noise; no ratio is made of that.
    positive = all(value > 0 for value in theirs)
    ratio = spread(figures.paired_ratios(ours, theirs)) if positive else None
    return Figure(of, what, unit, spread(ours), name, spread(theirs).median, ratio)


def _notes(samples: Samples) -> tuple[str, ...]:
    steps = [step for rounds in samples.rounds.values() for one in rounds for step in one.before]
    median = spread(steps).median
    notes = [
        f"an undisturbed step takes {median * 1e3:.0f} ms (median of all methods)",
        "drag: what the steps until the copy was durable took beyond undisturbed ones of the round",
        "raw write: the faster of buffered and O_DIRECT, each with fsync, training stopped",
        "ratios: medians of the ratios within each round; peak PSS: one more save, not timed",
    ]
    if not 0.05 <= median <= 0.15:
        notes.append(
            "the step is outside 50 to 150 ms: drag is coarse or the cores are idle; set --batch"
        )
    return tuple(notes)


def _raw(samples: Samples) -> dict[str, list[dict[str, float | None]]]:
    raw: dict[str, list[dict[str, float | None]]] = {
        name: [
            {"blocked": one.blocked, "drag": drag_of(one), "durable": one.durable,
             "step": spread([*one.before, *one.after]).median}
            for one in rounds
        ]
        for name, rounds in samples.rounds.items()
    }  # fmt: skip
    raw["limits"] = [
        {"copy": one.copy, "buffered": one.buffered, "direct": one.direct} for one in samples.limits
    ]
    return raw
