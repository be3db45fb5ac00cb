"""Runs that do not share all parameters: personal ones stay with their member, frozen ones stay as they were."""

import json
import os
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from federation.monitoring.events import Events
from federation.spec.computation import Ability, Descend, Measure, MeasureAlong
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import Sharing, SharingError, Unshared
from federation.tasks import DataSource, initial_model, task
from federation.training.own import KeptState, Own, compute
from federation.training.torch_trainer import TorchTrainer
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.vectors import Layout, Tensor, Vector, read_vector, to_bytes
from federation.work.base import WorkError
from fedpareto.face.simulated import simulate
from fedpareto.processes.forked import completed
from fedpareto.simulation import SimulationError
from fedpareto.simulation.simulate import Simulation
from storage.blob_directory import DirectoryStore
from tests.coordinator.rounds.runs.scene import Scene, halted, kept_file, serving
from tests.coordinator.rounds.runs.small_task import GIVEN, SGD, Small, descend
from tests.trained import train
from worker.home import WorkerHome
from worker.work.local_state import LocalState, kept_state
from worker.work.spool import Spool

LAYOUT = Layout(
    (Tensor("body.weight", (2, 3)), Tensor("body.bias", (2,)), Tensor("head.weight", (1, 2)), Tensor("head.bias", (1,)))
)


def trainer(fixed: str = "") -> TorchTrainer:
    made = Small(fixed)
    return TorchTrainer(made, made.load(DataSource()))


def own(personal: tuple[str, ...] = (), frozen: tuple[str, ...] = ()) -> Own:
    layout, values = initial_model(Small(), 0)
    return Own(Sharing.of(layout, Unshared(tuple(personal), tuple(frozen))), values)


# ---- which parameters


def test_patterns_choose_what_is_personal_and_frozen_and_the_rest_is_shared() -> None:
    sharing = Sharing.of(LAYOUT, Unshared(("head.*",), ("*body.bias",)))
    model = np.arange(11, dtype=np.float32)
    assert [tensor.name for tensor in sharing.shared.tensors] == ["body.weight"]
    assert [tensor.name for tensor in sharing.personal.tensors] == ["head.weight", "head.bias"]
    assert sharing.frozen == (slice(6, 8),)
    assert sharing.shared_of(model).tolist() == [0, 1, 2, 3, 4, 5]
    assert sharing.personal_of(model).tolist() == [8, 9, 10]
    made = sharing.with_personal(sharing.with_shared(model, np.full(6, -1.0, np.float32)), np.zeros(3, np.float32))
    assert made.tolist() == [-1, -1, -1, -1, -1, -1, 6, 7, 0, 0, 0]
    assert model.tolist() == list(range(11))


@pytest.mark.parametrize(
    ("personal", "frozen", "says"),
    [
        (["tail.*"], [], "parameters.personal: 'tail.*' matches no parameter of the model; there are body.weight"),
        ([], ["head"], "parameters.frozen: 'head' matches no parameter"),
        (["head.*"], ["*.bias"], "parameters: 'head.bias' is both personal and frozen"),
        (["head.*"], ["body.*"], "parameters: no parameter of the model is shared"),
        (["he[a]d.*"], [], "parameters.personal: 'he[a]d.*' is no pattern"),
        (["*"] * 101, [], "parameters.personal: 101 patterns; at most 100"),
    ],
)
def test_patterns_that_do_not_suit_the_model_are_refused(personal: list[str], frozen: list[str], says: str) -> None:
    with pytest.raises(SharingError, check=lambda error: says in str(error)):
        Sharing.of(LAYOUT, Unshared(tuple(personal), tuple(frozen)))


def test_a_specification_names_the_pattern_that_is_malformed() -> None:
    with pytest.raises(SpecError, match=r"parameters\.personal\.0"):
        RunSpec.parse('name = "a"\ntask = "digits"\nrounds = 1\n[parameters]\npersonal = ["head weight"]\n')


# ---- training


def test_a_frozen_parameter_does_not_move_and_the_others_train_as_if_it_were_no_parameter() -> None:
    whole, fixed = trainer(), trainer("head")
    chosen = own(frozen=("head.*",))
    base = chosen.sharing.shared_of(chosen.values)
    result = compute(whole, base, descend(whole), chosen, **GIVEN)
    assert result.personal is None
    np.testing.assert_array_equal(result.rows["loss"], train(fixed, base, SGD).rows["loss"])
    assert np.abs(result.rows["loss"]).max() > 0


