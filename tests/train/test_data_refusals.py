"""What the feed refuses, warns of and guards: the loader, its workers, and peers' defects."""

from __future__ import annotations

import copy
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from everstep.errors import InexactData, UsageError
from everstep.state import rng
from everstep.train.data import DataFeed


class Counted(Dataset[int]):
    """Counts its fetches in this process."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self.fetched = 0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Buffered(IterableDataset[int]):
    """Shuffles through a buffer, drawing as it goes, from ``draw``."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in range(12):
            buffer.append(number)
            if len(buffer) == 4:
                yield buffer.pop(self.draw(4))
        yield from buffer


def _take(feed: DataFeed, count: int) -> list[Any]:
    batches = feed.batches()
    return [_values(next(batches)) for _ in range(count)]


def _values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def _stop(make: Callable[[], Any], after: int, **options: Any) -> tuple[dict[str, Any], Any]:
    """Position and streams after some batches."""
    torch.manual_seed(1)
    random.seed(1)
    feed = DataFeed(make(), **options)
    _take(feed, after)
    left = copy.deepcopy(feed.position()), rng.capture()
    feed.close()
    return left


def _continue(feed: DataFeed, left: tuple[dict[str, Any], Any], count: int) -> list[Any]:
    feed.restore(left[0])
    feed.prepare()
    rng.restore(left[1])
    return _take(feed, count)


# ---- refused


@pytest.mark.parametrize(
    "bare",
    [
        iter([1, 2]),
        (number for number in range(3)),
        zip([1], [2], strict=True),
        iter(DataLoader([1, 2])),  # type: ignore[arg-type]
    ],
    ids=["list_iterator", "generator", "zip", "iterator of a DataLoader"],
)
def test_a_bare_iterator_is_refused_with_what_to_pass(bare: Any) -> None:
    with pytest.raises(InexactData, match=r"EVS-105.*'train'.*Pass the object it was made from"):
        DataFeed(bare, name="train")


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(UsageError, match="int, which cannot be iterated"):
        DataFeed(7)


def test_an_unknown_word_for_inexact_is_refused() -> None:
    with pytest.raises(UsageError, match='"replay" or "skip"'):
        DataFeed([1], inexact="guess")  # type: ignore[arg-type]


def test_workers_out_of_order_are_refused_and_only_warned_of_when_the_user_says_skip() -> None:
    loader = DataLoader(Counted(), 2, num_workers=2, in_order=False)
    with pytest.raises(InexactData, match="in_order=True"):
        DataFeed(loader)
    told: list[str] = []
    DataFeed(loader, inexact="skip", on_warning=told.append)
    assert "in_order=False" in told[0]


def test_persistent_workers_behind_an_own_iter_are_refused() -> None:
    class Own(DataLoader[int]):
        def __iter__(self) -> Any:
            yield from super().__iter__()

    with pytest.raises(InexactData, match="Own with its own __iter__"):
        DataFeed(Own(Counted(), 2, num_workers=2, persistent_workers=True))


@pytest.mark.parametrize("empty", [[], DataLoader(Counted(3), 4, drop_last=True)])
def test_an_epoch_without_batches_is_an_error_and_no_endless_loop(empty: Any) -> None:
    with pytest.raises(UsageError, match="yielded no batch in epoch 0"):
        _take(DataFeed(empty), 1)


def test_an_iterator_in_disguise_is_found_out_at_its_second_epoch() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = [1, 2]

        def __iter__(self) -> Once:
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop()

    with pytest.raises(UsageError, match="yielded no batch in epoch 1"):
        _take(DataFeed(Once()), 3)


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    left = _stop(lambda: [1, 2, 3], 2)
    with pytest.raises(InexactData, match=r"kind 'dataloader'.*kind 'numbered'"):
        DataFeed(DataLoader(Counted())).restore(left[0])


def test_a_position_cannot_be_restored_under_a_running_loop() -> None:
    feed = DataFeed([1, 2, 3])
    _take(feed, 1)
    with pytest.raises(UsageError, match="only before the first"):
        feed.restore(feed.position())


