"""A site's noise, ledger and budget, enforced by the worker; and what the coordinator makes of what replies state."""

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest

from federation.spec.accounting import DELTA, Mechanism, epsilon
from federation.spec.computation import Descend
from federation.spec.train_section import LocalSgd
from federation.training.trainer import Trainer
from federation.trust.keys import replace_private
from federation.v1.admin_pb2 import GetRoundRequest, GetRunRequest
from federation.v1.common_pb2 import AssignmentManifest, JacobianWork, SamplePrivacy
from federation.work.base import WorkError
from fedpareto.cli.show import round_tables, tables
from tests.harness import wait_for
from tests.scripted import opened
from tests.stage import Stage
from tests.worker.scene import Running, Scene, command
from tests.works import set_work
from worker.home import MEMBER_FILE, WorkerHome
from worker.ledgers.privacy_ledger import Ledger, PrivacyEntry, read_ledger
from worker.site.policy_file import Policy, SamplePolicy
from worker.site.privacy import SitePrivacy, spent_noise

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None or find_spec("opacus") is None, reason="needs fedpareto[dp]"
)

BATCH = 10
BEGUN = "2026-01-01T00:00:00+00:00"
RULE = SamplePolicy(noise=4.0, clip=0.5, epsilon=8.0)


def start(scene: Scene, rule: SamplePolicy = RULE) -> Running:
    """Starts a worker whose owner has this rule for digits; it ends the one before."""
    for running in scene.started:
        running.stop()
    return scene.start(policy=Policy(privacy={"digits": rule}))


def entries(home: WorkerHome) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(home.privacy)) as connection:
        return connection.execute("SELECT data_set, task, run, round, noise, clip, rate, steps FROM spent").fetchall()


def test_the_owners_floor_holds_although_the_coordinator_asks_for_no_noise(scene: Scene) -> None:
    running, rate = start(scene), BATCH / scene.offers["digits"].samples
    scene.train(5, steps=4)
    running.wait_for("receipt")
    reply = scene.reply()
    stated, found = reply.privacy, epsilon([Mechanism(4.0, rate, 4)], DELTA)
    assert (stated.noise, stated.clip, stated.rate, stated.steps, stated.delta) == (4.0, 0.5, rate, 4, DELTA)
    assert (stated.epsilon, stated.bound) == pytest.approx((found.value, found.bound))
    assert not reply.losses
    assert set(reply.metrics) == {"train/samples"}  # which the reply tells anyway
    assert entries(running.home) == [("digits", "digits", "run-1", 5, 4.0, 0.5, rate, 4)]


def test_the_stricter_of_owner_and_coordinator_counts(scene: Scene) -> None:
    running = start(scene)
    for number, (noise, clip) in enumerate([(8.0, 0.1), (0.5, 3.0)]):
        scene.train(number, sample_noise=noise, sample_clip=clip)
    running.wait_for("receipt", 2)
    stated = [opened(one, scene.member).privacy for one in scene.coordinator.submissions]
    assert [(one.noise, one.clip) for one in stated] == [(8.0, 0.1), (4.0, 0.5)]


def test_a_training_that_would_overspend_is_declined_after_a_restart_too_and_others_go_on(scene: Scene) -> None:
    rate = BATCH / scene.offers["digits"].samples
    budget = (epsilon([Mechanism(4.0, rate, 6)], DELTA).value + epsilon([Mechanism(4.0, rate, 5)], DELTA).value) / 2
    rule = RULE.model_copy(update={"epsilon": budget})
    running = start(scene, rule)
    for number in (1, 2):  # of two runs: the budget is for all
        scene.train(number, run=f"run-{number}", steps=3)
    running.wait_for("receipt")
    running.wait_for("declined")
    running = start(scene, rule)
    running.wait_for("declined")
    scene.train(3, steps=2)
    running.wait_for("receipt")
    told = wait_for(lambda: scene.coordinator.declines, "a decline")[-1]
    spent = epsilon([Mechanism(4.0, rate, 3)], DELTA).value
    assert (told.assignment_id, told.reason) == ("assignment-2", "dp-budget")
    assert f"spent epsilon = {spent:.4g} of {budget:g}" in told.message
    assert f"{budget - spent:.4g} is left" in told.message
    assert [row[-1] for row in entries(running.home)] == [3, 2]  # nothing was drawn for the one that was declined


