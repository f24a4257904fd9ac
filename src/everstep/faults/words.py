"""What an operator says: when it need not be said again, and what is odd about it.

Owns: the records of words. Never does: I/O, clocks; what follows from a word is decide's and
suspicion's affair. Called by: the commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.errors import UsageError
from everstep.faults.budget import count
from everstep.faults.fold import History
from everstep.faults.history import (
    DecisionRecord,
    IncidentRecord,
    Record,
    Stamp,
    Word,
    WordRecord,
    next_sequence,
)
from everstep.faults.limits import Limits
from everstep.faults.redact import redact
from everstep.faults.suspicion import Rules, standings

MOST = 500
"""Characters of a reason, and of a node's name."""


def word_of(
    past: Sequence[Record], attempt: int, word: Word, subject: str, reason: str, by: str, at: Stamp
) -> WordRecord:
    """The record behind all of ``past``; ``attempt`` is the newest that is known of.

    Raises ``UsageError`` for a text that is empty or too long.
    """
    for name, text in (("the reason", reason), ("the node's name", subject)):
        if len(text) > MOST:
            raise UsageError(f"{name} has {len(text)} characters; at most {MOST} are recorded.")
    if word == "reset-budget" and not reason.strip():
        raise UsageError(
            "a budget is reset for a reason.", hint='Say what was changed: --reset-budget "..."'
        )
    if word in ("exclude", "pardon") and not subject.strip():
        raise UsageError("no node is named.", hint="`everstep explain` names the job's nodes.")
    place = next_sequence(past, attempt)
    reason = redact(_clean(reason))
    return WordRecord(word, attempt, at, place, _clean(subject), reason, _clean(by))


def needless(history: History, word: Word, subject: str) -> str:
    """Why nothing would change if it were said, empty where something would."""
    if word == "reset-budget":
        return _nothing_spent(history)
    if word == "on-fault":
        same = history.mode == subject and any(w.word == "on-fault" for _, w in history.words())
        return f"it is {subject} already" if same else ""
    found = standings(history, Rules()).get(subject)
    if word == "exclude":
        for_good = found is not None and found.state == "excluded" and not found.until
        return f"node {subject} is excluded already, until it is pardoned" if for_good else ""
    if found is None or (found.state == "trusted" and not found.exclusions):
        return f"nothing is held against node {subject}"
    pardoned = found.state == "probation" and not found.score and not found.exclusions
    return f"node {subject} is pardoned already" if pardoned else ""


def odd_node(history: History, node: str) -> str:
    """A warning where no record of the job names the node, empty where one does."""
    known = nodes_of(history)
    if node in known:
        return ""
    if not known:
        return f"no record of the job names its nodes; {node} is taken as it was said"
    shown = ", ".join(known[:16]) + (", ..." if len(known) > 16 else "")
    return f"no record of the job names node {node}; known are: {shown}"


def nodes_of(history: History) -> list[str]:
    """All nodes that incidents and decisions name, sorted."""
    found: set[str] = set()
    for _, record in history.records:
        if isinstance(record, IncidentRecord):
            found |= {*record.nodes, record.verdict.root_node or ""}
        elif isinstance(record, DecisionRecord):
            found |= {*record.rung.nodes, *record.excluded, *record.avoided}
    return sorted(found - {""})


def _nothing_spent(history: History) -> str:
    """A reset says that something was changed: twice in a row it says nothing new."""
    newest = history.records[-1][1] if history.records else None
    if isinstance(newest, WordRecord) and newest.word == "reset-budget":
        return "the budgets were reset already, and nothing happened since"
    budgets = count(history, Limits())
    spent = budgets.fingerprints or budgets.stuck or budgets.unrestored or budgets.window
    stopped = any(decision.stops for decision in history.decisions())
    return "" if spent or stopped else "nothing of the budgets is spent"


def _clean(text: str) -> str:
    """Text that can be stored: bytes of an argument that are no UTF-8 came as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
