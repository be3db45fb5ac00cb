"""Trainers of a member's own: what the contract checks, and a run in which each member trains in its own way."""

import math
import re
import shlex
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coordinator.rounds.runs.specification import needed_abilities, parse_run
from federation.plugins import PluginError
from federation.spec.computation import CANNOT, Ability, Descend, Differentiate, MeasureAlong, PrivateSgd
from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, Dataset, DataSource, Splits, Task, TaskError, initial_model, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.trainers import make_trainer, trainer_code, trainer_kind
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from federation.vectors import Array, Vector
from federation.work.base import WorkError
from fedpareto import simulate
from fedpareto.simulation import SimulationError
from tests.federation.training.scene import Halving
from tests.harness import Federation, federation, python
from tests.paths import EXAMPLES, ROOT
from tests.trained import jacobian, train

SGD = LocalSgd(epochs=2, batch_size=4, learning_rate=0.25)
BASE = np.array([1.0, 2.0, 3.0], dtype=np.float32)


class Numbers(Task):
    """Ten samples, three parameters, no PyTorch."""

    def initial(self, seed: int) -> dict[str, NDArray[np.float64]]:
        return {"a": np.full((1, 2), float(seed)), "b": np.zeros(())}

    def load(self, source: DataSource) -> Splits:
        ten, none = Dataset(np.arange(20.0).reshape(10, 2), np.arange(10)), Dataset(np.zeros((0, 2)), np.zeros(0))
        return Splits(ten, none, Dataset(np.ones((3, 2)), np.ones(3)))


def halving(kind: type[Trainer] = Halving, made: Task | None = None) -> Trainer:
    learned = made or Numbers()
    return kind(learned, learned.load(DataSource()))


def reason(trainer: Trainer, computation: Any) -> str:
    with pytest.raises(WorkError) as caught:
        trainer.compute(BASE, computation, seed=0, round=0, client_id="a")
    return caught.value.reason


# ---- the contract


def test_an_update_is_the_base_model_minus_what_the_trainer_returns_and_its_losses_are_those_of_the_base() -> None:
    shares: list[float] = []
    result = train(halving(), BASE, SGD, progress=shares.append)
    np.testing.assert_array_equal(result.rows["loss"], BASE / 2)
    assert (result.rows["loss"].dtype, result.samples, shares) == (np.dtype(np.float32), 10, [0.5])
    assert result.losses == {"loss": 6.0}
    assert result.metrics == {"train/samples": 10.0, "train/loss": 6.0, "train/accuracy": 0.5}


def test_every_trainer_measures_splits_and_models_along_a_line() -> None:
    trainer = halving()
    assert trainer.measure(BASE, ("validation", "test")) == {
        "validation/samples": 0.0,
        "test/samples": 3.0,
        "test/loss": 6.0,
        "test/accuracy": 0.5,
    }
    assert trainer.measure(BASE, ("test",), ("recall",)).keys() == {
        *("test/samples", "test/loss", "test/accuracy", "test/recall/1")
    }
    along = MeasureAlong(direction=BASE, steps=(1.0, 0.5), names=("one", "half"))
    assert trainer.compute(BASE, along, seed=0, round=0, client_id="a").metrics == {"one": 0.0, "half": 3.0}


