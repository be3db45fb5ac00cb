"""Private rounds with real workers over TLS: rosters are pinned, a round is summed, and what was secret is erased.

The record that the runs leave is verified, and each fact of it that is edited is named.
"""

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.home import CoordinatorHome
from federation.record.bundle import BundleReader
from federation.tasks import initial_model, task
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, StepManifest
from federation.v1.record_pb2 import RoundRecord
from federation.v1.secure_pb2 import SecureDealWork
from federation.vectors import Layout, Tensor, to_bytes
from federation.work.base import Shape
from federation.work.evaluate.work import Evaluate
from federation.work.site import SessionEntry
from tests.compared_metrics import check_exact, watched
from tests.few import few_of
from tests.harness import Federation, federation, wait_for
from tests.verification import independent_metrics
from tests.verification.recorded import Recorded, check_listed, first_of
from tests.verification.scene import Edited, signed_again
from tests.worker.work.scene import STAGES, Members
from verification.errors import VerificationError
from verification.run import verify
from worker.ledgers.left_reading import read_left
from worker.ledgers.round_ledger import RoundLedger
from worker.site.assignment_checks import CheckedAssignment
from worker.work.memory import WorkerMemory

CLIENTS = tuple(f"client-{number}" for number in range(5))
LATE = CLIENTS[-1]
SPEC = """\
task = "digits"
rounds = 1
algorithm.name = "fedavg-n"
selection = { minimum = 5, pool = "enrolled" }
train = { steps = 1, batch_size = 20, deadline_seconds = 120.0 }
evaluate = { every = 0, splits = ["train"] }
limits = { skipped_rounds = 1 }
privacy.secure = "sum"
"""


SHAPE = Shape(Layout((Tensor("weight", (1,)),)), ("loss",), ("loss",))


def roster_command(scene: Members, command: str, client: str, *arguments: str) -> str:
    return scene.fed.fedpareto("worker", "roster", command, *arguments, "--home", str(scene.fed.directory / client))


@pytest.fixture(scope="module")
def unpinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Five members, of whom the last one has not pinned the roster yet."""
    with federation(tmp_path_factory.mktemp("private")) as fed:
        fed.serve()
        made = Members(fed, CLIENTS, task="digits")
        # Runs in different modes are compared, so each model is trained on several times. The owners decide about runs,
        # so their workers keep the specifications and hold the coordinator to them.
        made.enrol('submitters = ["admin"]\n[secure]\nsums_per_model = 1000\nblur = 0.0\n')
        (fed.directory / LATE / "roster.toml").rename(fed.directory / "roster.toml")
        for client in CLIENTS:
            made.work(client)
        yield made


@pytest.fixture(scope="module")
def scene(unpinned: Members) -> Members:
    unpinned.fed.workers[LATE].stop()
    roster_command(unpinned, "pin", LATE, str(unpinned.fed.directory / "roster.toml"), "--yes")
    unpinned.work(LATE)
    unpinned.fed.attending(*CLIENTS)
    return unpinned


@pytest.mark.full
def test_a_worker_without_a_roster_declines(unpinned: Members) -> None:
    fed = unpinned.fed
    run = fed.submit("too-early", SPEC)
    assert fed.wait_ended(run) == "FAILED"
    record = fed.admin("round", run, "0")
    (phase,) = record["phases"]
    assert (phase["kind"], phase["asked"], phase["replied"]) == ("secure-ready", 5, 4)
    unpinned.fed.workers[LATE].wait_for_text("declined, roster: no roster is pinned here")


class Watch:
    """Reads what a worker keeps of its sessions, again and again, and decrypts it with the member's key."""

    def __init__(self, home: Path) -> None:
        self.values: dict[str, bytes] = {}
        self.encrypted: set[bytes] = set()
        self._home = home
        self._rows: set[tuple[Any, ...]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kept(self) -> set[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self._home / 'memory.db'}?mode=ro", uri=True)) as database:
            return set(database.execute("SELECT * FROM kept").fetchall())

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._rows |= self.kept()

    def stop(self, copy: Path) -> None:
        """Ends the watch. `values` is what was seen, by its name; `encrypted` is the same as it was kept.

        `copy` is a database to make.
        """
        self._ended.set()
        self._thread.join()
        memory = WorkerMemory(copy, MemberFiles.load(self._home).signing_key)
        with closing(sqlite3.connect(copy)) as database, database:
            database.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?)", self._rows)
        for run, number, attempt, name, encrypted, _ in self._rows:
            manifest = AssignmentManifest(run_id=run, round=number, attempt=attempt)
            order = CheckedAssignment(SignedEnvelope(), manifest, Evaluate(splits=()), SHAPE, (), datetime.now(UTC))
            value = memory.begin(order).get(name)
            assert value is not None
            self.values[name] = value
            self.encrypted.add(encrypted)
        memory.close()


