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

from everstep.core.health import DETECTION_DELAY
from everstep.errors import UsageError

Resume = Literal["auto", "require", "never"]
OnFault = Literal["", "act", "advise", "off"]
Nonfinite = Literal["stop", "warn", "off"]

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
    nonfinite: Nonfinite = setting(
        "stop",
        "What is done where a logged loss or gradient norm, or a parameter, is no finite number: "
        "`stop` raises NonFinite, so that the step is never a recovery point, `warn` tells of it "
        "and goes on, `off` looks at nothing (and no checkpoint is known to be healthy).",
        parse="nonfinite",
    )
    detection_delay: float = setting(
        DETECTION_DELAY,
        "Seconds from its commit after which a sound checkpoint counts as healthy: as long as what "
        "is wrong with a state may stay unseen.",
        parse="seconds",
    )
    grace: float = setting(30.0, "Seconds from SIGTERM to the end of the job.", parse="seconds")
    hang_floor: float = setting(
        0.0,
        "Seconds without a finished step before which no job is ended as hanging; 0: 30, or the "
        "time that a restart was measured to take, where that is longer. `off`: never.",
        parse="patience",
    )
    final_deadline: float = setting(
        600.0, "Seconds for which the last checkpoint is retried before the job gives up waiting.",
        parse="seconds",
    )  # fmt: skip
    events: str = setting("", "File to which every event is appended as a line of JSON.")
    state_dir: str = setting("", "Folder for the keeper's log; empty: $XDG_STATE_HOME/everstep.")
    on_fault: OnFault = setting(
        "",
        "What follows from a verdict: `act` does what it says, `advise` restarts in place and "
        "says what it would have done, `off` restarts in place; budgets hold in each. Recorded, "
        "and kept until another is said; empty: as it was said last, at first `act`.",
        parse="on_fault",
    )
    verdict_deadline: float = setting(
        2.0,
        "Seconds after a failure for which late evidence is waited for: a stop waits as long, the "
        "first optimizer step of a restart until then.",
        parse="seconds",
    )
    resume_deadline: float = setting(
        1800.0,
        "Seconds for a restart to lead to a new step, at least three times what the slowest took; "
        "then what stands behind it is tried: other nodes, a wait, an older state, a stop.",
        parse="seconds",
    )
    catalog: str = setting(
        "", "TOML file with more signatures of failures, asked before everstep's own."
    )
    per_fingerprint: int = setting(
        3, "Restarts after the same failure, until it is refilled; 0: no limit.", parse="count"
    )
    no_progress: int = setting(
        3, "Attempts in a row that get no further, at which the job is stopped; 0: no limit.",
        parse="count",
    )  # fmt: skip
    window_restarts: int = setting(
        50, "Restarts within the window, whatever their cause; 0: no limit.", parse="count"
    )
    window: float = setting(24 * 3600.0, "Seconds of that window.", parse="seconds")
    useful_share: float = setting(
        0.2,
        "Share of the time since the last refill, spent on new committed steps, that refills the "
        "budget of a failure.",
        parse="share",
    )
    skip_batches: bool = setting(
        False,
        "Whether batches that give no finite values a second time, in an exact replay, may be left "
        "out; else the job is stopped. `yes` or `no`.",
        parse="yes",
    )
    notify: str = setting(
        "",
        "URL to which a stop, and a budget of which 80 % are spent, is posted as JSON; or a "
        "command that gets it on standard input.",
    )
    node_name: str = setting(
        "", "What the platform calls this node, in verdicts and exclusions; empty: the host name."
    )
    node_pod: str = setting("", "The rack, switch or pod that this node stands in.")
    kernel_log: str = setting(
        "",
        "File with the kernel's messages, read as it grows; empty: /dev/kmsg or the journal.",
    )
    termination_notice: str = setting(
        "", "File that a hook or a node's termination handler writes before the node is taken away."
    )
    keeper: str = setting("", "Name of the keeper's socket (set by the agent for its workers).")
    attempt: int = setting(0, "Number of this attempt (set by the agent).", parse="count")
    node: int = setting(0, "Index of this node in the job (set by the agent).", parse="count")
    nodes: int = setting(1, "Nodes in the job (set by the agent).", parse="count")
    ranks: str = setting("", "Ranks of each node, as 0-3,4-5 (set by the agent).")
    agent_pid: int = setting(
        0, "The agent, whose workers end when it dies (set by the agent).", parse="count"
    )
    stacks: str = setting(
        "", "Folder through which stacks of this process are asked for (set by the agent)."
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


def _patience(text: str) -> float:
    return math.inf if text.strip().lower() in ("off", "inf") else _seconds(text)


def _resume(text: str) -> Resume:
    if text not in ("auto", "require", "never"):
        raise ValueError("must be auto, require or never")
    return text  # type: ignore[return-value]  # narrowed by the test above


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number from 0 to 1") from None
    if not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return value


def _yes(text: str) -> bool:
    answer = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}.get(
        text.strip().lower()
    )
    if answer is None:
        raise ValueError("must be yes or no")
    return answer


def _on_fault(text: str) -> OnFault:
    if text not in ("act", "advise", "off"):
        raise ValueError("must be act, advise or off")
    return text  # type: ignore[return-value]  # narrowed by the test above


def _nonfinite(text: str) -> Nonfinite:
    if text not in ("stop", "warn", "off"):
        raise ValueError("must be stop, warn or off")
    return text  # type: ignore[return-value]  # narrowed by the test above


PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "count": _count,
    "positive": _positive,
    "seconds": _seconds,
    "patience": _patience,
    "resume": _resume,
    "on_fault": _on_fault,
    "share": _share,
    "yes": _yes,
    "nonfinite": _nonfinite,
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
