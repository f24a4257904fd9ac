"""R4 for the data position: a resumed run's batches and RNG streams equal an undisturbed one's.

Each case is run undisturbed, recording per step the batch and one draw of each stream of the
process, then stopped at many steps and continued with new objects and scrambled streams.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from everstep.state import rng
from everstep.state.encode import decode, encode
from everstep.train.data import DataFeed


class Numbers(Dataset[Any]):
    """Item i and, where ``noisy``, draws of every stream of the process it is fetched in."""

    def __init__(self, size: int = 10, noisy: bool = True) -> None:
        self.size = size
        self.noisy = noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not self.noisy:
            return index, 0.0, 0.0, 0.0
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class Stream(IterableDataset[Any]):
    """A shuffle buffer, shared out among the workers, with noise."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = range(self.size)
        mine = mine if worker is None else mine[worker.id :: worker.num_workers]
        order = torch.randperm(len(mine)).tolist()
        for number in order:
            yield mine[number], torch.rand(()).item(), random.random(), np.random.rand()


class _QuietStream(Stream):
    """The same without randomness."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        yield from range(self.size)[worker.id :: worker.num_workers]


class StreamWithState(IterableDataset[int]):
    """Its iterators keep their own position, as torchdata asks for; workers end unevenly."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return _Walk(range(17) if worker is None else range(17)[worker.id :: worker.num_workers])


class _Walk:
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class WithOwnRandomness(Dataset[Any]):
    """Augments from a generator of its own, which lives in this process."""

    def __init__(self) -> None:
        self.bits = np.random.default_rng(9)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return index, self.bits.random()


class Epochal(Dataset[Any]):
    """Knows its epoch; a persistent worker's copy stays at the one it was born in."""

    epoch = -1

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class OwnIteration(DataLoader[Any]):
    """A DataLoader that iterates in its own way."""

    def __iter__(self) -> Any:
        yield from enumerate(super().__iter__())


class LazySampler:
    """Draws from a generator of its own kind while it goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rng = random.Random(5)
        self.bits = np.random.default_rng(6)
        self.legacy = np.random.RandomState(7)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            one, two = self.rng.randrange(self.size), int(self.bits.integers(self.size))
            self.legacy.randn()
            yield (one + two + self.legacy.randint(self.size)) % self.size


class Renewable:
    """A user's own loader: shuffled at each epoch from the process's stream."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        for number in order:
            yield self.epoch, number, torch.rand(()).item()


class ByNumber:
    """A numbered iterable: no ``__iter__``."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return number, torch.rand(()).item()


class WithState:
    """A user's loader that keeps its own position, duck-typed."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.at = 0
        self.resumed = False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.order, self.at = torch.randperm(4).tolist(), 0
        self.resumed = False
        while self.at < 4:
            self.at += 1
            yield self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.resumed = state["order"], state["at"], True


def _generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _with_shared_generator(workers: int) -> DataLoader[Any]:
    shared = _generator()
    data = Numbers()
    sampler = RandomSampler(data, generator=shared)
    return DataLoader(data, 3, sampler=sampler, generator=shared, num_workers=workers)


def _with_replacement(workers: int) -> DataLoader[Any]:
    data = Numbers()
    sampler = RandomSampler(data, replacement=True, num_samples=70, generator=_generator())
    return DataLoader(data, 20, sampler=sampler, num_workers=workers)


def _distributed(workers: int) -> DataLoader[Any]:
    data = Numbers(20)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=4)
    return DataLoader(data, 3, sampler=sampler, num_workers=workers)


def _batch_sampler(workers: int) -> DataLoader[Any]:
    data = Numbers()
    weights = torch.arange(1.0, 11.0).tolist()
    sampler = WeightedRandomSampler(weights, 9)
    batches = BatchSampler(sampler, 2, drop_last=True)
    return DataLoader(data, batch_sampler=batches, num_workers=workers)


