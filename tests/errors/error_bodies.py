"""Jobs that meet an error, as plain python and under ``everstep run``."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train_bodies import Training
from train_jobs import wait_for

import everstep

SCRIPT = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[2])
import error_bodies, train_jobs
from everstep.train.uncaught import install
install(os.environ)  # as where the worker is the first to import it
with train_jobs.as_an_interpreter_ends():
    getattr(error_bodies, sys.argv[1])(**json.loads(sys.argv[3]))
"""


def everstep_run(
    work: str, ranks: int = 1, unprivileged: bool = False, **arguments: object
) -> None:
    """An agent of ``ranks`` workers that call the function ``work``. The workers are forked from
    it, because it has imported torch."""
    from everstep.agent.main import run

    if unprivileged:
        obey_modes()
    script = Path.cwd() / "script.py"
    script.write_text(SCRIPT)
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]
    raise SystemExit(
        run(
            [
                "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork",
                str(script), work, json.dumps(places), json.dumps(arguments),
            ]
        )
    )  # fmt: skip


def obey_modes() -> None:
    """Have files' modes hold for this process and what it starts, also where it is root."""
    if os.getuid() != 0:
        return
    drop_from_bounding_set, dac_override, version_3 = 24, 1, 0x20080522
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    failed = libc.prctl(drop_from_bounding_set, dac_override, 0, 0, 0)
    failed = failed or libc.capget(header, sets)
    for at in range(3):  # effective, permitted, inheritable
        sets[at] &= ~(1 << dac_override)
    if failed or libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the capability cannot be dropped")


def short(until: int = 3, unprivileged: bool = False) -> None:
    if unprivileged:
        obey_modes()
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=until):
        training.step(batch)


def patient(go_on: str) -> None:
    """Stands in its third step until the file ``go_on`` is there."""
    training = Training()
    run = everstep.attach(**training.objects())
    for batch in run.steps(until=5):
        training.step(batch)
        if run.step == 2:
            Path("standing").touch()
            wait_for(lambda: os.path.exists(go_on), "the test lets it go on")


def forgetful() -> None:
    """Two backwards in a step, and nothing said of accumulation."""
    training = Training()
    run = everstep.attach(**training.objects())
    for index, batch in enumerate(run.steps(until=6)):
        training.backward(batch)
        if index % 2:
            training.end()
            training.optimizer.zero_grad()


def other_names() -> None:
    training = Training()
    model = nn.Sequential(*training.model[:3], nn.Sequential(nn.Linear(8, 2)), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    objects = {**training.objects(), "model": model, "optimizer": optimizer}
    objects["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    everstep.attach(**objects).restore()


def other_objects() -> None:
    training = Training()
    objects = training.objects()
    del objects["scheduler"]
    everstep.attach(**objects, ema=nn.Linear(2, 2)).restore()


def without_loader() -> None:
    objects = Training().objects()
    del objects["loader"]
    everstep.attach(**objects).restore()


def without_loader_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        without_loader()
    else:
        short()


def positional() -> None:
    training = Training()
    everstep.attach(training.model, training.optimizer)  # type: ignore[call-arg,arg-type]


def without_until() -> None:
    for _ in everstep.attach(**Training().objects()).steps():  # type: ignore[call-arg]
        pass


def stop_early() -> None:
    training = Training()
    for batch in everstep.attach(**training.objects()).steps(until=30):
        if training.step(batch) is not None:
            break


def old_loop() -> None:
    """attach was added, and the loop was kept."""
    training = Training()
    everstep.attach(**training.objects())
    for batch in training.loader:
        training.step(batch)


def never_attached() -> None:
    assert Training()


class Holder:
    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"here": open(os.devnull)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(f"never reached: {state}")


def unsavable() -> None:
    everstep.attach(**Training().objects(), holder=Holder())


class Failing:
    """An object that cannot be read at some boundaries."""

    def __init__(self, fails: set[int]) -> None:
        self.fails, self.reads = fails, 0

    def state_dict(self) -> dict[str, Any]:
        self.reads += 1
        if self.reads in self.fails:
            raise ZeroDivisionError("the user's own")
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


def failing_state_dict(fails: list[int]) -> dict[str, Any]:
    """``fails`` counts reads: the first is attach's, the second is for the slots' size."""
    training = Training()
    run = everstep.attach(**training.objects(), failing=Failing(set(fails)))
    for batch in run.steps(until=6):
        training.step(batch)
        if run.step + 1 in (2, 4):
            run.checkpoint(wait=True)
    return {"step": run.step}


def full_disk(during: str) -> dict[str, Any]:
    """A disk that is full at step 2 and has room again at step 4."""
    training = Training()
    objects = training.objects()
    del objects["loader"]
    run = everstep.attach(**objects)
    run.restore()
    answers = []
    batches = iter(training.loader)
    for _ in range(4):
        training.step(next(batches))
        run.step_end()
        if run.step == 2:
            Path(during).touch()
            answers.append(run.checkpoint(wait=True, timeout=1.0))
        if run.step == 4:
            os.unlink(during)
            answers.append(run.checkpoint(wait=True))
    return {"answers": answers, "digest": training.digest()}


def reloaded() -> str:
    training = Training()
    objects = training.objects()
    del objects["loader"]
    assert everstep.attach(**objects).restore() == 4
    return training.digest()


if __name__ == "__main__":
    sys.exit("this module is called by tests")
