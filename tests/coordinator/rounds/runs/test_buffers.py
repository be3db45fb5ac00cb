"""Models that keep more than parameters, such as BatchNorm's statistics: local, averaged or frozen, as a run says."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coordinator.rounds.runs.specification import parse_run
from federation.attacks import parse_attack
from federation.spec.computation import Descend, Measure, MeasureAlong
from federation.spec.objective_names import joint_target
from federation.spec.run_sections import ParametersSpec
from federation.spec.run_spec import SpecError
from federation.spec.sharing import BUFFERS, Sharing, SharingError, Unshared
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Task, initial_model, task
from federation.training.own import Own, compute, run_model
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, StepManifest
from federation.vectors import Layout, Tensor, Vector, read_vector, to_bytes, update_layout, update_rows
from federation.work.base import Result
from fedpareto.code_path import VARIABLE
from fedpareto.face.simulated import simulate
from fedpareto.simulation.simulate import Simulation
from storage.states import RunState
from tests.coordinator.rounds.runs.scene import Scene, halted, kept_file, serving
from tests.coordinator.rounds.runs.small_task import GIVEN, SGD, Small, descend
from tests.harness import Federation, federation
from tests.paths import OWNERS_CODE
from tests.running import refused
from tests.stage import LAYOUT, Stage, spec
from worker.work.attacker import Attacker


@pytest.fixture(autouse=True)
def owners_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of this process find the task of RUN, which an owner would name with --code."""
    monkeypatch.syspath_prepend(str(OWNERS_CODE))


class Normed(Small):
    """As `Small`, with BatchNorm between body and head."""

    def model(self) -> torch.nn.Module:
        made = torch.nn.Sequential()
        made.add_module("body", torch.nn.Linear(3, 2))
        made.add_module("norm", torch.nn.BatchNorm1d(2))
        made.add_module("head", torch.nn.Linear(2, 2))
        return made


RESNET = """
import torch
from torchvision.models import resnet18
from fedpareto import Pool, Task


class ResNet(Task):
    def model(self):
        made = resnet18(num_classes=2)
        made.load_state_dict(torch.load({state!r}, weights_only=True))
        return made

    def pool(self, source):
        torch.manual_seed(1)
        return Pool(torch.randn(20, 3, 32, 32), torch.arange(20) % 2)
"""
RESNET_RUN = """
task = "resnet_task:ResNet"
rounds = 1
algorithm.name = "fedavg"
train = {{ steps = 2, batch_size = 4, learning_rate = 0.001 }}
simulation.clients = 2
parameters.buffers = "{treatment}"
"""


def with_buffers(made: Task, treatment: str) -> tuple[TorchTrainer, Own]:
    trained = TorchTrainer(made, made.load(DataSource()))
    layout, values = initial_model(made, 0)
    assert trained.layout == layout
    return trained, Own(Sharing.of(layout, Unshared(buffers=treatment), made.buffers()), values)