def test_other_generators_than_those_saved_are_refused() -> None:
    data = Counted()

    def sampled(generator: torch.Generator | None) -> DataLoader[int]:
        return DataLoader(data, 2, sampler=RandomSampler(data, generator=generator))

    left = _stop(lambda: sampled(torch.Generator()), 2)
    feed = DataFeed(sampled(None))
    feed.restore(left[0])
    with pytest.raises(InexactData, match=r"saved position has \['sampler.generator'\]"):
        feed.prepare()


# ---- data that changed


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (lambda: DataLoader(Counted(), 2), lambda: DataLoader(Counted(), 3), "other indices"),
        (lambda: DataLoader(Counted(), 2), lambda: DataLoader(Counted(4), 2), "only 2 batches"),
        (lambda: [1, 2, 3, 4], lambda: [1, 2], "only 2 batches"),
        (lambda: {1: 0, 2: 0, 3: 0}, lambda: {1: 0}, "only 1 batches"),
    ],
    ids=["batch size", "size", "list", "iterable"],
)
def test_changed_data_is_an_error_and_never_silently_repeated_or_skipped(
    before: Callable[[], Any], after: Callable[[], Any], match: str
) -> None:
    left = _stop(before, 3)
    feed = DataFeed(after())
    feed.restore(left[0])
    with pytest.raises(InexactData, match=match):
        feed.prepare()
    told: list[str] = []
    lenient = DataFeed(after(), inexact="skip", on_warning=told.append)
    assert len(_continue(lenient, left, 2)) == 2
    assert "Going on all the same" in told[0]


def test_a_sampler_entangled_with_the_training_codes_stream_is_found_out() -> None:
    """It draws lazily from the process's stream: a resume cannot give it the draws in between."""

    def make() -> DataLoader[int]:
        data = Counted(70)
        lazily = RandomSampler(
            data, replacement=True, num_samples=70, generator=torch.default_generator
        )
        return DataLoader(data, 10, sampler=lazily)

    torch.manual_seed(1)
    feed = DataFeed(make())
    for _, _batch in zip(range(5), feed.batches(), strict=False):
        torch.rand(3)
    position = feed.position()
    other = DataFeed(make())
    other.restore(position)
    with pytest.raises(InexactData, match="needs a generator of its own"):
        other.prepare()


def test_another_number_of_workers_is_refused_where_it_changes_the_data() -> None:
    left = _stop(lambda: DataLoader(Buffered(lambda n: n - 1), 2, num_workers=2), 2)
    feed = DataFeed(DataLoader(Buffered(lambda n: n - 1), 2))
    feed.restore(left[0])
    with pytest.raises(InexactData, match=r"had 2 workers and has 0 now.*num_workers=2"):
        feed.prepare()


# ---- skip, replay, progress, warnings


def test_without_workers_nothing_is_fetched_to_resume() -> None:
    left = _stop(lambda: DataLoader(Counted(), 2, shuffle=True), 3)
    data = Counted()
    feed = DataFeed(DataLoader(data, 2, shuffle=True))
    feed.restore(left[0])
    feed.prepare()
    assert data.fetched == 0


def test_with_workers_batches_are_replayed_with_progress() -> None:
    left = _stop(lambda: DataLoader(Counted(), 2, num_workers=2), 3)
    seen: list[tuple[int, int]] = []
    told: list[str] = []
    feed = DataFeed(
        DataLoader(Counted(), 2, num_workers=2),
        on_progress=lambda done, total: seen.append((done, total)),
        on_warning=told.append,
    )
    assert _continue(feed, left, 1) == [[6, 7]]
    assert (seen, told) == ([(1, 3), (2, 3), (3, 3)], [])
    feed.close()


def test_at_an_epochs_end_nothing_is_replayed() -> None:
    """Workers that have served their last batch end with the epoch."""
    left = _stop(lambda: DataLoader(Counted(), 2, num_workers=2), 4)
    seen: list[int] = []
    feed = DataFeed(
        DataLoader(Counted(), 2, num_workers=2), on_progress=lambda done, _: seen.append(done)
    )
    assert _continue(feed, left, 1) == [[0, 1]]
    assert (seen, feed.epoch) == ([], 1)
    feed.close()


