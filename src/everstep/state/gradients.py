"""Gradients that a step boundary would lose (R1): what a later optimizer step still uses of them.

Owns: the hooks on optimizers and parameters, and what they saw. Never does: raise, change a
gradient, keep one alive. Called by: train at every boundary.

Every gradient is known by a weak reference and its version. Three of its moments matter:

- At a boundary, one that has changed since the last step of *any* optimizer is accumulated for a
  step to come: the boundary is refused at once.
- One that its own optimizer has used, or that another optimizer's step came after (a GAN: the
  backward of one network leaves gradients in the other), may stand at a boundary, since most loops
  zero it before they add to it. Whether this one does cannot be known there, so it is remembered.
- At the next step of its own optimizer, that step has used it all the same if nothing zeroed it
  between: a boundary lay inside an accumulation, and the next one is refused.

Setting to None shows by the reference. Zeroing in place and adding on look alike from outside (each
moves the version by one), so where it matters a hook before the accumulation looks.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from everstep.state import sharding
from everstep.state.inspect import Attached


class _Marks(NamedTuple):
    """Weak references to gradients and their versions, in the order of the parameters."""

    references: list[Any]
    versions: list[int]


class _Absent:
    """Stands where a parameter has no gradient."""

    _version = 0


_ABSENT = _Absent()
_NOTHING = weakref.ref(_ABSENT)
_NONE = _Marks([], [])
_SPARSE = 2
_WHOLE = frozenset({torch.Tensor, _Absent})
"""Types whose version is that of their memory."""
_gradient_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")


class Gradients:
    """Watches the attached optimizers until :meth:`close`. One for each run."""

    def __init__(self, attached: Attached) -> None:
        self._watches = [_Watch(*named) for named in attached.optimizers()]
        self._scalers = [held for _, held in attached.others() if isinstance(held, GradScaler)]
        self._states = [_states(scaler) for scaler in self._scalers]
        self._broken: str | None = None
        self._hooks = [
            watch.optimizer.register_step_post_hook(self._after_step) for watch in self._watches
        ]

    def pending(self) -> str | None:
        """Why this boundary is none, or an earlier one was none: gradients that no step had used
        and that one was still to use. None where all is well.

        Call it at every boundary: a skip of the scaler is told from the state it leaves between
        two calls. Gradients that are all zero are not pending.
        """
        broken, self._broken = self._broken, None
        skipped = self._skipped()
        self._states = [_states(scaler) for scaler in self._scalers]
        if skipped:
            self._settle_all()
        unused = [watch.keyword for watch in self._watches if watch.boundary()]
        if broken is None and unused:
            return _unused(unused[0], bool(self._scalers))
        return broken

    def close(self) -> None:
        """Take the hooks off and forget what they saw."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for watch in self._watches:
            watch.close()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watch in self._watches:
            if watch.optimizer is optimizer:
                self._broken = watch.stepped() or self._broken
            else:
                watch.settle()

    def _settle_all(self) -> None:
        """A scaler's update does not tell which optimizer it kept from stepping. With one there is
        no question; with several, gradients count as those that another's step came after."""
        for watch in self._watches:
            watch.settle()
            if len(self._watches) == 1:
                watch.used = watch.settled

    def _skipped(self) -> bool:
        """Whether a scaler has stepped or updated since the last boundary. ``update`` replaces the
        scaler's record of its optimizers; until then it says that ``step`` was called."""
        return any(
            _states(scaler) is not before or _stepped(scaler)
            for scaler, before in zip(self._scalers, self._states, strict=True)
        )


def standing(attached: Attached) -> dict[str, bytes]:
    """Of each optimizer's parameters, which have a gradient at this boundary: 0 none, 1 a dense
    one, 2 a sparse one. What it holds is no state, but that it is there may be: an optimizer moves
    a parameter whose gradient is zero, and leaves one alone that has none."""
    found = {}
    for keyword, optimizer in attached.optimizers():
        kinds = bytes(map(_kind, map(_gradient_of, _flat(optimizer))))
        if any(kinds):
            found[keyword] = kinds
    return found