def test_local_buffers_are_personal_and_a_measurement_uses_them() -> None:
    trained, chosen = with_buffers(Normed(), "local")
    base = chosen.sharing.shared_of(chosen.values)
    assert [tensor.name for tensor in chosen.sharing.personal.tensors] == [
        f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    result = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert result.rows["loss"].shape == base.shape == (8 + 4 + 6,)
    assert result.personal is not None
    assert result.personal[-1] == SGD.steps  # batches that were counted
    again = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert again.rows["loss"].tobytes() == result.rows["loss"].tobytes()
    mine = Own(chosen.sharing, chosen.sharing.with_personal(chosen.values, result.personal))
    tested = [compute(trained, base, Measure(splits=("test",)), one, **GIVEN).metrics for one in (mine, chosen)]
    assert tested[0]["test/loss"] != tested[1]["test/loss"]


def test_frozen_buffers_are_used_in_training_and_do_not_change() -> None:
    trained, chosen = with_buffers(Normed(), "frozen")
    values = chosen.values.copy()
    values[-5:-1] = [3.0, -3.0, 0.5, 2.0]  # the statistics of a pretrained model
    base, other = chosen.sharing.shared_of(values), Own(chosen.sharing, values)
    result = compute(trained, base, descend(trained), other, **GIVEN)
    assert result.personal is None
    assert np.abs(result.rows["loss"]).min() > 0
    plan = TrainingPlan(sgd=SGD, weights={"loss": 1.0}, seed=0, samples=12, frozen=other.sharing.frozen)
    assert trained.train(values, plan).tolist()[-5:] == [3.0, -3.0, 0.5, 2.0, 0.0]
    plain = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert not np.allclose(plain.rows["loss"], result.rows["loss"])


def test_averaged_buffers_are_a_row_of_their_own_behind_the_parameters() -> None:
    trained, chosen = with_buffers(Normed(), "averaged")
    base = chosen.sharing.shared_of(chosen.values)
    assert [tensor.name for tensor in chosen.sharing.shared.tensors][-4:-2] == ["head.bias", "norm.running_mean"]
    base[-5:] = [3.0, -3.0, 0.5, 2.0, 7.0]  # in the middle of a run
    result = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert {name: row.shape for name, row in result.rows.items()} == {"loss": (18,), BUFFERS: (5,)}
    assert (result.rows[BUFFERS][-1], result.personal) == (7 + SGD.steps, None)
    alone, own = with_buffers(Normed(), "local")
    values = own.sharing.with_personal(own.values, base[-5:])
    expected = compute(alone, base[:18], descend(alone), Own(own.sharing, values), **GIVEN)
    assert result.rows["loss"].tobytes() == expected.rows["loss"].tobytes()
    assert expected.personal is not None
    assert result.rows[BUFFERS].tobytes() == expected.personal.tobytes()
    along = MeasureAlong(direction=np.ones(18, np.float32), steps=(0.5,), names=("half",))
    moved = np.append(base[:18] - np.float32(0.5), base[18:])
    there = trained.measure(chosen.sharing.with_shared(chosen.values, moved), ("train",))["train/loss"]
    assert compute(trained, base, along, chosen, **GIVEN).metrics == {"half": there}
    assert [name for name, model in along.models(base) if model.tobytes() == moved.tobytes()] == ["half"]


def test_names_of_buffers_that_are_no_buffers_are_refused() -> None:
    for names, says in (
        (("*.num_batches_tracked",), "they must match the buffers, and nothing else: see 'norm.running_mean'"),
        (("*.running_mean", "*.running_var"), r"\(\*.running_mean, \*.running_var\); this one holds body.weight"),
        (("*.mean",), r"\(\*.mean\); this one holds body.weight"),
    ):
        with pytest.raises(SharingError, match=f"parameters.buffer_names.*{says}"):
            run_model(Normed(), 0, ParametersSpec(buffers="averaged", buffer_names=names))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ('privacy = { secure = "sum" }', r"a private round sums updates alone \(privacy.secure\): use .local. or"),
        ("privacy = { sample_noise = 1.0, sample_clip = 1.0 }", "no noise protects the samples that they describe"),
        ("privacy = { client_noise = 1.0 }", "no noise protects the client that they describe"),
    ],
)
def test_averaged_buffers_are_refused_where_updates_are_protected(section: str, says: str) -> None:
    document = f'name = "a"\ntask = "digits"\nrounds = 1\nalgorithm.name = "fedavg-n"\n{section}\n'
    parse_run(document)
    with pytest.raises(SpecError, match=says):
        parse_run(document + 'parameters.buffers = "averaged"\n')


@pytest.mark.parametrize(
    ("made", "treatment", "says"),
    [
        (Normed(), "", "keeps 3 buffers, such as 'norm.num_batches_tracked': say what becomes of them, one of 'local'"),
        (Small(), "local", "parameters.buffers: 'local', but the model keeps no buffers"),
    ],
)
def test_a_model_with_buffers_needs_a_run_that_says_what_becomes_of_them(made: Task, treatment: Any, says: str) -> None:
    with pytest.raises(SharingError, match=says):
        run_model(made, 0, ParametersSpec(buffers=treatment))


