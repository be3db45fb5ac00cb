"""The command of `[notify]`, a real program: what it is told, and what it cannot do to the worker."""

import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from federation.monitoring.events import Events
from fedpareto.cli.reasons.known_reasons import by_table
from tests.harness import wait_for
from tests.process_state import is_running
from tests.scripted import CLIENT, FEDERATION
from tests.worker.scene import notifier
from worker.notifier import KINDS, MAX_WAITING, PRIVACY

KEEPS = 'cat >> "$0.told"; env > "$0.env"'


class Owner:
    """A worker's events, and a program in a directory of its own that is told of them."""

    def __init__(self, directory: Path, script: str) -> None:
        self.program = directory / "tell me"  # a shell would take this for two words
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        self.program.chmod(0o700)
        self.out = io.StringIO()
        self.events = Events(self.out)

    def told(self) -> list[dict[str, Any]]:
        path = Path(f"{self.program}.told")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def facts(self) -> list[dict[str, Any]]:
        return [fact for document in self.told() for fact in document["facts"]]

    def failures(self) -> list[str]:
        lines = map(json.loads, self.out.getvalue().splitlines())
        return [line["message"] for line in lines if line["event"] == "notify-failed"]

    def waits(self, run: str) -> None:
        about = {"name": "trial", "task": "digits", "submitted_by": "al\x1bice"}
        self.events.warn("run-waits", "at /srv/secret", run_id=run, spec="s", answer="waiting", **about)

    def declined(self, run: str, reason: str = "dp-budget") -> None:
        self.events.warn("declined", "at /srv/secret", assignment_id="a", run_id=run, reason=reason)


def test_a_fact_is_told_once_until_it_is_over_and_without_the_text_of_the_log_or_secrets(tmp_path: Path) -> None:
    owner = Owner(tmp_path, KEEPS)
    environment = {"FEDPARETO_PASSPHRASE": "secret", "https_proxy": "http://u:secret@h:1", "LANG": "C"}
    with notifier(owner.events, str(owner.program), environment=environment):
        for _ in range(2):
            owner.waits("run-1")
            owner.declined("run-1")
            owner.declined("run-2", "training-diverged")
            owner.events.warn("certificate-ends", "...", not_after="2030-01-01", days_left=20)
            owner.events.warn("disk", "/srv/secret cannot be written")
        owner.events.warn("certificate-ends", "...", not_after="2030-01-01", days_left=14)
        owner.events.warn("restore-pending", "...", restored="2030-01-01", runs={"run-1": 3})
        owner.events.tell("done", "the work in which the disk failed")
        owner.events.tell("run-answered", "...", run_id="run-1", spec="s", answer="accepted")
        wait_for(lambda: len(owner.facts()) == 6, "the facts")
        for event in ("done", "renewed", "restored"):
            owner.events.tell(event, "...")
            owner.events.tell(event, "...")
        owner.waits("run-1")
    told = [(fact["kind"], fact["state"]) for fact in owner.facts()]
    first = ["run-waits", "privacy-refused", "disk", "certificate-ends", "restore-waits"]
    begins, ends = [(kind, "begins") for kind in first], ["disk", "certificate-ends", "restore-waits"]
    over = [("run-waits", "over"), *((kind, "over") for kind in ends)]
    assert told == [*begins, *over, ("run-waits", "begins")]
    fact = owner.facts()[0]
    assert fact["text"].startswith(r"run run-1 (trial, task digits, submitted by al\x1bice) waits for your approval")
    assert (fact["run_id"], fact["submitted_by"]) == ("run-1", r"al\x1bice")
    assert owner.facts()[1]["reason"] == "dp-budget"
    whose = {(each["format"], each["federation_id"], each["client_id"], each["dropped"]) for each in owner.told()}
    assert whose == {(1, FEDERATION, CLIENT, 0)}
    shown = Path(f"{owner.program}.env").read_text()
    assert "LANG=C" in shown
    assert "secret" not in shown + Path(f"{owner.program}.told").read_text()
    assert owner.failures() == []
    assert {kind for kind, _ in told} == set(KINDS), "every kind"


def test_a_command_that_hangs_is_ended_with_its_children_and_later_facts_are_told(tmp_path: Path) -> None:
    owner = Owner(tmp_path, f'[ -e "$0.no" ] && {{ {KEEPS}; exit; }}\nsleep 1000 & echo $! $$ > "$0.no"; wait')
    with notifier(owner.events, str(owner.program), seconds=2):
        owner.waits("run-1")
        [failure] = wait_for(owner.failures, "the failure")
        assert "was ended after 2 s: 1 fact was not told" in failure
        processes = [int(process) for process in Path(f"{owner.program}.no").read_text().split()]
        wait_for(lambda: not any(map(is_running, processes)), "the end of both processes")
        owner.waits("run-1")
        [document] = wait_for(owner.told, "the fact whose command hung")
    assert (document["dropped"], document["facts"][0]["run_id"]) == (1, "run-1")


def test_a_command_that_fails_or_is_missing_is_reported_once_until_it_succeeds(tmp_path: Path) -> None:
    owner = Owner(tmp_path, f'[ -e "$0.ok" ] || {{ echo >> "$0.failed"; exit 3; }}\n{KEEPS}')
    ran, ok = Path(f"{owner.program}.failed"), Path(f"{owner.program}.ok")

    def ran_more(count: int) -> bool:
        return ran.exists() and len(ran.read_text()) > count

    with notifier(owner.events, str(owner.program)):
        for number in range(3):
            owner.declined(f"run-{number}")
            wait_for(partial(ran_more, number), "the command")
        ok.touch()
        owner.declined("run-3")
        [document] = wait_for(owner.told, "the facts")
        assert document["dropped"] == 3
        ok.unlink()
        owner.declined("run-4")
        wait_for(lambda: len(owner.failures()) == 2, "the next failure")
    assert "of [notify] in worker.toml ended with exit status 3: 1 fact was not told" in owner.failures()[0]
    missing = Owner(tmp_path, "")
    with notifier(missing.events, str(tmp_path / "none")):
        missing.waits("run-1")
    assert "cannot be started (No such file or directory)" in missing.failures()[0]


def test_a_flood_of_facts_waits_for_nothing_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    owner = Owner(tmp_path, f'[ -e "$0.told" ] || read line < "{tmp_path / "gate"}"\n{KEEPS}')
    with notifier(owner.events, str(owner.program)):
        owner.waits("run-0")
        gate = os.open(tmp_path / "gate", os.O_WRONLY)  # returns once the command reads
        for number in range(MAX_WAITING + 50):
            owner.declined(f"{number:0>300}")
        os.write(gate, b"go\n")
        os.close(gate)
        first, second = wait_for(lambda: found if len(found := owner.told()) == 2 else None, "both commands")
    assert (len(first["facts"]), first["dropped"]) == (1, 0)
    assert (len(second["facts"]), second["dropped"]) == (MAX_WAITING, 50)
    assert len(second["facts"][0]["run_id"]) == 200


def test_without_a_command_nothing_is_heard_and_a_stop_tells_what_still_waits(tmp_path: Path) -> None:
    owner = Owner(tmp_path, KEEPS)
    with notifier(owner.events):
        owner.waits("run-1")
    quiet = notifier(owner.events, str(owner.program))
    owner.waits("run-2")  # before it is entered, as what a worker finds at its start
    with quiet:
        pass
    assert [fact["run_id"] for fact in owner.facts()] == ["run-2"]


def test_every_reason_of_a_refusal_is_one_that_a_worker_gives() -> None:
    assert set(PRIVACY) <= {name for row in by_table()["worker"] for name in row.reasons}