def _stateful(workers: int, dataset: Any, **options: Any) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, 3, num_workers=workers, **options)


def _quiet(size: int = 10) -> Numbers:
    return Numbers(size, noisy=False)


@dataclass(frozen=True)
class Case:
    """A kind of loader, how to make it anew, and what the feed is told."""

    name: str
    make: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def _cases() -> list[Case]:
    cases = [
        Case("list", lambda: [torch.ones(2) * number for number in range(4)]),
        Case("numbered", ByNumber),
        Case("renewable", Renewable),
        Case("with_state", WithState),
        Case("dataset_rng", lambda: DataLoader(WithOwnRandomness(), 2, shuffle=True)),
    ]
    for workers in (0, 2):
        options: dict[str, Any] = {"num_workers": workers}
        makers: dict[str, Callable[..., Any]] = {
            "sequential": lambda o: DataLoader(Numbers(), 3, **o),
            "shuffle": lambda o: DataLoader(Numbers(), 3, shuffle=True, drop_last=True, **o),
            "loader_generator": lambda o: DataLoader(
                Numbers(9), 3, shuffle=True, generator=_generator(), **o
            ),
            "shared_generator": lambda o: _with_shared_generator(o["num_workers"]),
            "replacement": lambda o: _with_replacement(o["num_workers"]),
            "distributed": lambda o: _distributed(o["num_workers"]),
            "batch_sampler": lambda o: _batch_sampler(o["num_workers"]),
            "lazy_sampler": lambda o: DataLoader(Numbers(), 3, sampler=LazySampler(10), **o),
            "unbatched": lambda o: DataLoader(Numbers(4), batch_size=None, shuffle=True, **o),
            "stream": lambda o: DataLoader(Stream(), 3, **o),
            "own_iteration": lambda o: OwnIteration(Numbers(), 3, shuffle=True, **o),
        }
        for name, make in makers.items():
            cases.append(Case(f"{name}-{workers}", lambda m=make, o=options: m(o)))
    return cases + _cases_of_torchdata() + _cases_of_persistent_workers()


def _cases_of_torchdata() -> list[Case]:
    cases = []
    for workers in (0, 2):
        dataset: Any = _quiet if workers else Numbers
        told = {"deterministic_dataset": True}
        cases += [
            Case(
                f"torchdata_shuffle-{workers}",
                lambda w=workers, d=dataset: _stateful(w, d(), shuffle=True),
                told,
            ),
            Case(
                f"torchdata_random_sampler-{workers}",
                lambda w=workers, d=dataset: _stateful(w, d(), sampler=RandomSampler(d())),
                told,
            ),
        ]
        cases.append(
            Case(f"torchdata_stream-{workers}", lambda w=workers: _stateful(w, StreamWithState()))
        )
    cases.append(
        Case(
            "torchdata_persistent-2",
            lambda: _stateful(
                2, _quiet(), sampler=RandomSampler(_quiet()), persistent_workers=True
            ),
            {"deterministic_dataset": True},
        )
    )
    return cases


