"""torch's DataLoader as a source.

Owns: when the sampler may skip and when batches must be fetched again. Relies on torch's inner
parts (``_index_sampler``, ``_dataset_kind``), which ``recognise`` tests for; a loader that
iterates in its own way is treated as any iterable. Never does: change the user's loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from everstep.train.data.sources import (
    Place,
    Source,
    Terms,
    copy_of,
    refuse_shrunk,
    replay,
    warn_of_new_workers,
)
from everstep.train.data.tap import UNKNOWN, SamplerTap


class LoaderSource(Source):
    """A DataLoader with a tap at its sampler.

    Map-style without workers: the sampler skips. With workers: batches are replayed in the same
    workers, because a worker's RNG advances with each batch it serves, unless the user declares
    the dataset deterministic or accepts an inexact skip. IterableDataset: always replayed.
    """

    kind = "dataloader"

    def __init__(self, loader: DataLoader[Any], terms: Terms) -> None:
        super().__init__(loader, terms)
        self._workers = loader.num_workers
        self._map_style = loader._dataset_kind == _DatasetKind.Map
        self._seeds_matter = not terms.deterministic_dataset and terms.inexact == "replay"
        self._persistent = self._workers > 0 and loader.persistent_workers
        if self._persistent and self._seeds_matter:
            self._persistent = False
            warn_of_new_workers(terms)
        self.in_process = self._workers == 0 and not self._map_style
        self._tapped: DataLoader[Any] | None = None
        self._tap = SamplerTap(())
        self._born: int | None = None
        self._iterator: Iterator[Any] | None = None

    def open(self) -> Iterator[Any]:
        return self._opened(skip=0)

    def reopen(self, place: Place) -> Iterator[Any]:
        if place.mark["drained"] and not self._persistent:
            # Workers that have served their last batch end with the epoch: nothing to rebuild.
            return iter(())
        self._check_workers(place.mark["workers"])
        if self._map_style and (self._workers == 0 or not self._seeds_matter):
            iterator = self._skipped_to(place.yielded)
        else:
            iterator = self.open()
            replay(iterator, place.yielded, self._terms, self._tap.batch_yielded)
        self._check_digest(place)
        return iterator

    def ready(self, place: Place) -> None:
        """Start persistent workers without a task, as of the epoch in which they were born.

        A later epoch then begins as it did for them: no seed is drawn, and their copy of the
        dataset is that of the first epoch.
        """
        born = place.mark["born"]
        if not self._persistent or born is None or born == place.epoch:
            return
        self.set_epoch(born)
        self._tapped, self._tap = self._with_tap()
        self._tap.closed = True
        iter(self._tapped)
        self._tap.closed = False
        self._born = born

    def batch_yielded(self) -> None:
        self._tap.batch_yielded()

    def mark(self) -> dict[str, Any]:
        return {
            "digest": self._tap.digest,
            "workers": self._workers,
            "drained": self._drained(),
            "born": self._born,
        }

    def close(self) -> None:
        self._iterator = self._tapped = self._born = None

    def _skipped_to(self, yielded: int) -> Iterator[Any]:
        if self._workers and not self._terms.deterministic_dataset:
            self._terms.warn(
                f"loader {self._terms.name!r}: {yielded} batches skipped without fetching "
                "(inexact_data='skip'). If its dataset draws randomness in the workers, the data "
                "that follows differs from the undisturbed run's."
            )
        iterator = self._opened(skip=yielded)
        found = self._tap.skip_now()
        if found < yielded:
            refuse_shrunk(self._terms, found, yielded)
        return iterator

    def _opened(self, skip: int) -> Iterator[Any]:
        self._iterator = None
        if self._tapped is None or not self._persistent:
            self._tapped, self._tap = self._with_tap()
        if self._born is None and self._persistent:
            self._born = self._epoch
        self._tap.skip = skip
        iterator: Iterator[Any] = iter(self._tapped)
        self._iterator = iterator
        return iterator

    def _with_tap(self) -> tuple[DataLoader[Any], SamplerTap]:
        which = "batch_sampler" if self._loader.batch_sampler is not None else "sampler"
        tap = SamplerTap(getattr(self._loader, which))
        changes = {which: tap, "persistent_workers": self._persistent}
        return copy_of(self._loader, **changes), tap

    def _drained(self) -> bool:
        """Whether the workers surely have no batch left; False where it cannot be known."""
        outstanding = getattr(self._iterator, "_tasks_outstanding", None)
        return outstanding == 0 and not getattr(self._iterator, "_task_info", True)

    def _check_workers(self, saved: int) -> None:
        now = self._workers
        if saved != now and (not self._map_style or (self._seeds_matter and now > 0)):
            self._terms.refuse(
                f"loader {self._terms.name!r} had {saved} workers and has {now} now: "
                "the RNG of its workers and their shares of the data differ.",
                f"Pass num_workers={saved}.",
            )

    def _check_digest(self, place: Place) -> None:
        saved, now = place.mark["digest"], self._tap.digest
        if saved != now and UNKNOWN not in (saved, now):
            self._terms.refuse(
                f"loader {self._terms.name!r}: its sampler now gives other indices for the first "
                f"{place.yielded} batches of epoch {place.epoch} than it gave the interrupted "
                "run, so data would be repeated or skipped.",
                "Use the same dataset, batch size, sampler and world; a sampler that draws lazily "
                "from a stream shared with the training code needs a generator of its own.",
            )
