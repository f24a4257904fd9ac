"""Whether what this rank computes are numbers: the logged loss and gradient norm, and the
parameters at a cut.

Owns: what is looked at, when, and the words for what is found. Never does: make a device wait in
a step that takes no cut and is not replayed, change a tensor, judge a finite value (a spike is no
fault here). Called by: run and boundary of this room.

A step that gave no number is never a recovery point: it is looked at before its boundary is
posted, and again, with all that was still on its way from a device, before a cut is taken.

A step that no optimizer took part in, or that a GradScaler has backed off from, has changed no
parameter: what was logged of it is no fault.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Rational
from typing import Any, Literal, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from everstep.core.health import Figures, Health, Parameters
from everstep.errors import NonFinite
from everstep.state import sharding
from everstep.state.inspect import Attached
from everstep.train.place import Place
from everstep.train.since import Since

Mode = Literal["stop", "warn", "off"]

WHOLE_SHARE = 0.001
"""Of training time, for looks at all parameters. Cuts between them look at a part."""
PART_SHARE = 0.05
"""Of a cut's bytes, for the part: reading is at least twice as fast as copying."""
_LEAST = 1024
"""Elements of a window: fewer cost as much."""
_BEHIND = 8
"""Steps of which figures may be on their way from a device before one is waited for."""


class Finite:
    """Looks until it has found something: then every later look raises the same again.

    ``mode`` "warn" tells of it and goes on; "off" looks at nothing. ``watched`` are the names of
    figures of :meth:`~everstep.train.run.Run.log`. ``replay_until`` is the step that is replayed.
    """

    def __init__(
        self,
        attached: Attached,
        since: Since,
        place: Place,
        say: Callable[..., None],
        *,
        mode: Mode = "stop",
        watched: Iterable[str] = ("loss", "grad_norm"),
    ) -> None:
        self._since = since
        self._place = place
        self._say = say
        self._mode = mode
        self._watched = frozenset(watched)
        self._logged: list[_Figure] = []
        self._steps: deque[_Step] = deque()
        self._scales = _Scales(attached)
        self._parameters = _Trained(attached, place)
        self._figures: Figures = "none"
        self._told = -1
        self._first = False
        self.replay_until: int | None = None
        self.found: NonFinite | None = None

    def start(self) -> None:
        """Training begins here, from what was restored."""
        self._first = True
        self._scales.start()

    @property
    def figures(self) -> Figures:
        """What is known of the figures since the last cut, or the start."""
        return self._figures

    def note(self, values: Mapping[str, Any]) -> None:
        """Figures of the step that is being computed."""
        if self._mode != "off":
            self._logged += [_figure(n, v) for n, v in values.items() if n in self._watched]

    def look(self, step: int) -> None:
        """``step`` is finished. Raises :class:`NonFinite` where one of its figures, or of a step
        before it whose figures have only now come from the device, is no number."""
        self._raise_again()
        if self._mode == "off":
            return
        skipped = self._since.watches_optimizers and not self._since.stepped
        logged, self._logged = self._logged, []
        self._steps.append(_Step(step, tuple(logged), skipped, self._scales.fell()))
        # A replay is to name the very step, and the first one proves the resume (F7): there a
        # device is waited for.
        replays = self.replay_until is not None and step <= self.replay_until
        first, self._first = self._first, False
        self._judge(wait=first or replays)

    def before_cut(self, step: int, *, nbytes: int, whole: bool) -> Health | None:
        """What a cut of ``step``, of ``nbytes``, is to carry with it; None where nothing is looked
        at. ``whole``: look at all parameters. Raises :class:`NonFinite`: there must be no cut."""
        self._raise_again()
        if self._mode == "off":
            return None
        self._judge(wait=True)  # the copy waits for the device as well
        looked, wrong = self._parameters.look(int(nbytes * PART_SHARE), whole=whole)
        if wrong is not None:
            self._tell(step, f"parameter {wrong.name}", wrong.value)
            looked = "bad"
        return Health(self._figures, looked, "agreed")

    def cut_taken(self) -> None:
        """What was looked at goes with that cut; the next one begins anew."""
        self._figures = "none"

    def _judge(self, *, wait: bool) -> None:
        while self._steps:
            step = self._steps[0]
            if not (wait or len(self._steps) > _BEHIND or all(f.ready() for f in step.figures)):
                return
            self._judge_step(self._steps.popleft())

    def _judge_step(self, step: _Step) -> None:
        for figure in step.figures:
            value = figure.value()
            if math.isfinite(value):
                self._figures = "bad" if self._figures == "bad" else "finite"
            elif step.unused or step.scale_fell():
                self._say(
                    "train.step_unused", f"no optimizer used it: {figure.name} was out of range",
                    step=step.number, level="debug", figure=figure.name, value=str(value),
                )  # fmt: skip
            else:
                self._figures = "bad"
                self._tell(step.number, figure.name, value)

    def _tell(self, step: int, what: str, value: float) -> None:
        found = NonFinite.at(rank=self._place.rank, step=step, figure=what, value=value)
        stops = self._mode == "stop"
        if self._told != step:
            self._told = step
            self._say(
                "train.nonfinite", found.what, step=step, level="error" if stops else "warning",
                figure=what, value=str(value), stops=stops,
            )  # fmt: skip
        if stops:
            self.found = found
            raise found

    def _raise_again(self) -> None:
        if self.found is not None:
            raise self.found