def around_the_largest(vector: bytes) -> bytes:
    """Up to 32 bytes of a vector of float32, which are not all zero."""
    place = 4 * int(np.abs(np.frombuffer(vector, "<f4")).argmax())
    return vector[max(0, place - 16) : place + 16]


def files_with(directory: Path, values: Iterable[bytes]) -> list[Path]:
    """The files that hold one of these values."""
    contents = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return [path for path, content in contents.items() if any(value in content for value in values)]


def secrets_left_nowhere(scene: Members, watch: Watch, copy: Path) -> int:
    """Checks that nobody has a secret or a vector of LATE once its sessions are over; returns how many sessions.

    `copy` is a database to make.
    """
    wait_for(lambda: not watch.kept(), "the worker to erase the session")
    watch.stop(copy)
    secrets = [value for name, value in watch.values.items() if name.endswith("/secret")]
    vectors = [value for name, value in watch.values.items() if name.endswith("/vector")]
    assert {len(secret) for secret in secrets} == {32}
    assert len(vectors) == len(secrets)
    hidden = [*secrets, *map(around_the_largest, vectors)]
    assert not files_with(scene.fed.directory, [*hidden, *watch.encrypted])
    return len(secrets)


def test_a_private_round_shows_one_sum_and_leaves_no_secret(scene: Members, tmp_path: Path) -> None:
    fed = scene.fed
    watch = Watch(scene.fed.directory / LATE)
    run = fed.completed("private", SPEC)
    record = fed.admin("round", run, "0")
    phases = record["phases"][: len(STAGES)]
    assert not record["gram_clients"], "one combined vector has no cosines"
    assert [part.get("reason", "") for part in record["participations"]] == [""] * len(CLIENTS)
    assert [phase["kind"] for phase in phases] == STAGES
    assert {(phase["asked"], phase["replied"]) for phase in phases} == {(5, 5)}

    assert secrets_left_nowhere(scene, watch, tmp_path / "copy.db") == 2, "of an update and of an evaluation"

    # Each session is one row of what left, with its phases. The order for the masked vector named the coefficient.
    sessions = read_left(fed.directory / LATE / "left.db", run=run).rows
    assert [(row.work, row.telling.state) for row in sessions] == [("evaluate", "accepted"), ("train", "accepted")]
    assert [[reply.kind for reply in row.replies] for row in sessions] == [STAGES] * 2
    assert all(row.coefficient and row.numbers > 0 for row in sessions)

    # Beside its worker, the member gets the model: its receipts confirm it, and nobody's own result is told.
    options = ("--home", str(fed.directory / LATE), "--out", str(tmp_path / "model.safetensors"), "--json")
    told = json.loads(fed.fedpareto("worker", "model", run, *options))
    assert (told["compared"]["round"], told["members"], told["digest"]) == (0, 5, fed.admin("run", run)["run"]["model"])
    assert [(score["own"], score["members"], score["worst"]) for score in told["scores"]] == [(None, 5, None)] * 2


