"""What has become of the attached objects since the last step boundary.

Owns: counting the steps of optimizers, the mark of a boundary that a loop may be left at, and the
answer whether a step is whole. Never does: cut, decide, change an object. Called by: leaving and
run of this room.

When a loop is left, the state in memory is one of three things, and only the first two are saved:
a boundary's still (nothing was done since), a whole step's (all that takes part has stepped), or
half a step's (R1).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from everstep.state import sharding
from everstep.state.inspect import Attached

MARK_SHARE = 0.005
"""Of training time, for marks: where steps are shorter than a mark's cost allows, some boundaries
have none, and who leaves a loop at one of those is told."""

Beside = tuple[dict[str, Any], Any]
"""The generators' states and the position in the data (None without a loader)."""


@dataclass(frozen=True)
class _Mark:
    beside: Beside
    versions: list[tuple[int, int]]
    held: Any


class Since:
    """Watches the attached optimizers until :meth:`close`. ``beside`` reads what a cut keeps
    besides the objects, and leaves it as it was.

    ``boundaries`` and ``steps`` count those of this attempt: boundaries passed, steps of any
    optimizer. ``stepped`` says whether one has stepped since the last boundary.
    """

    def __init__(self, attached: Attached, beside: Callable[[], Beside]) -> None:
        self._attached = attached
        self._beside = beside
        self._optimizers = dict(attached.optimizers())
        others = dict(attached.others())
        self._schedulers = {k: o for k, o in others.items() if isinstance(o, LRScheduler)}
        self._opaque = any(not isinstance(o, LRScheduler | GradScaler) for o in others.values())
        self._tensors: list[torch.Tensor] | None = None
        self._stepped: set[str] = set()
        self._usual: set[str] | None = None
        self._paces = self._pace()
        self._paced: set[str] = set()
        self._mark: _Mark | None = None
        self._mark_again_at = 0.0
        self.boundaries = self.steps = 0
        self._hooks = [
            optimizer.register_step_post_hook(self._counting(keyword))
            for keyword, optimizer in self._optimizers.items()
        ]

    @property
    def stepped(self) -> bool:
        return bool(self._stepped)

    @property
    def watches_optimizers(self) -> bool:
        """Whether any is attached: else nobody knows whether one has stepped."""
        return bool(self._optimizers)

    def start(self) -> None:
        """Training begins here, at the step that was restored."""
        self._begin()

    def boundary(self) -> None:
        """A step is finished here."""
        self._paced = {k for k, pace in self._pace().items() if pace != self._paces[k]}
        self._usual = self._stepped
        self.boundaries += 1
        self._begin()

    def is_whole(self) -> bool:
        """Whether all that makes up a step has been done since the boundary: the optimizers and
        schedulers have stepped that did in the step before, or every optimizer in the first."""
        wanted = self._usual or set(self._optimizers)
        now = self._pace()
        behind = any(now[keyword] == self._paces[keyword] for keyword in self._paced)
        return bool(wanted) and wanted <= self._stepped and not behind

    def untouched(self, *, in_body: bool) -> Beside | None:
        """What a cut of the last boundary keeps besides the objects, where these are still as they
        were there; else None. ``in_body``: part of a step may have been done since, and what
        that does to objects of the user's own cannot be seen."""
        mark = self._mark
        if mark is None or self._stepped or (in_body and self._opaque):
            return None
        same = mark.versions == _versions(self._listed()) and _equal(mark.held, self._held())
        return mark.beside if same else None

    def close(self) -> None:
        """Take the hooks off and forget."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._mark = self._tensors = None

    def _begin(self) -> None:
        self._stepped = set()
        self._paces = self._pace()
        self._mark = None
        began = time.monotonic()
        if began < self._mark_again_at:
            return
        if self._tensors is None:
            self._tensors = self._listed()
        try:
            self._mark = _Mark(self._beside(), _versions(self._tensors), self._held())
        except Exception:  # noqa: BLE001 - a loader's state_dict is user code, and a cut tells of it
            self._mark = None
        now = time.monotonic()
        self._mark_again_at = now + (now - began) / MARK_SHARE

    def _counting(self, keyword: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self.steps += 1
            self._stepped.add(keyword)

        return count

    def _pace(self) -> dict[str, int]:
        return {keyword: held.last_epoch for keyword, held in self._schedulers.items()}

    def _listed(self) -> list[torch.Tensor]:
        """The tensors of the attached modules. A walk over modules takes long, so a mark is of
        those that were there at the first boundary, and only the answer walks again."""
        found: list[torch.Tensor] = []
        for _, module in self._attached.modules():
            found += map(sharding.local, module.parameters())
            found += map(sharding.local, module.buffers())
        return found

    def _held(self) -> Any:
        """What else can be changed beside an optimizer's step: its options and the schedule."""
        groups = {
            keyword: [{k: v for k, v in g.items() if k != "params"} for g in held.param_groups]
            for keyword, held in self._optimizers.items()
        }
        return copy.deepcopy((groups, self._pace()))


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