@pytest.mark.parametrize(
    ("options", "warned"), [({"inexact": "skip"}, True), ({"deterministic_dataset": True}, False)]
)
def test_with_workers_batches_are_skipped_when_the_user_says_so(
    options: dict[str, Any], warned: bool
) -> None:
    left = _stop(lambda: DataLoader(Counted(), 2, num_workers=2), 3)
    replayed: list[int] = []
    told: list[str] = []
    feed = DataFeed(
        DataLoader(Counted(), 2, num_workers=2),
        on_progress=lambda done, _: replayed.append(done),
        on_warning=told.append,
        **options,
    )
    assert _continue(feed, left, 1) == [[6, 7]]
    assert replayed == []
    assert [text for text in told if "3 batches skipped" in text] == told
    assert bool(told) is warned
    feed.close()


def test_torchdata_with_workers_warns_that_their_rng_is_not_in_its_state() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    left = _stop(lambda: stateful(Counted(), 2, num_workers=2), 3)
    told: list[str] = []
    feed = DataFeed(stateful(Counted(), 2, num_workers=2), on_warning=told.append)
    assert _continue(feed, left, 1) == [[6, 7]]
    assert "does not hold the RNG of its workers" in told[0]
    feed.close()


def test_an_iterable_entangled_with_the_training_codes_stream_is_told_of_once() -> None:
    told: list[str] = []
    feed = DataFeed(DataLoader(Buffered(random.randrange), 1), on_warning=told.append)
    for _, _batch in zip(range(8), feed.batches(), strict=False):
        random.random()
    assert len(told) == 1
    assert "draws from random between its batches" in told[0]


def test_an_iterable_with_a_generator_of_its_own_is_not_warned_of_and_resumes_exactly() -> None:
    class Own(Buffered):
        def __init__(self) -> None:
            self.bits = np.random.default_rng(3)
            super().__init__(lambda n: int(self.bits.integers(n)))

    def run(feed: DataFeed, count: int) -> list[Any]:
        batches = feed.batches()
        return [(_values(next(batches)), random.random()) for _ in range(count)]

    told: list[str] = []
    feed = DataFeed(DataLoader(Own(), 1), on_warning=told.append)
    run(feed, 17)
    left = copy.deepcopy(feed.position()), rng.capture()
    expected = run(feed, 12)
    other = DataFeed(DataLoader(Own(), 1), on_warning=told.append)
    other.restore(left[0])
    other.prepare()
    rng.restore(left[1])
    assert (run(other, 12), told) == (expected, [])


# ---- the loader and its workers


