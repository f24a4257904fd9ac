"""Calls of everstep by a script: wrong arguments are refused in everstep's own words.

Owns: :func:`explained`. Called by: run of this room, on what a script calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from everstep.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def explained(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a call whose arguments do not fit raise :class:`~everstep.errors.UsageError` with
    ``example`` as its hint. A plain TypeError would be taken for a failure that a restart helps."""

    def wrap(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            try:
                return call(*args, **given)
            except TypeError:
                _check(call, args, given, example)
                raise  # of something inside the call

        return checked

    return wrap


def _check(
    call: Callable[..., object], args: tuple[object, ...], given: dict[str, object], example: str
) -> None:
    try:
        inspect.signature(call).bind(*args, **given)
    except TypeError as bad:
        raise UsageError(f"{call.__name__}(): {bad}.", hint=example) from None
