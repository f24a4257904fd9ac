"""A sampler with a counter: skips indices without fetching them and digests those handed out.

Owns: the running digest of an epoch's indices, by which a resume proves that it serves the same
data. Never does: change the sampler it wraps. Called by: ``sources``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import xxhash

START = "0"
UNKNOWN = "?"
_PLAIN = (int, str, float, type(None))


def fold(digest: str, index: Any) -> str:
    """The digest after one more index; ``UNKNOWN`` from the first index without a plain form."""
    if digest == UNKNOWN or not _is_plain(index):
        return UNKNOWN
    return xxhash.xxh3_64_hexdigest(f"{digest}{index!r}".encode())


def _is_plain(index: Any) -> bool:
    if isinstance(index, list | tuple):
        return all(isinstance(item, _PLAIN) or _is_plain(item) for item in index)
    return isinstance(index, _PLAIN)


class SamplerTap:
    """Stands in for a (batch) sampler in a private copy of a loader.

    ``skip`` indices are passed over in each iteration begun while it is set, before the first is
    handed out (a loader with workers begins two and drops one).
    ``closed`` makes an iteration end at once, to start a loader's workers without any task.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._run: _Run | None = None
        self.skip = 0
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        if self.closed:
            return iter(())
        # iter() of the sampler stands here and not at the first index: it may draw from an RNG,
        # and the loader draws its own seed between the two.
        self._run = _Run(iter(self._sampler), self.skip)
        return self._run

    def __len__(self) -> int:
        return len(self._sampler)

    def skip_now(self) -> int:
        """Pass over the indices to skip, unless the loader made it happen by asking for one.

        Returns how many were passed over: fewer than asked for if the sampler ended.
        """
        self.skip = 0
        if self._run is None:
            return 0
        self._run.skip_now()
        return self._run.skipped

    @property
    def digest(self) -> str:
        """Digest of the indices of all batches yielded so far, prefetched ones left out."""
        return self._run.digest if self._run is not None else START

    def batch_yielded(self) -> None:
        """The loader has yielded the batch of the oldest index handed out."""
        if self._run is not None:
            self._run.batch_yielded()


class _Run:
    """One iteration over the sampler."""

    def __init__(self, indices: Iterator[Any], skip: int) -> None:
        self._indices = indices
        self._skip = skip
        self._newest = START
        self._ahead: deque[str] = deque()
        self.skipped = 0
        self.digest = START

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip_now()
        index = next(self._indices)
        self._newest = fold(self._newest, index)
        self._ahead.append(self._newest)
        return index

    def skip_now(self) -> None:
        while self.skipped < self._skip:
            try:
                index = next(self._indices)
            except StopIteration:
                self._skip = self.skipped
                return
            self.digest = self._newest = fold(self._newest, index)
            self.skipped += 1

    def batch_yielded(self) -> None:
        if self._ahead:
            self.digest = self._ahead.popleft()
