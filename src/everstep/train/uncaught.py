"""An error of everstep's that ends a worker: told to the agent by the exit code, said once.

Owns: the hook for uncaught exceptions in a worker of ``everstep run``. Never does: anything in
other processes, or for other errors. Called by: this room, when it is first imported.

Where the user has to change something no restart helps, and all ranks fail alike. So such an
error ends the worker with a final code, and its traceback goes into the error file of the rank
(the one that torch's ``@record`` writes), from which the agent prints it once.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from everstep.core import exits
from everstep.core.settings import variable
from everstep.errors import EverstepError, NonFinite, NoRecoveryPoint

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install(environment: Mapping[str, str]) -> None:
    """Take uncaught errors of everstep's over where an agent has started this process."""
    if environment.get(variable("attempt")):
        sys.excepthook = hook(sys.excepthook, environment)


def hook(before: Hook, environment: Mapping[str, str]) -> Hook:
    """The function for ``sys.excepthook``; ``before`` gets what is not everstep's to tell. It
    raises ``SystemExit``, which the interpreter obeys there."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = final_code(error)
        if code is not None or isinstance(error, KeyboardInterrupt | NonFinite):
            _cut_to_the_script(error, trace)
        if isinstance(error, NonFinite):
            _recorded(error, environment.get("TORCHELASTIC_ERROR_FILE", ""))  # rank and step
        if code is None:
            before(kind, error, trace)
            return
        if not _recorded(error, environment.get("TORCHELASTIC_ERROR_FILE", "")):
            before(kind, error, trace)
        raise SystemExit(code)

    return tell


def final_code(error: BaseException) -> int | None:
    """The exit code that ends the job for ``error``; None where a restart may help."""
    if isinstance(error, NoRecoveryPoint):
        return exits.NO_RECOVERY_POINT
    if isinstance(error, EverstepError) and error.blame == "user" and not error.retryable:
        return exits.REFUSED
    return None


def _cut_to_the_script(error: BaseException, trace: TracebackType | None) -> None:
    """Leave of the trace what leads to the call of everstep: of an error of the user the line of
    the script tells, and of Ctrl-C where everstep waited tells nothing."""
    error.__cause__, error.__suppress_context__ = None, True
    at = trace
    while at is not None and at.tb_next is not None:
        if str(at.tb_next.tb_frame.f_globals.get("__name__")).startswith("everstep."):
            at.tb_next = None
        at = at.tb_next


def _recorded(error: BaseException, path: str) -> bool:
    """Whether the error file holds ``error`` now, where the agent reads it; what @record wrote on
    the way here is replaced. Its form is torch's, whose own writer knows only an exception that is
    being handled, and here none is any more."""
    if not path:
        return False
    told = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    try:
        Path(path).write_text(json.dumps({"message": told}))
    except OSError:
        return False  # then the caller prints it here
    return True