def write_pretrained(directory: Path) -> None:
    """The module of a task whose model begins with the weights in a file."""
    from torchvision.models import resnet18  # seconds that collecting the tests need not take

    torch.manual_seed(3)
    torch.save(resnet18(num_classes=2).state_dict(), directory / "resnet.pt")
    (directory / "resnet_task.py").write_text(RESNET.format(state=str(directory / "resnet.pt")))


def all_moved(layout: Layout, before: Vector, after: Vector) -> bool:
    """Whether every tensor has changed."""
    return all(tensor.any() for tensor in layout.split(after - before).values())


@pytest.mark.full
@pytest.mark.parametrize("treatment", ["local", "averaged", "frozen"])
def test_a_pretrained_resnet_with_batch_normalisation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, treatment: str
) -> None:
    write_pretrained(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "resnet_task", raising=False)
    trained, chosen = with_buffers(task("resnet_task:ResNet"), treatment)
    work = Descend(sgd=LocalSgd(steps=2, batch_size=0, learning_rate=0.001), targets=joint_target(trained.objectives))
    base = chosen.sharing.shared_of(chosen.values)
    result = compute(trained, base, work, chosen, **GIVEN)
    assert base.shape == (11_177_538 + 9_620 * (treatment == "averaged"),)
    after = base - np.append(result.rows["loss"], np.zeros(chosen.sharing.buffers, np.float32))
    mine = chosen
    if treatment == "averaged":
        after[-9_620:] = result.rows[BUFFERS]
    if treatment == "local":
        assert result.personal is not None
        assert all_moved(chosen.sharing.personal, chosen.sharing.personal_of(chosen.values), result.personal)
        mine = Own(chosen.sharing, chosen.sharing.with_personal(chosen.values, result.personal))
    assert all_moved(chosen.sharing.shared, base, after)
    measured = compute(trained, after, Measure(splits=("train",)), mine, **GIVEN).metrics
    assert np.isfinite(measured["train/loss"])
    if treatment == "frozen":
        assert measured["train/loss"] < result.losses["loss"]
    document = 'name = "resnet"\n' + RESNET_RUN.format(treatment=treatment)
    history = simulate(document.encode(), home=tmp_path / "home", threads=1)
    assert (history.state, history.model.shape) == ("COMPLETED", base.shape)
    assert all_moved(chosen.sharing.shared, base, history.model)
    assert np.isfinite(history.round_records[-1]["loss/test"])


@pytest.mark.full
def test_a_pretrained_resnet_keeps_local_buffers_at_a_worker_which_exports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pretrained(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))  # a command with --code sets it, for the processes that it starts
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = ("--code", str(tmp_path))
    with federation(tmp_path) as fed:
        fed.serve()
        fed.join("ann")
        fed.work("ann", *code, task="resnet_task:ResNet")
        fed.attending("ann")
        run = fed.completed("resnet", RESNET_RUN.format(treatment="local"), *code)
        shared, kept = tmp_path / "shared.safetensors", tmp_path / "kept.safetensors"
        fed.fedpareto("admin", "export", run, "--out", str(shared), "--home", str(fed.home / "admin"))
        fed.fedpareto("worker", "export", run, "--out", str(kept), "--home", str(tmp_path / "ann"))
    layout, values = read_vector(kept)
    assert (len(read_vector(shared)[1]), len(values)) == (11_177_538, 9_620)
    buffers = layout.split(values)
    assert buffers["bn1.num_batches_tracked"] == 2
    assert np.all(buffers["bn1.running_mean"] != 0)


# ---- runs