# figures


class _Figure(NamedTuple):
    """``value`` waits until the figure is there, ``ready`` says that it does not have to."""

    name: str
    ready: Callable[[], bool]
    value: Callable[[], float]


class _Step(NamedTuple):
    """``unused``: no optimizer has stepped. ``scale_fell``: whether a scaler has backed off."""

    number: int
    figures: tuple[_Figure, ...]
    unused: bool
    scale_fell: Callable[[], bool]


def _figure(name: str, value: Any) -> _Figure:
    """Of a number that is in this process's memory now, or on its way here."""
    if isinstance(value, torch.Tensor):
        held = sharding.local(value).detach()
        if held.device.type != "cpu":
            return _Figure(name, *_on_its_way(held))
        value = held
    known = 0.0 if isinstance(value, Rational) else float(value)  # whole numbers know no limit
    return _Figure(name, _at_once, lambda: known)


def _on_its_way(held: torch.Tensor) -> tuple[Callable[[], bool], Callable[[], float]]:
    """A copy that the device makes in the order of its work, while this process goes on."""
    if held.device.type != "cuda":
        kept = held.clone()
        return _never, lambda: float(kept)
    with torch.cuda.device(held.device):
        here = torch.empty(held.shape, dtype=held.dtype, pin_memory=True)
        here.copy_(held, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

    def value() -> float:
        copied.synchronize()
        return float(here)

    return copied.query, value


def _at_once() -> bool:
    return True


def _never() -> bool:
    return False


# scalers


class _Scales:
    """The scales of the attached scalers from step to step: one that falls says that gradients
    overflowed and that the parameters were left alone, also where the optimizer itself (a fused
    one) was told to."""

    def __init__(self, attached: Attached) -> None:
        held = [one for _, one in attached.others() if isinstance(one, GradScaler)]
        self._scalers = [scaler for scaler in held if scaler.is_enabled()]
        self._before: list[float | torch.Tensor] = []

    def start(self) -> None:
        self._before = [scaler.get_scale() for scaler in self._scalers]

    def fell(self) -> Callable[[], bool]:
        """Whether one fell in the step that has just ended. Asking may make a device wait."""
        if not self._scalers:
            return _never
        before, self._before = self._before, [_scale(scaler) for scaler in self._scalers]
        after = self._before
        return lambda: any(float(b) > float(a) for b, a in zip(before, after, strict=False))


def _scale(scaler: GradScaler) -> float | torch.Tensor:
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, torch.Tensor) else scaler.get_scale()