def test_personal_parameters_are_trained_with_the_shared_ones_and_are_not_in_the_row() -> None:
    whole, chosen = trainer(), own(personal=("head.*",))
    base = chosen.sharing.shared_of(chosen.values)
    result, expected = compute(whole, base, descend(whole), chosen, **GIVEN), train(whole, chosen.values, SGD)
    assert result.personal is not None
    assert result.losses == expected.losses
    np.testing.assert_array_equal(result.rows["loss"], chosen.sharing.shared_of(expected.rows["loss"]))
    trained = chosen.sharing.personal_of(chosen.values - expected.rows["loss"])
    np.testing.assert_array_equal(result.personal, trained)
    mine = Own(chosen.sharing, chosen.sharing.with_personal(chosen.values, result.personal))
    measured = compute(whole, base, Measure(splits=("test",)), mine, **GIVEN).metrics
    assert measured == whole.measure(mine.values, ("test",)) != whole.measure(chosen.values, ("test",))


def test_along_a_line_only_shared_parameters_move() -> None:
    whole, chosen = trainer(), own(personal=("head.*",))
    base = chosen.sharing.shared_of(chosen.values)
    along = MeasureAlong(direction=np.ones_like(base), steps=(0.5,), names=("half",))
    moved = chosen.sharing.with_shared(chosen.values, base - np.float32(0.5))
    expected = whole.measure(moved, ("train",))["train/loss"]
    assert compute(whole, base, along, chosen, **GIVEN).metrics == {"half": expected}


def test_work_of_several_rows_and_trainers_that_cannot_freeze_are_told_apart() -> None:
    work = Descend(sgd=SGD, targets={"a": {"loss": 1.0}, "b": {"loss": 2.0}})
    with pytest.raises(WorkError, match="for several rows", check=lambda error: error.reason == "parameters"):
        own(personal=("head.*",)).widened(work)

    class Plain(TorchTrainer):
        abilities = frozenset(Ability) - {Ability.FROZEN}

    made = Small()
    plain = Plain(made, made.load(DataSource()))
    chosen = own(frozen=("head.*",))
    with pytest.raises(WorkError, match=r"cannot leave some parameters as they are \(parameters.frozen\)") as caught:
        compute(plain, chosen.sharing.shared_of(chosen.values), descend(plain), chosen, **GIVEN)
    assert caught.value.reason == "ability:frozen"


# ---- where they are kept


def test_two_states_are_kept_and_a_round_that_is_repeated_begins_with_the_one_before_it(tmp_path: Path) -> None:
    layout = Layout((Tensor("a", (2,)),))

    def values(number: float) -> Vector:
        return np.array([number, number], dtype=np.float32)

    kept = KeptState(tmp_path / "run")
    assert kept.before(9, layout) is None
    for number in (0, 3, 4):
        kept.keep(number, to_bytes(layout, values(number)))
    assert kept.rounds() == [3, 4]
    for number, found in ((9, 4), (5, 4), (4, 3)):
        np.testing.assert_array_equal(kept.before(number, layout), values(found))
    assert kept.before(3, layout) is None
    assert kept.before(9, Layout((Tensor("b", (2,)),))) is None
    kept.keep(3, to_bytes(layout, values(30)))  # the coordinator was restored: round 4 is forgotten
    assert kept.rounds() == [3]
    kept.path(3).write_bytes(b"damaged")
    assert kept.before(9, layout) is None


def test_a_state_that_cannot_be_read_for_now_is_not_taken_for_none(tmp_path: Path) -> None:
    layout = Layout((Tensor("a", (2,)),))
    kept, aside = KeptState(tmp_path / "run"), tmp_path / "aside"
    kept.keep(0, to_bytes(layout, np.ones(2, dtype=np.float32)))
    for place in (kept.path(0), tmp_path / "run"):
        place.rename(aside)
        if place.suffix:
            place.mkdir()  # to read it is an error of the system
        else:
            place.write_bytes(b"")
        with pytest.raises((IsADirectoryError, NotADirectoryError)):
            kept.before(1, layout)
        place.rmdir() if place.suffix else place.unlink()
        aside.rename(place)
        np.testing.assert_array_equal(kept.before(1, layout), np.ones(2))