def _cases_of_persistent_workers() -> list[Case]:
    def make(data: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(data, 3, shuffle=True, num_workers=2, persistent_workers=True)

    return [
        Case("persistent_random-2", lambda: make(Numbers())),
        Case("persistent_kept-2", lambda: make(Epochal()), {"deterministic_dataset": True}),
        Case(
            "persistent_stream-2",
            lambda: DataLoader(
                _QuietStream(), 3, num_workers=2, persistent_workers=True, generator=_generator()
            ),
            {"deterministic_dataset": True},
        ),
        Case(
            "declared_deterministic-2",
            lambda: DataLoader(_quiet(), 3, shuffle=True, num_workers=2),
            {"deterministic_dataset": True},
        ),
    ]


CASES = {case.name: case for case in _cases()}
_EVERY_KIND = {
    *("list", "numbered", "renewable", "with_state", "shuffle-0", "shuffle-2", "lazy_sampler-2"),
    *("stream-0", "stream-2", "torchdata_shuffle-0", "torchdata_stream-2", "persistent_kept-2"),
}


def _seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.tolist()
    if isinstance(batch, list | tuple):
        return [_plain(item) for item in batch]
    return batch


def _step(batches: Iterator[Any]) -> Any:
    """What a training step sees: its batch, and then one draw of each stream."""
    batch = _plain(next(batches))
    return batch, torch.rand(1).item(), random.random(), np.random.rand()


@dataclass
class Stop:
    """A boundary at which a run was left: position and streams, as a checkpoint has them (S8)."""

    data: bytes
    tensors: list[torch.Tensor]

    @classmethod
    def at(cls, feed: DataFeed) -> Stop:
        tensors: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, _path: str) -> int:
            tensors.append(tensor.clone())
            return len(tensors) - 1

        return cls(encode((feed.position(), rng.capture()), "data", keep), tensors)

    @property
    def position(self) -> dict[str, Any]:
        return self._decoded()[0]

    @property
    def streams(self) -> dict[str, Any]:
        return self._decoded()[1]

    def _decoded(self) -> tuple[dict[str, Any], dict[str, Any]]:
        both: tuple[dict[str, Any], dict[str, Any]] = decode(
            self.data, [tensor.clone() for tensor in self.tensors]
        )
        return both


def _undisturbed(case: Case, steps: int, stops: set[int]) -> tuple[list[Any], dict[int, Stop]]:
    _seed(11)
    feed = DataFeed(case.make(), **case.options)
    batches = feed.batches()
    seen, left = [], {}
    for step in range(steps + 1):
        if step in stops:
            left[step] = Stop.at(feed)
        if step < steps:
            seen.append(_step(batches))
    feed.close()
    return seen, left


def _resumed(case: Case, stop: Stop, steps: int) -> list[Any]:
    _seed(99)
    feed = DataFeed(case.make(), **case.options)
    feed.restore(stop.position)
    feed.prepare()
    rng.restore(stop.streams)
    batches = feed.batches()
    seen = [_step(batches) for _ in range(steps)]
    feed.close()
    return seen


def _two_epochs_and_two_batches(case: Case) -> tuple[list[Any], list[Stop], int]:
    """Steps seen, the stop before each and after the last, and batches per epoch."""
    _seed(11)
    feed = DataFeed(case.make(), **case.options)
    batches = feed.batches()
    seen, left, epoch = [], [Stop.at(feed)], 0
    while (feed.epoch, feed.yielded) != (2, 2):
        seen.append(_step(batches))
        left.append(Stop.at(feed))
        epoch += feed.epoch == 0
    feed.close()
    return seen, left, epoch


@pytest.mark.parametrize("name", CASES)
def test_r4_a_resume_at_any_boundary_goes_on_as_the_undisturbed_run(name: str) -> None:
    case = CASES[name]
    seen, left, epoch = _two_epochs_and_two_batches(case)
    stops = {1, epoch - 1, epoch, epoch + 2} | (set() if name.endswith("-2") else {0, 2 * epoch})
    for step in sorted(stops):
        # Into the epoch after the one resumed in.
        end = min(len(seen), step + epoch + 1)
        assert _resumed(case, left[step], end - step) == seen[step:end], f"stopped at {step}"


@pytest.mark.parametrize("name", ["shuffle-0", "shuffle-2", "stream-2", "torchdata_shuffle-2"])
def test_a_position_counts_batches_yielded_and_not_those_prefetched(name: str) -> None:
    feed = DataFeed(CASES[name].make(), **CASES[name].options)
    batches = feed.batches()
    for step in range(1, 4):
        next(batches)
        assert (feed.position()["epoch"], feed.position()["yielded"]) == (0, step)
    feed.close()


