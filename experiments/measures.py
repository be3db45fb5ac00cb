"""What is measured in a simulation, over clients and in percent."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.rounds.metrics import accuracies
from experiments.results import Measures

if TYPE_CHECKING:
    from simulation.history import History

FEW = 10  # clients, so many of which are shown one by one

_SHARES = ("mean", "std", "worst", "best", "worst5", "best5", "p5", "p95")
_OF_ROUNDS = (
    "direction_norm",
    "stationarity",
    "stationarity/relative",
    "stationary",
    "conflicts",
    "conflict_depth",
    "descent_min",
    "descent_share",
    "entropy",
    "step/rate",
)
_SHARES_OF_ROUNDS = ("improved", "backdoor")
_OF_OBJECTIVES = r"loss/[a-z]+/.+|(weight|objective|preference)/.+"
_ACCURACY = "accuracy/objective/"
_MEGABYTE = 1e6
_FLOAT = 4  # bytes


def final(history: "History", *, exclude: Iterable[str] = ()) -> Measures:
    """What a finished run came to: the last model, not the best.

    Args:
        history: of the run.
        exclude: clients whose accuracies and losses do not count.

    Returns:
        `mean`, `std`, `variance`, `worst`, `best`, `worst5`, `best5`, `p5`, `p95` of the clients' test accuracies (%)
        and their `jain` index; `pooled`, the accuracy over all samples; `client/NAME` where clients are few;
        `loss/train` and `loss/test` where they were evaluated; of several objectives `accuracy/NAME` (%),
        `loss/SPLIT/NAME` and what else the last evaluated round tells of them; `improved`, the mean share of improved
        participants, attackers among them, over the evaluated rounds, `improved_late`, the same over the last tenth of
        these, `backdoor`, its success at the end
        (%); `uploaded`, what each participant sent (MB), `upload/d`, in how many floats a round for each parameter of
        the model; `agreement`, the mean over the rounds; `rate/first` and `rate/last`, the server's learning rate in
        the first and the last round that made a step; `rounds`, `skipped`, `stationary` rounds, `refusals` of
        updates, `seconds`.
    """
    excluded = frozenset(exclude)
    every = rounds(history, exclude=excluded)
    tested = _accuracies(history, excluded)
    clients = tested[max(tested)] if tested else {}
    records = history.round_records
    improved = [100 * record["improved"] for record in records if _known(record.get("improved"))]
    late = improved[-math.ceil(len(improved) / 10) :]
    last = {} if not every else {key: value for key, value in every[-1].items() if re.fullmatch(_AT_THE_END, key)}
    uploads, agreements = _uploads(history), _agreements(history)
    rates = [float(record["step/rate"]) for record in records if _known(record.get("step/rate"))]
    return {
        **last,
        **({f"client/{name}": 100 * value for name, (value, _) in clients.items()} if len(clients) <= FEW else {}),
        **({"improved": sum(improved) / len(improved), "improved_late": sum(late) / len(late)} if improved else {}),
        **({"uploaded": sum(uploads.values()) / _MEGABYTE} if uploads else {}),
        **({"upload/d": _mean(uploads.values()) / (_FLOAT * len(history.model))} if uploads else {}),
        **({"agreement": _mean(agreements.values())} if agreements else {}),
        **({"rate/first": rates[0], "rate/last": rates[-1]} if rates else {}),
        "rounds": float(len(records)),
        "skipped": float(sum(record["state"] == "SKIPPED" for record in records)),
        "stationary": float(sum(record.get("stationary") or 0.0 for record in records)),
        "refusals": float(sum(not record["accepted"] for record in history.update_records)),
        "seconds": float(sum(record["seconds"] or 0.0 for record in records)),
    }


def rounds(history: "History", *, exclude: Iterable[str] = ()) -> list[Measures]:
    """What is measured in every evaluated round; `round` counts the steps that were made, from 1.

    `steps` are the local steps that a client had made in each of the rounds so far, where the specification says how
    many; `uploaded` is what each participant had sent so far (MB): over the rounds, the sum of the bytes of all phases
    divided by the participants. `agreement` is the mean over the participants of the cosine of the update with the
    direction: clients that pull apart make it small, and so does the noise of minibatches, most of all in few steps.

    Args:
        history: of the run.
        exclude: clients whose accuracies and losses do not count.
    """
    excluded = frozenset(exclude)
    tested = _accuracies(history, excluded)
    losses = _losses(history, excluded)
    records = {record["round"]: record for record in history.round_records}
    uploads, agreements = _uploads(history), _agreements(history)
    found = []
    for number in sorted({record["round"] for record in history.client_records}):
        record, clients = records[number], tested.get(number, {})
        found.append(
            {
                "round": float(number + 1),
                **({"steps": float((number + 1) * history.spec.train.steps)} if history.spec.train.steps else {}),
                **({"uploaded": sum(uploads[t] for t in uploads if t <= number) / _MEGABYTE} if uploads else {}),
                **_percent([value for value, _ in clients.values()]),
                **({"pooled": 100 * _pooled(clients.values())} if clients else {}),
                **{f"loss/{split}": value for split, value in losses.get(number, {}).items()},
                **{name: 100 * record[name] for name in _SHARES_OF_ROUNDS if _known(record.get(name))},
                **{name: float(record[name]) for name in _OF_ROUNDS if _known(record.get(name))},
                **_of_objectives(record),
                **({"agreement": agreements[number]} if number in agreements else {}),
            }
        )
    return found


def all_skipped(final: Measures) -> bool:
    """Whether a finished run made no step at all."""
    return 0 < final.get("rounds", 0) == final.get("skipped")


_AT_THE_END = "|".join(
    [*_SHARES, "variance", "jain", "pooled", "backdoor", "loss/(train|validation|test)", "accuracy/.+", _OF_OBJECTIVES]
)


def _of_objectives(record: Mapping[str, Any]) -> Measures:
    """What a round tells of each of several objectives."""
    shares = {f"accuracy/{name.removeprefix(_ACCURACY)}": name for name in record if name.startswith(_ACCURACY)}
    return {
        **{name: 100 * record[key] for name, key in shares.items() if _known(record[key])},
        **{key: float(record[key]) for key in record if re.fullmatch(_OF_OBJECTIVES, key) and _known(record[key])},
    }


def _uploads(history: "History") -> dict[int, float]:
    """By round: the bytes of all phases, for each client that took part."""
    participants: dict[int, set[str]] = defaultdict(set)
    for update in history.update_records:
        participants[update["round"]].add(update["client"])
    return {
        record["round"]: record["bytes/up"] / len(participants[record["round"]])
        for record in history.round_records
        if participants[record["round"]] and _known(record.get("bytes/up"))
    }


def _agreements(history: "History") -> dict[int, float]:
    """By round: the mean cosine between a participant's update and the direction."""
    cosines: dict[int, list[float]] = defaultdict(list)
    for update in history.update_records:
        if _known(update.get("cosine")):
            cosines[update["round"]].append(update["cosine"])
    return {number: _mean(values) for number, values in cosines.items()}