RUN = """
task = "normed_task:Normed"
rounds = 3
seed = 5
algorithm.name = "fedavg"
selection = { pool = "enrolled", minimum = 2, quorum = 1.0 }
train = { steps = 6, batch_size = 20, learning_rate = 0.2, momentum = 0.5, wire_dtype = "bf16" }
simulation = { clients = 2, partition = "shards:2" }
parameters.buffers = "TREATMENT"
"""
CLIENTS = ("client-000", "client-001")


def text(treatment: str) -> str:
    return RUN.replace("TREATMENT", treatment)


COMMON = ["--set", "partition=shards:2", "--code", str(OWNERS_CODE)]
OPTIONS = {client: ["--set", f"part={number}/2", *COMMON] for number, client in enumerate(CLIENTS, 1)}
# The samples of one are not in memory; the results are the same to the last byte.
OPTIONS[CLIENTS[1]] += ["--set", "loader_workers=1", "--set", "pin_memory=true"]


def blob(fed: Federation, digest: str) -> Path:
    kind, _, value = digest.partition(":")
    return fed.home / "blobs" / kind / value[:2] / value[2:]


def last_model(fed: Federation, run: str) -> Vector:
    """The last model of a run, as soon as it is completed."""
    return read_vector(blob(fed, fed.wait_completed(run)))[1]


