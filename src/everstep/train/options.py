"""What a script may say to ``attach`` besides its objects.

Owns: :class:`Options` and how they meet the settings of the environment. Called by:
:mod:`everstep.train.run`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from everstep.core.ids import check_job, default_job
from everstep.core.settings import Settings, from_environment, parse_seconds
from everstep.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Choices of a script. What the environment (``everstep run``'s flags) says goes before them.

    ``store``, ``job``: as the flags of the same name. ``snapshot_every``: optimizer steps, 0 lets
    the measured stall decide. ``checkpoint_every``: seconds, or text such as ``"5min"``.
    ``keep_last``: committed checkpoints kept, at least 1. ``replicated``: keywords whose tensors
    are equal on all ranks (stored once; checked by digest, R8). ``inexact_data``: what to do where
    the data position can only be reached by fetching batches again: ``"replay"`` them (exact) or
    ``"skip"`` them at the sampler (fast; not exact where the dataset draws random numbers in
    loader workers). ``deterministic_dataset``: your word that the loader's dataset and collate
    function draw no random numbers in its workers: a resume then skips at the sampler, which is
    exact, and persistent workers are kept.
    """

    store: str | None = None
    job: str | None = None
    snapshot_every: int | None = None
    checkpoint_every: float | str | None = None
    keep_last: int | None = None
    replicated: tuple[str, ...] = ()
    inexact_data: Literal["replay", "skip"] = "replay"
    deterministic_dataset: bool = False

    def __post_init__(self) -> None:
        if self.inexact_data not in ("replay", "skip"):
            raise UsageError(f"inexact_data={self.inexact_data!r} must be 'replay' or 'skip'.")
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise UsageError(f"snapshot_every={self.snapshot_every!r} must not be negative.")
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(f"keep_last={self.keep_last!r} must be at least 1.")


def effective(
    options: Options, environment: Mapping[str, str], arguments: Sequence[str]
) -> Settings:
    """The settings of a worker: the environment's, then the script's, then the defaults.

    ``arguments`` is ``sys.argv``; the job's default name is made from it.
    """
    told = from_environment(environment)
    default = Settings()
    chosen: dict[str, object] = {}
    for name in ("store", "job", "snapshot_every", "checkpoint_every", "keep_last"):
        value = getattr(options, name)
        if value is not None and getattr(told, name) == getattr(default, name):
            chosen[name] = _seconds(value) if name == "checkpoint_every" else value
    mixed = dataclasses.replace(told, **chosen)  # type: ignore[arg-type]  # checked by name above
    job = mixed.job or default_job(os.path.abspath(arguments[0]), arguments[1:])
    store = mixed.store if "://" in mixed.store else os.path.abspath(mixed.store)
    return dataclasses.replace(mixed, job=check_job(job), store=store)


def _seconds(value: float | str) -> float:
    try:
        return parse_seconds(value) if isinstance(value, str) else float(value)
    except ValueError as bad:
        raise UsageError(f"checkpoint_every={value!r}: {bad}.") from bad
