"""Messages between the saving benchmark and its training processes.

Owns: the records. Called by: save, memory (ask), save_job (answers). Without torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Method = Literal["everstep", "dcp", "dcp-thread", "dcp-process", "torch-save", "none", "limits"]
Verb = Literal["train", "open", "round", "saves", "close"]


class Job(msgspec.Struct, frozen=True):
    """One training process and how it saves. ``folder`` exists and is the process's own."""

    method: Method
    folder: str
    state_bytes: int
    trained: float
    batch: int
    threads: int


class Ask(msgspec.Struct, frozen=True):
    """``train``: so many steps. ``open``: make the method ready. ``round``: one measured save (or
    the limits). ``saves``: so many saves, each waited for. ``close``: end."""

    verb: Verb
    count: int = 1


class Round(msgspec.Struct, frozen=True):
    """One measured save. Seconds. ``durable`` is from the call to the durable copy; ``before`` and
    ``after`` are undisturbed steps, ``during`` those until the copy was durable."""

    blocked: float
    durable: float
    before: list[float]
    during: list[float]
    after: list[float]


class Limits(msgspec.Struct, frozen=True):
    """What the machine needs for the same bytes. Seconds; ``direct`` is None where the filesystem
    has no O_DIRECT."""

    copy: float
    buffered: float
    direct: float | None


class Answer(msgspec.Struct, frozen=True):
    """``steps``: seconds of the steps that ``train`` made. ``state_bytes``: of all tensors."""

    steps: list[float] = []
    round: Round | None = None
    limits: Limits | None = None
    state_bytes: int = 0
