"""What a script may say to ``attach`` besides its objects.

Owns: :class:`Options` and how they meet the settings of the environment. Called by:
:mod:`everstep.train.run`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal, TypeVar

from everstep.core.ids import check_job, default_job
from everstep.core.settings import MOST, Settings, from_environment, named, parse_seconds
from everstep.errors import UsageError
from everstep.keeper.control import LONGEST_NAME
from everstep.train.phases import OWN as OWN_PHASES

T = TypeVar("T")


def _explaining(kind: type[T]) -> type[T]:
    """Have a keyword that the class does not know refused with the closest one that it does."""
    made: Callable[..., None] = kind.__init__
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # a dataclass

    @functools.wraps(made)  # the signature stays the dataclass's own
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise UsageError(
                    f"{kind.__name__}() has no {name!r}.",
                    hint=f"Did you mean {close[0]}?" if close else f"It has {', '.join(known)}.",
                )
        made(self, *args, **given)

    kind.__init__ = init  # type: ignore[method-assign]  # of the same signature
    return kind


@_explaining
@dataclass(frozen=True)
class Options:
    """Choices of a script. What the environment (``everstep run``'s flags) says goes before them.

    ``store``, ``job``: as the flags of the same name; a script that names them is started by
    ``everstep run`` with those flags, because the job is claimed before the script runs.
    ``snapshot_every``: optimizer steps, 0 lets the measured stall decide. ``checkpoint_every``:
    seconds, or text such as ``"5min"``. ``keep_last``: committed checkpoints kept, at least 1.
    Rank 0's count for the job. ``replicated``: keywords whose tensors are equal on all ranks
    (stored once, and compared by digest). ``inexact_data``: what to do where the data position can
    only be reached by fetching batches again: ``"replay"`` them (exact) or ``"skip"`` them at the
    sampler (fast; not exact where the dataset draws random numbers in loader workers).
    ``deterministic_dataset``: your word that the loader's dataset and collate function draw no
    random numbers in its workers: a resume then skips at the sampler, which is exact, and
    persistent workers are kept. ``nonfinite``: what is done where a value is no finite number:
    ``"stop"``, ``"warn"`` or ``"off"`` (see the setting of that name). ``watched``: the figures of
    ``run.log`` that must be finite.

    Raises :class:`~everstep.errors.UsageError` naming the field whose value cannot be.
    """

    store: str | None = None
    job: str | None = None
    snapshot_every: int | None = None
    checkpoint_every: float | str | None = None
    keep_last: int | None = None
    replicated: tuple[str, ...] = ()
    inexact_data: Literal["replay", "skip"] = "replay"
    deterministic_dataset: bool = False
    nonfinite: Literal["stop", "warn", "off"] | None = None
    watched: tuple[str, ...] = ("loss", "grad_norm")

    def __post_init__(self) -> None:
        for name, (holds, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            optional = _DEFAULTS[name] is None
            if not (value is None and optional) and not holds(value):
                either = " or None" if optional else ""
                raise UsageError(f"{name}={value!r} must be {allowed}{either}.")
        if self.checkpoint_every is not None:
            _seconds(self.checkpoint_every)
        if self.job:
            check_job(self.job)


def whole(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number that counts something, from ``least`` on."""
    counts = isinstance(value, Integral) and not isinstance(value, bool)
    return counts and least <= value <= MOST  # type: ignore[operator]  # narrowed above


def phase_name(name: object) -> str:
    """The name of a declared phase. Raises :class:`UsageError`."""
    if not _is_text(name) or not str(name).strip() or not str(name).isprintable():
        raise UsageError(f"long_phase({name!r}): the name must be printable text.")
    if str(name) in OWN_PHASES:
        raise UsageError(
            f"long_phase({name!r}): that is a name of everstep's own.",
            hint=f"Take another than {', '.join(sorted(OWN_PHASES))}.",
        )
    if len(str(name).encode()) > LONGEST_NAME:
        raise UsageError(f"long_phase({name!r}): at most {LONGEST_NAME} bytes are shown of a name.")
    return str(name)


def phase_limit(limit: object) -> float:
    """The limit of a declared phase in seconds, 0 where none was given. Raises
    :class:`UsageError`."""
    if limit is None:
        return 0.0
    if not _is_duration(limit):
        raise UsageError(f"limit={limit!r} must be {_ALLOWED['checkpoint_every'][1]}, or None.")
    seconds = _seconds(limit, "limit")  # type: ignore[arg-type]  # a duration, as was seen
    if seconds <= 0:
        raise UsageError(f"limit={limit!r} must be more than 0.")
    return seconds


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_duration(value: object) -> bool:
    if isinstance(value, str):
        return True  # which text, is for its parser to say
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= MOST  # type: ignore[arg-type,operator]


def _are_keywords(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "store": (lambda value: _is_text(value) and value != "", "text, a path or a URL,"),
    "job": (_is_text, "text, the name of the job,"),
    "snapshot_every": (lambda value: whole(value, 0), "a whole number of steps, at least 0,"),
    "checkpoint_every": (
        _is_duration,
        "a finite number of seconds, at least 0, or text such as '5min'",
    ),
    "keep_last": (lambda value: whole(value, 1), "a whole number, at least 1,"),
    "replicated": (_are_keywords, "a tuple of keywords of attach(), such as ('ema',)"),
    "inexact_data": (
        lambda value: isinstance(value, str) and value in ("replay", "skip"),
        "'replay' or 'skip'",
    ),
    "deterministic_dataset": (lambda value: isinstance(value, bool), "True or False"),
    "nonfinite": (
        lambda value: isinstance(value, str) and value in ("stop", "warn", "off"),
        "'stop', 'warn' or 'off'",
    ),
    "watched": (_are_keywords, "a tuple of names of run.log(), such as ('loss',)"),
}
_DEFAULTS = {item.name: item.default for item in fields(Options)}


def effective(
    options: Options, environment: Mapping[str, str], arguments: Sequence[str]
) -> Settings:
    """The settings of a worker: the environment's, then the script's, then the defaults.

    ``arguments`` is ``sys.argv``; the job's default name is made from it.
    """
    told = from_environment(environment)
    said = named(environment)
    chosen: dict[str, object] = {}
    for name in _FORMS:
        value = getattr(options, name)
        if value is not None and name not in said:
            chosen[name] = _FORMS[name](value)
    mixed = dataclasses.replace(told, **chosen)  # type: ignore[arg-type]  # checked by name above
    if not mixed.job:
        mixed = dataclasses.replace(mixed, assumed="job")
    job = mixed.job or default_job(os.path.abspath(arguments[0]), arguments[1:])
    return dataclasses.replace(mixed, job=check_job(job), store=_absolute(mixed.store))


def check_claimed(options: Options, told: Settings) -> None:
    """Raises :class:`UsageError` where the script names another store or job than the one that an
    agent has claimed because nobody had told it.

    What a flag or a variable names goes before the script, as with every setting. What the agent
    had to make up itself is no choice of anybody's, and is past changing."""
    assumed = told.assumed.split(",")
    wanted = {
        name: value
        for name, value in (("store", options.store), ("job", options.job))
        if value and name in assumed and not _same(name, value, told)
    }
    if wanted:
        asked = " and ".join(f"{name}={value!r}" for name, value in wanted.items())
        claimed = " and ".join(f"{name} {getattr(told, name)!r}" for name in wanted)
        flags = " ".join(f"--{name} {shlex.quote(value)}" for name, value in wanted.items())
        raise UsageError(
            f"the script's Options say {asked}, but `everstep run` was not told and has claimed "
            f"{claimed} before the script ran.",
            hint=f"Say it to the agent: `everstep run {flags} ...`.",
        )


def overruled(options: Options, settings: Settings) -> str:
    """What to warn of where the agent was told another store or job than the script's; else
    empty."""
    pairs = (("store", options.store), ("job", options.job))
    other = [name for name, value in pairs if value and not _same(name, value, settings)]
    if not settings.attempt or not other:
        return ""
    asked = " and ".join(f"{name}={getattr(options, name)!r}" for name in other)
    told = " and ".join(f"{name} {getattr(settings, name)}" for name in other)
    return f"the script's Options({asked}) are without effect: `everstep run` was told {told}."


def _same(name: str, value: str, settings: Settings) -> bool:
    """Whether ``value`` is the job or the store of ``settings``, a path however it is spelt."""
    known: str = getattr(settings, name)
    if name == "job" or "://" in value or "://" in known:
        return value == known
    return os.path.realpath(value) == os.path.realpath(known)


def _absolute(store: str) -> str:
    return store if "://" in store else os.path.abspath(store)


def _seconds(value: float | str, name: str = "checkpoint_every") -> float:
    try:
        return parse_seconds(value) if isinstance(value, str) else float(value)
    except ValueError as bad:
        raise UsageError(f"{name}={value!r}: {bad}.") from bad


_FORMS: dict[str, Callable[[Any], object]] = {
    "store": str, "job": str, "snapshot_every": int, "checkpoint_every": _seconds,
    "keep_last": int, "nonfinite": str,
}  # fmt: skip
"""The plain form of each choice, whatever subclass or number type the script has it in."""
