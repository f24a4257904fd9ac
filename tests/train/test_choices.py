"""What a script says wrongly is refused where it says it, and told what is allowed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_bodies as bodies
from torch import nn
from train_jobs import Jobs

import everstep
from everstep import Options
from everstep.core.settings import MOST, Settings, from_environment, to_environment
from everstep.errors import BadName, UsageError
from everstep.train.calls import explained
from everstep.train.options import check_claimed, effective, overruled
from everstep.train.place import Place
from everstep.train.run import Run, attach
from everstep.train.session import Session
from everstep.train.voice import check_figures

PLACE = Place(rank=0, world=1, local_rank=0, node=0, ranks_of_node=((0,),), launch="test")


# -- Options

WRONG: list[tuple[str, object, str]] = [
    ("store", 5, "must be text"),
    ("store", "", "must be text"),
    ("store", "a\0b", "must be text"),
    ("store", Path("s"), "must be text"),
    ("job", 7, "must be text"),
    ("snapshot_every", 2.5, "a whole number of steps, at least 0"),
    ("snapshot_every", -5, "a whole number of steps, at least 0"),
    ("snapshot_every", "ten", "a whole number of steps, at least 0"),
    ("snapshot_every", True, "a whole number of steps, at least 0"),
    ("snapshot_every", MOST + 1, "a whole number of steps, at least 0"),
    ("checkpoint_every", -5, "a finite number of seconds, at least 0"),
    ("checkpoint_every", float("nan"), "a finite number of seconds, at least 0"),
    ("checkpoint_every", float("inf"), "a finite number of seconds, at least 0"),
    ("checkpoint_every", False, "a finite number of seconds, at least 0"),
    ("checkpoint_every", [1], "a finite number of seconds, at least 0"),
    ("checkpoint_every", "soon", "a number of seconds"),
    ("keep_last", True, "a whole number, at least 1"),
    ("keep_last", 0, "a whole number, at least 1"),
    ("keep_last", 1.0, "a whole number, at least 1"),
    ("replicated", "ema", "a tuple of keywords"),
    ("replicated", (nn,), "a tuple of keywords"),
    ("replicated", None, "a tuple of keywords"),
    ("inexact_data", "maybe", "'replay' or 'skip'"),
    ("inexact_data", None, "'replay' or 'skip'"),
    ("deterministic_dataset", 1, "True or False"),
    ("deterministic_dataset", "no", "True or False"),
    ("nonfinite", "raise", "'stop', 'warn' or 'off'"),
    ("watched", "loss", "a tuple of names"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_name_value_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(UsageError) as refused:
        Options(**{name: value})  # type: ignore[arg-type]
    assert refused.value.what.startswith(f"{name}={value!r}")
    assert allowed in refused.value.what


def test_each_field_has_a_wrong_value_above() -> None:
    assert {name for name, _, _ in WRONG} == set(inspect.signature(Options).parameters)
    with pytest.raises(BadName):
        Options(job="../up")


def test_right_values_reach_the_settings_as_plain_ones() -> None:
    options = Options(
        store="s", job="j", snapshot_every=np.int64(4), checkpoint_every="1.5min",  # type: ignore[arg-type]
        keep_last=np.int32(2), replicated=("ema",),  # type: ignore[arg-type]
    )  # fmt: skip
    found = effective(options, {}, ["t.py"])
    assert (found.job, found.snapshot_every, found.checkpoint_every) == ("j", 4, 90.0)
    assert (type(found.snapshot_every), type(found.keep_last)) == (int, int)
    assert effective(Options(checkpoint_every=0), {}, ["t.py"]).checkpoint_every == 0.0


def test_a_misspelt_choice_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError, match=r"no 'snapshot_evry'\. Did you mean snapshot_every\?"):
        Options(snapshot_evry=5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="It has store, job,"):
        Options(xyz=5)  # type: ignore[call-arg]
    assert list(inspect.signature(Options).parameters)[:2] == ["store", "job"]


def test_a_job_that_nobody_named_is_known_to_be_named_after_its_arguments() -> None:
    assert effective(Options(), {}, ["t.py", "5"]).assumed == "job"
    assert effective(Options(job="j"), {}, ["t.py"]).assumed == ""
    assert effective(Options(), {"EVERSTEP_JOB": "j"}, ["t.py"]).assumed == ""


def test_every_choice_that_a_text_advises_exists() -> None:
    """What errors and warnings tell to pass: ``Options(name=...)``, or ``name='skip'``."""
    calls = (Options, Run.checkpoint, torch.utils.data.DataLoader)
    known = {name for call in calls for name in inspect.signature(call).parameters}
    advised: set[str] = set()
    for file in sorted(Path(everstep.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                advised |= set(re.findall(r"\bOptions\((\w+)=", node.value))
                if "train" in file.parts:
                    advised |= set(re.findall(r"(\w+)=(?:.skip|True|False)", node.value))
    assert advised - known == set()
    assert {"inexact_data", "deterministic_dataset"} <= advised


def test_a_variable_goes_before_the_script_even_with_the_default() -> None:
    default = Settings()
    told = to_environment(default, always=("keep_last", "snapshot_every"))
    assert told == {"EVERSTEP_KEEP_LAST": "3", "EVERSTEP_SNAPSHOT_EVERY": "0"}
    found = effective(Options(keep_last=9, snapshot_every=9, checkpoint_every=9), told, ["t.py"])
    assert (found.keep_last, found.snapshot_every) == (default.keep_last, default.snapshot_every)
    assert found.checkpoint_every == 9.0


def test_a_variable_that_no_format_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=f"EVERSTEP_SNAPSHOT_EVERY.*must be at most {MOST}"):
        from_environment({"EVERSTEP_SNAPSHOT_EVERY": str(MOST + 1)})


def test_only_what_the_agent_made_up_is_held_against_the_script(tmp_path: Path) -> None:
    store = str(tmp_path / "s")
    agents = Settings(store=store, job="j", attempt=1, assumed="store")
    check_claimed(Options(store=str(tmp_path / "x" / ".." / "s"), job="other"), agents)
    with pytest.raises(UsageError, match="--store memory://m"):
        check_claimed(Options(store="memory://m", job="other"), agents)
    assert "job='other'" in overruled(Options(store=store, job="other"), agents)
    assert overruled(Options(store=store, job="j"), agents) == ""
    assert overruled(Options(job="other"), Settings(job="j")) == "", "no agent runs"


# -- attach

WRONG_OBJECTS: list[tuple[dict[str, Any], str]] = [
    ({}, "was given nothing to keep"),
    ({"model": nn.Linear}, r"attach\(model=...\) was given the class Linear"),
    ({"loader": torch.utils.data.DataLoader}, "was given the class DataLoader"),
]


def test_arguments_that_do_not_fit_are_refused_with_the_right_form() -> None:
    model, keyword = nn.Linear(2, 2), r"everstep\.attach\(model=model, optimizer=optimizer\)"
    with pytest.raises(UsageError, match=f"too many positional arguments.*{keyword}"):
        attach(model, torch.optim.SGD(model.parameters()))  # type: ignore[call-arg,arg-type]
    with pytest.raises(UsageError, match=f"given a Linear without a keyword.*{keyword}"):
        attach(model, optimizer=None)  # type: ignore[arg-type]
    run = object.__new__(Run)  # arguments are looked at first
    with pytest.raises(UsageError, match=r"missing.*'until'.*run\.steps\(until=50_000\)"):
        run.steps()  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="unexpected keyword argument 'untill'"):
        run.steps(5, untill=5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="too many positional"):
        run.checkpoint(True)  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"run\.log\(loss=loss\)"):
        run.log(0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="of the call itself"):
        explained("")(_wrong_inside)(1)


def _wrong_inside(_: int) -> None:
    raise TypeError("of the call itself")


@pytest.mark.parametrize(("objects", "says"), WRONG_OBJECTS)
def test_nothing_and_a_class_are_no_objects(objects: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        attach(**objects)


class Trainer:
    """Holds an optimizer in a state of its own form."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"optimizer": self.optimizer.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["inner"]["optimizer"])


