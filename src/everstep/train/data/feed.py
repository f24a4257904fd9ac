"""The feed: batches over epochs, and the position between any two of them.

Owns: the order in which RNG streams, ``set_epoch`` and iterators are put in place at an epoch's
start and at a resume. Never does: leave the process's RNG streams other than it found them when
it positions. Called by: the step loop, from one thread.

How a position comes back. An epoch's beginning draws from the RNG (a loader's seed, a sampler's
permutation). So the RNG of that moment is recorded; a resume puts it in place, opens the epoch
again, goes on to the batch recorded, and then puts the boundary's RNG in place. What the loader,
its sampler and its workers hold by then is what they held in the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everstep.core.points import reach
from everstep.errors import InexactData, UsageError
from everstep.state import rng
from everstep.train.data import generators
from everstep.train.data.entangled import Watch
from everstep.train.data.recognise import recognise
from everstep.train.data.sources import Inexact, Place, Terms

VERSION = 1


@dataclass(frozen=True)
class _EpochStart:
    """The streams just before the epoch was begun."""

    rng: dict[str, Any]
    generators: dict[str, Any]


def _quiet_progress(done: int, total: int) -> None: ...


def _quiet_warning(text: str) -> None: ...


class DataFeed:
    """Yields the batches of ``loader`` over epochs without end, resumable between any two.

    ``loader`` is an object with ``state_dict``/``load_state_dict`` (torchdata's
    StatefulDataLoader), a torch DataLoader, a sequence of batches or an object with
    ``__getitem__`` and ``__len__``, or any object whose ``__iter__`` begins an epoch.

    ``inexact``: what a resume does where fetching is the only exact way. ``"replay"`` (default)
    fetches the epoch's batches again and drops them, telling ``on_progress(done, total)`` after
    each; ``"skip"`` goes on without, telling ``on_warning(text)``. ``deterministic_dataset``:
    the user's word that the dataset and collate function draw no randomness in the workers;
    skipping is then exact, and persistent workers are kept.

    Raises InexactData for a loader that cannot be resumed exactly, UsageError for one that
    cannot be iterated.
    """

    def __init__(
        self,
        loader: Any,
        *,
        name: str = "loader",
        inexact: Inexact = "replay",
        deterministic_dataset: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        if inexact not in ("replay", "skip"):
            raise UsageError(
                f"inexact={inexact!r} for loader {name!r}.", hint='Pass "replay" or "skip".'
            )
        self._name = name
        self._warn = on_warning or _quiet_warning
        terms = Terms(
            name, inexact, deterministic_dataset, on_progress or _quiet_progress, self._warn
        )
        self._loader = loader
        self._source = recognise(loader, terms)
        self._generators = generators.find(loader)
        self._watch = Watch() if self._source.in_process else None
        self._epoch = -1
        self._yielded = 0
        self._start: _EpochStart | None = None
        self._iterator: Iterator[Any] | None = None
        self._unused: dict[str, Any] | None = None
        self._prepared = True

    @property
    def epoch(self) -> int:
        """The epoch of the last batch yielded, from 0; -1 before the first."""
        return self._epoch

    @property
    def yielded(self) -> int:
        """Batches of this epoch yielded so far; prefetched ones do not count."""
        return self._yielded

    def batches(self) -> Iterator[Any]:
        """Batch after batch, epoch after epoch. May be called again to go on where it stood.

        Raises UsageError on an epoch that yields nothing.
        """
        self.prepare()
        while True:
            yield self._next_batch()

    def position(self) -> dict[str, Any]:
        """The position after the last batch yielded, as a plain tree of values that
        ``everstep.state.encode`` holds (tensors only where the loader's own state has some).

        Draws nothing and advances nothing. The process's own RNG at this boundary is not part
        of it: the caller keeps it with the rest of the state.
        """
        if self._unused is not None:
            return self._unused
        start = self._start
        return {
            "version": VERSION,
            "kind": self._source.kind,
            "epoch": self._epoch,
            "yielded": self._yielded,
            "start": None if start is None else {"rng": start.rng, "generators": start.generators},
            "mark": self._source.mark() if self._yielded else {},
            "generators": generators.capture(self._generators),
        }

    def restore(self, position: Mapping[str, Any]) -> None:
        """Take a position, to be gone to by ``prepare`` or the first batch.

        Raises InexactData if it was taken from another kind of loader, UsageError if batches
        have been yielded already.
        """
        if self._iterator is not None or self._epoch >= 0:
            raise UsageError(
                f"loader {self._name!r} has already yielded batches; its position can be "
                "restored only before the first.",
                hint="Restore right after attach, with a loader just made.",
            )
        if position["version"] != VERSION or position["kind"] != self._source.kind:
            raise InexactData(
                f"loader {self._name!r} is of kind {self._source.kind!r}, but the saved position "
                f"is of kind {position['kind']!r}, version {position['version']}.",
                hint="Pass the same kind of loader as the interrupted run did.",
            )
        self._unused = dict(position)
        self._prepared = False

    def prepare(self) -> None:
        """Go to the restored position now: open the epoch again, skip or replay to the batch.

        The process's RNG streams are left as found. Without a restored position: does nothing.
        Raises InexactData if the data is seen to differ from the interrupted run's.
        """
        if self._prepared or self._unused is None:
            return
        reach("train.data.prepare.before_open")
        with _streams_untouched():
            self._go_to(self._unused)
        generators.restore(self._generators, self._unused["generators"], self._name)
        self._prepared = True

    def close(self) -> None:
        """End the loader's iteration and its workers.

        The position stays readable, and ``batches`` would go on from it, at a resume's cost.
        """
        self._unused = self.position()
        self._prepared = False
        self._iterator = None
        self._source.close()

    def _go_to(self, position: Mapping[str, Any]) -> None:
        place = Place(position["epoch"], position["yielded"], position["mark"])
        # Without a first batch the epoch is begun again, from the boundary's RNG.
        self._epoch = place.epoch if place.yielded else max(place.epoch - 1, -1)
        self._yielded = place.yielded
        if not place.yielded:
            return
        start = position["start"]
        self._start = _EpochStart(start["rng"], start["generators"])
        self._source.ready(place)
        generators.restore(self._generators, start["generators"], self._name)
        rng.restore(start["rng"])
        self._source.set_epoch(place.epoch)
        self._iterator = self._source.reopen(place)

    def _next_batch(self) -> Any:
        while True:
            if self._iterator is None:
                self._iterator = self._begin_epoch()
            try:
                batch = self._fetch(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            self._unused = None
            self._yielded += 1
            self._source.batch_yielded()
            return batch

    def _begin_epoch(self) -> Iterator[Any]:
        self._start = _EpochStart(rng.capture(), generators.capture(self._generators))
        self._unused = None
        self._epoch += 1
        self._yielded = 0
        self._source.set_epoch(self._epoch)
        return self._source.open()

    def _end_epoch(self) -> None:
        self._iterator = None
        if self._yielded == 0:
            raise UsageError(
                f"loader {self._name!r} yielded no batch in epoch {self._epoch}.",
                hint="Check that the dataset is not empty, that drop_last leaves a batch, and "
                "that each iteration over the loader begins anew.",
            )

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        if self._watch is None:
            return next(iterator)
        if self._yielded == 0:
            self._watch.epoch_begins()
        batch = self._watch.next_batch(iterator)
        if self._watch.shared:
            self._warn(
                f"loader {self._name!r} draws from {', '.join(self._watch.shared)} between its "
                "batches, and so does other code of this process. A resume replays its batches "
                "without those other draws: what it remembers of its own (a shuffle buffer) may "
                "differ. Give it a generator of its own, or state_dict and load_state_dict."
            )
            self._watch = None
        return batch


@contextmanager
def _streams_untouched() -> Iterator[None]:
    found = rng.capture()
    try:
        yield
    finally:
        rng.restore(found)