# parameters


class _Wrong(NamedTuple):
    name: str
    value: float


class _Piece(NamedTuple):
    """A part of a parameter of that name."""

    name: str
    elements: torch.Tensor


class _Trained:
    """The parameters that are trained. A frozen one may hold what it likes.

    A look at a part takes a window of every parameter: what spoils all of them (a loss that is no
    number, a norm that all gradients are divided by) is seen at once. The windows move on from look
    to look, and those of ranks begin at different places, because most ranks hold the same."""

    def __init__(self, attached: Attached, place: Place) -> None:
        self._attached = attached
        self._place = place
        self._names: dict[int, str] = {}
        self._round = 0
        self._whole_again_at = 0.0

    def look(self, budget: int, *, whole: bool) -> tuple[Parameters, _Wrong | None]:
        """How much was looked at, with ``budget`` bytes for a part, and the first that is no
        number."""
        parameters = self._listed()
        if not parameters:
            return "none", None
        began = time.monotonic()
        if whole or began >= self._whole_again_at:
            wrong = _first_wrong([_Piece(*one) for one in parameters])
            now = time.monotonic()
            self._whole_again_at = now + (now - began) / WHOLE_SHARE
            return "all", wrong
        share = budget / sum(local.nbytes for _, local in parameters)
        part = [_Piece(name, self._window(local, share)) for name, local in parameters]
        self._round += 1
        return ("all" if share >= 1.0 else "part"), _first_wrong(part)

    def _window(self, local: torch.Tensor, share: float) -> torch.Tensor:
        # One that lies scattered would be copied to be made flat: there whole rows are taken.
        flat = local.reshape(-1) if local.is_contiguous() else local
        length = flat.shape[0]
        size = min(max(math.ceil(length * share), min(length, _LEAST), 1), length)
        count = -(-length // size)
        at = (self._round + self._place.rank * count // self._place.world) % count
        return flat[at * size : (at + 1) * size]

    def _listed(self) -> list[tuple[str, torch.Tensor]]:
        """Names and local parts; those without elements have nothing to look at."""
        held = [p for _, m in self._attached.modules() for p in m.parameters() if _is_trained(p)]
        unique = {id(parameter): parameter for parameter in held}
        if not unique.keys() <= self._names.keys():
            self._names = self._attached.parameter_names()
        locals_ = [(key, sharding.local(p).detach()) for key, p in unique.items()]
        return [(self._names.get(key, "?"), local) for key, local in locals_ if local.numel()]


def _is_trained(parameter: torch.Tensor) -> bool:
    kind = parameter.dtype
    wide = kind.is_floating_point and kind.itemsize >= 2  # torch cannot add up 8-bit floats
    return parameter.requires_grad and wide and parameter.device.type != "meta"


def _first_wrong(pieces: list[_Piece]) -> _Wrong | None:
    """A sum is no number where one of its terms is none, and it is the fastest look there is."""
    with torch.no_grad():
        sums = [_sum(piece) for piece in pieces]
        for device in dict.fromkeys(total.device for total in sums):
            mine = [at for at, total in enumerate(sums) if total.device == device]
            good = torch.isfinite(torch.stack([sums[at] for at in mine])).tolist()
            for at, fine in zip(mine, good, strict=True):
                if not fine and (wrong := _wrong(pieces[at])) is not None:
                    return wrong
    return None


def _sum(piece: _Piece) -> torch.Tensor:
    # In the elements' own type: torch adds 16-bit floats up as 32-bit ones by itself, but copies
    # them first where it is asked to, which is ten times as slow.
    return piece.elements.sum().float()


def _wrong(piece: _Piece) -> _Wrong | None:
    """None where large finite values have only added up to infinity."""
    elements = piece.elements
    if bool(torch.isfinite(elements).all()):
        return None
    return _Wrong(piece.name, math.nan if bool(torch.isnan(elements).any()) else math.inf)
