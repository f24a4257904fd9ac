"""The command line: one file a command, imported when it is called.

Owns: the group ``everstep`` and finding its commands. Never does: a command's work. Called by:
the console script. ``everstep --help`` must answer at once, so nothing heavy is imported here.
"""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS: dict[str, str] = {
    "run": "Run a training script and keep it alive (takes torchrun's flags).",
    "ls": "List jobs, or the checkpoints of a job.",
    "show": "Show one checkpoint.",
    "status": "Say whether the job runs, how well it was kept alive, and what to do.",
    "incidents": "List what failed and how it ended.",
    "explain": "Explain one incident: what was seen, decided and done, and how it ended.",
    "retry": "Let a job start again that was stopped for good.",
    "node": "Exclude a node from a job, or pardon it.",
    "mode": "Say what a running job does about failures: act, advise or off.",
    "verify": "Read checkpoints back and say what that proved.",
    "drill": "Inject faults into a real run and judge the recovery.",
    "bench": "Measure recovery and saving beside their peers.",
    "classify": "Say what failed, on which ranks and node, and what helps.",
    "doctor": "Check this machine and say what to do.",
}
"""Each command's line in the list; its file is everstep/cli/<name>.py and holds ``command``."""


class _Lazy(click.Group):
    """Loads a command's file when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"everstep.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="everstep", prog_name="everstep")
def main() -> None:
    """Keeps PyTorch distributed training alive."""