def test_a_model_is_split_into_the_tensors_of_the_task_and_joined_again() -> None:
    trainer = halving()
    arrays = trainer.arrays(BASE)
    assert {name: array.shape for name, array in arrays.items()} == {"a": (1, 2), "b": ()}
    np.testing.assert_array_equal(trainer.vector(arrays), BASE)
    with pytest.raises(ValueError, match=r"not the tensors of the model: other shapes: a \[2\] instead of \[1, 2\]$"):
        trainer.vector({"a": np.zeros(2), "b": 0.0})


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (np.zeros(2), "trainer:result: train() of the trainer has the shape (2,); the model has 3 parameters"),
        (np.zeros((3, 1)), "trainer:result: train() of the trainer has the shape (3, 1); the model has 3 parameters"),
        (np.array([1.0, np.nan, 0.0]), "training diverged at step 6: try a smaller learning rate"),
        (np.array([1.0, 1e300, 0.0]), "training diverged at step 6: try a smaller learning rate"),
    ],
)
def test_a_trained_model_of_another_length_or_with_nan_is_not_sent(returned: Array, found: str) -> None:
    class Wrong(Halving):
        def train(self, model: Vector, plan: TrainingPlan) -> Array:
            return returned

    with pytest.raises((WorkError, TrainingDiverged)) as caught, np.errstate(over="ignore"):
        train(halving(Wrong), BASE, SGD)
    said = caught.value
    assert (f"{said.reason}: {said}" if isinstance(said, WorkError) else str(said)) == found


class Returning(Halving):
    """Returns what a test says: a model, as a function of the right one, or scores."""

    abilities = frozenset({"gradients"})
    model: Any = None
    scores: Any = None

    def train(self, model: Vector, plan: TrainingPlan) -> Any:
        return self.model(super().train(model, plan))

    def gradients(self, model: Vector, batch_size: int, seed: int) -> Any:
        return self.model(model)

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Any:
        return self.scores


def returning(**returned: Any) -> Trainer:
    return halving(type("Returning", (Returning,), returned))


def by_name(right: Vector) -> dict[str, Any]:
    return {"a": torch.tensor(right[:2], requires_grad=True)[None], "b": right[2]}


@pytest.mark.parametrize(
    "shaped",
    [
        list,
        lambda right: torch.tensor(right, requires_grad=True),
        lambda right: torch.tensor(right).bfloat16(),
        lambda right: right.astype(np.float64),
        by_name,
        lambda right: OrderedDict(reversed(by_name(right).items())),
        lambda right: list(by_name(right).values()),
    ],
)
def test_a_trained_model_that_leaves_no_doubt_is_taken(shaped: Callable[[Vector], Any]) -> None:
    trainer = returning(model=staticmethod(shaped), scores={"loss": 1.0})
    np.testing.assert_array_equal(train(trainer, BASE, SGD).rows["loss"], BASE / 2)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "returned None; return a vector like the model that it was given"),
        ("model", "returned a str that is no model: its values are str"),
        (([np.zeros(2)], 10, {}), "returned a tuple of 3 that is no model"),
        ([np.zeros((1, 2))], r"they are 1 arrays of the shapes \[1, 2\]; a model has a \[1, 2\], b \[\]"),
        ({"a": np.zeros((1, 2))}, "returned a dict with 'a' that is no model: .* missing parameters: b"),
        (torch.nn.Linear(2, 1), "returned a Linear that is no model: its values are object"),
        (np.ma.masked_less(BASE, 2.0), "returned a MaskedArray .* that is no model: some of its values are masked"),
        (BASE * 1j, "its values are complex"),
    ],
)
def test_anything_else_that_train_returns_is_refused_in_words_that_say_what_came(returned: Any, says: str) -> None:
    trainer = returning(model=lambda self, right: returned, scores={"loss": 1.0})
    with pytest.raises(WorkError, match=rf"^train\(\) of the trainer .*{says}") as caught:
        train(trainer, BASE, SGD)
    assert caught.value.reason == "trainer:result"


@pytest.mark.parametrize("returned", [None, BASE, {"left": BASE}, {"loss": None}])
def test_gradients_that_are_not_by_objective_are_refused_in_words(returned: Any) -> None:
    with pytest.raises(WorkError, match=r"^gradients\(\)"):
        jacobian(returning(model=lambda self, right: returned, scores={"loss": 1.0}), BASE, 0)


