"""Replication proved by digest (R8): which bytes are looked at now, and who differs.

Owns: the rotation and the comparison. Never does: exchange digests (train does, through the
keeper) or act on a difference. Called by: train.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
import xxhash

from everstep.core.layout import ITEMSIZE
from everstep.state.inspect import LiveState
from everstep.state.memory import as_bytes, is_direct


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Elements ``[start, stop)`` of a replicated tensor's row-major order."""

    fqn: str
    start: int
    stop: int


def replicated(live: LiveState) -> tuple[Span, ...]:
    """Every tensor that all ranks are said to hold equally, whole, sorted by name."""
    whole = [Span(h.ref.fqn, 0, h.ref.box.numel) for h in live.held if h.split]
    return tuple(sorted(whole, key=lambda span: span.fqn))


def rotation(live: LiveState, *, cursor: int, budget_bytes: int) -> tuple[tuple[Span, ...], int]:
    """What to check at this checkpoint, and the cursor for the next one.

    The replicated tensors form a ring of bytes; the window begins at ``cursor`` and covers
    ``budget_bytes`` (at least one element, at most all). All ranks with the same layout and
    cursor get the same answer.
    """
    line = [(span, _itemsize(live)[span.fqn]) for span in replicated(live)]
    total = sum(span.stop * size for span, size in line)
    if total == 0:
        return (), 0
    begin = cursor % total
    length = min(max(budget_bytes, 1), total)
    end = begin + length
    spans = _window(line, begin, min(end, total)) + _window(line, 0, end - total)
    return _merged(spans), end % total


def _itemsize(live: LiveState) -> dict[str, int]:
    return {h.ref.fqn: ITEMSIZE[h.ref.dtype] for h in live.held if h.split}


def _window(line: Sequence[tuple[Span, int]], begin: int, end: int) -> list[Span]:
    """Elements that begin in a window of bytes."""
    spans, at = [], 0
    for span, size in line:
        start = max(0, -(-(begin - at) // size))
        stop = min(span.stop, -(-(end - at) // size))
        if start < stop:
            spans.append(Span(span.fqn, start, stop))
        at += span.stop * size
    return spans


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """One span a name: a window that covers the whole ring begins and ends in the same tensor."""
    by_name: dict[str, Span] = {}
    for span in spans:
        other = by_name.get(span.fqn)
        if other is not None:
            span = Span(span.fqn, min(span.start, other.start), max(span.stop, other.stop))
        by_name[span.fqn] = span
    return tuple(by_name.values())


def digests(live: LiveState, part: Iterable[Span] | None = None) -> dict[str, str]:
    """XXH3-128 (hex) of each span's bytes in the live tensors, by name; all whole by default.

    Reads host memory in place; parts of device or non-contiguous tensors are copied first.
    """
    tensors = {h.ref.fqn: t for h, t in zip(live.held, live.tensors, strict=True) if h.split}
    wanted = replicated(live) if part is None else part
    return {span.fqn: _digest(tensors[span.fqn], span) for span in wanted}


def _digest(tensor: torch.Tensor, span: Span) -> str:
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)[span.start : span.stop]
        if not is_direct(flat):
            flat = flat.cpu().resolve_conj().resolve_neg().contiguous()
    return xxhash.xxh3_128_hexdigest(as_bytes(flat))


def compare(by_rank: Mapping[int, Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """The names on which ranks differ, each with its groups of equal ranks, largest first (among
    equals the one with the lowest rank). A name that a rank lacks differs too."""
    names = sorted({name for found in by_rank.values() for name in found})
    different = {}
    for name in names:
        groups: defaultdict[str | None, list[int]] = defaultdict(list)
        for rank in sorted(by_rank):
            groups[by_rank[rank].get(name)].append(rank)
        if len(groups) > 1:
            different[name] = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return different
