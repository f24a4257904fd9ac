"""Thousands of ranks: the time to judge grows with what is told, not with ranks times facts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest
from classify_scenes import closed, stack, tb, watchdog

from everstep.faults.catalog import load
from everstep.faults.judge import judge
from everstep.faults.records import Incident, Signal, Verdict

EACH = 8
"""Ranks of a node."""
STEPS = "\n".join(f"step {step} loss 2.{step} lr 3e-4 tok/s 11203" for step in range(1000, 1016))
WAITS = stack("all_reduce (torch/distributed/distributed_c10d.py:2501)", "step (/app/train.py:91)")


def node(rank: int) -> str:
    return f"n{rank // EACH:03d}"


def ended(rank: int, code: int) -> Iterator[Signal]:
    yield Signal("exit", f"pid {10_000 + rank}: ended", rank, node(rank), 101.0, exit_code=code)
    beat = "step=1015 phase=all_reduce last_beat_age_s=61.2 process=dead"
    yield Signal("heartbeat", beat, rank, node(rank), 101.5)


def waiting(rank: int) -> Iterator[Signal]:
    text = f"{STEPS}\n{watchdog(rank, 55, 58, 54)}"
    yield Signal("log", text, rank, node(rank), 100.0 + rank / 1000)
    yield from ended(rank, -6)


def raising(rank: int) -> Iterator[Signal]:
    yield Signal(
        "log", f"{STEPS}\n{tb(f'ValueError: sample {rank} of pid {rank}')}", rank, node(rank), 100.0
    )
    yield from ended(rank, 1)


def naming(rank: int) -> Iterator[Signal]:
    yield Signal("log", f"{STEPS}\n{closed('10.0.0.3')}", rank, node(rank), 100.0)
    yield from ended(rank, -6)


def falling(rank: int) -> Iterator[Signal]:
    pci = f"0000:{rank % EACH + 16:02x}:00"
    yield Signal("gpu", f"rank {rank}: GPU {pci}.0", None, node(rank), 0.0)
    yield Signal(
        "kernel",
        f"NVRM: Xid (PCI:{pci}): 79, pid={10_000 + rank}, GPU has fallen off the bus.",
        None,
        node(rank),
        99.0,
    )
    yield from ended(rank, -6)


def standing(rank: int) -> Iterator[Signal]:
    apart = stack("get (queue.py:171)", "next_batch (/app/data.py:7)")
    yield Signal("stack", apart if rank == 77 else WAITS, rank, node(rank), 101.0)
    yield Signal("log", STEPS, rank, node(rank), 100.0)


KINDS: tuple[tuple[Callable[[int], Iterator[Signal]], str, tuple[int, ...]], ...] = (
    (waiting, "UNKNOWN_ROOT", ()), (raising, "USER_EXCEPTION", ()),
    (naming, "NCCL_REMOTE_ERROR", ()), (falling, "XID_79", ()), (standing, "HANG_APP", (77,)),
)  # fmt: skip


def judged(signals: Callable[[int], Iterator[Signal]], world: int) -> tuple[Verdict, float]:
    nodes = {node(rank): tuple(range(rank, rank + EACH)) for rank in range(0, world, EACH)}
    incident = Incident("x", tuple(s for rank in range(world) for s in signals(rank)), nodes)
    gc.disable()  # a pass over all that other tests left is no work of the judge
    try:
        began = time.thread_time()
        verdict = judge(incident, load())
        return verdict, time.thread_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize(("signals", "fault", "ranks"), KINDS, ids=[k[0].__name__ for k in KINDS])
def test_four_times_the_ranks_take_no_sixteen_times_as_long(
    signals: Callable[[int], Iterator[Signal]], fault: str, ranks: tuple[int, ...]
) -> None:
    load()
    few = min(judged(signals, 128)[1] for _ in range(2))
    verdict, many = min((judged(signals, 512) for _ in range(2)), key=lambda one: one[1])
    assert (verdict.fault, verdict.root_ranks) == (fault, ranks)
    assert many < 10 * max(few, 0.004), (few, many)


@pytest.mark.soak
@pytest.mark.parametrize(("signals", "fault", "ranks"), KINDS, ids=[k[0].__name__ for k in KINDS])
def test_a_job_of_4096_ranks_is_judged_within_what_a_step_is_held(
    signals: Callable[[int], Iterator[Signal]], fault: str, ranks: tuple[int, ...]
) -> None:
    load()
    verdict, took = judged(signals, 4096)
    assert (verdict.fault, verdict.root_ranks) == (fault, ranks)
    assert took < 2.0