@pytest.mark.full
def test_an_owner_sees_which_private_run_starts_from_a_model_of_its_submitter_and_both_are_done(
    scene: Members, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_bytes(*initial_model(task("digits"), 12)))
    run = scene.fed.completed("pretrained", SPEC, "--model", str(path))
    assert {part.get("reason", "") for part in scene.round(run)["participations"]} == {""}
    home = ("--home", str(scene.fed.directory / LATE))
    assert "warning: initial model blake3:" in (shown := scene.fed.fedpareto("worker", "runs", "pretrained", *home))
    assert "given by the submitter" in shown
    assert "from task and seed, checked" in scene.fed.fedpareto("worker", "runs", "private", *home)


# The stages of each mode: all but "sum" open the Gram matrix too.
COORDINATORS_SEED = 100  # of runs whose coordinator dies
WITH_GRAM = [*STAGES[:3], "secure-open", *STAGES[3:]]
MODES = {"sum": STAGES, "private": WITH_GRAM, "verified": WITH_GRAM}


def in_mode(mode: str, seed: int) -> str:
    """The specification of a run in this mode, from a model of its own: owners limit the sessions from one model.

    Members train on all their samples and add no blur: the samples that they would choose, and the blur, follow from a
    secret of the session.
    """
    spec = SPEC.replace('secure = "sum"', f'secure = "{mode}"').replace("batch_size = 20", "batch_size = 0")
    return f"seed = {seed}\n{spec}privacy.blur = 0.0\n"


def replies_of(scene: Members, run: str) -> list[Any]:
    """How many replies each member has signed for each phase of a run that it did not decline.

    Runs that end in a model that was evaluated before are declined its evaluation.
    """
    return scene.fed.query(
        "select count(replies.reply_id) from assignments a join phases using (phase_id) join rounds using (round_id) "
        "left join replies using (assignment_id) where run_id = :run and a.state != 'DECLINED' group by assignment_id",
        run=run,
    )


def with_dying_coordinators(fed: Federation, name: str, spec: str, phases: Iterable[int]) -> str:
    """A completed run; one coordinator after the other dies before one of these phases."""
    fed.serving.stop()
    run = ""
    for phase in phases:
        dying = fed.serve(crash=f"phase-{phase}")
        run = run or fed.submit(name, spec, crash=True)
        dying.wait_killed()
    fed.serve()
    fed.wait_completed(run)
    return run


def with_dying_worker(scene: Members, name: str, spec: str, number: int) -> str:
    """A completed run, during which the worker of the first client dies at its reply of this number."""
    fed, victim = scene.fed, CLIENTS[0]
    fed.workers[victim].stop()
    dying = scene.work(victim, crash=f"reply-{number}")
    run = fed.submit(name, spec)
    dying.wait_killed()
    scene.work(victim)
    fed.wait_completed(run)
    return run


@pytest.mark.full
def test_a_member_that_is_paused_in_a_private_round_does_its_part_in_it_and_is_not_asked_in_the_next(
    scene: Members,
) -> None:
    fed, paused = scene.fed, CLIENTS[0]
    run = fed.submit("paused", in_mode("sum", 400), "--paused")
    accepted = "select 1 from consents where run_id = :run and answer = 'ACCEPTED'"
    wait_for(lambda: len(fed.query(accepted, run=run)) == 5, "all owners to accept the run")
    fed.workers[LATE].stop()
    fed.admin("resume", run)
    ready = (
        "select 1 from replies join assignments using (assignment_id) join phases using (phase_id) "
        "join rounds using (round_id) where accepted and run_id = :run"
    )
    wait_for(lambda: len(fed.query(ready, run=run)) == 4, "the others to be ready")
    home = ("--home", str(fed.directory / paused))
    fed.fedpareto("worker", "pause", *home)
    fed.workers[paused].wait_for_text("the site is paused")
    scene.work(LATE)
    fed.wait_completed(run)
    assert list(scene.step(run).secure[0].survivors) == list(CLIENTS)
    waits = fed.submit("not-asked", in_mode("sum", 401))
    reason = f"{paused} is paused"
    wait_for(lambda: reason in fed.query("select reason from runs where run_id = :run", run=waits)[0][0], reason)
    fed.fedpareto("worker", "resume", *home)
    fed.wait_completed(waits)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["verified", "sum", "private"])