def test_set_epoch_reaches_dataset_sampler_batch_sampler_and_loader_once_each() -> None:
    told: list[tuple[str, int]] = []

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            return 4

        def set_epoch(self, epoch: int) -> None:
            told.append(("sampler", epoch))

    class Batches(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(("batches", epoch))

    data = Counted()
    batches = Batches(Sampler(), 2, False)
    feed = DataFeed(DataLoader(data, batch_sampler=batches))
    _take(feed, 3)
    assert sorted(told) == [("batches", 0), ("batches", 1), ("sampler", 0), ("sampler", 1)]
    assert data.epochs == [0, 1]


def test_the_users_loader_is_never_changed() -> None:
    for workers in (0, 2):
        loader = DataLoader(
            Counted(), 2, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        before = dict(vars(loader))
        left = _stop(lambda own=loader: own, 3)  # type: ignore[misc]
        feed = DataFeed(loader)
        _continue(feed, left, 2)
        feed.close()
        assert vars(loader) == before


@pytest.mark.parametrize("options", [{}, {"deterministic_dataset": True}])
def test_closing_ends_all_workers(options: dict[str, Any]) -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    loader = DataLoader(Counted(), 2, num_workers=2, persistent_workers=True)
    feed = DataFeed(loader, **options)
    _take(feed, 5)
    assert len({child.pid for child in multiprocessing.active_children()} - before) == 2
    feed.close()
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_persistent_workers_live_on_where_the_dataset_is_declared_deterministic() -> None:
    def workers(feed: DataFeed, count: int) -> set[int | None]:
        _take(feed, count)
        return {child.pid for child in multiprocessing.active_children()}

    told: list[str] = []
    loader = DataLoader(Counted(), 2, num_workers=2, persistent_workers=True)
    kept = DataFeed(loader, deterministic_dataset=True, on_warning=told.append)
    assert workers(kept, 1) == workers(kept, 4)
    kept.close()
    anew = DataFeed(loader, on_warning=told.append)
    assert not workers(anew, 1) & workers(anew, 4)
    anew.close()
    assert len(told) == 1
    assert "workers start anew with each epoch" in told[0]


def test_persistent_workers_fetch_nothing_to_resume_where_batches_are_skipped() -> None:
    class Shared(Counted):
        served = multiprocessing.Value("i", 0)

        def __getitem__(self, index: int) -> int:
            with self.served.get_lock():
                self.served.value += 1
            return index

    def make() -> DataLoader[int]:
        return DataLoader(Shared(), 2, num_workers=2, persistent_workers=True)

    left = _stop(make, 8, deterministic_dataset=True)
    Shared.served.value = 0
    feed = DataFeed(make(), deterministic_dataset=True)
    feed.restore(left[0])
    feed.prepare()
    assert left[0]["epoch"] == 1
    assert Shared.served.value == 0
    feed.close()


def test_a_failing_prepare_leaves_the_streams_as_found() -> None:
    left = _stop(lambda: DataLoader(Counted(), 2, shuffle=True), 3)
    feed = DataFeed(DataLoader(Counted(4), 2, shuffle=True))
    feed.restore(left[0])
    torch.manual_seed(8)
    expected = torch.rand(2).tolist()
    torch.manual_seed(8)
    with pytest.raises(InexactData):
        feed.prepare()
    assert torch.rand(2).tolist() == expected


# ---- defects of peers


def test_defect_resume_repeats_data() -> None:
    """Peers count prefetched batches or begin the epoch again: no sample comes twice."""
    for workers in (0, 2):

        def make(workers: int = workers) -> DataLoader[int]:
            return DataLoader(Counted(20), 2, shuffle=True, num_workers=workers)

        torch.manual_seed(1)
        first = DataFeed(make())
        before = _take(first, 4)
        left = copy.deepcopy(first.position()), rng.capture()
        first.close()
        second = DataFeed(make())
        after = _continue(second, left, 6)
        second.close()
        served = [index for batch in before + after for index in batch]
        assert sorted(served) == list(range(20))


def test_defect_resume_skips_the_same_number_in_every_later_epoch() -> None:
    """A skip that is left in the loader shortens all epochs after the resumed one."""
    left = _stop(lambda: DataLoader(Counted(), 2), 3)
    feed = DataFeed(DataLoader(Counted(), 2))
    assert _continue(feed, left, 9)[1:] == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


def test_defect_every_epoch_after_a_resume_has_the_first_epochs_order() -> None:
    """Peers that forget set_epoch shuffle each epoch alike."""
    from torch.utils.data import DistributedSampler

    def make() -> DataLoader[int]:
        data = Counted(16)
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=0, seed=2)
        return DataLoader(data, 4, sampler=sampler)

    orders = _take(DataFeed(make()), 6)
    assert orders[0:2] != orders[2:4] != orders[4:6]
    left = _stop(make, 3)
    assert _continue(DataFeed(make()), left, 3) == orders[3:6]


def test_defect_position_aliases_the_loaders_live_state() -> None:
    """A state_dict that hands out its own dict must not move under a position taken (R1)."""

    class Aliasing:
        def __init__(self) -> None:
            self.state = {"at": 0}

        def __iter__(self) -> Iterator[int]:
            while self.state["at"] < 5:
                self.state["at"] += 1
                yield self.state["at"]

        def state_dict(self) -> dict[str, int]:
            return self.state

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state

    feed = DataFeed(Aliasing())
    batches = feed.batches()
    next(batches)
    position = feed.position()
    next(batches)
    assert position["mark"]["state"] == {"at": 1}
    other = DataFeed(Aliasing())
    other.restore(position)
    assert _take(other, 2) == [2, 3]
    assert position["mark"]["state"] == {"at": 1}
