"""The attached objects of one run: read at a boundary, filled at a restore.

Owns: what is kept beside the objects (step, RNG, data position) and DDP's bucket order. Never
does: cut, load bytes, talk to the keeper. Called by: cut, boundary, restore and run of this room.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.core.layout import RankState, TensorRef
from everstep.errors import PendingGradients, StateMismatch
from everstep.state import difference, gradients, restore, rng
from everstep.state.ddp import rebuild_buckets_now
from everstep.state.gradients import Gradients
from everstep.state.inspect import Attached, LiveState
from everstep.state.objects import Objects
from everstep.state.restore import Destination
from everstep.train.data import DataFeed
from everstep.train.environment import changes, observe
from everstep.train.options import Options
from everstep.train.place import Place
from everstep.train.since import Beside, Since


@dataclass(frozen=True)
class Loaded:
    """A recovery point on its way into the objects: bytes first, records after the vote."""

    state: RankState
    tree: Objects
    tensors: tuple[torch.Tensor, ...]
    destinations: tuple[Destination, ...]

    @property
    def step(self) -> int:
        return self.state.step

    def wanted(self) -> list[tuple[TensorRef, memoryview]]:
        """What to read and where its bytes go."""
        return [(d.ref, d.view) for d in self.destinations if d.ref.nbytes]

    def finish_tensors(self) -> None:
        """Have what was read over bounce buffers in the tensors themselves."""
        for destination in self.destinations:
            destination.finish()


class Session:
    """Everything that one rank saves. Raises :class:`~everstep.errors.UsageError` for objects
    that cannot be saved."""

    def __init__(
        self, objects: Mapping[str, Any], place: Place, options: Options, feed: DataFeed | None
    ) -> None:
        self.attached = Attached(
            objects, replicated=options.replicated, rank=place.rank, world=place.world
        )
        with _streams_untouched():
            self.attached.check()
        self._feed = feed
        self._place = place
        self._fix_bucket_order()
        self._gradients = Gradients(self.attached)
        self._as_of: Beside | None = None
        self.since = Since(self.attached, self.beside)

    def resolve(self, step: int) -> LiveState:
        """The state at the boundary of ``step``, still in the user's memory. Random numbers that
        the objects' ``state_dict`` draws are put back: a cut changes nothing (R1)."""
        with _streams_untouched() as streams:
            drawn, data = self._as_of or (streams, self._position())
            extra = {
                "step": step,
                "environment": observe(self._place.world),
                "rng": drawn,
                "data": data,
                "gradients": gradients.standing(self.attached),
            }
            return self.attached.resolve(step, extra)

    def beside(self) -> Beside:
        """What a cut here would keep besides the objects."""
        with _streams_untouched() as streams:
            return streams, self._position()

    @contextmanager
    def as_of(self, beside: Beside | None) -> Iterator[None]:
        """In here the state is read with what :meth:`beside` gave at its boundary."""
        self._as_of = beside
        try:
            yield
        finally:
            self._as_of = None

    def check_gradients(self, step: int) -> None:
        """Raises :class:`PendingGradients` where the boundary would lose gradients (R1)."""
        why = self._gradients.pending()
        if why is not None:
            raise PendingGradients(f"rank {self._place.rank}, step {step}: {why}")

    def prepare(self, state: RankState) -> Loaded:
        """Destinations for a saved state. Nothing is changed yet.

        Raises :class:`~everstep.errors.StateMismatch` telling all that differs.
        """
        tree = restore.decode(state)
        difference.check(self.attached, state, tree)
        pairs = restore.targets(self.attached, state, tree)
        tensors = tuple(tensor for _, tensor in pairs)
        # What else is there is known now; what a tensor in it holds is not.
        self._check_data(restore.extra(self.attached, state, tree, tensors)["data"])
        return Loaded(
            state, tree, tensors, tuple(Destination(ref, tensor) for ref, tensor in pairs)
        )

    def apply(self, loaded: Loaded) -> list[str]:
        """After the vote: hand the records to the objects, go to the data position, and put the
        RNG of the boundary back last, because everything before may have drawn from it.

        Gives what has changed around the state, so that the continuation may differ (R4)."""
        extra = restore.extra(self.attached, loaded.state, loaded.tree, loaded.tensors)
        restore.apply(self.attached, loaded.state, loaded.tree, loaded.tensors)
        gradients.stand_again(self.attached, extra.get("gradients", {}))
        if self._feed is not None and extra["data"] is not None:
            self._feed.restore(extra["data"])
            self._feed.prepare()
        rng.restore(extra["rng"])
        return changes(extra["environment"], observe(self._place.world))

    def unsaved(self) -> str:
        """What to warn of where parameters are to be trained by an optimizer that is not attached;
        else empty. A trainer of the user's own may hold it: its state shows it."""
        held = self.attached.objects
        if any(isinstance(one, torch.optim.Optimizer) for one in held.values()):
            return ""
        trained = [name for name, one in held.items() if _is_trained(one)]
        if not trained:
            return ""
        with _streams_untouched():
            if any(_has_groups(one.state_dict()) for _, one in self.attached.others()):
                return ""
        return (
            f"no optimizer is attached, though {trained[0]} has parameters to train: the state of "
            "its optimizer is not saved, and a restart goes on with a fresh one. Attach it as "
            "well: attach(..., optimizer=optimizer)."
        )

    @property
    def at_batch(self) -> list[int] | None:
        """The epoch, and how many of its batches were given; None where no loader is attached."""
        return None if self._feed is None else [self._feed.epoch, self._feed.yielded]

    def close(self) -> None:
        """Take the hooks off the user's objects."""
        self._gradients.close()
        self.since.close()

    def _position(self) -> Any:
        return None if self._feed is None else self._feed.position()

    def _check_data(self, position: object) -> None:
        if (position is None) != (self._feed is None):
            raise StateMismatch(
                "the saved state was made "
                + ("with" if self._feed is None else "without")
                + " a loader, and the script attaches "
                + ("none." if self._feed is None else "one."),
                hint="Attach the same objects as before.",
            )

    def _fix_bucket_order(self) -> None:
        if self._place.world <= 2:
            return
        for keyword, module in self.attached.modules():
            if isinstance(module, DistributedDataParallel) and not rebuild_buckets_now(module):
                warnings.warn(
                    f"everstep: this torch does not let {keyword} fix its order of gradient sums "
                    f"at once; with {self._place.world} ranks a resumed run may differ from an "
                    "undisturbed one in the last bits.",
                    stacklevel=3,
                )


def _is_trained(held: object) -> bool:
    return isinstance(held, torch.nn.Module) and any(p.requires_grad for p in held.parameters())


def _has_groups(state: object, depth: int = 3) -> bool:
    """Whether an optimizer's state is in it, as every one of torch's form looks."""
    if not isinstance(state, dict) or not depth:
        return False
    return "param_groups" in state or any(_has_groups(x, depth - 1) for x in state.values())


@contextmanager
def _streams_untouched() -> Iterator[dict[str, Any]]:
    """Gives the generators' states, and has them so again afterwards."""
    before = rng.capture()
    try:
        yield before
    finally:
        if not _equal(before, rng.capture()):
            rng.restore(before)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if hasattr(one, "tobytes"):  # an array has no single truth to its ==
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
