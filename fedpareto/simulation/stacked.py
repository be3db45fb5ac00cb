"""Local work of simulated clients, all at once: `torch.func.vmap` over their stacked parameters.

Every client draws the same batches as a real worker of its name, so the results differ by rounding only.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from federation.spec.computation import SPLITS, Ability, AtBase, Descend, Differentiate, Measure
from federation.spec.objective_names import Targets
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, Splits, Task
from federation.tasks import parameters as flat
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.batch_statistics import TRIED, is_evened, needs_two, normalizes
from federation.training.determinism import Kernels
from federation.training.generators import generators_kept
from federation.training.lending import Lending, version
from federation.training.objective_losses import Measured, OwnMetrics, correct
from federation.training.objective_losses import losses as losses_of
from federation.training.serving import reported_losses, served, split_metrics
from federation.training.sgd import Descent, in_groups
from federation.training.trainer import inability, training_seed
from federation.work.base import Result, WorkError
from federation.work.minibatch_sizes import Cut, Forming
from fedpareto.simulation.local import LocalWork, Outcome, Serves, Stopped, Turn, naming

_ROWS = 3  # samples that show whether an output has a row for each
_KEPT = 4  # copies of joined samples; with more, memory would grow with the number of clients squared


class Stacked(LocalWork):
    """All clients with equally many samples at once: `torch.func.vmap` over their stacked parameters."""

    def __init__(self, task: Task, splits: Mapping[str, Splits], device: str, serves: Serves | None = None) -> None:
        self._task = task
        self._serves = {name: served(task, (serves or {}).get(name)) for name in splits}
        self._device = torch.device(device)
        self._model = flat.build(task).to(self._device)
        self._layout = flat.layout(self._model)
        self._names = [name for name, _ in flat.trainable(self._model)]
        self._shapes = [parameter.shape for _, parameter in flat.trainable(self._model)]
        self._sizes = [tensor.size for tensor in self._layout.tensors]
        self._splits = {
            name: {split: self._place(getattr(own, split)) for split in SPLITS} for name, own in splits.items()
        }
        self._kept: dict[tuple[str, ...], Dataset] = {}
        self._two: bool | None = None  # see _needs_two
        self._lending = Lending(task)
        self._kernels = Kernels(self._device, task.name)

    def compute(self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn) -> dict[str, Outcome]:
        began = time.perf_counter()
        with naming(list(computations), turn.round):
            rows, measured = self._kernels.run(turn.seed, lambda: self._computed(base, computations, turn))
        seconds = (time.perf_counter() - began) / max(1, len(computations))
        return {
            name: self._outcome(name, work, rows[name], measured[name], seconds) for name, work in computations.items()
        }

    def repeatable(self, client: str) -> bool:
        return self._kernels.repeatable

    def _computed(
        self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn
    ) -> tuple[dict[str, Outcome], dict[str, dict[str, Measured]]]:
        """The rows of each client, and the scores of the base model by client and split."""
        groups: dict[object, list[str]] = defaultdict(list)
        for name, computation in computations.items():
            groups[len(self._splits[name]["train"]), self._alike(name, computation)].append(name)
        rows: dict[str, Outcome] = {}
        start = self._parameters(base)
        measured = self._measured(start, computations, turn.stopped)
        for members in groups.values():
            keys = [_seed(computations[name], turn, name) for name in members]
            works = [computations[name] for name in members]
            rows |= self._rows(start, works, members, keys, turn.stopped)
        return rows, measured

    def _alike(self, name: str, computation: AtBase) -> object:
        """Equal for clients whose computations can be stacked."""
        match computation:
            case Descend():
                return computation.sgd, computation.idle, tuple(computation.targets)
            case Differentiate():
                return replace(computation, secret_seed=None), self._serves[name]
            case Measure():
                return computation

    def _measured(
        self, start: list[Tensor], computations: Mapping[str, AtBase], stopped: Stopped
    ) -> dict[str, dict[str, Measured]]:
        """The scores of the base model on the splits that each client measures, by client and split."""
        scores: dict[str, dict[str, Measured]] = {name: {} for name in computations}
        own = {
            name: computation.metrics for name, computation in computations.items() if isinstance(computation, Measure)
        }
        for split in SPLITS:
            clients = [name for name, computation in computations.items() if split in _splits_of(computation)]
            for name, measured in self._measure(start, clients, split, stopped, own).items():
                scores[name][split] = measured
        return scores

    def _rows(
        self, start: list[Tensor], works: list[AtBase], members: list[str], keys: list[int], stopped: Stopped
    ) -> dict[str, Outcome]:
        """The rows of clients whose computations are alike."""
        try:
            match works[0]:
                case Descend(idle=True, targets=targets):
                    zeros = {row: np.zeros(self._layout.size, dtype=np.float32) for row in targets}
                    return {name: Result(zeros, {}, {}, 0) for name in members}
                case Descend(sgd=sgd):
                    # With given gradients, the first step is the step on the first minibatch.
                    targets_of = [work.targets for work in works if isinstance(work, Descend)]
                    return self._train_group(start, sgd, members, keys, targets_of, stopped)
                case Differentiate(batch_size=size):
                    return self._gradients(start, size, members, keys)
                case Measure():
                    return {name: Result({}, {}, {}, 0) for name in members}
        except WorkError as error:
            return dict.fromkeys(members, error)

    def _outcome(
        self, name: str, computation: AtBase, outcome: Outcome, measured: Mapping[str, Measured], seconds: float
    ) -> Outcome:
        """A client's rows and what it measured."""
        if Ability.REPEATABLE in computation.needs() and not self._kernels.repeatable:
            return inability(Ability.REPEATABLE)
        samples = len(self._splits[name]["train"])
        if isinstance(computation, Measure):
            metrics: dict[str, float] = {}
            for split in computation.splits:
                scores, size = measured[split].scores(), measured[split].samples
                metrics |= split_metrics(split, size, scores, undefined=computation.undefined)
            return Result({}, {}, metrics, samples, seconds)
        before = measured.get("train", Measured({}, {}, samples))
        idle = isinstance(computation, Descend) and computation.idle
        if not idle and not np.isfinite(list(before.losses.values())).all():
            return TrainingDiverged(0)
        if not isinstance(outcome, Result):
            return outcome
        scores = before.scores()
        losses, metrics = reported_losses(scores, self._serves[name]), split_metrics("train", before.samples, scores)
        return Result(outcome.rows, losses, metrics, samples, seconds)

    def _train_group(
        self,
        start: list[Tensor],
        work: LocalSgd,
        members: list[str],
        keys: list[int],
        targets: list[Targets],
        stopped: Stopped,
    ) -> dict[str, Outcome]:
        """SGD of clients whose splits are of one size, once for each row of their updates."""
        total = work.count(len(self._splits[members[0]]["train"]))
        rows: dict[str, dict[str, NDArray[np.float32]]] = {name: {} for name in members}
        diverged: dict[str, TrainingDiverged] = {}
        for row in targets[0]:
            values = [part.expand(len(members), *part.shape).clone() for part in start]
            weights = [client_targets[row] for client_targets in targets]
            losses = self._descend(weights, start, values, work, total, members, keys, stopped)
            updates = torch.cat([(a - b).reshape(len(members), -1) for a, b in zip(start, values, strict=True)], dim=1)
            finite = torch.cat([losses.isfinite(), updates.isfinite().all(dim=1)[None]]).cpu().numpy()
            for index, (name, update) in enumerate(zip(members, updates.cpu().numpy(), strict=True)):
                rows[name][row] = update
                if not finite[:, index].all():
                    diverged.setdefault(name, TrainingDiverged(min(total, int(np.argmin(finite[:, index])) + 1)))
        return {name: diverged.get(name) or Result(rows[name], {}, {}, 0) for name in members}

    def _gradients(
        self, start: list[Tensor], batch_size: int, members: list[str], keys: list[int]
    ) -> dict[str, Outcome]:
        """The gradient of each objective at `start`, of clients that serve the same ones."""
        rows: dict[str, dict[str, NDArray[np.float32]]] = {name: {} for name in members}
        x, y = next(self._batches(members, batch_size, keys, 1))
        drawn = version(x), version(y)
        self._model.train()
        for objective in self._serves[members[0]]:
            if (version(x), version(y)) != drawn:  # the task's code has written into them
                x, y = next(self._batches(members, batch_size, keys, 1))
            leaves = [part.expand(len(members), *part.shape).clone().requires_grad_() for part in start]
            with self._lent(members, batch_size, x, y) as (own_x, own_y):
                ones = torch.ones(len(members), 1, device=self._device)
                loss = vmap(self._loss((objective,)))(leaves, own_x, own_y, ones)
            parts = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
            gradients = torch.cat([part.reshape(len(members), -1) for part in parts], dim=1).cpu().numpy()
            for name, row in zip(members, gradients, strict=True):
                rows[name][objective] = row
        return {
            name: Result(own, {}, {}, 0) if all(np.isfinite(row).all() for row in own.values()) else TrainingDiverged(1)
            for name, own in rows.items()
        }

    def _loss(self, objectives: tuple[str, ...]) -> Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]:
        """The weighted sum of some objectives of one client."""

        def loss_of(parameters: list[Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            output = functional_call(self._model, dict(zip(self._names, parameters, strict=True)), (x,))
            losses = losses_of(self._task, output, y)
            if len(objectives) == 1:
                return weights[0] * losses[objectives[0]]
            return (weights * torch.stack([losses[name] for name in objectives])).sum()

        return loss_of

    def _descend(
        self,
        weights: list[Mapping[str, float]],
        start: list[Tensor],
        values: list[Tensor],
        work: LocalSgd,
        total: int,
        members: list[str],
        keys: list[int],
        stopped: Stopped,
    ) -> Tensor:
        """SGD as `Trainer` does it; `values` move in place. Returns the losses, (steps, clients)."""
        if len({tuple(each.items()) for each in weights}) == 1 and set(weights[0].values()) == {1.0}:
            used = tuple(weights[0])
        else:
            used = tuple(name for name in self._task.objectives if any(name in each for each in weights))
            used = used if len(used) > 1 else self._task.objectives
        shares = torch.tensor([[each.get(name, 0.0) for name in used] for each in weights], device=self._device)
        loss_of = self._loss(used)
        losses = []
        descent = Descent.fresh(work, values, [part[None] for part in start], total)
        batches = self._batches(members, work.batch_size, keys, total)
        self._model.train()
        for _ in range(total):
            if stopped():
                raise TrainingStopped
            x, y = next(batches)
            leaves = [part.requires_grad_() for part in values]
            with self._lent(members, work.batch_size, x, y) as (own_x, own_y):
                loss = vmap(loss_of)(leaves, own_x, own_y, shares)
            gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
            for part in values:
                part.detach_()
            descent.step(gradients)
            losses.append(loss.detach())
        return torch.stack(losses)

    def _batches(self, members: list[str], size: int, keys: list[int], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches side by side, (clients, batch, ...), each in the order that the client's worker would draw.

        Raises:
            WorkError: as of `is_evened`.
        """
        data = [self._splits[name]["train"] for name in members]
        count = len(data[0])
        even = self._evens(members[0], size, steps)
        if self._whole(members, size):
            whole = self._joined(members, "train")
            while True:
                yield _per_client(whole.x, len(members)), _per_client(whole.y, len(members))
        generators = [torch.Generator().manual_seed(key) for key in keys]
        groups = in_groups(Cut.of(count, size, even=even))
        while True:
            orders = [torch.randperm(count, generator=generator).to(self._device) for generator in generators]
            gathered = [torch.split(order, list(map(sum, groups))) for order in orders]
            for sizes, *indices in zip(groups, *gathered, strict=True):
                pairs = list(zip(data, indices, strict=True))
                x = torch.stack([part.x.index_select(0, index) for part, index in pairs])
                y = torch.stack([part.y.index_select(0, index) for part, index in pairs])
                yield from zip(torch.split(x, sizes, dim=1), torch.split(y, sizes, dim=1), strict=True)

    def _evens(self, name: str, size: int, steps: int) -> bool:
        """Whether a client and those with as many samples even their minibatches out, as their workers would."""
        forming = Forming(samples=len(self._splits[name]["train"]), batch_size=size, steps=steps)
        self._model.train()
        return is_evened(forming, layers=normalizes(self._model), needs_two=lambda: self._needs_two(name))

    def _needs_two(self, name: str) -> bool:
        """`needs_two` of the initial model, which is found once."""
        if self._two is None:
            data = self._splits[name]["train"]
            x, y = (part[torch.arange(TRIED) % len(part)] for part in (data.x, data.y))
            with generators_kept():
                self._two = needs_two(self._task, self._model, self._serves[name], x, y)
        return self._two

    def _whole(self, members: list[str], size: int) -> bool:
        """True if minibatches of this size are whole splits, of clients whose splits are of one size."""
        return size == 0 or size >= len(self._splits[members[0]]["train"])

    @contextmanager
    def _lent(self, members: list[str], size: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A minibatch for one pass: if it is the clients' own samples, as `Lending` lends them."""
        if not self._whole(members, size):
            yield x, y  # gathered for this pass
            return
        with self._lending.of("training", x, y) as loan:
            yield loan.give(x, y)

    def _joined(self, clients: list[str], split: str) -> Dataset:
        """The samples of several clients, one after the other; the last few are kept for the next round."""
        if len(clients) == 1:
            return self._splits[clients[0]][split]
        key = (split, *clients)
        if key not in self._kept:
            parts = [self._splits[name][split] for name in clients]
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = Dataset(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        return self._kept[key]

    def _measure(
        self,
        model: list[Tensor],
        clients: Sequence[str],
        split: str,
        stopped: Stopped,
        metrics: Mapping[str, Sequence[str]],
    ) -> dict[str, Measured]:
        """Losses, accuracy and samples of one split of each client: whole clients share a forward pass.

        `metrics` are the task's own metrics to measure, by client.
        """
        self._model.eval()
        named = dict(zip(self._names, model, strict=True))
        scores: dict[str, Measured] = {}
        with torch.no_grad():
            for group in self._passes(clients, split):
                if stopped():
                    raise TrainingStopped
                joined = self._joined(group, split)
                with self._lending.of("evaluation", joined.x) as loan:
                    output = functional_call(self._model, named, (loan.give(joined.x),))
                begin = 0
                for name in group:
                    part = self._splits[name][split]
                    rows = slice(begin, begin + len(part))
                    begin = rows.stop
                    own = tree_map(lambda whole, rows=rows: whole[rows], output)
                    with self._lending.of("losses", joined.x, part.y) as loan:
                        losses = losses_of(self._task, *loan.give(own, part.y))
                        own_output, own_y = loan.give(own, part.y)
                        hits = correct(self._task, own_output, own_y, self._serves[name])
                        others = OwnMetrics(self._task, metrics.get(name, ()))
                        others.update(*loan.give(own, part.y))
                    scores[name] = Measured(
                        {key: losses[key].item() for key in self._serves[name]},
                        {key: value.float().mean().item() for key, value in hits.items()},
                        len(part),
                        others.compute(),
                    )
        return scores | {name: Measured({}, {}, 0) for name in clients if name not in scores}

    def _passes(self, clients: Sequence[str], split: str) -> list[list[str]]:
        """Clients in groups whose samples together make up about one batch of evaluation."""
        groups: list[list[str]] = []
        room = 0
        for name in clients:
            count = len(self._splits[name][split])
            if count == 0:
                continue
            if count > room:
                groups.append([])
                room = max(count, self._task.evaluation_batch)
            groups[-1].append(name)
            room -= count
        return groups

    def _parameters(self, base: NDArray[np.float32]) -> list[Tensor]:
        vector = torch.from_numpy(np.array(base, dtype=np.float32)).to(self._device)
        return [part.view(shape) for part, shape in zip(torch.split(vector, self._sizes), self._shapes, strict=True)]

    def _place(self, data: Dataset) -> Dataset:
        return Dataset(data.x.detach().to(self._device), data.y.detach().to(self._device))


def _seed(computation: AtBase, turn: Turn, client: str) -> int:
    """The seed of a client's minibatches and dropout."""
    secret = None if isinstance(computation, Measure) else computation.secret_seed
    return training_seed(turn.seed, turn.round, client) if secret is None else secret


def _splits_of(computation: AtBase) -> tuple[str, ...]:
    """The splits that a computation measures."""
    if isinstance(computation, Measure):
        return computation.splits
    idle = isinstance(computation, Descend) and computation.idle
    return ("train",) if computation.measure or idle else ()


def _per_client(joined: Tensor, clients: int) -> Tensor:
    return joined.view(clients, -1, *joined.shape[1:])


def why_not_stacked(
    task: Task, splits: Mapping[str, Splits], device: str, sgd: LocalSgd, *, strict: bool = False
) -> str:
    """The reason why clients cannot be trained together, or, unless `strict`, should not; empty if they can."""
    if not all(isinstance(split, Dataset) for own in splits.values() for split in own):
        return "its data is not in memory"
    if sgd.clip_norm or sgd.micro_batch or sgd.precision != "float32":
        return "train.clip_norm, micro_batch and precision are for one client at a time"
    model = flat.build(task)
    if type(task).augment is not Task.augment:
        return "its minibatches are varied at random, differently for each client"
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout draws its own numbers for each client"
        if isinstance(module, nn.RNNBase):
            return "recurrent layers cannot be stacked"
        if not strict and isinstance(module, nn.modules.conv._ConvNd) and torch.device(device).type == "cpu":
            return "stacked convolutions are slower than a loop on a CPU"
    sizes = [len(own.train) for own in splits.values() if len(own.train)]
    if not strict and len(set(sizes)) > max(1, len(sizes) // 2):
        return "the clients hold different numbers of samples"
    first = next(own.train for own in splits.values() if len(own.train))
    try:
        if not _gives_rows(model, first.x[:_ROWS].clone()):
            return "the model's output in an evaluation has no row for each sample"
        if normalizes(model.eval()):
            return "its BatchNorm would mix the samples of clients that are evaluated together"
        model.train()
        _try_stacked(task, model, Dataset(first.x[:1], first.y[:1]))
    except Exception as error:  # of many kinds: the same code has passed its trial, for one client alone
        return f"the model cannot be stacked: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""


def _gives_rows(model: nn.Module, x: Tensor) -> bool:
    """True if the output of an evaluation can be cut into those of clients whose samples are evaluated together."""
    model.eval()
    with torch.no_grad():
        parts = tree_leaves(model(x))
    model.train()
    return all(isinstance(part, Tensor) and part.shape[:1] == x.shape[:1] for part in parts)


def _try_stacked(task: Task, model: nn.Module, data: Dataset) -> None:
    names = [name for name, _ in flat.trainable(model)]
    stacked = [parameter.detach()[None].clone().requires_grad_() for _, parameter in flat.trainable(model)]

    def loss_of(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return torch.stack(list(task.losses(output, y).values())).sum()

    x, y = data.x[None].clone(), data.y[None].clone()  # the task's code may write into them
    torch.autograd.grad(vmap(loss_of)(stacked, x, y).sum(), stacked, allow_unused=True)