def test_parameters_wait_beside_their_reply_and_count_only_when_it_is_accepted(tmp_path: Path) -> None:
    layout = Layout((Tensor("a", (2,)),))
    content = to_bytes(layout, np.ones(2, dtype=np.float32))
    key, home, events = Ed25519PrivateKey.from_private_bytes(bytes(32)), WorkerHome(tmp_path), Events()
    order = sign(AssignmentManifest(run_id="r"), key)

    def added(spool: Spool, name: str, wanted: bool = True) -> None:
        reply = ReplyManifest(assignment_id=name, run_id="r", round=4)
        spool.add(reply, None, {}, order, lambda: wanted, state=content)

    spool = Spool(home, key, events)
    added(spool, "unwanted", wanted=False)
    added(spool, "refused")
    spool.remove("refused")
    assert (list(home.spool.iterdir()), spool.awaits_state("r")) == ([], False)
    added(spool, "accepted")
    (home.spool / "half-made.state").write_bytes(content)  # the process died before it wrote the envelope

    again = Spool(home, key, events)
    assert (len(list(home.spool.iterdir())), again.awaits_state("r"), again.awaits_state("s")) == (3, True, False)
    personal, kept = LocalState(home.kept, again, events), kept_state(home.kept, "r")
    assert kept.rounds() == []
    (entry,) = again.entries()
    personal.commit(entry)
    personal.commit(entry)  # the process died after the first time
    again.settle(entry)
    assert again.renew("accepted")
    assert (kept.rounds(), again.awaits_state("r")) == ([4], False)

    for days, rounds in ((179, [4]), (181, [])):
        used = time.time() - days * 86_400
        os.utime(kept.path(4), (used, used))
        LocalState(home.kept, again, events)
        assert kept.rounds() == rounds


# ---- simulations


SIMULATED = """
name = "personal"
task = "digits"
rounds = 4
[algorithm]
name = "fedavg"
[train]
learning_rate = 0.3
[simulation]
clients = 3
partition = "shards:2"
[parameters]
"""
HEAD = 'personal = ["out.*"]\n'