def unsaved(**objects: Any) -> str:
    session = Session(objects, PLACE, Options(), None)
    try:
        return session.unsaved()
    finally:
        session.close()


def test_parameters_to_train_without_an_optimizer_are_a_doubt() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "though model has parameters" in unsaved(model=model)
    assert "though model has parameters" in unsaved(model=model, scheduler=scheduler)
    assert unsaved(model=model, optimizer=optimizer) == ""
    assert unsaved(model=model, trainer=Trainer(optimizer)) == ""
    assert unsaved(model=nn.Linear(2, 2).requires_grad_(False)) == ""


def attach_without_optimizer() -> None:
    run = everstep.attach(model=nn.Linear(2, 2))
    for _ in run.steps(until=1):
        pass


def test_the_doubt_is_said_on_the_terminal_and_in_the_journal(jobs: Jobs) -> None:
    started = jobs.start(attach_without_optimizer)
    assert started.wait() == 0, started.said()
    assert started.said().count("no optimizer is attached, though model has parameters") == 1
    assert len(jobs.events("train.warning")) == 1
    jobs.run(bodies.train, until=1, env={"EVERSTEP_RESUME": "never"})
    assert len(jobs.events("train.warning")) == 1


# -- steps and log


def take_wrong_steps() -> list[str]:
    training = bodies.Training()
    said = []
    with everstep.attach(**training.objects()) as run:
        for until, accumulate in [("100", 1), (3.5, 1), (-1, 1), (True, 1), (3, 0), (3, 1.5)]:
            try:
                next(iter(run.steps(until, accumulate)))  # type: ignore[arg-type]
            except UsageError as refused:
                said.append(refused.what)
        run.log(loss=torch.tensor(1.0))
        try:
            run.log(loss="abc")
        except UsageError as refused:
            said.append(refused.what)
    return said


def test_steps_and_log_refuse_what_is_no_number(jobs: Jobs) -> None:
    said = jobs.run(take_wrong_steps)
    until, accumulate = "steps() needs a whole until >= 0", "steps() needs a whole accumulate >= 1"
    values = ["'100'", "3.5", "-1", "True", "0", "1.5"]
    wanted = [until] * 4 + [accumulate] * 2
    assert said[:-1] == [f"{w}, not {v}." for w, v in zip(wanted, values, strict=True)]
    assert said[-1].startswith("run.log(loss=...) was given str 'abc'; allowed are numbers and")


@pytest.mark.parametrize(
    "value",
    [1, 0.5, True, np.float32(1), np.array(1.0), np.bool_(1), torch.tensor(2),
     torch.tensor(1.0, dtype=torch.bfloat16), torch.empty((), device="meta")],
)  # fmt: skip
def test_figures(value: object) -> None:
    check_figures({"loss": value})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("abc", "given str 'abc'"),
        (None, "given NoneType None"),
        ([1.0], r"given list \[1.0\]"),
        (1j, "given complex 1j"),
        (torch.ones(2), r"given Tensor of shape \(2,\).*0-d.*loss.mean\(\)"),
        (torch.ones(1), r"given Tensor of shape \(1,\)"),
        (np.ones((2, 3)), r"given ndarray of shape \(2, 3\)"),
        (torch.tensor(1j), "given Tensor"),
    ],
)
def test_what_is_no_figure(value: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_figures({"loss": value})
