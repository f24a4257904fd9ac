"""Telling someone outside: a URL or a command, at a stop and where a budget is nearly spent.

Owns: the message and its way out, in a thread; a receiver that hangs or fails delays nothing.
Never does: decide what is worth telling. Called by: respond, to which lead hands it.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
import urllib.error
import urllib.request

import msgspec

from everstep.agent.record import Recorder
from everstep.faults.history import DecisionRecord, IncidentRecord
from everstep.faults.redact import redact

FORMAT = "everstep.notice/1"
POST_SECONDS = 10.0
COMMAND_SECONDS = 30.0
CLOSE_SECONDS = 5.0
"""For messages on their way when the agent ends."""


class Notifier:
    """``to`` is a URL (``http://`` or ``https://``) that gets a POST of JSON, or a command that
    gets the JSON on standard input; empty: nobody is told."""

    def __init__(self, to: str, job: str, store: str, record: Recorder) -> None:
        self._to = to
        self._job = job
        self._store = store
        self._record = record
        self._threads: list[threading.Thread] = []

    def tell(self, decision: DecisionRecord, incident: IncidentRecord | None) -> None:
        """Send word of a decision; nothing is waited for."""
        if not self._to:
            return
        body = message(self._job, self._store, decision, incident)
        thread = threading.Thread(
            target=self._send, args=(body, decision.id), name="everstep-notify", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Wait a little for what is on its way."""
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _send(self, body: bytes, decision: str) -> None:
        try:
            _post(self._to, body) if "://" in self._to else _run(self._to, body)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._record.say(
                "notice.failed", f"nobody could be told of decision {decision}: "
                f"{redact(str(error))}", level="warning", decision=decision,
            )  # fmt: skip
        else:
            self._record.say(
                "notice.sent", f"decision {decision} was told", level="debug", decision=decision
            )


def message(
    job: str, store: str, decision: DecisionRecord, incident: IncidentRecord | None
) -> bytes:
    """The JSON that is sent (documented in docs/guides/incidents.md)."""
    verdict = incident.verdict if incident is not None else None
    told: dict[str, object] = {
        "format": FORMAT,
        "job": job,
        "store": redact(store),
        "attempt": decision.attempt,
        "incident": decision.incident,
        "action": decision.action,
        "reason": redact(decision.reason),
        "exit_code": decision.exit_code,
        "stopped": decision.stops,
        "alerts": [redact(alert) for alert in decision.alerts],
        "budget": dict(decision.budget),
        "class": verdict.fault if verdict else "",
        "root_ranks": list(verdict.root_ranks) if verdict else [],
        "root_node": verdict.root_node if verdict else None,
    }
    return msgspec.json.encode(told)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=POST_SECONDS):
            return
    except urllib.error.HTTPError as refused:
        raise OSError(f"the receiver answered {refused.code} {refused.reason}") from refused


def _run(command: str, body: bytes) -> None:
    done = subprocess.run(
        shlex.split(command), input=body, timeout=COMMAND_SECONDS, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise OSError(f"{command!r} ended with exit code {done.returncode}: {said}")