@pytest.mark.full
def test_a_simulation_with_personal_heads_is_better_on_skewed_data_and_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    text = (SIMULATED + HEAD).encode()
    whole = simulate(text, home=tmp_path / "whole", threads=1)
    sharing = Sharing.of(initial_model(task("digits"), 0)[0], Unshared(tuple(tomllib.loads(HEAD)["personal"])))
    assert whole.model.shape == (sharing.shared.size,)
    assert "(personalised models)" in repr(whole)
    everything = simulate(SIMULATED.encode(), threads=1)
    last = "accuracy/mean"
    assert whole.round_records[-1][last] > everything.round_records[-1][last] + 0.05
    home = tmp_path / "halted"
    halted(text, home)
    rest = simulate(text, home=home, resume=True, threads=1)
    assert rest.model.tobytes() == whole.model.tobytes()
    assert rest.clients.equals(whole.clients)
    for name in ("client-000", "client-001", "client-002"):
        one, other = (kept_file(place, name, 3) for place in (home, tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes()
        assert read_vector(one)[0] == sharing.personal


def test_personal_parameters_need_a_backend_that_trains_one_client_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stacked with personal or frozen parameters; use auto or loop"):
        Simulation((SIMULATED + HEAD).encode(), tmp_path / "a", backend="stacked")
    with pytest.raises((ValueError, SimulationError), match="'tail' matches no parameter"):
        Simulation((SIMULATED + 'frozen = ["tail"]\n').encode(), tmp_path / "b")
    with pytest.raises(SpecError, match="two-digits has 2 objectives; personal parameters are for tasks with one"):
        Simulation((SIMULATED.replace('"digits"', '"two-digits"') + HEAD).encode(), tmp_path / "c")


def test_a_private_round_sums_the_shared_parameters_and_members_train_their_heads(tmp_path: Path) -> None:
    text = SIMULATED + HEAD
    for old, new in (("s = 4", "s = 1"), ('"fedavg"', '"fedavg-n"\n[privacy]\nsecure = "sum"'), ("s = 3", "s = 5")):
        text = text.replace(old, new)
    found = simulate(text, home=tmp_path / "home", threads=1)
    assert (found.state, found.round_records[0]["state"]) == ("COMPLETED", "COMPLETED"), found
    assert found.model.shape == (64 * 64 + 64,)
    assert len(list((tmp_path / "home" / "kept").glob("*/0.safetensors"))) == 5


# ---- a federation


RUN = """
task = "digits"
rounds = 3
[algorithm]
name = "fedavg"
[selection]
minimum = 2
quorum = 1.0
[train]
learning_rate = 0.3
[parameters]
"""
PARTS = {
    "ann": ("--set", "part=1/2", "--set", "partition=shards:2"),
    "ben": ("--set", "part=2/2", "--set", "partition=shards:2"),
}


def refused(*arguments: str) -> str:
    """What a command that fails writes to standard error."""
    done = completed(["-m", "fedpareto", *arguments])
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two members with different digits."""
    with serving(tmp_path_factory.mktemp("personal"), PARTS) as made:
        for name in PARTS:
            made.work(name)
        made.fed.attending(*PARTS)
        yield made


@pytest.fixture(scope="module")
def whole(scene: Scene) -> str:
    """A run that nothing disturbed."""
    run = scene.fed.completed("whole", RUN + HEAD)
    return run


@pytest.mark.full
def test_workers_keep_and_export_their_heads_and_everybody_sees_whose_model_was_measured(
    scene: Scene, whole: str
) -> None:
    shown, content = scene.exported("ann", whole)
    told = json.loads(shown)
    assert (told["round"], told["tensors"]) == (2, ["out.weight", "out.bias"])
    assert content != scene.exported("ben", whole)[1]
    item = scene.fed.admin("round", whole, "-1")["run"]
    assert (item["parameters"], item["measured"]) == (64 * 64 + 64, "personalised")
    assert "the shared parameters with its personal ones" in " ".join(scene.admin("round", whole, "-1").split())
    model = scene.fed.directory / "shared.safetensors"
    scene.admin("export", whole, "--out", str(model))
    assert [tensor.name for tensor in read_vector(model)[0].tensors] == ["hidden.weight", "hidden.bias"]
    said = refused("worker", "export", "nothing", "--out", "x", "--home", str(scene.fed.directory / "ann"))
    assert "keeps no personal parameters of a run 'nothing'" in said


@pytest.mark.full
def test_a_worker_that_is_killed_between_training_and_its_receipt_keeps_the_same_heads(
    scene: Scene, whole: str
) -> None:
    scene.fed.workers["ann"].stop()
    dying = scene.work("ann", "spooled")
    scene.fed.attending(*PARTS)
    run = scene.fed.submit("killed", RUN + HEAD)
    for crash in ("before-receipt", "after-receipt", ""):
        dying.wait_killed()
        dying = scene.work("ann", crash)
    scene.fed.wait_completed(run)
    assert scene.exported("ann", run)[1] == scene.exported("ann", whole)[1]
    assert scene.exported("ben", run)[1] == scene.exported("ben", whole)[1]


@pytest.mark.full
def test_a_worker_that_has_lost_its_heads_begins_anew_and_says_so(scene: Scene, whole: str) -> None:
    scene.fed.workers["ann"].stop()
    dying = scene.work("ann", "reply-3")  # after the first round
    scene.fed.attending(*PARTS)
    run = scene.fed.submit("lost", RUN + HEAD)
    dying.wait_killed()
    kept = kept_state(scene.fed.directory / "ann" / "kept", run)
    assert kept.rounds() == [0]
    kept.path(0).unlink()
    again = scene.work("ann")
    scene.fed.wait_completed(run)
    again.wait_for_text("begin with the initial values, as none are kept here from an earlier round")
    assert scene.exported("ann", run)[1] != scene.exported("ann", whole)[1]


def test_members_take_a_file_with_tensors_in_another_order_and_begin_with_its_shared_ones(scene: Scene) -> None:
    path, document = (scene.fed.directory / name for name in ("half.safetensors", "given.toml"))
    layout, vector = initial_model(task("digits"), 8)
    save_file({name: values.astype(np.float16) for name, values in layout.split(vector).items()}, path)  # sorted
    spec = RUN.replace("rounds = 3", "rounds = 1") + HEAD
    document.write_text('name = "given"\n' + spec)
    submit = ("admin", "--home", str(scene.fed.home / "admin"), "submit", str(document), "--model", str(path))
    tried = completed(["-m", "fedpareto", *submit, "--dry-run"])
    assert "the run could begin now" in tried.stdout
    assert f"{path}: 2 tensors of float16 became float32, which has the same values" in tried.stderr
    assert f"{path}: 2 personal parameters left out" in tried.stderr
    run = scene.fed.completed("given", spec, "--model", str(path))
    first = DirectoryStore(scene.fed.home / "blobs").read(
        scene.fed.query("select initial_model from runs where run_id = :run", run=run)[0][0]
    )
    shared = Layout(layout.tensors[:2])
    assert first == to_bytes(shared, vector[: shared.size].astype(np.float16).astype(np.float32))
    document.write_text('name = "refused"\n' + RUN + 'frozen = ["tail.*"]\n')
    assert "parameters.frozen: 'tail.*' matches no parameter of the model" in refused(*submit[:-2])
