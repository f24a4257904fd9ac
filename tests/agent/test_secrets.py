"""Secrets of a program, of an address, of an operator: nowhere but where the program shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked import Start

from everstep.agent.record import Recorder
from everstep.agent.supervise import Learnt
from everstep.cli import main
from everstep.core import exits
from everstep.core.events import decode_line
from everstep.faults.history import IncidentRecord, LastWord, Stamp, WordRecord, pack, unpack
from everstep.faults.records import Evidence, Verdict
from everstep.faults.words import word_of
from everstep.keeper.wire import Fatal

# Workers forked from an agent that has imported torch's compiler with its first optimizer.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

FORKED = ("--run-path", "--start-method", "fork", "--job", "toy", "--snapshot-every", "1")
# In pieces, so that nothing takes this file for one with secrets in it.
AWS, PASSWORD = "AK" + "IA" + "Q3EXAMPLE7RTYU42", "hunter2" + "xK9"
HUB, BEARER = "hf" + "_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1", "eyK" + "9x.Zq83-Ttr5_Lm20Pq"
SECRETS = (AWS, PASSWORD, HUB, BEARER)
SAID = (
    f"cannot read: key {AWS} at https://reader:{PASSWORD}@data.example.com/shard-7, "
    f"token {HUB}, Authorization: Bearer {BEARER}"
)
SCRIPT = f"""
import everstep

class Stateful:
    made = 0
    def state_dict(self):
        self.made += 1
        if self.made > 1:
            raise OSError("{SAID}")
        return {{"made": 0}}
    def load_state_dict(self, state): pass

run = everstep.attach(stateful=Stateful())
for step in run.steps(until=9):
    print("{SAID}")
    if step == 3:
        raise RuntimeError("{SAID}")
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    return ("--store", str(tmp_path / "everstep-store"), "--job", "toy")


def test_no_secret_is_stored_or_told(start: Start, tmp_path: Path, asked: tuple[str, ...]) -> None:
    agent = start(*FORKED, script=SCRIPT)
    assert agent.wait() in (exits.REPEATED, exits.NO_PROGRESS), agent.said()
    reset = CliRunner().invoke(main, ["retry", "--reset-budget", f"now with {HUB}", *asked])
    assert reset.exit_code == 0, reset.output
    told = [
        CliRunner().invoke(main, [*command, *asked, *form]).output
        for command in (("explain", "--last"), ("incidents",), ("status",))
        for form in ((), ("--json",))
    ]
    kept = [path for top in ("everstep-store", "state") for path in (tmp_path / top).rglob("*")]
    texts = {str(path): path.read_bytes() for path in kept if path.is_file()}
    texts[str(agent.events_file)] = agent.events_file.read_bytes()
    texts |= {f"command {n}": text.encode() for n, text in enumerate([*told, reset.output])}
    held = [(name, s) for name, text in texts.items() for s in SECRETS if s.encode() in text]
    assert not held
    assert agent.events("cut.failed"), "the error of a state_dict was told"
    assert "data.example.com" in agent.events("job.stopped")[0].facts["errors"]["0"]  # type: ignore[index]  # a dict
    assert "cannot read" in told[0]

    assert SAID in agent.printed(), "what the program prints is the user's own"
    assert f"RuntimeError: {SAID}" in agent.said(), "and so is its traceback"


def test_the_last_word_of_a_worker_holds_none(tmp_path: Path) -> None:
    """It becomes the reason of decisions, of records and of the agent's exit."""
    record = Recorder("job", str(tmp_path / "events"), stream=io.StringIO())
    learnt = Learnt(record, _Lead())  # type: ignore[arg-type]  # of it only what is asked here
    learnt.hear(Fatal("EVS-400", SAID, exits.REFUSED, 3))
    assert learnt.fatal is not None
    assert learnt.fatal[1].startswith("rank 3: cannot read")
    assert not any(secret in learnt.fatal[1] for secret in SECRETS)
    record.close()


def test_an_event_holds_none_wherever_it_stands(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "events"
    record = Recorder("sk-learn-benchmark-v2", str(path), stream=stream)
    record.say("job.test", SAID, deep={"list": [SAID, 7], "map": {"1": SAID}}, plain="as it was")
    record.close()
    found = decode_line(path.read_bytes())
    assert not any(secret in path.read_text() + stream.getvalue() for secret in SECRETS)
    assert found.facts["deep"]["list"][1] == 7  # type: ignore[index]  # a dict
    assert (found.facts["plain"], found.job) == ("as it was", "sk-learn-benchmark-v2")


def test_a_record_holds_none_and_keeps_its_names() -> None:
    """The last line: whoever made the record."""
    name = "sk-learn-benchmark-v2-host-1-abcd"
    at = Stamp(name, 1.0, 1.0)
    verdict = Verdict(
        "USER_EXCEPTION", "user_code", "stop", message=SAID, advice=SAID, frame=SAID,
        evidence=(Evidence(SAID, "log", why=SAID, node=name),),
    )  # fmt: skip
    incident = IncidentRecord(f"1-{name}", 1, at, verdict, last_word=LastWord(92, SAID))
    word = word_of((), 1, "reset-budget", "", SAID, name, at)
    assert not any(secret in word.reason for secret in SECRETS)
    raw = WordRecord("exclude", 1, at, subject=name, reason=SAID)
    for record in (incident, word, raw):
        entry = pack(record)
        assert not any(secret.encode() in entry.body for secret in SECRETS)
        (read,) = unpack([entry]).records
        assert read.at == at
        assert pack(read) == entry, "the same record again is the same entry"
    (back,) = unpack([pack(incident)]).records
    assert isinstance(back, IncidentRecord)
    assert (back.id, back.verdict.evidence[0].node) == (incident.id, name)
    assert "data.example.com" in json.dumps(back.verdict.message)


class _Lead:
    proofs = None
    committed = -1
