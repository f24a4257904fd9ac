"""Makes the store of a running job fail, and work again.

Owns: the plan that the fault-injecting backend of every process reads, and the file whose
existence turns it on. Called by: the drill's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from everstep.drill.plan import Kind
from everstep.store.backends.local import path_of
from everstep.testing.faulty import BackendFault


def faulty_url(store: str, folder: Path) -> str:
    """The URL of a local store behind the fault-injecting backend, inert until a fault begins.

    Writes the plan into ``folder``.
    """
    plan = folder / "store-faults.json"
    plan.write_bytes(msgspec.json.encode(_faults(folder)))
    return f"faulty+file://{quote(path_of(store))}?plan={quote(str(plan))}"


class StoreFault:
    """The switch of one run's store faults."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on: Path | None = None

    @property
    def active(self) -> bool:
        return self._on is not None

    def begin(self, kind: Kind | Literal["store-down"]) -> None:
        """From the next write on (``store-down``: the next call of any kind) the store fails."""
        self._on = _switch(self._folder, kind)
        self._on.touch()

    def release(self) -> None:
        """The store works again."""
        if self._on is not None:
            self._on.unlink()
            self._on = None


def _faults(folder: Path) -> list[BackendFault]:
    full, torn = str(_switch(folder, "disk-full")), str(_switch(folder, "torn-write"))
    return [
        # A full disk still deletes.
        BackendFault("full", call="create", times=0, during=full),
        BackendFault("full", call="put", times=0, during=full),
        BackendFault("tear", call="create", key="/packs/", times=0, during=torn),
        BackendFault("fail", times=0, during=str(_switch(folder, "store-down"))),
    ]


def _switch(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.on"
