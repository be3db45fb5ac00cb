"""What an owner decides about private rounds: the policy, the ledger of sessions, and work that shows data."""

import secrets
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import UInt64Value

from federation.digests import digest
from federation.secure.thresholds import Mode
from federation.spec.run_sections import Scalar
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, SearchWork
from federation.work.base import Shows, Work
from federation.work.registry import BUILT_IN, STAGES, kind
from federation.work.site import EVALUATE, SecurePolicy, SessionEntry, Site
from tests.harness import wait_for
from tests.paths import OWNERS_CODE
from tests.worker.scene import Scene, gradients, policy_refused, reason, training
from tests.worker.work.scene import DOCUMENT, keys_of_five, pin, session_terms, to_be_ready
from tests.works import set_work
from worker.ledgers.round_ledger import RoundLedger
from worker.site.policy_file import Policy

# --- the policy

SECURE = """\
[secure]
modes = ["private", "verified"]
smallest = 8
disclose = ["loss"]

[secure.tasks.digits]
required = true
modes = ["sum"]
assumed = 0

[secure.tasks."clinic:Clinic"]
disclose = []
sessions = 10
"""


def policy(path: Path, text: str) -> Policy:
    path.write_text(text)
    return Policy.load(path)


def test_a_task_has_the_policy_of_all_tasks_but_for_what_is_said_of_it(tmp_path: Path) -> None:
    secure = policy(tmp_path / "policy.toml", SECURE).secure
    everywhere = SecurePolicy(modes=(Mode.PRIVATE, Mode.VERIFIED), smallest=8, disclose=("loss",))
    assert secure.of("mnist") == everywhere
    assert secure.of("digits") == everywhere.model_copy(update={"required": True, "modes": (Mode.SUM,), "assumed": 0})
    assert secure.of("clinic:Clinic") == everywhere.model_copy(update={"disclose": (), "sessions": 10})


