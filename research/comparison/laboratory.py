"""One run of the comparison, and its measures."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fedpareto
from comparison import tasks
from comparison.catalogue import AFTER, FIXED_RULE, MEMBERS, TASKS, ComparedTask
from comparison.specification import ComparisonSpecification
from federation.tasks import DataSource, Part, Splits, Task
from federation.tasks.parameters import build
from fedpareto.simulation.history import History, Record
from fedpareto.simulation.population import client_names

_EVERY = {"test": 5, "validation": 50}  # rounds between evaluations
_MEASURED = {"test": ("train", "test"), "validation": ("validation",)}  # a run that chooses reads no test split
_BATCH = 10
_DIVERGED = {"training-diverged", "non-finite"}  # why replies of a run that diverged are missing
_NAMES = client_names(MEMBERS)


def measure(spec: ComparisonSpecification, data: Path | None) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Makes a run and measures its honest members.

    Returns:
        For each of `AFTER` (15, 100), `N/mean` and `N/worst` over the honest members and `N/member/INDEX` of each:
        accuracies in percent, or losses where the task has no accuracy (then `worst` is the highest); of a task with a
        minority `N/minority`, the mean of its honest members. Besides `improved`, the mean share of the honest members
        whose training loss did not rise from one evaluation to the next (%), unless the split is validation; `sample`,
        the worth of one sample of the measured split in a member's accuracy (points); `cpu`, processor seconds a round.
        A measure that is missing or not finite was not reached. And `mean` and `worst` by round.

    Raises:
        ValueError: the task is held out, and the rule is not fixed yet.
        RuntimeError: the run ended early, and not since its training diverged.
    """
    compared = TASKS[spec.task]
    if compared.held_out and not FIXED_RULE:
        raise ValueError(f"{spec.task} is held out: fix the rule first (FIXED_RULE of comparison.catalogue)")
    kind: type[tasks.Dealt] = getattr(tasks, compared.kind)
    began = time.process_time()
    history = fedpareto.simulate(_document(spec, compared, kind), data=data, threads=1, progress=lambda progress: None)
    seconds = time.process_time() - began
    _check_ending(history)
    honest = [number for number in range(MEMBERS) if _NAMES[number] not in history.attackers]
    evaluated = _by_round(history.client_records, spec.split, loss=compared.loss)
    if spec.tuned:
        evaluated[spec.rounds] = _after_one_epoch(spec, kind(), history, data)
    final, rounds = dict[str, float](), list[dict[str, float]]()
    for number, values in sorted(evaluated.items()):
        mean, worst = _summary([values.get(member, math.nan) for member in honest], loss=compared.loss)
        rounds.append({"round": float(number), "mean": mean, "worst": worst})
        if number in AFTER:
            final |= {f"{number}/mean": mean, f"{number}/worst": worst}
            final |= {f"{number}/member/{member}": values.get(member, math.nan) for member in honest}
            unlike = [values.get(member, math.nan) for member in tasks.minority(kind, spec.seed) if member in honest]
            final |= {f"{number}/minority": sum(unlike) / len(unlike)} if unlike else {}
    if spec.split == "test":
        final["improved"] = _improved(_by_round(history.client_records, "train", loss=True), honest)
    if not compared.loss:
        sizes = [row["samples"] for row in history.client_records if row["split"] == spec.split]
        final |= {"sample": 100 / min(sizes)} if sizes else {}
    return final | {"cpu": seconds / spec.rounds, "skipped": float(_skipped(history))}, rounds


def _document(spec: ComparisonSpecification, compared: ComparedTask, kind: type[tasks.Dealt]) -> dict[str, Any]:
    """The run specification: all that is drawn follows the seed, and is alike for all rules."""
    attacked = {"attackers": spec.attackers, "attack": spec.attack} if spec.attackers else {}
    document: dict[str, Any] = {
        "name": spec.name,
        "task": compared.code,
        "rounds": spec.rounds,
        "seed": spec.seed,
        "algorithm": spec.algorithm,
        "server": {"learning_rate": spec.rate},
        "train": {"epochs": 1, "batch_size": _BATCH, "learning_rate": compared.learning_rate},
        "evaluate": {"every": _EVERY[spec.split], "splits": list(_MEASURED[spec.split])},
        "simulation": {"clients": MEMBERS, "partition_seed": spec.seed, **attacked},
    }
    if spec.personal:
        document["parameters"] = {"personal": [compared.last_layer]}
    if kind.objectives == tasks.ServedDigits.objectives:
        few, (left, right) = tasks.minority(kind, spec.seed), kind.objectives
        served = {name: [right if number in few else left] for number, name in enumerate(_NAMES)}
        document["objectives"] = {"serve": served}
    return document


def _by_round(records: Sequence[Record], split: str, *, loss: bool) -> dict[int, dict[int, float]]:
    """By number of rounds and member: its loss, or its accuracy in percent."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        value = record["loss"] if loss else record["accuracy"]
        if record["split"] == split and value is not None:
            own = found.setdefault(record["round"] + 1, {})
            own[_NAMES.index(record["client"])] = value if loss else 100 * value
    return found


def _summary(values: Sequence[float], *, loss: bool) -> tuple[float, float]:
    """Mean and worst; NaN if a member's value is missing or not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return sum(values) / len(values), max(values) if loss else min(values)


def _improved(losses: Mapping[int, Mapping[int, float]], honest: Sequence[int]) -> float:
    shares = [
        100.0 * sum(after.get(member, math.nan) <= before.get(member, math.nan) for member in honest) / len(honest)
        for (_, before), (_, after) in pairwise(sorted(losses.items()))
    ]
    return sum(shares) / len(shares) if shares else math.nan


def _check_ending(history: History) -> None:
    """A run that ended early counts as one that diverged only if its members say so. Raises RuntimeError."""
    reasons = {record["reason"] for record in history.reply_records if not record["accepted"]}
    if history.state != "COMPLETED" and not (reasons and reasons <= _DIVERGED):
        raise RuntimeError(f"{history.spec.name} ended {history.state}: {history.failure}")


def _skipped(history: History) -> int:
    return sum(record["state"] == "SKIPPED" for record in history.round_records)


def _after_one_epoch(
    spec: ComparisonSpecification, task: tasks.Dealt, history: History, data: Path | None
) -> dict[int, float]:
    """What each member has after one epoch of SGD more, with the run's batches and rate, on its own training split."""
    start = history.state_dict()
    values = {}
    for number in range(MEMBERS):
        own = task.load(DataSource(data, Part(number, MEMBERS, seed=spec.seed)))
        model = build(task, spec.seed)
        model.load_state_dict(start, strict=False)
        _train_one_epoch(task, model, own, TASKS[spec.task].learning_rate, seed=spec.seed * MEMBERS + number)
        values[number] = _tested(task, model, own, loss=TASKS[spec.task].loss)
    return values


def _train_one_epoch(task: Task, model: torch.nn.Module, own: Splits, rate: float, *, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    order = torch.randperm(len(own.train), generator=torch.Generator().manual_seed(seed))
    for batch in torch.split(order, _BATCH):
        optimizer.zero_grad()
        losses = task.losses(model(own.train.x[batch]), own.train.y[batch])
        torch.autograd.backward(torch.stack(list(losses.values())).mean())
        optimizer.step()


@torch.no_grad()
def _tested(task: Task, model: torch.nn.Module, own: Splits, *, loss: bool) -> float:
    output = model(own.test.x)
    if loss:
        return float(torch.stack(list(task.losses(output, own.test.y).values())).mean())
    return 100 * float((output.argmax(dim=1) == own.test.y).float().mean())