@pytest.mark.parametrize("name", sorted(_EVERY_KIND))
def test_r1_taking_a_position_draws_and_advances_nothing(name: str) -> None:
    case = CASES[name]
    seen, _ = _undisturbed(case, 6, stops=set())
    watched, _ = _undisturbed(case, 6, stops=set(range(7)))
    assert watched == seen


@pytest.mark.parametrize("name", ["shuffle-2", "stream-0", "torchdata_shuffle-0", "lazy_sampler-0"])
def test_preparing_leaves_the_streams_of_the_process_as_found(name: str) -> None:
    case = CASES[name]
    _, left = _undisturbed(case, 2, stops={2})
    _seed(55)
    expected = [torch.rand(1).item(), random.random(), np.random.rand()]
    _seed(55)
    feed = DataFeed(case.make(), **case.options)
    _seed(55)
    feed.restore(left[2].position)
    feed.prepare()
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == expected
    feed.close()


@pytest.mark.parametrize("name", sorted(_EVERY_KIND))
def test_r4_a_resumed_run_can_be_resumed_again(name: str) -> None:
    case = CASES[name]
    seen, left = _undisturbed(case, 9, stops={1})
    stop = left[1]
    for step in (1, 3, 5):
        _seed(99)
        feed = DataFeed(case.make(), **case.options)
        feed.restore(stop.position)
        feed.prepare()
        rng.restore(stop.streams)
        batches = feed.batches()
        assert [_step(batches) for _ in range(2)] == seen[step : step + 2]
        stop = Stop.at(feed)
        feed.close()
    assert _resumed(case, stop, 2) == seen[7:9]


@pytest.mark.parametrize("name", ["shuffle-2", "with_state", "numbered", "torchdata_shuffle-0"])
def test_a_restored_position_is_saved_again_unchanged_before_the_first_batch(name: str) -> None:
    """A preemption right after a restore: the next resume starts where this one did."""
    case = CASES[name]
    seen, left = _undisturbed(case, 6, stops={2})
    feed = DataFeed(case.make(), **case.options)
    feed.restore(left[2].position)
    before = copy.deepcopy(feed.position())
    feed.prepare()
    rng.restore(left[2].streams)
    again = Stop.at(feed)
    feed.close()
    assert str(before) == str(again.position)
    assert _resumed(case, again, 4) == seen[2:6]


@pytest.mark.parametrize("name", ["shuffle-0", "stream-2", "persistent_kept-2", "renewable"])
def test_a_second_loop_goes_on_where_the_first_was_left(name: str) -> None:
    case = CASES[name]
    seen, _ = _undisturbed(case, 6, stops=set())
    _seed(11)
    feed = DataFeed(case.make(), **case.options)
    first = feed.batches()
    got = [_step(first) for _ in range(2)]
    second = feed.batches()
    got += [_step(second) for _ in range(2)]
    feed.close()
    third = feed.batches()
    got += [_step(third) for _ in range(2)]
    feed.close()
    assert got == seen


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 12),
    batch=st.integers(1, 5),
    drop_last=st.booleans(),
    stop=st.integers(0, 30),
    kind=st.sampled_from(["sequential", "shuffle", "generator", "iterable", "list"]),
)
def test_r4_for_any_length_batch_size_and_stop(
    size: int, batch: int, drop_last: bool, stop: int, kind: str
) -> None:
    drop_last = drop_last and size >= batch

    def make() -> Any:
        options: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last}
        if kind == "list":
            return [list(range(first, size)[:batch]) for first in range(0, size, batch)]
        if kind == "iterable":
            return DataLoader(Stream(size), **options)
        sampler: Any = SequentialSampler(range(size))
        if kind != "sequential":
            own = _generator() if kind == "generator" else None
            sampler = RandomSampler(range(size), generator=own)
        return DataLoader(Numbers(size), sampler=sampler, **options)

    case = Case(kind, make)
    seen, left = _undisturbed(case, stop + 5, stops={stop})
    assert _resumed(case, left[stop], 5) == seen[stop:]
