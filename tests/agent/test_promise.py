"""S6: the owner restarts from memory while the store is away, and claims before it writes again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from forked import Start
from test_attached import FORKED, SCRIPT, steps

from everstep.agent import owner
from everstep.core import exits
from everstep.store import open_store

AWAY = """
    import shutil
    attempt = os.environ["EVERSTEP_ATTEMPT"]
    if (attempt, step) == ("1", 10):
        os.rename("everstep-store", "elsewhere")
        os.mkdir("everstep-store")
        os.kill(os.getpid(), signal.SIGKILL)"""
BODY = (
    AWAY
    + """
    if (attempt, step) == ("2", 20):
        shutil.rmtree("everstep-store")
        os.rename("elsewhere", "everstep-store")"""
)


def test_killed_worker_goes_on_from_memory_while_the_store_is_away(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PROMISE_SECONDS", 0.5)
    script = SCRIPT.replace("UNTIL", "30").replace("BODY", BODY)
    agent = start(*FORKED, "--job", "away", "--snapshot-every", "2", script=script)
    assert agent.wait() == exits.FINISHED, agent.said()
    assert [e.attempt for e in agent.events("attempt.started")] == [1, 2]
    assert agent.events("restore.elected")[1].facts["source"] == "memory"
    assert steps(agent.printed(), 2)[0] > 0
    job = open_store(str(tmp_path / "everstep-store")).job("away")
    assert set(job.branches()) == {1, 2}
    assert job.highest_claim() == 2
    assert next(iter(job.candidates())).step == 30


@pytest.mark.parametrize("last", [2, 3])
def test_next_agent_takes_the_number_after_those_that_were_lived_through(
    start: Start, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """The agent dies before its keeper can claim what was promised: nobody has to start twice."""
    monkeypatch.setattr(owner, "PROMISE_SECONDS", 0.5)
    body = (
        AWAY
        + f"""
    if (attempt, step) == ("2", 16) and {last} == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, step) == ("{last}", 20):
        shutil.rmtree("everstep-store")
        os.rename("elsewhere", "everstep-store")
        os.kill(int(os.environ["EVERSTEP_AGENT_PID"]), signal.SIGKILL)
        time.sleep(60)"""
    )
    script = SCRIPT.replace("UNTIL", "30").replace("BODY", body)
    cannot = {"point": "keeper.promise.before_claim", "action": "raise:EIO"}
    faults = {"EVERSTEP_FAULTS": json.dumps([cannot] * 12)}
    line = (*FORKED, "--job", "away", "--snapshot-every", "2")
    first = start(*line, script=script, **faults)
    assert first.wait() == -signal.SIGKILL, first.said()
    assert [e.attempt for e in first.events("attempt.started")] == list(range(1, last + 1))
    second = start(*line, script=script, **faults)
    assert second.wait() == exits.FINISHED, second.said()
    assert [e.attempt for e in second.events("attempt.started")][-1] == last + 1
    assert second.events("restore.elected")[-1].facts["source"] == "memory"
    assert steps(second.printed(), last + 1)[0] >= 18
