"""What a process may attach: which objects, and how often.

Owns: the runs that this process has open. Called by: :func:`everstep.train.run.attach`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.core.settings import Settings
from everstep.errors import UsageError


@dataclass
class _Here:
    """What this process has attached: how many runs ever, and the (store, job) of the open ones."""

    count: int = 0
    open: set[tuple[str, str]] = field(default_factory=set)


_here = _Here()


def check_objects(objects: Mapping[str, Any]) -> None:
    if not objects:
        raise UsageError(
            "attach() was given nothing to keep.",
            hint="Name each object: attach(model=model, optimizer=optimizer).",
        )
    for keyword, held in objects.items():
        if isinstance(held, type):
            raise UsageError(
                f"attach({keyword}=...) was given the class {held.__qualname__}, which has no "
                "state of its own.",
                hint="Attach the object that is made of it.",
            )


def _key(settings: Settings) -> tuple[str, str]:
    return settings.store, settings.job


def admit(settings: Settings) -> int:
    """How many runs this process has attached before. Raises :class:`UsageError` where the next
    one would take the place of a run: the keeper knows one worker a rank."""
    if _key(settings) in _here.open:
        raise UsageError(
            f"job {settings.job} is attached in this process already.",
            hint="Close the first run before you attach again.",
        )
    if _here.count and settings.attempt:
        raise UsageError(
            "this process has attached before, and its attempt can be restored only once.",
            hint="Under `everstep run` attach once in a process.",
        )
    return _here.count


def opened(settings: Settings) -> None:
    """A run is attached."""
    _here.count += 1
    _here.open.add(_key(settings))


def closed(settings: Settings) -> None:
    """It is closed."""
    _here.open.discard(_key(settings))
