"""Which kind of source a user's loader is, and which loaders are refused, with the reason.

Owns: that decision. Never does: iterate the loader. Called by: ``feed``, once, at attach.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.errors import InexactData, UsageError
from everstep.train.data.loaders import LoaderSource
from everstep.train.data.sources import (
    IterableSource,
    NumberedSource,
    Source,
    StatefulSource,
    Terms,
)


def recognise(loader: Any, terms: Terms) -> Source:
    """The source for ``loader``. Raises InexactData or UsageError for what cannot be resumed."""
    if isinstance(loader, DataLoader):
        _refuse_out_of_order(loader, terms)
    if _has_state(loader):
        return StatefulSource(loader, terms)
    if isinstance(loader, DataLoader):
        if _iterates_as_torch_does(loader):
            return LoaderSource(loader, terms)
        _refuse_hidden_persistent_workers(loader, terms)
        return IterableSource(loader, terms)
    if _is_numbered(loader):
        return NumberedSource(loader, terms)
    _refuse_bare_iterator(loader, terms)
    return IterableSource(loader, terms)


def _has_state(loader: Any) -> bool:
    both = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in both)


def _iterates_as_torch_does(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return hasattr(loader, "_dataset_kind") and all(
        getattr(kind, name, None) is getattr(DataLoader, name, "missing in this torch")
        for name in ("__iter__", "_get_iterator", "_index_sampler")
    )


def _is_numbered(loader: Any) -> bool:
    if isinstance(loader, Sequence):
        return True
    by_number = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    return by_number and not hasattr(loader, "__iter__")


def _refuse_out_of_order(loader: DataLoader[Any], terms: Terms) -> None:
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        terms.refuse(
            f"loader {terms.name!r} has in_order=False: which batches were yielded depends on "
            "the workers' speed, so no position describes them.",
            "Pass in_order=True.",
        )


def _refuse_hidden_persistent_workers(loader: DataLoader[Any], terms: Terms) -> None:
    if loader.num_workers > 0 and loader.persistent_workers:
        terms.refuse(
            f"loader {terms.name!r} is a {type(loader).__name__} with its own __iter__ and "
            "persistent_workers=True: its workers' RNG goes on over epochs and cannot be rebuilt.",
            "Pass persistent_workers=False.",
        )


def _refuse_bare_iterator(loader: Any, terms: Terms) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(
            f"loader {terms.name!r} is a {type(loader).__name__}, which cannot be iterated.",
            hint="Pass a DataLoader, a sequence of batches or an object with __iter__.",
        )
    # A class with an __iter__ written in Python may begin anew there, even if it returns itself;
    # one that does not is found out at its second epoch.
    written_in_python = inspect.isfunction(getattr(type(loader), "__iter__", None))
    is_iterator = hasattr(loader, "__next__") and not written_in_python
    if is_iterator or isinstance(loader, _BaseDataLoaderIter):
        raise InexactData(
            f"loader {terms.name!r} is a {type(loader).__name__}, an iterator that can be used "
            "up once and not begun again, so neither a second epoch nor a resume is possible.",
            hint="Pass the object it was made from: the DataLoader itself, a sequence of "
            "batches, or an object whose __iter__ begins an epoch (a class whose __iter__ is "
            "the generator function).",
        )