def rows_of(fed: Federation, envelope: str) -> dict[str, Vector]:
    """The rows of an update by the digest of its envelope."""
    ((payload,),) = fed.query("select payload from replies where envelope_digest = :name", name=envelope)
    return {name: np.array(row.read()) for name, row in update_rows(blob(fed, payload)).items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with serving(tmp_path_factory.mktemp("buffers"), OPTIONS, "normed_task:Normed") as made:
        made.work(CLIENTS[1])
        yield made


@pytest.mark.full
def test_local_buffers_outlive_their_worker_and_a_simulation_makes_the_same(scene: Scene, tmp_path: Path) -> None:
    simulated = simulate(('name = "local"\n' + text("local")).encode(), home=tmp_path / "home", threads=1)
    dying = scene.work(CLIENTS[0], "spooled")
    scene.fed.attending(*CLIENTS)
    run = scene.fed.submit("local", text("local"), "--code", str(OWNERS_CODE))
    for crash in ("before-receipt", ""):
        dying.wait_killed()
        dying = scene.work(CLIENTS[0], crash)
    assert last_model(scene.fed, run).tobytes() == simulated.model.tobytes()
    for client in CLIENTS:
        scene.exported(client, run)
        buffers, values = read_vector(scene.fed.directory / f"{client}.safetensors")
        layout, state = read_vector(kept_file(tmp_path / "home", client, 2))
        assert [tensor.name for tensor in layout.tensors] == [*(one.name for one in buffers.tensors), "residual/loss"]
        assert values.tobytes() == state[: len(values)].tobytes()
        assert values[-1] == 18  # batches that were counted
    assert scene.fed.run_state(run)["measured"] == "personalised"


@pytest.mark.full
def test_averaged_buffers_are_the_mean_of_the_replies_and_k_does_not_see_them(scene: Scene, tmp_path: Path) -> None:
    document = text("averaged").replace('"fedavg"', '"fedmgda+"') + 'server = { optimizer = "momentum" }\n'
    simulated = simulate(('name = "averaged"\n' + document).encode(), home=tmp_path / "home", threads=1)
    if CLIENTS[0] not in scene.fed.workers:
        scene.work(CLIENTS[0])
    scene.fed.attending(*CLIENTS)
    run = scene.fed.submit("averaged", document, "--code", str(OWNERS_CODE))
    model = last_model(scene.fed, run)
    assert model.tobytes() == simulated.model.tobytes()
    assert scene.fed.run_state(run)["measured"] == "shared"
    columns = "select base_model, result_model, step, gram from rounds where run_id = :run order by number"
    steps = scene.fed.query(columns, run=run)
    momentum = np.zeros(626)
    for base, after, step, gram in steps:
        signed = StepManifest.FromString(SignedEnvelope.FromString(step).manifest)
        rows = [rows_of(scene.fed, name) for name in signed.replies]
        U = np.array([row["loss"] for row in rows], dtype=np.float64)
        np.testing.assert_allclose(np.load(blob(scene.fed, gram)), U @ U.T, rtol=1e-9)
        momentum = 0.9 * momentum + signed.coefficients @ U
        found, before = (read_vector(blob(scene.fed, name))[1] for name in (after, base))
        np.testing.assert_allclose(found[: U.shape[1]], before[: U.shape[1]] - signed.rate * momentum, atol=1e-6)
        mean = np.mean([row[BUFFERS].astype(np.float64) for row in rows], axis=0)
        assert found[U.shape[1] :].tobytes() == mean.astype(np.float32).tobytes()
    assert model[-1] == 18  # batches that were counted
    assert scene.fed.admin("round", run, "-1")["gram_clients"] == [*CLIENTS]
    mean_of_models = text("averaged").replace('"fedavg"', '"afl"')
    assert simulate(('name = "mean"\n' + mean_of_models).encode(), threads=1).model[-1] == 18


def test_an_attack_on_updates_leaves_averaged_buffers_alone() -> None:
    attacked = text("averaged").replace("clients = 2", 'clients = 2, attackers = 1, attack = "sign-flip"')
    assert simulate(('name = "attacked"\n' + attacked).encode(), threads=1).model[-1] == 18
    attacker = Attacker(parse_attack("sign-flip"), "ann")
    honest = Result({"loss": np.ones(3, np.float32), BUFFERS: np.ones(2, np.float32)}, {}, {}, 1)
    asked = AssignmentManifest(kind="train", run_id="r")
    sent = attacker.distort(asked, honest, now=datetime.now(UTC), pause=lambda seconds: None).rows
    assert {name: set(row) for name, row in sent.items()} == {"loss": {-1.0}, BUFFERS: {1.0}}
    idle = Attacker(parse_attack("free-rider"), "ann")
    for model in (np.zeros(5, np.float32), np.arange(5, dtype=np.float32)):
        asked.base_model = str(model)
        idle.see(asked, model)
    sent = idle.distort(asked, honest, now=datetime.now(UTC), pause=lambda seconds: None).rows
    assert (sent["loss"].shape, set(sent[BUFFERS])) == ((3,), {1.0})


@pytest.mark.full
def test_a_simulation_with_local_buffers_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    document = ('name = "local"\n' + text("local")).encode()
    whole = simulate(document, home=tmp_path / "whole", threads=1)
    home = tmp_path / "halted"
    halted(document, home)
    assert simulate(document, home=home, resume=True, threads=1).model.tobytes() == whole.model.tobytes()
    for client in CLIENTS:
        assert kept_file(home, client, 2).read_bytes() == kept_file(tmp_path / "whole", client, 2).read_bytes()


def test_a_model_with_buffers_is_not_trained_stacked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be trained by the backend stacked with personal or frozen parameters"):
        Simulation(('name = "local"\n' + text("local")).encode(), tmp_path / "a", backend="stacked")


# ---- what clients send that they should not

WITH_BUFFERS = Layout((*LAYOUT.tensors, Tensor("n.running_mean", (2,)), Tensor("n.num_batches_tracked", ())))
PERSONAL = 'parameters.personal = ["layer.bias"]'
AVERAGED = 'parameters.buffers = "averaged"\nlimits.norm = 100.0\nselection = { minimum = 1, quorum = 0.1 }'


def test_buffers_that_are_not_what_was_asked_are_refused_and_long_ones_are_no_long_update(stage: Stage) -> None:
    values = np.arange(WITH_BUFFERS.size, dtype=np.float32)
    model = to_bytes(WITH_BUFFERS, values)
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", algorithm="fedavg", more=AVERAGED, model=model)
    order = ann.order()
    assert [(row.name, row.length) for row in order.rows] == [("loss", 45), (BUFFERS, 3)]
    wrong = to_bytes(update_layout([("loss", 45), (BUFFERS, 4)]), np.ones(49, np.float32))
    with refused("INVALID_ARGUMENT", "layout"):
        ann.member.submit(ann.member.sign(ann.member.manifest(order, wrong[:-4])), wrong[:-4])
    assert stage.outcomes(run)["ann"] == ("REFUSED", "layout")
    order, update = ben.order(), np.ones(48, np.float32)
    short = ben.member.manifest(order, to_bytes(update_layout([("loss", 45), (BUFFERS, 2)]), update[:47]))
    short.rows[1].length = 2
    with refused("INVALID_ARGUMENT", "mismatch:rows"):
        ben.member.submit(ben.member.sign(short))
    update[46] = np.nan
    with refused("INVALID_ARGUMENT", "non-finite"):
        ben.submit(order, update)
    assert stage.outcomes(run)["ben"] == ("REFUSED", "non-finite")
    update[45:] = 0.0, 1e30, 8.0
    cleo.reply(cleo.order(), update)
    stage.play(run, ann, ben, cleo)
    made = stage.parameters(stage.run(run).model)
    np.testing.assert_array_equal(made, np.append(values[:45] - 1.0, update[45:]).astype(np.float32))


def test_an_update_of_zeros_has_no_direction_whatever_its_buffers_are(stage: Stage) -> None:
    model = to_bytes(WITH_BUFFERS, np.ones(48, np.float32))
    run, (ann,) = stage.begin("ann", algorithm="fedavg", more=AVERAGED, model=model)
    with refused("INVALID_ARGUMENT", "zero"):
        ann.submit(ann.order(), np.append(np.zeros(45), np.ones(3)).astype(np.float32))
    stage.wait_state(run, RunState.FAILED)  # its one round is skipped


def test_an_initial_model_of_other_tensors_than_the_run_shares_is_refused(stage: Stage) -> None:
    first = Layout((*WITH_BUFFERS.tensors[2:], *LAYOUT.tensors))
    local = AVERAGED.replace("averaged", "local")
    for more, layout in ((AVERAGED, LAYOUT), (AVERAGED, first), (local, WITH_BUFFERS), (PERSONAL, LAYOUT)):
        document = spec("other", stage.task(), more=more)
        with refused("INVALID_ARGUMENT", "spec"):
            stage.submit(document, model=to_bytes(layout, np.ones(layout.size, np.float32)))


KINDS = {"state": torch.float32, "half": torch.float16, "bf16": torch.bfloat16, "parameters": torch.float32}


@pytest.mark.full
@pytest.mark.parametrize("treatment", ["averaged", "local", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_members_take_each_file_that_the_command_takes(scene: Scene, kind: str, treatment: str) -> None:
    torch.manual_seed(4)
    trained = task("normed_task:Normed").model()
    trained(torch.randn(32, 64))
    state = {
        name: value.to(KINDS[kind]) if value.is_floating_point() else value
        for name, value in trained.state_dict().items()
        if kind != "parameters" or name in dict(trained.named_parameters())
    }
    path = scene.fed.directory / f"{kind}.safetensors"
    save_file(state, path)
    if CLIENTS[0] not in scene.fed.workers:
        scene.work(CLIENTS[0])
    scene.fed.attending(*CLIENTS)
    document = text(treatment).replace("rounds = 3", "rounds = 1")
    run = scene.fed.completed(f"{kind}-{treatment}", document, "--code", str(OWNERS_CODE), "--model", str(path))
    ((first,),) = scene.fed.query("select initial_model from runs where run_id = :run", run=run)
    layout, values = read_vector(blob(scene.fed, first))
    assert ("norm.running_var" in layout.shapes) == (treatment == "averaged")
    for name, value in layout.split(values).items():
        expected = state[name].float() if name in state else np.full(value.shape, name.endswith("var"))
        np.testing.assert_array_equal(value, expected)