def test_a_score_of_none_is_absent_and_the_others_stay() -> None:
    scores = {"loss": torch.tensor([0.5], requires_grad=True), "accuracy": None, "auc": np.float32(0.25), "other": "x"}
    found = returning(scores=scores).measure(BASE, ("train",), ("auc",))
    assert found == {"train/samples": 10.0, "train/loss": 0.5, "train/auc": 0.25}


@pytest.mark.parametrize("writes", [lambda model: model.__iadd__(1.0), lambda model: model.fill(0.0)])
def test_a_trainer_that_writes_into_the_model_that_it_is_given_is_told_so(writes: Callable[[Any], Any]) -> None:
    class Writes(Halving):
        def train(self, model: Vector, plan: TrainingPlan) -> Any:
            return writes(model)

    with pytest.raises(WorkError, match=r"^train\(\) of the trainer must not change the model that it is given"):
        train(halving(Writes), BASE.copy(), SGD)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_pytorch_writes_into_the_model_does_not_get_into_that_of_the_run() -> None:
    class Writes(Halving):
        def train(self, model: Vector, plan: TrainingPlan) -> Any:
            return torch.from_numpy(model).div_(2)

    base = BASE.copy()
    np.testing.assert_array_equal(train(halving(Writes), base, SGD).rows["loss"], BASE / 2)
    np.testing.assert_array_equal(base, BASE)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({"accuracy": 1.0}, "has no 'loss'"),
        ({"loss": 1.0, "auc/two words": 1.0}, "has a metric 'auc/two words'"),
        (None, r'returned None; numbers by name are needed, such as {"loss": 0.4, "accuracy": 0.8}'),
        ((0.4, 24, {"accuracy": 0.8}), "returned a tuple of 3; numbers by name"),
        (0.4, "returned a float; numbers by name"),
        ({"loss": 1.0, "auc": "0.5"}, "has the score 'auc', which is a str: a number or None is needed"),
        ({"loss": True}, "has the score 'loss', which is a bool"),
        ({"loss": 1.0, "auc": [0.5]}, "has the score 'auc', which is a list of a float"),
        ({"loss": torch.zeros(2)}, r"has the score 'loss', which is a Tensor \(2,\) of float32"),
        ({"loss": 1.0, 7: 1.0}, "has a score with the name '7', which is an int"),
    ],
)
def test_an_evaluation_without_a_loss_or_with_a_name_that_no_reply_can_hold_is_not_sent(scores: Any, says: str) -> None:
    says = rf"^evaluate\(\) of the trainer {says}"
    with pytest.raises(WorkError, match=says, check=lambda error: error.reason == "trainer:result"):
        returning(scores=scores).measure(BASE, ("train",), ("auc",))


def test_of_several_objectives_a_trainer_gives_the_loss_of_each_and_their_mean_follows() -> None:
    class Both(Halving):
        abilities = frozenset({"weights"})

        def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
            return {"loss/left": 1.0, "loss/right": 2.0}

    class Pair(Numbers):
        objectives = ("left", "right")

    assert train(halving(Both, Pair()), BASE, SGD).losses == {"left": 1.0, "right": 2.0, "loss": 1.5}
    with pytest.raises(WorkError, match="has no 'loss/left'"):
        halving(Halving, Pair()).measure(BASE, ("train",))