def test_a_coordinator_that_dies_before_each_stage_asks_the_same_and_loses_nobody(
    scene: Members, mode: str, tmp_path: Path
) -> None:
    fed, stages = scene.fed, MODES[mode]
    watch = Watch(scene.fed.directory / LATE)
    spec = in_mode(mode, COORDINATORS_SEED)
    run = with_dying_coordinators(fed, f"killed-{mode}-{COORDINATORS_SEED}", spec, range(2, len(stages) + 2))
    phases = fed.admin("round", run, "0")["phases"][: len(stages)]
    assert [(phase["kind"], phase["replied"]) for phase in phases] == [(name, 5) for name in stages]
    (step,) = scene.step(run).secure
    assert list(step.ready) == list(step.members) == list(step.survivors) == list(CLIENTS)
    assert not step.alarms
    assert {count for (count,) in replies_of(scene, run)} == {1}
    # members evaluate a model once: in the runs after the first one from this model, they do not
    assert secrets_left_nowhere(scene, watch, tmp_path / "copy.db") >= 1


@pytest.mark.full
@pytest.mark.parametrize("mode", list(MODES))
def test_a_worker_that_dies_at_each_stage_gives_the_same_bytes_or_drops_out(scene: Members, mode: str) -> None:
    for number in range(1, len(MODES[mode]) + 1):
        run = with_dying_worker(scene, f"killed-{mode}-{number}", in_mode(mode, number), number)
        assert CLIENTS[0] in scene.step(run).secure[0].survivors
        assert {count for (count,) in replies_of(scene, run)} == {1}


def check_evaluation(scene: Members, run: str) -> None:
    """All members have evaluated the model in a session, each stage once, and the record says so."""
    phases = scene.fed.admin("round", run, "0")["phases"][len(STAGES) :]
    assert [(phase["kind"], phase["replied"]) for phase in phases] == [(name, 5) for name in STAGES]
    assert {count for (count,) in replies_of(scene, run)} == {1}
    ((name,),) = scene.fed.query("select name from runs where run_id = :run", run=run)
    record = record_of(scene, name)
    record.verify()
    assert "loss/train" in record.bundle.round(0).metrics


@pytest.mark.full
def test_a_coordinator_that_dies_before_each_stage_of_an_evaluation_asks_the_same(scene: Members) -> None:
    phases = (len(STAGES) + 1, *range(2, len(STAGES) + 1))  # the others of the evaluation: the step is recorded
    run = with_dying_coordinators(scene.fed, "evaluated-after-kills", in_mode("sum", 200), phases)
    check_evaluation(scene, run)


@pytest.mark.full
def test_a_worker_that_dies_at_each_stage_of_an_evaluation_gives_the_same_bytes(scene: Members) -> None:
    for number in range(len(STAGES) + 1, 2 * len(STAGES) + 1):
        check_evaluation(scene, with_dying_worker(scene, f"evaluated-{number}", in_mode("sum", 200 + number), number))


@pytest.mark.full
def test_kills_change_nothing_of_a_model_in_any_mode(scene: Members) -> None:
    """Each run with kills ends in the model of a run without kills from the same model."""
    for seed in (COORDINATORS_SEED, *range(1, len(WITH_GRAM) + 1)):
        model = scene.fed.wait_completed(scene.fed.submit(f"undisturbed-{seed}", in_mode("sum", seed)))
        killed = scene.fed.query(f"select model from runs where name like 'killed-%-{seed}'")
        assert len(killed) >= 2  # the modes whose tests have run
        assert {made for (made,) in killed} == {model}