def test_work_that_shows_samples_without_noise_is_not_done(scene: Scene) -> None:
    running = start(scene)
    asked = scene.order(1)
    asked.rows[0].name = "jacobian"
    set_work(asked, JacobianWork(batch_size=BATCH, objectives=["loss"], sketch="exact", budget=1.0))
    scene.coordinator.assign(asked)
    assert scene.declined()[1] == "dp-work"
    scene.train(1, precision="bf16")
    _, reason, message = scene.declined(2)
    assert reason == "dp-work"
    assert message == (
        'this site trains with noise. train.precision = "bf16": gradients that get noise are made in "float32"'
    )
    for number, rule in ((2, RULE), (3, RULE.model_copy(update={"evaluate": True}))):
        running = start(scene, rule)
        scene.evaluate("train", "test", number=number)
        running.wait_for("receipt")
    first, second = (opened(one, scene.member) for one in scene.coordinator.submissions)
    assert not first.metrics
    assert set(second.metrics) == {"test/samples", "test/loss", "test/accuracy"}
    assert not entries(running.home)


# --- the owner's side


def test_tasks_on_one_data_set_share_its_budget(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "privacy.db")
    rules = {"patients": RULE.model_copy(update={"tasks": ("mortality", "stay")})}
    site = SitePrivacy(rules, ledger)
    assert site.data_set("mortality").name == site.data_set("stay").name == "patients"
    assert site.data_set("other").rule is None
    for name in ("mortality", "stay"):
        ledger.add(PrivacyEntry(BEGUN, "patients", name, "r", 0, "a", 1.0, 0.5, 0.1, 5))
    assert ledger.mechanisms("patients") == [Mechanism(1.0, 0.1, 10)]
    ledger.close()


def test_a_task_that_cannot_be_trained_with_noise_does_not_start(tmp_path: Path) -> None:
    class Unsuited:
        samples = 100

        def check_private(self) -> None:
            raise WorkError("the model has BatchNorm", reason="dp-model")

    site = SitePrivacy({"digits": RULE}, Ledger(tmp_path / "privacy.db"))
    unsuited: Any = Unsuited()
    site.check_suits({"other": unsuited})
    with pytest.raises(WorkError, match=r"task digits, which policy\.toml wants .*: the model has BatchNorm"):
        site.check_suits({"digits": unsuited})
    unsuited.samples = 100_000
    with pytest.raises(WorkError, match=r"delta = 1e-05 .* one of 100000 samples"):
        site.check_suits({"digits": unsuited})


def test_a_training_is_on_the_disk_before_it_begins_and_does_not_begin_if_it_cannot_be(
    tmp_path: Path, offers: dict[str, Trainer]
) -> None:
    path, trainer = tmp_path / "privacy.db", offers["digits"]
    site = SitePrivacy({"digits": RULE}, Ledger(path))
    asked = Descend(sgd=LocalSgd(steps=2, batch_size=BATCH, learning_rate=0.1), targets={"loss": {"loss": 1.0}})
    order = AssignmentManifest(run_id="run-1", round=0, assignment_id="a", task="digits")
    computation, statement = site.admit(order, asked, trainer, datetime.now(UTC))
    assert isinstance(computation, Descend)
    assert (computation.private, computation.measure) == (RULE.floor, False)
    assert statement is not None
    [entry] = read_ledger(path)  # from the file, as a worker would that starts after a crash
    assert (entry.steps, entry.assignment) == (2, "a")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")  # as if the disk did not take it
        with site.ledger._file.using() as ledger:
            ledger.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(OSError, match=r"privacy\.db is locked"):
            site.admit(order, asked, trainer, datetime.now(UTC))
    assert len(read_ledger(path)) == 1