def test_without_a_section_the_defaults_are_those_of_the_protocol() -> None:
    assert Policy().secure.of("digits") == SecurePolicy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("restore = 'never'", "restore: Input should be 'accept' or 'ask'"),
        ("[limits]\nsample = 3", "limits.sample: no such key"),
        ("[limits]\nsamples = 0", "limits.samples: Input should be greater than or equal to 1; got 0"),
        ("[limits]\nsamples = '3'", "limits.samples: Input should be a valid integer; got '3'"),
        ("[limits]\nhours = nan", "limits.hours: Input should be a finite number"),
        ("limits = 3", "limits: Input should be a valid dictionary"),
        ("tasks = 'digits'", "tasks: Input should be a valid tuple"),
        ("[limits]\nmembers = 0", "limits.members: Input should be greater than or equal to 1; got 0"),
        ("restore", "is not a TOML document"),
        ("\xff", "is not a TOML document"),
        ("[secure]\nmodes = ['off']", "secure.modes.0: Input should be 'sum', 'private' or 'verified'; got 'off'"),
        ("[secure]\ndisclose = ['all']", "secure.disclose.0: Input should be"),
        ("[secure]\nsmallest = 4", "secure.smallest: Input should be greater than or equal to 5; got 4"),
        ("[secure]\nsessions = -1", "secure.sessions: Input should be greater than or equal to 0"),
        ("[secure]\nrequired = 1", "secure.required: Input should be a valid boolean"),
        ("[secure.tasks.digits]\nmode = 'sum'", "secure.tasks.digits.mode: no such key"),
        ("[secure.digits]\nrequired = true", "secure.digits: no such key"),
        ("[privacy.digits]\nepsilon = 8.0", "privacy.digits.noise: missing"),
        ("[privacy.digits]\nnoise = 0.1\nepsilon = 8.0", "privacy.digits.noise: Input should be greater than or equal"),
        ("[privacy.digits]\nnoise = 1.0\nepsilon = 8.0\ndelta = 1.0", "privacy.digits.delta"),
        (
            "[privacy.a]\nnoise = 1.0\nepsilon = 8.0\ntasks = ['b']\n[privacy.b]\nnoise = 1.0\nepsilon = 8.0",
            "task 'b' belongs to two data sets",
        ),
        ("[open]\nzone = 'Mars/Olympus'", "open.zone: this machine knows no time zone 'Mars/Olympus'"),
        ("[open]\nzone = '/etc/passwd'", "open.zone: this machine knows no time zone"),
        ("[open]\nbegin = '8:00'", "open.begin: String should match pattern"),
        ("[open]\nend = '24:01'", "open.end: String should match pattern"),
        ("[open]\ndays = ['monday']", "open.days.0: Input should be 'mon'"),
        ("[open]\ndays = []", "open.days: Tuple should have at least 1 item"),
        ("approve = 'always'", "approve: Input should be 'none' or 'each-run'"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_the_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    message = policy_refused(path, text)
    assert words in message
    assert str(path) in message


# --- the ledger

BASE = "blake3:base"


def entry(session: str, work: str = "train", **reached: bool) -> SessionEntry:
    return SessionEntry(session, "run", "digits", BASE, work, **reached)


def test_sessions_are_counted_once_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "private-rounds.db"
    first = RoundLedger(path)
    for made in (entry("a"), entry("b", EVALUATE), entry("a")):
        first.add(made)
    first.add(SessionEntry("c", "run", "mnist", BASE, "train"))
    for session in ("a", "b"):
        first.mask(session)
    first.unmask("a")
    other_process = RoundLedger(path)
    expected = [entry("a", masked=True, unmasked=True), entry("b", EVALUATE, masked=True)]
    assert list(other_process.entries({"digits"})) == expected
    assert other_process.tasks() == ["digits", "mnist"]
    assert path.stat().st_mode & 0o777 == 0o600


# --- work in the clear


def required(*disclose: Scalar) -> Site:
    return Site(policies={"digits": SecurePolicy(required=True, disclose=disclose)})


def evaluation() -> AssignmentManifest:
    asked = training()
    del asked.rows[:]
    set_work(asked, EvaluateWork(splits=["train"]))
    return asked


def test_an_owner_who_requires_private_rounds_declines_what_shows_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    search, ticket = training(), training()
    set_work(search, SearchWork(steps=[1.0]))
    monkeypatch.syspath_prepend(str(OWNERS_CODE / "lottery"))
    ticket.kind, ticket.work = "ticket", UInt64Value(value=1).SerializeToString()
    for asked in (training(), gradients(8), search, ticket):
        assert reason(asked, site=required("evaluation")) == "policy:required"
    assert reason(training()) == ""
    assert reason(training(), site=Site(policies={"mnist": SecurePolicy(required=True)})) == ""


def test_an_owner_who_requires_private_rounds_declines_evaluations_unless_they_are_disclosed() -> None:
    assert reason(evaluation(), site=required("loss", "accuracy", "norm")) == "policy:required"
    assert reason(evaluation(), site=required("evaluation")) == ""
    assert reason(evaluation()) == ""


def test_only_evaluations_and_the_stages_of_private_rounds_do_not_show_updates() -> None:
    shows = {name: kind(name).work.shows for name in (*BUILT_IN, *STAGES)}
    assert {name for name, what in shows.items() if what is Shows.NOTHING} == set(STAGES)
    assert [name for name, what in shows.items() if what is Shows.METRICS] == ["evaluate"]
    assert Work.shows is Shows.UPDATE


# --- a worker that works


def test_a_worker_evaluates_in_the_clear_what_the_ledger_allows_and_declines_the_rest(
    scene: Scene, tmp_path: Path
) -> None:
    secure = '[secure]\nrequired = true\ndisclose = ["evaluation"]\n[secure.tasks.mnist]\n'
    text = secure + '[secure.data_sets]\nimages = ["digits", "mnist"]\n'
    running = scene.start(policy=policy(tmp_path / "policy.toml", text))
    told = " ".join(event["message"] for event in running.events("policy"))
    assert "no roster is pinned" in told
    assert "does not offer" in told
    number = iter(range(100))

    def evaluate(*splits: str) -> None:
        scene.evaluate(*splits, number=next(number), run_id="run", round=0)

    evaluate("train")
    running.wait_for("declined")
    with closing(RoundLedger(scene.home.rounds)) as ledger:
        for session in "ab":
            ledger.add(SessionEntry(session, "run", "mnist", BASE, "train"))
    for times in (1, 2):
        evaluate("train")
        running.wait_for("receipt", times)
    evaluate("train", "test")
    running.wait_for("declined", 2)
    wait_for(lambda: scene.coordinator.left, "the numbers that are left")
    running.stop()
    assert [event["reason"] for event in running.events("declined")] == ["evaluations", "model-evaluated"]
    assert [(one.task, one.training, one.evaluation) for one in scene.coordinator.left] == [("digits", 998, 999)]


def test_a_session_ends_by_a_cancel_or_a_day_after_the_worker_was_ready_and_no_other_does(scene: Scene) -> None:
    keys = keys_of_five(scene.member)
    pin(scene.home, scene.member, keys)

    def ready(number: int, steps: int = 1_000_000) -> AssignmentManifest:
        document = DOCUMENT.replace(b"steps = 1", b"steps = %d" % steps)
        scene.coordinator.blobs[digest(document)] = document
        asked = scene.order(number, run_id="run", round=0, spec=digest(document))
        return to_be_ready(asked, session_terms(asked, keys, document, nonce=secrets.token_bytes(16)), document)

    def kept() -> set[str]:
        with closing(sqlite3.connect(scene.home.memory)) as database:
            return {name for (name,) in database.execute("SELECT DISTINCT substr(name, 1, 64) FROM kept")}

    running = scene.start()
    scene.coordinator.assign(ready(0))
    running.wait_for("preparing a private round")
    (first,) = kept()
    scene.coordinator.assign(ready(1))
    scene.coordinator.cancel("assignment-0")
    running.wait_for("preparing a private round", 2)
    (second,) = wait_for(lambda: kept() - {first}, "the second session")
    assert kept() == {second}
    scene.coordinator.cancel("assignment-1")
    wait_for(lambda: not kept(), "the second session to be erased")
    scene.coordinator.assign(ready(2, steps=1))
    running.wait_for("receipt")
    memory = running.worker._runner.execution.memory
    memory.clock = lambda: datetime.now(UTC) + timedelta(hours=23, minutes=59)
    memory.sweep(datetime.now(UTC))
    assert len(kept()) == 1
    memory.clock = lambda: datetime.now(UTC) + timedelta(hours=24, minutes=1)
    memory.sweep(datetime.now(UTC))
    assert not kept()
    for gone in (scene.order(kind="gone"), scene.order(task="gone")):
        running.worker._runner.execution.forget(sign(gone, scene.coordinator.signing_key))
    running.stop()
