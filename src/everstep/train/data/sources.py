"""What a loader is to the feed, and the kinds that need little: numbered, renewable, stateful.

Owns: how an epoch is opened, and opened again at batch k. Never does: save or restore RNG streams
(``feed`` does, around these calls), or change the user's loader: where a loader must differ, a
shallow copy of it does. Called by: ``feed``; chosen by ``recognise``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.utils.data import DataLoader

from everstep.errors import InexactData

Inexact = Literal["replay", "skip"]


@dataclass(frozen=True)
class Terms:
    """What the user allows, and who is told."""

    name: str
    inexact: Inexact
    deterministic_dataset: bool
    progress: Callable[[int, int], None]
    warn: Callable[[str], None]

    def refuse(self, what: str, hint: str) -> None:
        """Raise InexactData, or warn alone where the user accepts inexact resumes."""
        if self.inexact != "skip":
            skip = 'everstep.attach(everstep.Options(inexact_data="skip"), ...)'
            raise InexactData(what, hint=f"{hint} Or go on all the same: {skip}.")
        self.warn(f"{what} Going on all the same (inexact_data='skip').")


@dataclass(frozen=True)
class Place:
    """Where in the data: ``yielded`` batches of ``epoch``, and what the source marked there."""

    epoch: int
    yielded: int
    mark: Mapping[str, Any]


class Source:
    """A loader that can be opened at an epoch's start and again in the middle of one.

    Order of calls: ``set_epoch``, then ``open`` or ``reopen``; before those of a resume, ``ready``.
    """

    kind: ClassVar[str]
    in_process: bool = False
    """Whether code of an iterable runs in this process between two batches."""

    def __init__(self, loader: Any, terms: Terms) -> None:
        self._loader = loader
        self._terms = terms
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the loader, its samplers and its dataset, where they ask for it."""
        self._epoch = epoch
        for owner in _epoch_owners(self._loader):
            owner.set_epoch(epoch)

    def open(self) -> Iterator[Any]:
        """Iterate over the epoch from its first batch."""
        raise NotImplementedError

    def reopen(self, place: Place) -> Iterator[Any]:
        """Iterate over the epoch from batch ``place.yielded`` on."""
        raise NotImplementedError

    def ready(self, place: Place) -> None:
        """Do what must come before the RNG of the epoch's start is put in place."""

    def batch_yielded(self) -> None:
        """A batch of the epoch goes to the user."""

    def mark(self) -> dict[str, Any]:
        """What this kind adds to the position; draws nothing, advances nothing."""
        return {}

    def close(self) -> None:
        """End what outlives an epoch."""


class NumberedSource(Source):
    """Batches by number: a sequence, or ``__getitem__`` and ``__len__`` without ``__iter__``."""

    kind = "numbered"

    def open(self) -> Iterator[Any]:
        return self._from(0)

    def reopen(self, place: Place) -> Iterator[Any]:
        if len(self._loader) < place.yielded:
            refuse_shrunk(self._terms, len(self._loader), place.yielded)
        return self._from(place.yielded)

    def _from(self, first: int) -> Iterator[Any]:
        for number in range(first, len(self._loader)):
            yield self._loader[number]


class IterableSource(Source):
    """An object whose iteration can be renewed; resumed by replay."""

    kind = "iterable"
    in_process = True

    def open(self) -> Iterator[Any]:
        return iter(self._loader)

    def reopen(self, place: Place) -> Iterator[Any]:
        iterator = self.open()
        replay(iterator, place.yielded, self._terms, self.batch_yielded)
        return iterator


class StatefulSource(Source):
    """An object with ``state_dict``: its own state, loaded before its iteration is renewed."""

    kind = "stateful"

    def __init__(self, loader: Any, terms: Terms) -> None:
        workers = getattr(loader, "num_workers", 0) or 0
        if workers and isinstance(loader, DataLoader) and loader.persistent_workers:
            # Workers that live on draw no new seed at a later epoch; a resumed loader does.
            loader = copy_of(loader, persistent_workers=False)
            warn_of_new_workers(terms)
        super().__init__(loader, terms)
        self._random_workers = bool(workers) and not terms.deterministic_dataset

    def open(self) -> Iterator[Any]:
        return iter(self._loader)

    def reopen(self, place: Place) -> Iterator[Any]:
        if self._random_workers:
            self._terms.warn(
                f"loader {self._terms.name!r} restores its own state, which does not hold the "
                "RNG of its workers: exact only if the dataset draws no randomness there or "
                "keeps it in its own state_dict (say so: Options(deterministic_dataset=True))."
            )
        self._loader.load_state_dict(copy.deepcopy(place.mark["state"]))
        return iter(self._loader)

    def mark(self) -> dict[str, Any]:
        # state_dict() may hand out live structures; a position is a cut (R1).
        return {"state": copy.deepcopy(self._loader.state_dict())}


def _epoch_owners(loader: Any) -> list[Any]:
    sampler = getattr(loader, "batch_sampler", None)
    parts = [getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
    parts += [getattr(sampler, "sampler", None), sampler, loader]
    owners = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return list(owners.values())


def copy_of(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A shallow copy with some attributes changed; DataLoader itself forbids setting them."""
    twin = copy.copy(loader)
    twin.__dict__.update(changes, _iterator=None)
    return twin


def replay(
    iterator: Iterator[Any], batches: int, terms: Terms, batch_yielded: Callable[[], None]
) -> None:
    """Fetch ``batches`` batches and drop them."""
    for done in range(batches):
        try:
            next(iterator)
        except StopIteration:
            refuse_shrunk(terms, done, batches)
            return
        batch_yielded()
        terms.progress(done + 1, batches)


def refuse_shrunk(terms: Terms, found: int, yielded: int) -> None:
    """The epoch has fewer batches than had been consumed of it."""
    terms.refuse(
        f"loader {terms.name!r} has only {found} batches in the epoch of which the interrupted "
        f"run had consumed {yielded}: its data changed.",
        "Use the same dataset, batch size, sampler and world.",
    )


def warn_of_new_workers(terms: Terms) -> None:
    """Persistent workers are not kept, and why."""
    terms.warn(
        f"loader {terms.name!r} has persistent_workers=True. The RNG of workers that live on over "
        "epochs cannot be rebuilt without replaying all epochs, so workers start anew with each "
        "epoch. If the dataset draws no randomness in its workers, say so with "
        "Options(deterministic_dataset=True): a plain DataLoader then keeps them."
    )
