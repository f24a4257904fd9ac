"""everstep keeps PyTorch distributed training alive.

The public names, loaded lazily: importing everstep never imports torch. In a worker of
``everstep run`` the import begins the watch over its agent (:mod:`everstep.guard`).
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.errors import EverstepError
    from everstep.train.options import Options
    from everstep.train.run import Run, attach

__version__ = "0.1.0.dev0"
__all__ = ["EverstepError", "Options", "Run", "__version__", "attach"]

_HOMES = {
    "attach": "everstep.train.run",
    "Run": "everstep.train.run",
    "Options": "everstep.train.options",
    "EverstepError": "everstep.errors",
}


if "EVERSTEP_AGENT_PID" in _os.environ:
    from everstep import guard as _guard

    _guard.begin(_os.environ)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
