"""What an owner decides about private rounds: the policy, the ledger of sessions, and work that shows data."""

import secrets
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.wrappers_pb2 import UInt64Value

from federation.digests import digest
from federation.secure.thresholds import Mode
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.training.trainer import Trainer
from federation.trust.envelope import key_id, seal
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, SearchWork
from federation.v1.secure_pb2 import SecureReadyWork
from federation.vectors import Layout
from federation.work.base import Shows, Work
from federation.work.registry import BUILT_IN, STAGES, kind
from federation.work.secure.terms import Invited, SessionTerms
from federation.work.secure.wire import terms_bytes
from federation.work.site import EVALUATE, SecurePolicy, SessionEntry, Site
from federation.work.train.work import Train
from tests.harness import wait_for
from tests.paths import OWNERS_CODE
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator
from tests.worker import scene as worker_stage
from tests.worker.work.test_limits import gradients, manifest, reason
from tests.worker.working import Running, files_of_at_most
from tests.works import offer_input, set_work
from worker.home import DiskFull, FileLocked, WorkerHome, WorkerHomeError
from worker.site.policy import Policy, PolicyError
from worker.site.roster import Card, Roster
from worker.site.round_ledger import RoundLedger

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
    everywhere = SecurePolicy(modes=frozenset({Mode.PRIVATE, Mode.VERIFIED}), smallest=8, disclose=frozenset({"loss"}))
    assert secure.of("mnist") == everywhere
    assert secure.of("digits") == replace(everywhere, required=True, modes=frozenset({Mode.SUM}), assumed=0)
    assert secure.of("clinic:Clinic") == replace(everywhere, disclose=frozenset(), sessions=10)


def test_without_a_section_the_defaults_are_those_of_the_protocol() -> None:
    assert Policy().secure.of("digits") == SecurePolicy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[secure]\nmodes = ['off']", "secure.modes.0: Input should be 'sum', 'private' or 'verified'; got 'off'"),
        ("[secure]\ndisclose = ['all']", "secure.disclose.0: Input should be"),
        ("[secure]\nsmallest = 4", "secure.smallest: Input should be greater than or equal to 5; got 4"),
        ("[secure]\nsessions = -1", "secure.sessions: Input should be greater than or equal to 0"),
        ("[secure]\nrequired = 1", "secure.required: Input should be a valid boolean"),
        ("[secure.tasks.digits]\nmode = 'sum'", "secure.tasks.digits.mode: no such key"),
        ("[secure.digits]\nrequired = true", "secure.digits: no such key"),
    ],
)
def test_a_section_that_cannot_be_used_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(tmp_path / "policy.toml", text)
    assert words in str(caught.value)


# --- the ledger

BASE = "blake3:base"


def entry(session: str, work: str = "train", *, unmasked: bool = False) -> SessionEntry:
    return SessionEntry(session, "run", "digits", BASE, work, unmasked)


