"""What makes two failures the same one: class, normalised text and frame.

Owns: the normalisation. The step is no part of it: the same error at another step is the same
failure, and whether it came at the same step is asked beside it (F4). Never does: decide. Called
by: history, budget, decide.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec

from everstep.faults.records import Evidence, Verdict

TEXT_LIMIT = 240
"""Characters of the normalised text that count: a message that carries a dump stays one."""

_NAME_LEAST = 2
"""Characters of a node's name: a shorter one may be any word."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # A prefix that a launcher puts before each line: [rank3]: or [default0]: or 3:
    (re.compile(r"^(?:\s*\[[a-z]+\s*\d+\]:?|\s*\d+:)\s*", re.I | re.M), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.I), "<id>"),
    (re.compile(r"\b[a-z][a-z0-9+.-]{0,16}://[^\s'\"<>]+", re.I), "<url>"),
    (re.compile(r"(?<![\w.])(?:\.{0,2}/)[^\s'\"<>:,;()\[\]]+/([^\s'\"<>:,;()\[\]/]+)"), r"\1"),
    (re.compile(r"\[?(?:\d{1,3}\.){3}\d{1,3}\]?(?::\d+)?"), "<address>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.I), "<n>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.I), "<id>"),
    # A host's name ends in its number; so does a tensor's index. Neither is what failed.
    (re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", re.I), "<n>"),
    (re.compile(r"[-+](?=<n>)"), ""),
    (re.compile(r"\s+"), " "),
)
_FRAME = re.compile(r"^(?P<path>[^:]*)(?P<rest>:.*)?$", re.S)


class Fingerprint(msgspec.Struct, frozen=True):
    """``fault`` is the class of the verdict, ``text`` its message without what differs from one
    time to the next, ``frame`` the program's frame without its folder."""

    fault: str
    text: str = ""
    frame: str = ""

    @property
    def key(self) -> str:
        """16 hex digits that name it in budgets and messages."""
        whole = "\0".join((self.fault, self.text, self.frame))
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fingerprint(verdict: Verdict, names: Iterable[str] = ()) -> Fingerprint:
    """The fingerprint of what a verdict says: the same whatever rank, node, path, address, time or
    step it came from. ``names`` are those of the job's nodes, which may stand in the message."""
    message = verdict.message or _most_telling(verdict.evidence)
    for name in names:
        if len(name) >= _NAME_LEAST:
            message = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<node>", message)
    return Fingerprint(verdict.fault, normalise(message), normalise_frame(verdict.frame))


def normalise(text: str) -> str:
    """``text`` without numbers, times, addresses, folders, ids, colours and launchers' prefixes."""
    found = _ANSI.sub("", text[: TEXT_LIMIT * 4])
    for pattern, instead in _RULES:
        found = pattern.sub(instead, found)
    return found.strip()[:TEXT_LIMIT]


def normalise_frame(frame: str) -> str:
    """``file:line function`` with the file's last two parts alone: a job that moves to another
    machine, or is unpacked into another folder, fails in the same place."""
    match = _FRAME.match(_ANSI.sub("", frame.strip()))
    if match is None:
        return frame.strip()
    parts = [part for part in match["path"].split("/") if part]
    return "/".join(parts[-2:]) + re.sub(r"\s+", " ", match["rest"] or "")


def _most_telling(evidence: tuple[Evidence, ...]) -> str:
    """Independent of the order in which evidence is listed (it follows the order of arrival)."""
    roots = [item.text for item in evidence if item.role == "root"]
    return min(roots, default="")