def test_the_command_shows_what_is_spent_and_left(tmp_path: Path) -> None:
    home = WorkerHome(tmp_path)
    replace_private(tmp_path / MEMBER_FILE, b"")
    home.policy.write_text("[privacy.digits]\nnoise = 1.0\nepsilon = 8.0\n")
    arguments = ("privacy", "--home", str(tmp_path))
    assert "digits: epsilon = 0 of 8" in command(*arguments)
    ledger = Ledger(home.privacy)
    for number in range(2):
        ledger.add(PrivacyEntry(BEGUN, "digits", "digits", "r", number, f"{number}", 4.0, 0.5, 0.1, 5))
    found = epsilon([Mechanism(4.0, 0.1, 10)], DELTA)
    shown = command(*arguments)
    assert f"digits: epsilon = {found.value:.4g} of 8" in shown
    assert "run r: 10 steps, noise 4, rate 0.1" in shown
    [account] = json.loads(command(*arguments, "--json"))
    assert (account["epsilon"], account["bound"], account["budget"]) == pytest.approx((found.value, found.bound, 8.0))
    assert [entry["round"] for entry in account["entries"]] == [0, 1]
    ledger.close()
    [sums] = spent_noise(home.privacy, Policy.load(home.policy).privacy)  # for the member's console
    assert vars(sums) == {name: account[name] for name in vars(sums)}
    assert sums.left == 8.0 - sums.epsilon


# --- the coordinator's side

STATED = SamplePrivacy(noise=1.0, clip=1.0, rate=0.1, steps=5, epsilon=1.5, bound=1.75, delta=1e-5)


def test_the_record_and_the_commands_show_what_a_reply_states(stage: Stage) -> None:
    run, [alice] = stage.begin("alice", samples=[50], more="privacy.sample_noise = 1.0")
    alice.reply(alice.order(), privacy=STATED)
    alice.reply(alice.order())
    stage.wait_round(run, 0)
    [update] = stage.replies(run).values()
    assert update.privacy == {field.name: float(value) for field, value in STATED.ListFields()}
    [first, *_] = stage.rounds(run)
    assert first.metrics["epsilon/samples"] == 1.5
    shown = stage._admin.GetRound(GetRoundRequest(run=run, round=0))
    assert shown.participations[0].privacy == STATED
    assert all(check.verified for check in shown.participations[0].envelopes)
    item = stage._admin.GetRun(GetRunRequest(run=run)).run
    assert item.members[0].epsilon == 1.5
    console = tables.console()
    with console.capture() as capture:
        console.print(round_tables.round_(shown))
        console.print(tables.run(item))
    assert capture.get().count("epsilon") >= 3


@pytest.mark.parametrize("changes", [{}, {"noise": 0.9}, {"steps": 6}, {"epsilon": float("nan")}], ids=str)
def test_a_reply_with_less_noise_than_the_run_asks_for_is_refused(stage: Stage, changes: dict[str, float]) -> None:
    run, (alice, *others) = stage.begin("alice", "ben", "cleo", samples=[50] * 3, more="privacy.sample_noise = 1.0")
    stated = SamplePrivacy()
    if changes:
        stated.CopyFrom(STATED)
    for field, value in changes.items():
        setattr(stated, field, value)
    with pytest.raises(grpc.RpcError):
        alice.submit(alice.order(), **dict[str, Any]({"privacy": stated} if changes else {}))
    assert stage.outcomes(run)["alice"] == ("REFUSED", "privacy")
    for other in others:
        other.reply(other.order(), privacy=STATED)
    assert {other.order().kind for other in others} == {"evaluate"}, "the others' round goes on"