def test_sessions_are_counted_once_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "private-rounds.db"
    first = RoundLedger(path)
    for made in (entry("a"), entry("b", EVALUATE), entry("a")):
        first.add(made)
    first.add(SessionEntry("c", "run", "mnist", BASE, "train"))
    first.unmask("a")
    other_process = RoundLedger(path)
    assert list(other_process.entries({"digits"})) == [entry("a", unmasked=True), entry("b", EVALUATE)]
    assert other_process.tasks() == ["digits", "mnist"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_ledger_that_the_disk_does_not_take_or_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "private-rounds.db"
    ledger = RoundLedger(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as another:
        another.execute("BEGIN EXCLUSIVE")
        with ledger._file.using() as connection:
            connection.execute("PRAGMA busy_timeout = 0")
        with pytest.raises(FileLocked, match=r"private-rounds.db is locked by another process"):
            ledger.add(entry("a"))
    with files_of_at_most(100), pytest.raises(DiskFull, match=r"private-rounds.db cannot be written: disk I/O error"):
        ledger.add(entry("a"))
    ledger.close()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(WorkerHomeError, match=r"private-rounds.db is damaged .* put back a copy"):
        RoundLedger(path)


# --- work in the clear


@pytest.fixture(scope="module")
def signer() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def required(*disclose: str) -> Site:
    return Site(policies={"digits": SecurePolicy(required=True, disclose=frozenset(disclose))})


def evaluation() -> AssignmentManifest:
    asked = manifest()
    del asked.rows[:]
    set_work(asked, EvaluateWork(splits=["train"]))
    return asked


def test_an_owner_who_requires_private_rounds_declines_what_shows_an_update(
    signer: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, ticket = manifest(), manifest()
    set_work(search, SearchWork(steps=[1.0]))
    monkeypatch.syspath_prepend(str(OWNERS_CODE / "lottery"))
    ticket.kind, ticket.work = "ticket", UInt64Value(value=1).SerializeToString()
    for asked in (manifest(), gradients(8), search, ticket):
        assert reason(signer, asked, site=required("evaluation")) == "policy:required"
    assert reason(signer, manifest()) == ""
    assert reason(signer, manifest(), site=Site(policies={"mnist": SecurePolicy(required=True)})) == ""


def test_an_owner_who_requires_private_rounds_declines_evaluations_unless_they_are_disclosed(
    signer: Ed25519PrivateKey,
) -> None:
    assert reason(signer, evaluation(), site=required("loss", "accuracy", "norm")) == "policy:required"
    assert reason(signer, evaluation(), site=required("evaluation")) == ""
    assert reason(signer, evaluation()) == ""


def test_only_evaluations_and_the_stages_of_private_rounds_do_not_show_updates() -> None:
    shows = {name: kind(name).work.shows for name in (*BUILT_IN, *STAGES)}
    assert {name for name, what in shows.items() if what is Shows.NOTHING} == set(STAGES)
    assert [name for name, what in shows.items() if what is Shows.METRICS] == ["evaluate"]
    assert Work.shows is Shows.UPDATE


# --- a worker that works


offers = worker_stage.offers
model = worker_stage.model
coordinator = worker_stage.coordinator


def test_a_worker_evaluates_in_the_clear_what_the_ledger_allows_and_declines_the_rest(
    coordinator: ScriptedCoordinator, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> None:
    home = WorkerHome(tmp_path / "home")
    home.directory.mkdir()
    chosen = policy(
        home.policy,
        '[secure]\nrequired = true\ndisclose = ["evaluation"]\n[secure.tasks.mnist]\n'
        '[secure.data_sets]\nimages = ["digits", "mnist"]\n',
    )
    running = Running(home, coordinator.member(), offers, policy=chosen)
    assert {"no roster is pinned", "does not offer"} <= {
        words
        for words in ("no roster is pinned", "does not offer")
        for told in running.events("policy")
        if words in told["message"]
    }
    number = iter(range(100))

    def evaluate(*splits: str) -> AssignmentManifest:
        asked = coordinator.assignment(*model, next(number), run_id="run", round=0)
        del asked.rows[:]
        set_work(asked, EvaluateWork(splits=splits))
        coordinator.assign(asked)
        return asked

    evaluate("train")
    running.wait_for("declined")
    with closing(RoundLedger(home.rounds)) as ledger:
        for session in "ab":
            ledger.add(SessionEntry(session, "run", "mnist", BASE, "train"))
    for times in (1, 2):
        evaluate("train")
        running.wait_for("receipt", times)
    evaluate("train", "test")
    running.wait_for("declined", 2)
    wait_for(lambda: coordinator.left, "the numbers that are left")
    running.stop()
    assert [event["reason"] for event in running.events("declined")] == ["evaluations", "model-evaluated"]
    assert [(one.task, one.training, one.evaluation) for one in coordinator.left] == [("digits", 998, 999)]


def test_a_session_ends_by_a_cancel_or_a_day_after_the_worker_was_ready_and_no_other_does(
    coordinator: ScriptedCoordinator, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> None:
    member, home = coordinator.member(), WorkerHome(tmp_path / "home")
    home.directory.mkdir()
    others = {f"hospital-{name}": Ed25519PrivateKey.generate().public_key() for name in "bcde"}
    keys = {CLIENT: member.signing_key.public_key(), **others}
    cards = "".join(Card(FEDERATION, name, key.public_bytes_raw()).text() for name, key in keys.items())
    Roster.parse(cards, member).pin(home.roster)

    def ready(number: int, steps: int = 1_000_000) -> AssignmentManifest:
        document = (
            'name = "run"\ntask = "digits"\nrounds = 1\nseed = 7\nalgorithm.name = "fedavg-n"\nprivacy.secure = "sum"\n'
            f"train.steps = {steps}"
        ).encode()
        coordinator.blobs[digest(document)] = document
        asked = coordinator.assignment(*model, number, run_id="run", round=0, spec=digest(document))
        work = Train.of(RunSpec.parse(document), 0, joint_target(("loss",)))
        terms = SessionTerms(
            nonce=secrets.token_bytes(16), federation_id=FEDERATION, run_id="run", round=0, mode=Mode.SUM,
            base_model=asked.base_model, spec=asked.spec, task="digits", length=model[0].size, clip=0.0, disclose=(),
            invited=tuple(Invited(name, key_id(key)) for name, key in sorted(keys.items())),
            work=work, seed=asked.seed, unshared=b"",
        )  # fmt: skip
        del asked.rows[:]
        asked.kind, asked.work = "secure-ready", SecureReadyWork(terms=terms_bytes(terms)).SerializeToString()
        offer_input(asked, "specification", document)
        return asked

    def kept() -> set[str]:
        with closing(sqlite3.connect(home.memory)) as database:
            return {name for (name,) in database.execute("SELECT DISTINCT substr(name, 1, 64) FROM kept")}

    running = Running(home, member, offers)
    coordinator.assign(ready(0))
    running.wait_for("preparing a private round")
    (first,) = kept()
    coordinator.assign(ready(1))
    coordinator.cancel("assignment-0")
    running.wait_for("preparing a private round", 2)
    (second,) = wait_for(lambda: kept() - {first}, "the second session")
    assert kept() == {second}
    coordinator.cancel("assignment-1")
    wait_for(lambda: not kept(), "the second session to be erased")
    coordinator.assign(ready(2, steps=1))
    running.wait_for("receipt")
    memory = running.worker._memory
    memory.clock = lambda: datetime.now(UTC) + timedelta(hours=23, minutes=59)
    memory.sweep(datetime.now(UTC))
    assert len(kept()) == 1
    memory.clock = lambda: datetime.now(UTC) + timedelta(hours=24, minutes=1)
    memory.sweep(datetime.now(UTC))
    assert not kept()
    for gone in ({"kind": "gone"}, {"task": "gone"}):
        running.worker._runner.execution.forget(seal(coordinator.assignment(*model, **gone), coordinator.signing_key))
    running.stop()
