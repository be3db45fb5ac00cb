"""A Flower app as a task: `FlowerTask`. Tested with flwr 1.42.

Flower and the app are imported where they train, which is another environment than the worker's: flwr needs older
packages. The worker starts `fedpareto worker trainer` there.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.spec.computation import SPLITS
from federation.tasks import DataSource, Splits, Task, TaskError, task_code
from federation.tensor_names import tensor_differences
from federation.training import TrainingStopped
from federation.training.contract import refused
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import LOGGER, Trainer
from federation.vectors import Vector
from federation.work.base import WorkError
from fedpareto.adapters.order import exchanged

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

TESTED = "1.42"
_NODE = 1  # of Flower, for the app's messages: they go nowhere
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class FlowerSplits(Splits):
    """The numbers of samples, and the source that the app reads them from."""

    source: DataSource


class FlowerTrainer(Trainer):
    """Trains and measures by a Flower app. Each call has a new message and a new context."""

    task: "FlowerTask"
    data: FlowerSplits

    def prepare(self) -> None:
        """Imports Flower, without telemetry, and the app.

        Raises:
            TaskError: the task is of another kind, Flower is not installed, or the app cannot be imported.
        """
        task = self.task
        if not isinstance(task, FlowerTask):
            raise TaskError(f"task {task.name!r}: {type(task).__name__} must inherit from FlowerTask")
        os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # Flower reads it when it is imported
        try:
            found = version("flwr")
        except PackageNotFoundError:
            raise TaskError(
                f"task {task.name!r}: flwr is not installed in this environment; let the worker start the one that has "
                'it: --set "trainer_command=ENVIRONMENT/bin/fedpareto worker trainer --code DIR"'
            ) from None
        if not found.startswith(f"{TESTED}."):
            LOGGER.warning(
                "task %s: flwr %s is installed; the adapter is tested with flwr %s", task.name, found, TESTED
            )
        self._flwr: Any = import_module("flwr.app")
        with task_code(task.name, f"importing its app {task.app}"):
            self._app = _imported(task.app)
        if not isinstance(self._app, import_module("flwr.clientapp").ClientApp):
            self._app = import_module("flwr.clientapp").ClientApp(client_fn=self._app)
        # A reply takes its numbers from a message, and a message from the process, which nothing else sets here.
        identity: Any = import_module("flwr.supercore.task_identity").TaskIdentity
        identity.run_id = identity.node_id = identity.task_id = _NODE
        self._tensors, self._names = _state(task, self.layout.shapes)

    @property
    def measured(self) -> frozenset[str]:
        """The split that the app's evaluate measures."""
        return frozenset({self.task.evaluates})

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """What the app's train returns."""
        plan.progress(0.0)
        config: dict[str, Any] = {name.replace("_", "-"): value for name, value in plan.sgd.model_dump().items()}
        config |= {"lr": plan.sgd.learning_rate, "local-epochs": plan.sgd.epochs, "seed": plan.seed}
        sent = self._sent(model)
        with _seeded(plan.seed):
            reply = self._answer("train", sent, config)
        plan.progress(1.0)
        records = list(reply.array_records.values())
        if len(records) != 1:
            raise refused("the app's train", f"answered with {len(records)} ArrayRecords; needed: one")
        return self._model_of({str(name): array.numpy() for name, array in records[0].items()}, sent)

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        """The numbers of the app's evaluate, under the names in `scores` of the task."""
        if plan.stopped():
            raise TrainingStopped
        with _seeded(0):
            reply = self._answer("evaluate", self._sent(model), {})
        records = (*reply.metric_records.values(), *reply.config_records.values())
        told = {str(name): value for record in records for name, value in record.items()}
        if (needed := self.task.scores.get("loss")) not in told:
            names = ", ".join(map(repr, sorted(told))) or "nothing"
            raise refused("the app's evaluate", f"needs {needed!r} as the loss; it tells {names}: see `scores`")
        return {name: told[key] for name, key in self.task.scores.items() if key in told}

    def _sent(self, model: Vector) -> Arrays:
        """The tensors that the app is given, in the order of the state dict; integers are rounded."""
        values = self.arrays(model)
        sent = {}
        for name, own in self._tensors.items():
            value = values.get(self._names[name], own)
            sent[name] = np.asarray(value if own.dtype.kind == "f" else np.rint(value), own.dtype)
        return sent

    def _model_of(self, got: Arrays, sent: Arrays) -> Vector:
        """The model (d,) among the tensors that the app returned: by their names, or in the order of `sent`.

        Raises WorkError: they are others, or they seem to be in another order.
        """
        expected = {name: array.shape for name, array in sent.items()}
        if not got.keys() & sent.keys():
            shapes = [array.shape for array in got.values()]
            if shapes != list(expected.values()):
                raise refused("the app's train", f"returned {_listed(shapes)}; the model has {_named(expected)}")
            got = dict(zip(sent, got.values(), strict=True))
            if pair := exchanged(sent, got):
                raise refused(
                    "the app's train",
                    f"returned tensors in another order: that of {pair[0]} looks like {pair[1]}. They have no names, "
                    "so they are taken in the order of the state dict",
                )
        if difference := tensor_differences({name: array.shape for name, array in got.items()}, expected, self.buffers):
            raise refused("the app's train", f"returned other tensors than the model: {difference}")
        known = self.layout.shapes.keys()
        kept = [name for name in sent if self._names[name] not in known]
        if moved := next((name for name in kept if not np.array_equal(got[name], sent[name])), None):
            raise refused("the app's train", f"changed {moved}, which the model of the task does not train")
        return self.vector({name: got[name] for name in known})

    def _answer(self, kind: str, sent: Arrays, config: Mapping[str, Any]) -> Any:
        """The content of the app's reply to a message of this kind. Raises WorkError: the reply is an error."""
        flwr, task = self._flwr, self.task
        if getattr(self._app, "_call", None) is None:
            arrays = flwr.ArrayRecord({name: flwr.Array(array) for name, array in sent.items()})
            content = flwr.RecordDict({"arrays": arrays, "config": flwr.ConfigRecord(dict(config))})
        else:
            content = _of_client(kind, list(sent.values()), dict(config))
        own = {name: config.get(name, value) for name, value in task.run_config.items()}
        context = flwr.Context(
            run_id=_NODE,
            node_id=_NODE,
            node_config=dict(task.node_config(self.data.source)),
            state=flwr.RecordDict(),
            run_config=own,
        )
        reply = self._app(flwr.Message(content, dst_node_id=_NODE, message_type=kind), context)
        if reply.has_error():
            raise WorkError(f"the app answered with an error: {reply.error.reason}", reason="trainer:error")
        return reply.content