def test_work_that_a_trainer_cannot_do_is_not_begun_and_the_reason_names_the_ability() -> None:
    one, heavy = {"loss": {"loss": 1.0}}, {"loss": {"loss": 2.0}}
    noise = PrivateSgd(noise=1.0, clip=1.0)
    proximal = LocalSgd(steps=1, batch_size=0, learning_rate=1.0, proximal_mu=0.1)
    assert reason(halving(), Descend(sgd=SGD, targets=heavy)) == "ability:weights"
    assert reason(halving(), Descend(sgd=SGD, targets=one, private=noise)) == "ability:noise"
    assert reason(halving(), Descend(sgd=SGD, targets=one, from_jacobian=True)) == "ability:gradients"
    assert reason(halving(), Descend(sgd=proximal, targets=one)) == "ability:proximal"
    assert reason(halving(), Descend(sgd=SGD, targets=one, frozen=(slice(1),))) == "ability:frozen"
    for more in (
        {"optimizer": "adam"}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"clip_norm": 1.0}, {"step_warm_up": 1},
        {"step_schedule": "cosine"},
    ):  # fmt: skip
        sgd = LocalSgd(steps=3, batch_size=0, learning_rate=1.0, **more)
        assert reason(halving(), Descend(sgd=sgd, targets=one)) == "ability:optimizers"
    assert reason(halving(), Differentiate(batch_size=0)) == "ability:gradients"

    class Gradients(Halving):
        abilities = frozenset({"gradients"})

        def gradients(self, model: Vector, batch_size: int, seed: int) -> Mapping[str, Array]:
            return {"loss": model}

    found = jacobian(halving(Gradients), BASE, 0)
    np.testing.assert_array_equal(found.rows["loss"], BASE)
    assert reason(halving(Gradients), Differentiate(batch_size=0, again=True)) == "ability:repeatable"


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        ('name = "fedavg"', {"weights"}),
        ('name = "fsmgda"', set()),
        ('name = "fsmgda"\nexact_stationarity = true', {"gradients"}),
        ('name = "fedcmoo"', {"weights", "gradients"}),
        ('name = "fedcmoo"\nsketch = "svd-two-way"', {"weights", "gradients", "repeatable"}),
    ],
)
def test_a_run_of_several_objectives_needs_what_its_algorithm_asks_for(algorithm: str, needs: set[str]) -> None:
    spec, rule = parse_run(f'name = "x"\ntask = "digits"\nrounds = 1\n[algorithm]\n{algorithm}\n')
    assert needed_abilities(spec, rule, ("left", "right")) == needs
    assert not needed_abilities(*parse_run('name = "x"\ntask = "digits"\nrounds = 1\n'), ("loss",))


def test_a_trainer_cannot_claim_an_ability_that_does_not_exist() -> None:
    class Boasting(Halving):
        abilities = frozenset({"telepathy"})

    with pytest.raises(TaskError, match="the ability 'telepathy': there are weights, gradients, optimizers, proximal"):
        halving(Boasting)


def test_a_training_ends_at_the_next_progress_when_its_result_is_no_longer_wanted() -> None:
    with pytest.raises(TrainingStopped):
        train(halving(), BASE, SGD, stopped=lambda: True)


def test_initial_losses_that_are_not_finite_are_found_before_the_worker_attends() -> None:
    class Bad(Halving):
        def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
            return {"loss": math.nan if plan.split == "test" else 1.0}

    with pytest.raises(DataError, match="the initial model has no finite loss on the test split"):
        halving(Bad).try_out()


@pytest.mark.parametrize(
    ("sgd", "sizes"),
    [
        (LocalSgd(epochs=2, batch_size=4, learning_rate=1.0), [4, 4, 2, 4, 4, 2]),
        (LocalSgd(steps=4, batch_size=4, learning_rate=1.0), [4, 4, 2, 4]),
        (LocalSgd(steps=3, batch_size=0, learning_rate=1.0), [10, 10, 10]),
        (LocalSgd(epochs=1, batch_size=64, learning_rate=1.0), [10]),
    ],
)
def test_the_minibatches_of_a_plan_follow_from_its_seed_and_pass_over_all_samples(
    sgd: LocalSgd, sizes: list[int]
) -> None:
    def drawn(seed: int) -> list[NDArray[np.int64]]:
        told: list[float] = []
        plan = TrainingPlan(sgd=sgd, weights={}, seed=seed, samples=10, tell=told.append)
        found = list(plan.minibatches())
        assert told == [step / len(sizes) for step in range(len(sizes) + 1)]
        return found

    batches = drawn(1)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(np.concatenate(batches)[:10].tolist()) == list(range(10))
    assert all(map(np.array_equal, batches, drawn(1)))
    assert not all(map(np.array_equal, batches, drawn(2)))


