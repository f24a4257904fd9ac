"""What only the user can change ends the job at once, and is said once, whatever the ranks."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Start

from everstep.agent.report import tell_refusals
from everstep.core import exits
from everstep.core.settings import misspelt
from everstep.errors import EverstepError, NoRecoveryPoint, StoreFull, UsageError
from everstep.train.uncaught import final_code, hook

BEFORE_ATTACH = """
import everstep
everstep.Options(snapshot_every=-1)
"""

TWICE = """
import everstep, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
run = everstep.attach(model=model, optimizer=optimizer)
run.restore()
everstep.attach(model=model, optimizer=optimizer)
"""

RECORDED = """
import everstep
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    everstep.Options(snapshot_every=-1)
main()
"""


MISMATCH = """
import everstep, os, torch
size = 2 if os.environ["EVERSTEP_ATTEMPT"] == "1" else 3
run = everstep.attach(model=torch.nn.Linear(2, size))
for step in run.steps(until=4):
    pass
"""


def test_a_state_that_does_not_fit_is_said_once(start: Start) -> None:
    """The keeper, the event and the workers all know of it."""
    assert start("--nproc-per-node", "2", script=MISMATCH).wait() == exits.FINISHED
    agent = start("--nproc-per-node", "2", script=MISMATCH)
    assert agent.wait() == exits.REFUSED, agent.said()
    assert agent.said().count("EVS-403") == 1, agent.said()
    assert agent.said().count("script.py") == 1, agent.said()
    assert "/everstep/train/" not in agent.said(), "how everstep came to it does not help"
    again = start("--nproc-per-node", "1", script=MISMATCH)
    assert again.wait() == exits.REFUSED, again.said()
    assert again.said().count("EVS-402") == 1, again.said()
    assert again.said().count("this run has 1") == 1


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (BEFORE_ATTACH, "EVS-100: snapshot_every"),
        (TWICE, "attached in this process already"),
        (RECORDED, "EVS-100: snapshot_every"),
    ],
    ids=["options", "twice", "record"],
)
def test_an_error_of_the_user_is_not_retried_and_said_once(
    start: Start, script: str, says: str
) -> None:
    agent = start("--nproc-per-node", "2", script=script)
    assert agent.wait() == exits.REFUSED, agent.said()
    assert len(agent.events("attempt.started")) == 1
    assert agent.said().count(says) == 1, agent.said()
    assert agent.said().count("Traceback") == 1
    assert "script.py" in agent.said(), "the line of the script is shown"
    assert "<string>" not in agent.said()
    assert "Root Cause" not in agent.said()
    assert "warning" not in agent.said()
    (stopped,) = agent.events("job.stopped")
    assert says in str(stopped.facts["errors"]), "who reads the events alone learns it too"


def test_an_error_of_the_scripts_own_is_tried_again(start: Start) -> None:
    """Once: that it comes again in the same place shows that a third time would help no more."""
    script = "import everstep\neverstep.Options\nraise RuntimeError('of the script')"
    agent = start(script=script)
    assert agent.wait() == exits.REPEATED
    assert len(agent.events("attempt.started")) == 2
    assert "RuntimeError: of the script" in agent.said()
    assert "Root Cause" in agent.said()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), exits.REFUSED),
        (NoRecoveryPoint("x"), exits.NO_RECOVERY_POINT),
        (StoreFull("x"), None),
        (EverstepError("x"), None),
        (ValueError("x"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_which_errors_are_final(error: BaseException, code: int | None) -> None:
    assert final_code(error) == code


@pytest.mark.parametrize("path", ["", "missing-folder/error.json"])
def test_without_a_place_for_it_the_error_is_printed_by_the_worker(
    tmp_path: Path, path: str
) -> None:
    printed: list[BaseException] = []
    told = hook(
        lambda _, error, __: printed.append(error),
        {"TORCHELASTIC_ERROR_FILE": path and str(tmp_path / path)},
    )
    error = UsageError("bad")
    with pytest.raises(SystemExit) as left:
        told(UsageError, error, None)
    assert (left.value.code, printed) == (exits.REFUSED, [error])


def test_different_errors_are_all_said(tmp_path: Path) -> None:
    from test_root_cause import error_file, fail

    failures = [
        fail(rank, 78, now=5.0, file=error_file(tmp_path / str(rank), text, 1.0))
        for rank, text in enumerate(["one", "other", "one"])
    ]
    stream = io.StringIO()
    assert tell_refusals([*failures, fail(3, -9, now=6.0, ours=True)], stream)
    assert stream.getvalue() == "ranks 0, 2, each:\none\nrank 1:\nother\n"
    assert not tell_refusals([fail(3, 78, now=6.0)], stream)


def test_the_error_file_has_the_form_of_torchs(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        raise UsageError("bad")
    except UsageError as error:
        kept = error
    path.write_text("what @record wrote")
    with pytest.raises(SystemExit):
        hook(sys.excepthook, {"TORCHELASTIC_ERROR_FILE": str(path)})(UsageError, kept, None)
    told = json.loads(path.read_text())["message"]
    assert told["message"] == "UsageError: EVS-100: bad"
    assert "raise UsageError" in told["extraInfo"]["py_callstack"]


def test_ctrl_c_shows_the_line_of_the_script_and_none_of_everstep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        misspelt(_Interrupts())
    except KeyboardInterrupt as error:
        hook(sys.__excepthook__, {})(KeyboardInterrupt, error, error.__traceback__)
    said = capsys.readouterr().err
    assert "test_refusals.py" in said
    assert "settings.py" not in said
    assert said.rstrip().endswith("KeyboardInterrupt")


class _Interrupts(dict[str, str]):
    """A mapping in which everstep is interrupted."""

    def __iter__(self) -> Iterator[str]:
        raise KeyboardInterrupt
