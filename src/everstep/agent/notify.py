"""Telling someone outside: a URL or a command, at a stop and where a budget is nearly spent.

Owns: the message and its way out, in a thread; a receiver that hangs or fails delays nothing.
Never does: decide what is worth telling. Called by: respond, to which lead hands it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
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
"""For messages on their way when the agent ends, all together."""
END_SECONDS = 1.0
"""For a command that was ended to be gone, and told as failed."""


class Notifier:
    """``to`` is a URL (``http://`` or ``https://``) that gets a POST of JSON, or a command that
    gets the JSON on standard input; empty: nobody is told."""

    def __init__(self, to: str, job: str, store: str, record: Recorder) -> None:
        self._to = to
        self._job = job
        self._store = store
        self._record = record
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

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
        """Wait a little for what is on its way, and end the commands that still run then."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._closed = True
            for started in self._running:
                _kill(started)
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _send(self, body: bytes, decision: str) -> None:
        try:
            _post(self._to, body) if "://" in self._to else self._run(body)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._record.say(
                "notice.failed", f"nobody could be told of decision {decision}: "
                f"{redact(str(error))}", level="warning", decision=decision,
            )  # fmt: skip
        else:
            self._record.say(
                "notice.sent", f"decision {decision} was told", level="debug", decision=decision
            )

    def _run(self, body: bytes) -> None:
        with self._lock:
            if self._closed:
                raise OSError("the agent has ended before it was started")
            started = _start(self._to)
            self._running.add(started)
        with started:
            try:
                _hear_out(started, self._to, body, COMMAND_SECONDS)
            finally:
                with self._lock:
                    _kill(started)
                    self._running.discard(started)


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


def _start(command: str) -> subprocess.Popen[bytes]:
    """In a group of its own: what it starts ends with it."""
    return subprocess.Popen(
        shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def _hear_out(started: subprocess.Popen[bytes], command: str, body: bytes, seconds: float) -> None:
    try:
        _, told = started.communicate(body, seconds)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command!r} has not ended within {seconds:g} s") from None
    if started.returncode:
        said = told.decode(errors="replace").strip()[-300:]
        raise OSError(f"{command!r} ended with exit code {started.returncode}: {said}")


def _kill(started: subprocess.Popen[bytes]) -> None:
    """End its whole group, unless it was reaped: then its number may be another's."""
    if started.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)