# ---- named by the task, by a package or on the command line


def test_a_task_is_trained_by_its_own_trainer_unless_the_owner_names_another_one() -> None:
    class Own(Numbers):
        trainer = Halving

    assert (trainer_kind(Own()), trainer_kind(task("digits"))) == (Halving, TorchTrainer)
    assert trainer_kind(Own(), "torch") is TorchTrainer
    assert trainer_kind(task("digits"), "tests.federation.training.test_trainers:Halving").__name__ == "Halving"
    with pytest.raises(PluginError, match="no trainer 'torchy'; there are torch"):
        trainer_kind(Own(), "torchy")
    with pytest.raises(PluginError, match=r"federation\.tasks:Task is not a subclass of fedpareto\.Trainer"):
        trainer_kind(Own(), "federation.tasks:Task")


def test_an_error_of_a_trainers_own_code_is_shown_with_its_line() -> None:
    class Broken(Halving):
        def prepare(self) -> None:
            raise KeyError("here")

    with (
        pytest.raises(PluginError, match=rf"preparing it failed: KeyError: 'here'\n  {re.escape(__file__)}, line \d+"),
        trainer_code(Broken, "preparing it"),
    ):
        halving(Broken)


def test_a_trainer_that_cannot_be_made_is_refused_by_the_name_of_its_init() -> None:
    class Forgot(Halving):
        def __init__(self, *given: Any) -> None:
            self.epochs = 1

    class Fewer(Halving):
        def __init__(self, task: Task) -> None:
            raise AssertionError

    class Lacking(Trainer):
        train = Halving.train

    learned = Numbers()
    for kind, says in (
        (Forgot, r"trainer Forgot: its __init__ does not call super\(\).__init__\(task, data, device, threads, obj"),
        (Fewer, r"Fewer': .*__init__\(\) takes 2 positional arguments .*it is given a task, its data, a device"),
        (Lacking, "Lacking': Can't instantiate abstract class Lacking .* '?evaluate'?$"),
    ):
        with pytest.raises((PluginError, TaskError), match=says):
            make_trainer(kind, learned, learned.load(DataSource()), "cpu", None, None)


def test_an_initial_model_without_pytorch_is_checked_and_is_float32() -> None:
    layout, vector = initial_model(Numbers(), 7)
    assert [tensor.shape for tensor in layout.tensors] == [(1, 2), ()]
    assert (vector.dtype, vector.tolist()) == (np.dtype(np.float32), [7.0, 7.0, 0.0])

    class Endless(Numbers):
        def initial(self, seed: int) -> dict[str, NDArray[np.float64]]:
            return {"a": np.array([np.inf])}

    with pytest.raises(TaskError, match="the initial values of a are not finite"):
        initial_model(Endless(), 0)


@pytest.mark.full
def test_a_worker_without_pytorch_trains_a_task_of_scikit_learn_and_an_administrator_submits_its_model() -> None:
    code = """
        import sys
        class Nowhere:
            def find_spec(self, name, *_):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Nowhere())
        from federation.tasks import DataSource, Part
        from tests.trained import train
        from federation.tasks import initial_model
        from federation.spec.train_section import LocalSgd
        from federation.spec.run_spec import RunSpec
        from worker.service import prepare_offers
        from fedpareto import task
        from fedpareto.cli.admin.upload import initial_model as sent_model
        source = DataSource(part=Part(0, 3))
        offers, device = prepare_offers(["scikit:Tumours"], source, device="auto", threads=None)
        base = initial_model(task("scikit:Tumours"), 0)[1]
        work = LocalSgd(epochs=3, batch_size=16, learning_rate=0.003)
        one, again = (train(offers["scikit:Tumours"], base, work).rows["loss"] for _ in range(2))
        assert one.tobytes() == again.tobytes()
        submitted = sent_model(RunSpec.parse(b'name = "r"\ntask = "scikit:Tumours"\nrounds = 1'), None)
        print(offers["scikit:Tumours"].measure(base - one, ("test",))["test/accuracy"], submitted.digest)
    """
    done = python("-c", textwrap.dedent(code), PYTHONPATH=f"{EXAMPLES}:{ROOT}")
    accuracy, submitted = done.stdout.split()
    assert float(accuracy) > 0.8
    assert submitted.startswith("blake3:"), "what `admin submit` sends"


