"""The command line as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from everstep.cli import COMMANDS, main


def everstep(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli", *arguments],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_help_lists_the_commands_without_importing_any() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from everstep.cli import main\n"
        "print(CliRunner().invoke(main, ['--help']).output)\n"
        "assert not {'torch', 'everstep.agent', 'everstep.store'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, line in COMMANDS.items():
        assert name in done.stdout
        assert line.split(".")[0][:30] in done.stdout


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_flags_after_the_script_are_the_scripts_own(
    tmp_path: Path, job_environment: dict[str, str]
) -> None:
    """Also ones that everstep and torchrun have, and click's --help."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(0)")
    arguments = ["--nproc-per-node", "2", "--help", "--store", "x", "-m", "--", "y"]
    done = everstep("run", "--job", "mine", str(script), *arguments, cwd=tmp_path,
                    env=job_environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(arguments)]
    assert "job mine in" in done.stderr
    assert "--resume never" in done.stderr, "how to start afresh is said"
    assert (tmp_path / "everstep-store" / "jobs" / "mine").is_dir()


def test_run_help_and_usage_errors_come_from_torchs_parser(
    tmp_path: Path, job_environment: dict[str, str]
) -> None:
    done = everstep("run", "--nproc-per-node", cwd=tmp_path, env=job_environment)
    assert done.returncode == 2
    assert "--nproc-per-node" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_agents_exit_code_stands_whatever_threads_torch_has_left() -> None:
    """With several nodes torch's heartbeat runs on in C++; taking the interpreter down under it
    made SIGABRT of every exit code."""
    code = (
        "import atexit, sys, types\n"
        "sys.modules['everstep.agent.main'] = types.SimpleNamespace(run=lambda arguments: 75)\n"
        "atexit.register(print, 'taken down')\n"
        "print('said', end='')\n"
        "from everstep.cli.run import command\n"
        "command(['script.py'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "said", "")
