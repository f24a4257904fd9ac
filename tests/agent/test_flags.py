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
    ("flag", "value", "says"),
    [
        ("--resume", "maybe", "must be auto, require or never"),
        ("--checkpoint-every", "soon", "a number of seconds"),
        ("--checkpoint-every", "1e", "a number of seconds"),
        ("--keep-last", "0", "must be at least 1"),
        ("--keep-last", "abc", "must be a whole number"),
        ("--snapshot-every", "-1", "must not be negative"),
    ],
)
def test_bad_settings_are_refused_by_name(flag: str, value: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse([f"{flag}={value}", "x.py"], os.environ)
    assert flag in refused.value.what
    assert says in refused.value.what
    assert "int()" not in refused.value.what
    name = core_settings.variable(flag.strip("-").replace("-", "_"))
    with pytest.raises(UsageError, match=says) as refused:
        parse(["x.py"], {**os.environ, name: value})
    assert name in refused.value.what


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        (["--nproc-per-nodes", "2", "x.py"], "--nproc-per-nodes", "Did you mean --nproc-per-node?"),
        (["--keep_lst=3", "x.py"], "--keep_lst=3", "Did you mean --keep_last?"),
        (["--quite-unlike", "x.py"], "--quite-unlike", ""),
        ([], "no script was given", ""),
        (["--nproc-per-node"], "expected one argument", ""),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_closest_known(
    line: list[str], what: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        parse(line, os.environ)
    assert what in refused.value.what
    assert refused.value.hint.startswith(hint)
    assert ("Did you mean" in refused.value.hint) == bool(hint)
    assert refused.value.hint.endswith("See `everstep run --help`.")
    assert capsys.readouterr().err == "", "who raises does not print the usage as well"


PREFIXES = sorted(
    {spelling[:end] for _, spelling in SPELLINGS for end in range(3, len(spelling))}
    - {spelling for _, spelling in SPELLINGS}
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_torchrun_takes_for_short_is_taken_beside_everstep_flags(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--re`` is --redirects there, though --resume begins so too."""
    theirs = get_args_parser()
    values = ["1", "2:2", "c10d", "a=b", "h:1", "fork", "node", "x.py"]
    for line in ([prefix, value, "x.py"] for value in values):
        try:
            expected = vars(theirs.parse_args(line))
        except SystemExit:
            continue
        finally:
            capsys.readouterr()
        ours = vars(parser().parse_args(line))
        assert {name: ours[name] for name in expected} == expected


def test_everstep_flags_are_taken_for_short_where_torchrun_has_none_like_it() -> None:
    assert vars(parser().parse_args(["--keep-l", "7", "x.py"]))["everstep_keep_last"] == 7
    assert vars(parser().parse_args(["--re", "2", "x.py"]))["redirects"] == "2"


def test_variables_that_are_no_setting_are_named_with_the_closest_one() -> None:
    given = {"EVERSTEP_KEEP_LATS": "3", "EVERSTEP_XYZ": "1", "EVERSTEP_JOB": "j", "PATH": "/"}
    others = {"EVERSTEP_FAULTS": "", "EVERSTEP_DRILL": "m", "EVERSTEP_BENCH_MARK": "1"}
    said = core_settings.misspelt(given | others)
    assert "EVERSTEP_KEEP_LATS (did you mean EVERSTEP_KEEP_LAST?), EVERSTEP_XYZ" in said
    assert core_settings.misspelt({"EVERSTEP_JOB": "j", **others}) == ""


def test_help_shows_torchs_and_everstep_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"], os.environ)
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for flag in ("--nproc-per-node", "--nproc_per_node", "--rdzv-backend", "--store", "--resume"):
        assert flag in said
    for name in SETTINGS:
        assert core_settings.variable(name) in said