class FlowerTask(Task):
    """A task that a Flower app trains and measures: a ClientApp, or a `client_fn` that makes a NumPyClient.

    A subclass sets `app`, and defines `samples`, and `model` or `initial`. Its module must not import flwr, which is
    not in the worker's environment.

    Attributes:
        app: the ClientApp or the function, as "module:name".
        evaluates: the split that the app's evaluate measures.
        scores: the names under which it tells its numbers, by those of the federation: "loss", if known "accuracy", and
            those of `metrics`.
        run_config: the app's own config. The keys that `[train]` of a run sets have the values of the run.
    """

    trainer = FlowerTrainer
    app: str = ""
    evaluates: str = "validation"
    scores: ClassVar[Mapping[str, str]] = {"loss": "eval_loss", "accuracy": "eval_acc"}
    run_config: ClassVar[Mapping[str, Any]] = {}

    def samples(self, source: DataSource) -> Mapping[str, int]:
        """The number of the member's samples in "train", and in the split that the app measures."""
        raise NotImplementedError(f"{type(self).__name__} does not define samples")

    def node_config(self, source: DataSource) -> Mapping[str, Any]:
        """The config of the member's node: its directory, and the part of the data in a simulation or rehearsal."""
        config: dict[str, Any] = {} if source.directory is None else {"data-path": str(source.directory)}
        if source.part is not None:
            config |= {"partition-id": source.part.index, "num-partitions": source.part.count}
        return config

    def load(self, source: DataSource) -> FlowerSplits:
        """The numbers of samples. Raises TaskError: they are no whole numbers by split, or `evaluates` is no split."""
        counts = dict(self.samples(source))
        whole = all(isinstance(count, int) and count >= 0 for count in counts.values())
        if not whole or not {self.evaluates, *counts} <= {*SPLITS}:
            raise TaskError(
                f"task {self.name!r}: samples() returned {counts}, and evaluates is {self.evaluates!r}; needed: whole "
                f"numbers by split ({', '.join(SPLITS)})"
            )
        train, validation, test = (range(counts.get(name, 0)) for name in SPLITS)
        return FlowerSplits(train, validation, test, source)

    def cautions(self, spec: "RunSpec") -> tuple[str, ...]:
        """What a Flower app cannot do in a run."""
        cannot = ["a Flower app cannot be stopped in a training: ten seconds later its process is ended"]
        if spec.train.measure:
            cannot.append(
                "a Flower app does not measure the training split: there are no training losses, and rules that read "
                "losses leave its updates out. Set train.measure = false"
            )
        if spec.privacy.sample_noise:
            cannot.append("a Flower app adds no noise to gradients: members with privacy.sample_noise decline")
        return tuple(cannot)


def _imported(app: str) -> Any:
    """The object of a name as "module:name"."""
    module, _, name = app.partition(":")
    if not module or not name:
        raise ValueError(f"app is {app!r}; needed: module:name")
    return getattr(import_module(module), name)


def _state(task: Task, shapes: Mapping[str, Sequence[int]]) -> tuple[Arrays, dict[str, str]]:
    """The tensors of an app's model, in its order, and for each name the one under which the layout has it."""
    if type(task).initial is not Task.initial:
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, {name: name for name in shapes}
    from federation.tasks import parameters as flat  # noqa: PLC0415 - an app needs no PyTorch

    module = flat.build(task)
    tied = flat.further_names(module)
    state = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    return state, {name: tied.get(name, name) for name in state}


def _of_client(kind: str, arrays: list[NDArray[Any]], config: dict[str, Any]) -> Any:
    """The content of a message for a NumPyClient."""
    common, compat = import_module("flwr.common"), import_module("flwr.compat.common.recorddict_compat")
    parameters = common.ndarrays_to_parameters(arrays)
    if kind == "train":
        return compat.fitins_to_recorddict(common.FitIns(parameters, config), keep_input=True)
    return compat.evaluateins_to_recorddict(common.EvaluateIns(parameters, config), keep_input=True)


def _seeded(seed: int) -> Any:
    if find_spec("torch") is None:
        return nullcontext()
    from fedpareto.adapters.seeded import seeded  # noqa: PLC0415 - an app needs no PyTorch

    return seeded(seed)


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return f"{len(shapes)} tensors without names, of the shapes {', '.join(str(list(shape)) for shape in shapes[:8])}"


def _named(shapes: Mapping[str, Sequence[int]]) -> str:
    first = ", ".join(f"{name} {list(shape)}" for name, shape in list(shapes.items())[:8])
    return f"{len(shapes)}: {first}"