# ---- in a simulation

SIMULATED = 'name = "simulated"\ntask = "scikit:Tumours"\nrounds = 2\n[simulation]\nclients = 3\n'


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])


@pytest.mark.full
@pytest.mark.usefixtures("examples")
def test_simulated_clients_are_trained_by_the_tasks_trainer_or_by_the_one_that_is_named(tmp_path: Path) -> None:
    models: dict[str, bytes] = {}
    for name in ("", "scikit:Newton", ""):
        history = simulate(SIMULATED, home=tmp_path / f"{len(models)}-{name}", trainer=name, progress=lambda _: None)
        found = history.model.tobytes()
        assert models.setdefault(name, found) == found  # the same model for the same trainer
    assert models[""] != models["scikit:Newton"]


@pytest.mark.usefixtures("examples")
def test_a_simulation_that_its_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"PartialFit cannot add a proximal term \(train\.proximal_mu\)"):
        simulate(f"{SIMULATED}[train]\nproximal_mu = 0.1\n", home=tmp_path / "one")
    with pytest.raises(ValueError, match="cannot be trained by the backend stacked: its trainer is PartialFit"):
        simulate(SIMULATED, home=tmp_path / "two", backend="stacked")


# ---- in a federation


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Members with the task's trainer, with Newton's method, with one in plain Python, and with one that varies."""
    directory = tmp_path_factory.mktemp("trainers")
    code = directory / "code"
    code.mkdir()
    (code / "varying.py").write_text(
        "import os\nfrom scikit import PartialFit\n\n\nclass Varying(PartialFit):\n    abilities = frozenset()\n\n"
        "    def train(self, model, plan):\n        return super().train(model, plan) + 1e-6 * os.urandom(1)[0]\n"
    )
    with federation(directory) as made:
        made.serve()
        for at, (name, trainer) in enumerate({"ann": "", "ben": "scikit:Newton", "eve": "varying:Varying"}.items()):
            made.join(name)
            own = ["--set", f"trainer.scikit:Tumours={trainer}"] if trainer else []
            paths = ["--code", str(EXAMPLES), "--code", str(code)]
            made.work(name, "--task", "scikit:Tumours", "--set", f"part={at + 1}/4", *paths, *own)
        made.join("dan")
        from sklearn.datasets import load_breast_cancer  # takes two seconds, and not in each process of the tests

        x, y = load_breast_cancer(return_X_y=True)
        header = ",".join(map(str, range(31)))
        np.savetxt(directory / "tumours.csv", np.c_[x, y][::4], delimiter=",", header=header, comments="")
        command = shlex.join([sys.executable, "-S", str(EXAMPLES / "plain_trainer.py")])
        run = ["-m", "fedpareto", "worker", "run", "--home", str(directory / "dan"), "--task", "scikit:Tumours"]
        data = ["--data", str(directory), "--set", f"trainer_command={command}"]
        made.spawn("dan", [*run, "--code", str(EXAMPLES), *data])
        made.attending("ann", "ben", "dan", "eve")
        yield made


@pytest.mark.full
def test_members_train_one_model_with_trainers_of_their_own_and_replies_that_cannot_be_repeated_are_marked(
    running: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPARETO_CODE", str(EXAMPLES))
    text = 'task = "scikit:Tumours"\nrounds = 3\n[train]\nepochs = 3\nbatch_size = 16\nlearning_rate = 0.003\n'
    run = running.completed("tumours", f'{text}[algorithm]\nname = "fedavg"\n[selection]\nminimum = 4\nquorum = 1.0\n')
    replies = running.query("select client_id, unrepeatable, envelope from replies where payload != ''")
    manifests = [ReplyManifest.FromString(SignedEnvelope.FromString(row[2]).manifest) for row in replies]
    assert len(replies) == 12
    assert {(row[0], bool(row[1])) for row in replies} == {
        *(("ann", False), ("ben", False), ("dan", False), ("eve", True))
    }
    assert all(one.unrepeatable == (one.client_id == "eve") for one in manifests)
    item = running.admin("rounds", run)["rounds"][-1]
    assert item["metrics"]["accuracy/mean"] > 0.85, item
    shown = running.fedpareto("admin", "--home", str(running.home / "admin"), "round", run, "2")
    assert "The trainer of eve cannot repeat its work with the same result." in shown


@pytest.mark.full
def test_operators_see_what_the_trainer_of_each_member_can_do(running: Federation) -> None:
    shown = {
        client["client_id"]: offered.get("abilities", [])
        for client in running.admin("clients")["clients"]
        for offered in client["tasks"]
        if offered["task"] == "scikit:Tumours"
    }
    assert shown == {"ann": ["repeatable"], "ben": ["repeatable"], "dan": ["repeatable"], "eve": []}
    shown_of_eve = running.fedpareto("admin", "--home", str(running.home / "admin"), "client", "eve")
    lines = [line.split(maxsplit=1) for line in shown_of_eve.splitlines()]
    assert ["cannot", ", ".join(Ability)[:60]] in [[line[0], line[-1][:60]] for line in lines if line]


@pytest.mark.full
def test_a_run_that_needs_more_than_the_trainers_can_do_is_declined_and_submit_warns_of_it(
    running: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPARETO_CODE", str(EXAMPLES))
    path = running.directory / "more.toml"
    path.write_text(
        'name = "more"\ntask = "scikit:Tumours"\nrounds = 1\nalgorithm.name = "fedavg-n"\n'
        'train.momentum = 0.5\nparameters.frozen = ["intercept"]\nprivacy.sample_noise = 1.0\n'
    )
    dry = running.admin("submit", str(path), "--dry-run", code=None)
    inability = ", and ".join(CANNOT[ability] for ability in (Ability.FROZEN, Ability.NOISE, Ability.OPTIMIZERS))
    (said,) = (other["message"] for other in dry["others"] if other["client_id"] == "ann")
    assert said == f"the trainer of this worker {inability}"
    assert "0 of the 4 members that could be asked would take part" in dry["obstacle"]
    path = running.directory / "proximal.toml"
    path.write_text('name = "proximal"\ntask = "scikit:Tumours"\nrounds = 1\n[train]\nproximal_mu = 0.1\n')
    warnings = running.admin("submit", str(path))["warnings"]
    assert warnings == [
        "ann, ben, dan, eve (4 of 4 members) will decline work of this run: the trainer of this worker cannot add a "
        "proximal term (train.proximal_mu) [ability:proximal]",
        "each round would be skipped: 0 of the 4 members that could be asked would take part, and a round needs 3 "
        "replies",
    ]
    (run,) = running.query("select run_id from runs where name = 'proximal'")[0]
    assert running.wait_ended(run) == "FAILED", "no step was made"
    declined = running.query("select client_id, state, reason, message from assignments where reason != ''")
    why = "the trainer of this worker cannot add a proximal term (train.proximal_mu)"
    names = ("ann", "ben", "dan", "eve")
    assert set(map(tuple, declined)) == {(name, "DECLINED", "ability:proximal", why) for name in names}
