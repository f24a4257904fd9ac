"""How the saving benchmark's process saves: everstep and its peers, each at its best settings.

Owns: one class a method. Never does: measure. Called by: :mod:`everstep.bench.save_job`.

Every method leaves its bytes synced to the disk. What a peer can keep between saves (plans, staging
memory, the writer process) is kept, as a long run would.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep.bench.rounds import Method
from everstep.bench.workload import Workload
from everstep.core.events import decode_line
from everstep.core.settings import from_environment
from everstep.errors import BenchError


class Saving(Protocol):
    """``save`` blocks training for as long as the method has to; ``durable_at`` is when the copy
    was durable (CLOCK_MONOTONIC), None until then, and raises :class:`BenchError` where it
    failed."""

    def open(self) -> None: ...

    def step_end(self) -> None: ...

    def save(self, step: int) -> None: ...

    def durable_at(self) -> float | None: ...

    def tidy(self) -> None:
        """Delete saves that nobody needs any more; not measured."""

    def close(self) -> None: ...


class _Peer:
    """What the peers share: a folder for each save, and no work at a step's end."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload = workload
        self.folder = folder
        self.place = folder
        self.at: float | None = None

    def open(self) -> None:
        return None

    def step_end(self) -> None:
        return None

    def begin(self, step: int) -> None:
        self.at = None
        self.place = self.folder / f"step-{step}"

    def durable_at(self) -> float | None:
        return self.at

    def tidy(self) -> None:
        if self.place != self.folder:
            shutil.rmtree(self.place)
            self.place = self.folder

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class NoSaving(_Peer):
    """Training alone."""

    def save(self, step: int) -> None:
        del step
        self.at = time.monotonic()


class TorchSave(_Peer):
    """torch.save, fsync of the file, rename, fsync of the folder."""

    def save(self, step: int) -> None:
        self.begin(step)
        self.place.mkdir()
        state = {
            "model": self.workload.model.state_dict(),
            "optimizer": self.workload.optimizer.state_dict(),
            "step": step,
        }
        new = self.place / "new"
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.place / "state.pt")
        _sync_folder(self.place)
        self.at = time.monotonic()


class DcpSave(_Peer):
    """dcp.save, blocking; its writer syncs the file."""

    def open(self) -> None:
        _one_rank_group(self.folder)

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        self.begin(step)
        save(_state(self.workload, step), checkpoint_id=self.place, planner=_planner())
        self.at = time.monotonic()


class DcpAsync(_Peer):
    """dcp.async_save with staging memory that is allocated once."""

    def __init__(self, workload: Workload, folder: Path, *, process: bool) -> None:
        super().__init__(workload, folder)
        self._process = process
        self._stager: Any = None
        self._future: Future[Any] | None = None

    def open(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        _one_rank_group(self.folder)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self._process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType as Kind
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.begin(step)
        future: Any = async_save(
            _state(self.workload, step),
            checkpoint_id=self.place,
            planner=_planner(),
            async_stager=self._stager,
            async_checkpointer_type=Kind.PROCESS if self._process else Kind.THREAD,
        )
        self._future = future
        future.add_done_callback(self._note)

    def durable_at(self) -> float | None:
        if self.at is not None and self._future is not None:
            self._future.result()  # raises what the writer raised
        return self.at

    def close(self) -> None:
        self._stager.close()
        super().close()

    def _note(self, future: Future[Any]) -> None:
        del future
        self.at = time.monotonic()


class Everstep:
    """The real thing: attach, a keeper process, ``run.checkpoint``, the commit's event."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload = workload
        self._journal = Path(from_environment(os.environ).events)
        self._read = 0
        self._rest = b""
        self._step = 0
        self._at: float | None = None
        self._run: Any = None
        del folder  # the store's place comes from the environment

    def open(self) -> None:
        from everstep.train.run import attach

        self._run = attach(model=self._workload.model, optimizer=self._workload.optimizer)
        self._run.restore()

    def step_end(self) -> None:
        if self._run is not None:
            self._run.step_end()

    def save(self, step: int) -> None:
        del step
        self._at, self._step = None, self._run.step
        self._run.checkpoint()

    def durable_at(self) -> float | None:
        if self._at is None:
            self._follow()
        return self._at

    def tidy(self) -> None:
        return None  # nothing younger than the grace period may be removed from a store

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def _follow(self) -> None:
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        event = decode_line(line)
        if event.step != self._step:
            return
        if event.kind == "checkpoint.committed":
            self._at = event.mono
        elif event.kind in ("cut.failed", "cut.no_slot", "cut.dropped", "persist.abandoned"):
            raise BenchError(f"everstep did not save step {event.step}: {event.text}")


def method(name: Method, workload: Workload, folder: Path) -> Saving:
    """The method of that name."""
    made: dict[Method, Callable[[], Saving]] = {
        "everstep": lambda: Everstep(workload, folder),
        "dcp": lambda: DcpSave(workload, folder),
        "dcp-thread": lambda: DcpAsync(workload, folder, process=False),
        "dcp-process": lambda: DcpAsync(workload, folder, process=True),
        "torch-save": lambda: TorchSave(workload, folder),
        "none": lambda: NoSaving(workload, folder),
    }
    return made[name]()


def _state(workload: Workload, step: int) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(workload.model, workload.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step}


def _planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    return DefaultSavePlanner(enable_plan_caching=True)


def _one_rank_group(folder: Path) -> None:
    # The writer process of DCP looks for this host by name otherwise, which may not resolve.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
