"""The cut itself: bytes from the user's memory into the payload, as fast as a plain copy.

Owns: the views that make a cut a list of copies. Never does: decide what is copied (plan does),
keep a tensor of an earlier boundary (a replaced tensor gets a new view before it is read). Called
by: train, while training waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from everstep.core.layout import Box, Extent, RankLayout
from everstep.core.points import reach
from everstep.state.inspect import LiveState
from everstep.state.memory import Fingerprint, bits

_KEPT_PAYLOADS = 4
"""Payloads whose views are kept: the two slots, and those that replace them after a move."""

Payload = memoryview | torch.Tensor


class Capture:
    """The plan of a layout with its views. Make a new one where :meth:`matches` says no."""

    def __init__(self, live: LiveState, layout: RankLayout) -> None:
        self.layout = layout
        self._held = live.held
        index = {(h.ref.fqn, h.ref.rank): i for i, h in enumerate(live.held)}
        self._index = [index[extent.fqn, extent.rank] for extent in layout.extents]
        self._marks: list[Fingerprint | None] = [None] * len(layout.extents)
        self._sources: list[Any] = [None] * len(layout.extents)
        self._lazy: frozenset[int] = frozenset()
        self._targets: dict[tuple[int, int, frozenset[int]], list[torch.Tensor]] = {}

    def matches(self, live: LiveState) -> bool:
        """Whether the layout still says what ``live`` holds. Storage that moved is no difference:
        its view is made anew by the next copy."""
        return live.held == self._held

    def copy_into(self, payload: Payload, live: LiveState) -> None:
        """Copy each extent to its offset, from the memory that ``live`` shows.

        ``payload`` is writable, at least ``layout.payload_bytes`` long and aligned to 64 bytes.
        Copies from a device are ordered after the work on its current stream and have ended when
        this returns. Raises ``ValueError`` for a payload that is too short.
        """
        flat = _flat(payload)
        if flat.numel() < self.layout.payload_bytes:
            raise ValueError(
                f"the payload has {flat.numel()} bytes, and {self.layout.payload_bytes} are needed"
            )
        self._refresh(live)
        targets = self._views(flat)
        reach("state.capture.before_copy")
        with torch.no_grad():
            _copy(targets, self._sources)
        _synchronise(live.tensors)

    def release(self) -> None:
        """Let go of all payloads (a mapping cannot be closed while views of it exist)."""
        self._targets.clear()

    def _refresh(self, live: LiveState) -> None:
        marks, stored = live.fingerprints, self._marks
        changed = False
        for at, index in enumerate(self._index):
            mark = marks[index]
            if stored[at] is not mark and stored[at] != mark:
                stored[at] = mark
                self._sources[at] = self._source(at, live.tensors[index])
                changed = True
        if changed:
            self._lazy = frozenset(
                at for at, mark in enumerate(stored) if mark is not None and (mark[5] or mark[6])
            )

    def _source(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        extent, whole = self.layout.extents[at], self._held[self._index[at]].ref.box
        return bits(_part(tensor, extent.box, whole))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        key = (flat.data_ptr(), flat.numel(), self._lazy)
        found = self._targets.get(key)
        if found is None:
            found = [
                _target(flat, extent, source)
                for extent, source in zip(self.layout.extents, self._sources, strict=True)
            ]
            while len(self._targets) >= _KEPT_PAYLOADS:
                del self._targets[next(iter(self._targets))]
            self._targets[key] = found
        return found


def _flat(payload: Payload) -> torch.Tensor:
    if isinstance(payload, torch.Tensor):
        return payload
    if not payload.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(payload, dtype=torch.uint8)


def _part(tensor: torch.Tensor, box: Box, whole: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != whole.sizes[dim]:
            tensor = tensor.narrow(dim, offset - whole.offsets[dim], size)
    return tensor


def _target(flat: torch.Tensor, extent: Extent, source: torch.Tensor) -> torch.Tensor:
    part = flat.narrow(0, extent.payload_offset, extent.nbytes)
    return part.view(source.dtype).view(source.shape)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if not targets:
        return
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _synchronise(tensors: Iterable[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
