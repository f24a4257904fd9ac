"""The command line is the installed torch's own, in both spellings, with PET_* variables."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import config_from_args, get_args_parser

from everstep.agent.flags import SETTINGS, UNLIMITED, parse, parser
from everstep.core import settings as core_settings
from everstep.errors import BadName, UsageError

# A value for each flag that takes one and does not accept any text. The test below fails where a
# flag of a newer torch needs one and has none here.
VALUES = {
    "nnodes": "2:3", "nproc_per_node": "3", "rdzv_backend": "c10d", "rdzv_endpoint": "h:1",
    "rdzv_conf": "a=b", "max_restarts": "4", "monitor_interval": "0.5", "start_method": "fork",
    "redirects": "3", "tee": "3", "local_ranks_filter": "0,1", "node_rank": "1",
    "master_port": "1234", "duplicate_stdout_filters": "a,b", "duplicate_stderr_filters": "a,b",
    "numa_binding": "node", "shutdown_timeout": "7",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "EVERSTEP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def torch_actions() -> list[argparse.Action]:
    return [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]


SPELLINGS = [(a.dest, spelling) for a in torch_actions() for spelling in a.option_strings]


@pytest.mark.parametrize(("dest", "spelling"), SPELLINGS)
def test_every_torchrun_flag_in_every_spelling_means_what_it_means_there(
    dest: str, spelling: str
) -> None:
    action = next(a for a in torch_actions() if a.dest == dest)
    given = [spelling] if action.nargs == 0 else [spelling, VALUES.get(dest, "text")]
    line = [*given, "train.py", "--store", "of-the-script"]
    ours, theirs = vars(parser().parse_args(line)), vars(get_args_parser().parse_args(line))
    assert {name: ours[name] for name in theirs} == theirs
    assert ours[dest] != action.default


VARIABLES = [a.dest for a in torch_actions() if isinstance(a, env | check_env)]


@pytest.mark.parametrize("dest", VARIABLES)
def test_every_pet_variable_is_read(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    action = next(a for a in torch_actions() if a.dest == dest)
    monkeypatch.setenv(f"PET_{dest.upper()}", "1" if action.nargs == 0 else VALUES.get(dest, "t"))
    ours, theirs = vars(parser().parse_args(["x.py"])), vars(get_args_parser().parse_args(["x.py"]))
    assert ours[dest] == theirs[dest] != action.default


def test_kubeflow_variables_give_torchruns_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "1234",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ours = parse(["train.py"], os.environ).config
    theirs, _, _ = config_from_args(get_args_parser().parse_args(["train.py"]))
    for field in ("min_nodes", "max_nodes", "nproc_per_node", "rdzv_endpoint", "rdzv_backend"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.rdzv_configs == theirs.rdzv_configs
    assert ours.rdzv_endpoint == "head:1234"


@pytest.mark.parametrize("name", SETTINGS)
def test_everstep_flags_have_both_spellings_and_do_not_hide_torchs(name: str) -> None:
    own = parser()._option_string_actions
    assert "--" + name in own
    assert "--" + name.replace("_", "-") in own
    assert not {"--" + name, "--" + name.replace("_", "-")} & set(
        get_args_parser()._option_string_actions
    )


def test_a_flag_wins_over_its_variable() -> None:
    told = {"EVERSTEP_JOB": "from-env", "EVERSTEP_KEEP_LAST": "7"}
    launch = parse(["--job", "from-flag", "train.py"], {**os.environ, **told})
    assert launch.settings.job == "from-flag"
    assert launch.settings.keep_last == 7
    assert launch.job_given


def test_defaults_are_absolute_and_the_same_for_the_same_call(tmp_path: Path) -> None:
    first = parse(["train.py", "--lr", "1"], os.environ)
    again = parse(["--nproc-per-node", "1", str(tmp_path / "train.py"), "--lr", "1"], os.environ)
    other = parse(["train.py", "--lr", "2"], os.environ)
    assert first.settings.store == str(tmp_path / "everstep-store")
    assert first.settings.job == again.settings.job != other.settings.job
    assert first.settings.job.startswith("train-")
    assert not first.job_given


def test_restarts_are_unlimited_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["train.py"], os.environ).max_restarts is None
    assert parse(["train.py"], os.environ).config.max_restarts == UNLIMITED
    assert parse(["--max-restarts=0", "train.py"], os.environ).max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    assert parse(["train.py"], os.environ).max_restarts == 5


def test_script_module_and_program() -> None:
    assert parse(["train.py", "a"], os.environ).arguments == ("-u", "train.py", "a")
    assert parse(["-m", "pkg.train", "a"], os.environ).arguments == ("-u", "-m", "pkg.train", "a")
    program = parse(["--no-python", "/bin/true", "a"], os.environ)
    assert (program.entrypoint, program.arguments) == ("/bin/true", ("a",))


@pytest.mark.parametrize(
    "line",
    [
        ["--nnodes", "0", "x.py"],
        ["--nnodes", "x", "x.py"],
        ["--nproc-per-node", "many", "x.py"],
        ["--no-python", "--module", "x.py"],
        ["--max-restarts", "-1", "x.py"],
    ],
)
def test_values_that_cannot_be_used_are_usage_errors(line: list[str]) -> None:
    with pytest.raises(UsageError, match="command line"):
        parse(line, os.environ)


def test_a_job_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(BadName):
        parse(["--job", "../x", "x.py"], os.environ)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--resume", "maybe"), ("--checkpoint-every", "soon"), ("--keep-last", "-1")],
)
def test_bad_settings_are_refused_by_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([flag, value, "x.py"], os.environ)
    assert stopped.value.code == 2
    assert flag in capsys.readouterr().err


def test_help_shows_torchs_and_everstep_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"], os.environ)
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--nproc-per-node", "--nproc_per_node", "--rdzv-backend", "--store", "--resume"):
        assert flag in said
    for name in SETTINGS:
        assert core_settings.variable(name) in said