def test_each_owner_sees_the_same_digest_and_the_sessions_that_count(scene: Members) -> None:
    shown = [json.loads(roster_command(scene, "show", client, "--json")) for client in CLIENTS[-2:]]
    assert len({document["roster"]["digest"] for document in shown}) == 1
    for document in shown:
        digits = document["tasks"]["digits"]
        assert 1 <= digits["evaluations"] <= digits["sessions"]  # a model is evaluated once
    left = {one["client_id"]: one["tasks"][0] for one in scene.fed.admin("clients")["clients"]}
    for client, document in zip(CLIENTS[-2:], shown, strict=True):
        used = document["tasks"]["digits"]
        assert left[client]["training_sessions_left"] == 1000 - used["sessions"]
        assert left[client]["evaluation_sessions_left"] == 1000 - used["evaluations"]


# --- the record, verified

OF_PRIVATE_ROUNDS = {
    "private/members",
    "private/blur",
    "private/rule_share",
    "direction_norm",
    "accuracy/mean",
    "loss/train",
    "evaluation/noise",
}


@dataclass(frozen=True)
class Record:
    """What an outsider has of a run, and the key with which a dishonest coordinator signs what it edits."""

    bundle: Edited
    path: Path
    key: Ed25519PrivateKey

    def verify(self) -> list[str]:
        """The models after each round."""
        with BundleReader(self.bundle.write(self.path)) as reader:
            found = list(verify(reader))
            assert [one.missing for one in found] == [()] * len(found)
            steps = [StepManifest.FromString(record.step.manifest) for record in reader.rounds()]
        return [step.result_model for step in steps]

    def first(self, edit: Callable[[RoundRecord], object]) -> "Record":
        """With another record of the first round."""
        return replace(self, bundle=self.bundle.with_round(0, edit))

    def step(self, edit: Callable[[StepManifest], object]) -> "Record":
        """With another first step, which the coordinator has signed."""
        return self.first(lambda found: signed_again(found.step, StepManifest, self.key, edit))


def record_of(scene: Members, name: str) -> Record:
    """The record of a run."""
    path = scene.fed.directory / f"{name}.fedpareto"
    scene.fed.admin("bundle", name, "--payloads", "--yes", "--out", str(path), "--force")
    return Record(Edited.of(path), path, CoordinatorHome.load(scene.fed.home).signing_key)


@pytest.mark.parametrize("kinds", few_of([("SecureSession", "Input"), ("StepManifest",)], ("SecureSession", "Input")))
@pytest.mark.full
def test_an_outsider_verifies_the_record_of_a_run_and_finds_each_edit(
    scene: Members, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    killed = f"killed-verified-{COORDINATORS_SEED}"  # by a test that may run with the long ones alone
    for (name,) in scene.fed.query("select name from runs where name in ('private', :killed)", killed=killed):
        record = record_of(scene, name)
        ((model,),) = scene.fed.query("select model from runs where name = :name", name=name)
        with pytest.MonkeyPatch.context() as patch:
            compared = watched(patch)
            assert record.verify() == [model]
        assert {"private/members", "loss/train", "evaluated"} <= compared[0][1].keys()
        check_exact(compared)
        assert independent_metrics.check(record.path) >= OF_PRIVATE_ROUNDS, "from the sums, and from nothing of ours"
    keys = {client: MemberFiles.load(scene.fed.directory / client).signing_key for client in CLIENTS}
    home = CoordinatorHome.load(scene.fed.home)
    recorded = Recorded(record.bundle, {**keys, "coordinator": home.signing_key, "log": home.log_key.key})
    chosen = first_of(recorded, *kinds)
    _, refusals = check_listed(recorded, chosen, tmp_path / "edited")
    assert refusals > len(chosen)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda work, order: setattr(work, "mode", "private"), "was asked for other work than follows from the record"),
        (lambda work, order: order.inputs[0].ClearField("digest"), "was given other inputs than follow"),
        (lambda work, order: order.objectives.append("more"), "does not serve all objectives"),
    ],
)
def test_work_of_a_session_that_the_coordinator_changes_is_named(
    scene: Members, change: Callable[[SecureDealWork, AssignmentManifest], object], named: str
) -> None:
    """The replies to these assignments say nothing of what is changed."""
    record = record_of(scene, "private")

    def edit(order: AssignmentManifest) -> None:
        work = SecureDealWork.FromString(order.work)
        change(work, order)
        order.work = work.SerializeToString()

    def deal(found: RoundRecord) -> None:
        signed_again(found.phases[1].exchanges[0].assignment, AssignmentManifest, record.key, edit)

    with pytest.raises(VerificationError, match=f"round 0: .*{named}"):
        record.first(deal).verify()