def stand_again(attached: Attached, kinds: Mapping[str, bytes]) -> None:
    """Zero gradients where :func:`standing` has found some."""
    for keyword, optimizer in attached.optimizers():
        for parameter, kind in zip(_flat(optimizer), kinds.get(keyword, b""), strict=False):
            if kind and parameter.grad is None:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                parameter.grad = zeros.to_sparse() if kind == _SPARSE else zeros


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    return _SPARSE if sharding.local(gradient).is_sparse else 1


def _flat(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = optimizer.param_groups
    return [*itertools.chain.from_iterable(group["params"] for group in groups)]


class _Watch:
    """The gradients of one optimizer's parameters, which are known by their place among them.

    ``used`` is what its last step left, ``settled`` what stood after the last step of any.
    ``_left`` stood at the last boundary; of it ``_gone`` is known to be zeroed, ``_strays`` are
    those that its own steps have not used, ``_carried`` those that were seen to be added to.
    """

    def __init__(self, keyword: str, optimizer: torch.optim.Optimizer) -> None:
        self.keyword = keyword
        self.optimizer = optimizer
        self.used = self.settled = self._marks()
        self._left = _NONE
        self._gone: set[int] = set()
        self._strays: set[int] = set()
        self._carried: set[int] = set()
        self._zeroed: set[int] = set()
        self._hooks: dict[int, tuple[object, Any]] = {}

    def settle(self) -> None:
        """An optimizer has stepped."""
        self.settled = self._marks()

    def stepped(self) -> str | None:
        """This optimizer has stepped: why the boundary before lay inside an accumulation."""
        now = self._marks()
        why = self._judge(now)
        self.used = self.settled = now
        self._left = _NONE
        return why

    def boundary(self) -> bool:
        """Begin the time after a boundary. Whether gradients stand here that no step came after."""
        now = self._marks()
        if len(now.versions) < len(self.settled.versions):
            self._begin_again(now)  # a group was taken out, and places have changed
        fresh = _differing(now, self.settled)
        unused = bool(fresh) and _any_nonzero(self._gradients(fresh))
        # A boundary that is refused is no cut; fresh ones at any other are all zero.
        self._left, self._gone = (_NONE if unused else now), fresh
        one = self.settled is self.used
        self._strays = set() if one else _differing(now, self.used) - fresh
        self._carried.clear()
        self._look_before_accumulation(self._strays)
        return unused

    def close(self) -> None:
        self._begin_again(_NONE)

    def _begin_again(self, now: _Marks) -> None:
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._zeroed.clear()
        self._left, self.used, self.settled = _NONE, now, now

    def _parameters(self) -> list[torch.Tensor]:
        return _flat(self.optimizer)

    def _gradients(self, places: set[int]) -> list[torch.Tensor]:
        parameters = self._parameters()
        found = (parameters[at].grad for at in places)
        return [gradient for gradient in found if gradient is not None]

    def _marks(self) -> _Marks:
        """Of every parameter, at every step and boundary: hence the plain loops of C."""
        held: Any = [
            _ABSENT if gradient is None else gradient
            for gradient in map(_gradient_of, self._parameters())
        ]
        references = [*map(weakref.ref, held)]
        if not _WHOLE.issuperset(map(type, held)):
            held = [g if g is _ABSENT else sharding.local(g) for g in held]
        return _Marks(references, [*map(_version_of, held)])

    def _judge(self, now: _Marks) -> str | None:
        """What the step that has just ended used of what stood at the boundary."""
        same = [*map(operator.is_, now.references, self._left.references)]
        if not self._carried and not any(same):
            return None
        carried, unseen, unclear = set(self._carried), set[int](), set[int]()
        for at, is_same in enumerate(same):
            if is_same and at not in self._gone and now.references[at] is not _NOTHING:
                stands = now.versions[at] == self._left.versions[at]
                if at in self._strays and at not in carried:
                    (carried if stands else unseen).add(at)
                elif not stands:
                    # Of one that a step used before: every loop that zeroes in place at the start.
                    unclear.add(at)
                elif not self._may_be_of_a_graph(at):
                    carried.add(at)  # used a second time, as it is
        self._look_before_accumulation(unclear)
        if carried and _any_nonzero(self._gradients(carried)):
            return _carried(self.keyword)
        return _unseen(self.keyword) if unseen else None

    def _may_be_of_a_graph(self, at: int) -> bool:
        """A CUDA graph writes gradients anew, and their versions stand still."""
        return self._parameters()[at].device.type != "cpu"

    def _look_before_accumulation(self, places: set[int]) -> None:
        """From now on. Shards of FSDP2 get their gradients without autograd: there none runs."""
        missing = places - self._hooks.keys()
        parameters = self._parameters() if missing else []
        for at in missing:
            if parameters[at].requires_grad:
                look = functools.partial(_look, weakref.ref(self), at, parameters[at])
                # The parameter does not keep its node, so the hook lasts as long as both are held.
                # A hook on the tensor itself would be seen where the user pickles it.
                node: Any = torch.autograd.graph.get_gradient_edge(parameters[at]).node
                self._hooks[at] = (node, node.register_prehook(look))

    def look(self, at: int, gradient: torch.Tensor | None) -> None:
        """This gradient is about to be added to. Whether it stood at the boundary."""
        if at >= len(self._left.versions) or at in self._gone:
            return
        if gradient is not None and self._stands(at, gradient):
            self._carried.add(at)
        else:
            self._carried.discard(at)
            self._gone.add(at)

    def _stands(self, at: int, gradient: torch.Tensor) -> bool:
        if at in self._carried:  # and zeroed since, perhaps
            return _any_nonzero([gradient])
        if self._left.references[at] is not weakref.ref(gradient):
            return False
        moved = sharding.local(gradient)._version != self._left.versions[at]
        if at in self._strays and not moved:
            return _any_nonzero([gradient])
        # A loop that zeroes here once does so always, and is looked at once. (The version tells
        # nothing of `grad.data.zero_()`.)
        if at not in self._zeroed and not _any_nonzero([gradient]):
            self._zeroed.add(at)
        return at not in self._zeroed


def _look(
    watching: weakref.ref[_Watch], at: int, parameter: torch.Tensor, _incoming: object
) -> None:
    watch = watching()
    if watch is not None:
        watch.look(at, parameter.grad)


def _differing(now: _Marks, before: _Marks) -> set[int]:
    """Places of gradients that are new or have changed. References are compared by identity: to
    compare two live ones is to compare tensors."""
    if now.versions == before.versions and all(
        map(operator.is_, now.references, before.references)
    ):
        return set()
    known = len(before.versions)
    return {
        at
        for at, (reference, version) in enumerate(zip(*now, strict=True))
        if reference is not _NOTHING
        and not (
            at < known and reference is before.references[at] and version == before.versions[at]
        )
    }


def _states(scaler: GradScaler) -> Any:
    return getattr(scaler, "_per_optimizer_states", None)


def _stepped(scaler: GradScaler) -> bool:
    states: dict[int, dict[str, Any]] = _states(scaler) or {}
    return any(state["stage"] is OptState.STEPPED for state in states.values())


def _any_nonzero(gradients: Iterable[torch.Tensor]) -> bool:
    with torch.no_grad():
        return any(bool(torch.count_nonzero(_elements(gradient))) for gradient in gradients)


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    held = sharding.local(gradient).detach()
    return held._values() if held.is_sparse else held


def _unused(keyword: str, has_scaler: bool) -> str:
    text = (
        f"{keyword}'s parameters hold gradients accumulated since the last optimizer step, and "
        "a cut here would lose them. Pass accumulate=<micro-batches per step> to run.steps, or "
        "end the step before run.step_end(). Where a step is left out on purpose (a norm that is "
        f"not finite), zero them instead: {keyword}.zero_grad()."
    )
    if not has_scaler:
        text += " If a GradScaler skipped the step, attach it (scaler=...)."
    return text


def _carried(keyword: str) -> str:
    return (
        f"{keyword}'s last step used gradients that had stood at the boundary before it and were "
        "not zeroed since: a cut there lost them. Pass accumulate=<bodies per step of "
        f"{keyword}> to run.steps, or zero them ({keyword}.zero_grad()) before the backward that "
        "the step is to use."
    )


def _unseen(keyword: str) -> str:
    return (
        f"{keyword}'s last step may have used gradients that had stood at the boundary before it, "
        "left there by another optimizer's backward: whether they were zeroed in place or added to "
        f"cannot be seen here. Set them to None ({keyword}.zero_grad(set_to_none=True)) before the "
        f"backward that the step is to use, or pass accumulate=<bodies per step of {keyword}> to "
        "run.steps."
    )
