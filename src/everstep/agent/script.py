"""Whether what is to be run can be run at all, before a job is made for it.

Owns: the look at the script. Never does: run it. Called by: main.
"""

from __future__ import annotations

import os
import shutil
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from everstep.errors import UsageError

Kind = Literal["file", "module", "program"]


def check_script(name: str, kind: Kind, environment: Mapping[str, str]) -> None:
    """Raises :class:`UsageError` where no start of ``name`` could ever succeed: it is not there,
    or is no Python. What cannot be known without running it (a module) is let through.

    The agent's Python reads a script as its workers do, unless PYTHON_EXEC names another one.
    """
    if kind == "program":
        if shutil.which(name) is None:
            raise UsageError(f"there is no program {name} that could be run (--no-python).")
    elif kind == "file":
        _check_file(name, syntax="PYTHON_EXEC" not in environment)


def _check_file(name: str, *, syntax: bool) -> None:
    if not os.path.exists(name):
        hint = "Nothing was started. A module is run with -m, another program with --no-python."
        where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        raise UsageError(f"there is no script {name}{where}.", hint=hint)
    if not os.access(name, os.R_OK):
        raise UsageError(f"the script {name} cannot be read by this user.")
    # Python also runs folders, archives and pipes, and reading a pipe would empty it.
    if syntax and name.endswith(".py") and os.path.isfile(name):
        _compile(name)


def _compile(name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers say them
            compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as bad:
        said = "".join(traceback.format_exception_only(bad)).rstrip()
        what = f"the script {name} is not valid Python, nothing was started:\n{said}"
        raise UsageError(what) from bad