def test_an_edited_mean_of_a_private_evaluation_is_found(scene: Members) -> None:
    rounds = "runs join rounds using (run_id) where name = 'private'"
    ((run, metrics),) = scene.fed.query(f"select run_id, rounds.metrics from {rounds}")

    def set_metrics(changes: dict[str, float]) -> None:
        with closing(sqlite3.connect(scene.fed.home / "coordinator.db")) as database, database:
            values = json.dumps(json.loads(metrics) | changes), run
            database.execute("update rounds set metrics = ? where run_id = ?", values)

    set_metrics({"loss/train": 0.01})
    try:
        (problem,) = scene.fed.admin("audit", "verify", code=1)["problems"]
    finally:
        set_metrics({})
    assert problem.startswith(f"round {run}/0: the record says loss/train = 0.01; what was signed gives ")


@pytest.mark.full
def test_a_run_over_objectives_is_verified_round_by_round(scene: Members) -> None:
    """The weights of the second round follow from those of the first, which the run remembers."""
    fedcmoo = 'algorithm = { name = "fedcmoo", bound = "none", scope = "all" }'
    spec = SPEC.replace('algorithm.name = "fedavg-n"', fedcmoo).replace("\nrounds = 1", "\nrounds = 2\nseed = 9")
    scene.fed.completed("objectives", spec + "privacy.clip = 10.0\n")
    record = record_of(scene, "objectives")
    models = record.verify()
    assert len(set(models)) == 2
    step = StepManifest.FromString(record.bundle.round(1).step.manifest)
    assert [session.purpose for session in step.secure] == ["jacobian", "train"]
    with pytest.raises(VerificationError, match=r"round 0: .*weights"):
        record.step(lambda step: setattr(step.weights[0], "weight", 0.5)).verify()


@pytest.mark.full
def test_a_member_finds_its_private_rounds_in_the_record_and_what_its_owner_requires(
    scene: Members, tmp_path: Path
) -> None:
    run = scene.fed.query("select run_id from runs where name = 'private'")[0][0]
    bundle = str(tmp_path / "private.fedpareto")
    scene.fed.admin("bundle", "private", "--payloads", "--yes", "--out", bundle)
    home = shutil.copytree(scene.fed.directory / CLIENTS[0], tmp_path / "home")

    def problems(code: int) -> list[str]:
        shown = scene.fed.fedpareto("worker", "verify", bundle, "--home", str(home), "--json", code=code)
        found: list[str] = json.loads(shown)["problems"]
        return found

    assert not problems(0)
    (home / "policy.toml").write_text("[secure]\neffective_members = 4.5\n")
    uncovered = problems(1)  # at MASK and at CONFIRM, of the training and of the evaluation
    assert len(uncovered) == 4
    assert all("was 4.00 effective members; its owner requires 4.5" in problem for problem in uncovered)
    (home / "policy.toml").write_text("[secure]\neffective_members = 4\n")
    assert not problems(0)
    ledger = RoundLedger(home / "private-rounds.db")
    ledger.add(SessionEntry("ab" * 32, run, "digits", "blake3:00", "train"))
    ledger.add(SessionEntry("cd" * 32, "another-run", "digits", "blake3:00", "train"))
    ledger.close()
    (problem,) = problems(1)
    assert f"answered in the private session {'ab' * 8} of train, which the record lacks" in problem
