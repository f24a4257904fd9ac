"""Every setting, declared once: its variable, its meaning and its default.

Owns: parsing of ``EVERSTEP_*`` from a mapping that is handed in. Never does: read the process's
environment by itself. Called by: train, agent, keeper, cli; docs/reference/settings.md is made
from it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from everstep.errors import UsageError

Resume = Literal["auto", "require", "never"]

PREFIX = "EVERSTEP_"
_OTHERS = ("EVERSTEP_FAULTS", "EVERSTEP_DRILL", "EVERSTEP_BENCH_")
"""What everstep's own tools hand to the processes that they start."""
DEFAULT_STORE = "./everstep-store"
MOST = 2**53
"""The largest whole number of a setting: more are no steps, and some formats hold no more."""


def setting(default: Any, doc: str, *, parse: str = "text") -> Any:
    """A field of :class:`Settings`; ``parse`` names one of :data:`PARSERS`."""
    return field(default=default, metadata={"doc": doc, "parse": parse})


@dataclass(frozen=True)
class Settings:
    """What a process of a job was told. Times in seconds."""

    store: str = setting(DEFAULT_STORE, "URL or path of the checkpoint store.")
    job: str = setting("", "Name of the job; empty: made from the script's path and arguments.")
    resume: Resume = setting(
        "auto",
        "`auto` resumes where there is something to resume, `require` fails where there is "
        "nothing, `never` starts a new lineage.",
        parse="resume",
    )
    snapshot_every: int = setting(
        0, "Steps between snapshots in memory; 0: chosen from the measured stall.", parse="count"
    )
    checkpoint_every: float = setting(60.0, "Seconds between durable checkpoints.", parse="seconds")
    keep_last: int = setting(
        3, "Committed checkpoints that retention keeps, at least 1.", parse="positive"
    )
    grace: float = setting(30.0, "Seconds from SIGTERM to the end of the job.", parse="seconds")
    final_deadline: float = setting(
        600.0, "Seconds for which the last checkpoint is retried before the job gives up waiting.",
        parse="seconds",
    )  # fmt: skip
    events: str = setting("", "File to which every event is appended as a line of JSON.")
    state_dir: str = setting("", "Folder for the keeper's log; empty: $XDG_STATE_HOME/everstep.")
    keeper: str = setting("", "Name of the keeper's socket (set by the agent for its workers).")
    attempt: int = setting(0, "Number of this attempt (set by the agent).", parse="count")
    node: int = setting(0, "Index of this node in the job (set by the agent).", parse="count")
    nodes: int = setting(1, "Nodes in the job (set by the agent).", parse="count")
    ranks: str = setting("", "Ranks of each node, as 0-3,4-5 (set by the agent).")
    agent_pid: int = setting(
        0, "The agent, whose workers end when it dies (set by the agent).", parse="count"
    )
    assumed: str = setting(
        "", "Which of store and job nobody named, so that the agent did (set by the agent)."
    )


def _count(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if value > MOST:
        raise ValueError(f"must be at most {MOST}")
    return value


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(ms|s|m|min|h|d)?\s*", text)
    if match is None:
        raise ValueError("must be a number of seconds, or a number with ms, s, m, h or d")
    scale = {"ms": 1e-3, "m": 60, "min": 60, "h": 3600, "d": 86400}.get(match[2] or "s", 1)
    try:
        value = float(match[1]) * scale
    except ValueError:
        raise ValueError("must be a number of seconds") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("must be finite and not negative")
    return value


def _resume(text: str) -> Resume:
    if text not in ("auto", "require", "never"):
        raise ValueError("must be auto, require or never")
    return text  # type: ignore[return-value]  # narrowed by the test above


PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "count": _count,
    "positive": _positive,
    "seconds": _seconds,
    "resume": _resume,
}


def parse_seconds(text: str) -> float:
    """``"90"``, ``"1.5h"``, ``"200 ms"`` as seconds. Raises ValueError."""
    return _seconds(text)


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings of ``environment``. Raises :class:`UsageError` naming the bad variable."""
    given: dict[str, Any] = {}
    parsers = {item.name: PARSERS[item.metadata["parse"]] for item in fields(Settings)}
    for name in named(environment):
        text = environment[variable(name)]
        try:
            given[name] = parsers[name](text)
        except ValueError as bad:
            raise UsageError(f"{variable(name)}={text!r}: {bad}.") from bad
    return Settings(**given)


def named(environment: Mapping[str, str]) -> frozenset[str]:
    """The settings that ``environment`` names, be it with their defaults."""
    return frozenset(item.name for item in fields(Settings) if environment.get(variable(item.name)))


def to_environment(settings: Settings, always: Collection[str] = ()) -> dict[str, str]:
    """The variables that give ``settings`` back: what an agent hands to its workers.

    Defaults are left out but for those named in ``always``: what somebody asked for goes before
    what a script asks for, and before what else the environment says.
    """
    return {
        variable(item.name): str(getattr(settings, item.name))
        for item in fields(Settings)
        if item.default is not MISSING
        and (item.name in always or getattr(settings, item.name) != item.default)
    }


def misspelt(environment: Mapping[str, str]) -> str:
    """One text that names the variables which look like settings and are none; empty where all
    are known."""
    known = [variable(item.name) for item in fields(Settings)]
    found = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not name.startswith(_OTHERS):
            close = difflib.get_close_matches(name, known, n=1)
            found.append(name + (f" (did you mean {close[0]}?)" if close else ""))
    return f"no setting of everstep, so without effect: {', '.join(found)}" if found else ""


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()
