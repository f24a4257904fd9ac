"""What the pages say is so: snippets run, links lead somewhere, generated pages are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from train_jobs import Jobs, run_script

from everstep.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LAST = 6

STAND_INS = """\
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8, shuffle=True)


def next_batch(number):
    return torch.full((8, 4), float(number))


def forward(batch):
    return model(batch).square().mean()


def train_step(batch):
    loss = forward(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


"""


def _snippets() -> list[tuple[str, str]]:
    """Every ``python`` and ``diff`` block of README and guides, with a name to find it by."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(python|diff)\n(.*?)^```$", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 2
            code = match[2] if match[1] == "python" else _applied(match[2])
            found.append((f"{page.name}:{line}", code))
    return found


def _applied(diff: str) -> str:
    """The new side of a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-")


def _short(code: str) -> str:
    """The same code with numbers of steps that a test can wait for."""
    return re.sub(r"\b\d+_000\b", str(LAST), code)


SNIPPETS = _snippets()


def test_there_are_snippets_to_test() -> None:
    assert {name.split(":")[0] for name, _ in SNIPPETS} >= {
        "README.md",
        "first-job.md",
        "own-loop.md",
    }


@pytest.mark.parametrize("code", [code for _, code in SNIPPETS], ids=[name for name, _ in SNIPPETS])
def test_a_snippet_runs_to_its_last_step_and_commits_it(
    code: str, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    jobs = Jobs(tmp_path, job_environment)
    script = tmp_path / "train.py"
    script.write_text(STAND_INS + _short(code), encoding="utf-8")
    done = jobs.start(run_script, path=str(script))
    assert done.wait() == 0, done.said()
    jobs.close()
    committed = list(tmp_path.glob(f"*/jobs/*/steps/{LAST:012d}-*/manifest"))
    assert len(committed) == 1, done.said()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_targets_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    code = "\n".join(re.findall(r"`[^`\n]+`|^    .*$", text, re.M))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", code, re.M)) <= targets
    assert set(re.findall(r"(?:^ {4}|`)everstep ([a-z]+)", code, re.M)) <= set(COMMANDS)
    named = re.findall(r"`((?:docs|examples|tests|src|\.ci)/[\w./-]+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^      ([a-z]+)/ ", text, re.M))
    rooms = {path.parent.name for path in (ROOT / "src" / "everstep").glob("*/__init__.py")}
    assert named == rooms


def test_ci_runs_the_check_and_the_readmes_test_command() -> None:
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert steps[0].startswith("#!")
    assert [line for line in steps if line.startswith("make")] == ["make check", "make test"]
    assert "    make test " in (ROOT / "README.md").read_text(encoding="utf-8")