def _percent(values: Sequence[float]) -> Measures:
    shares = {name.rpartition("/")[2]: value for name, value in accuracies(values).items()}
    scale = dict.fromkeys(_SHARES, 100.0) | {"variance": 10_000.0}
    return {name: scale.get(name, 1.0) * value for name, value in shares.items()}


def _accuracies(history: "History", exclude: Iterable[str]) -> dict[int, dict[str, tuple[float, int]]]:
    """By evaluated round and client: the accuracy on its test part, in [0, 1], and the samples of that."""
    found: dict[int, dict[str, tuple[float, int]]] = {}
    for record in history.client_records:
        if record["split"] == "test" and record["client"] not in exclude and _known(record["accuracy"]):
            found.setdefault(record["round"], {})[record["client"]] = record["accuracy"], record["samples"]
    return found


def _losses(history: "History", exclude: Iterable[str]) -> dict[int, dict[str, float]]:
    """By evaluated round and split: the mean loss of the clients."""
    values: dict[int, dict[str, list[float]]] = {}
    for record in history.client_records:
        if record["client"] not in exclude and record["loss"] is not None:
            values.setdefault(record["round"], {}).setdefault(record["split"], []).append(record["loss"])
    return {number: {split: _mean(items) for split, items in splits.items()} for number, splits in values.items()}


def _pooled(clients: Iterable[tuple[float, int]]) -> float:
    pairs = list(clients)
    samples = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / samples if samples else math.nan


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)
