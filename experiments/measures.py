"""Measures of a simulation: accuracies in percent over clients, losses, bytes, and measures of its rounds."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.aggregation.measures.metrics import accuracies
from experiments.results import Measures

if TYPE_CHECKING:
    from simulation.history import History

FEW = 10  # up to this number, clients are shown one by one

_SHARES = ("mean", "std", "worst", "best", "worst5", "best5", "p5", "p95")
_OF_ROUNDS = (
    *("direction_norm", "stationarity", "stationarity/relative", "stationary", "conflicts", "conflict_depth"),
    *("descent_min", "descent_share", "entropy", "step/rate"),
)
_SHARES_OF_ROUNDS = ("improved", "backdoor")
_OF_OBJECTIVES = r"loss/[a-z]+/.+|(weight|objective|preference)/.+"
_OF_THE_LAST_ROUND = "|".join(
    [*_SHARES, "variance", "jain", "pooled", "backdoor", "loss/(train|validation|test)", "accuracy/.+", _OF_OBJECTIVES]
)
_OF_MEMBERS = "|".join(
    [
        *(*_SHARES[1:], "variance", "jain", "pooled", "client/.+", "improved", "improved_late", "agreement"),
        *("stationarity(/relative)?", "conflicts", "conflict_depth", "descent_min", "descent_share"),
    ]
)
_ACCURACY = "accuracy/objective/"
_MEGABYTE = 1e6
_FLOAT = 4  # bytes


def final(history: "History", *, exclude: Collection[str] = ()) -> Measures:
    """The measures of a finished run, with its last model, and without the accuracies and losses of excluded clients.

    Returns:
        `mean`, `std`, `variance`, `worst`, `best`, `worst5`, `best5`, `p5`, `p95` of the clients' test accuracies (%)
        and their `jain` index; `pooled`, the accuracy over all samples; `client/NAME` if there are at most `FEW`
        clients; `loss/train` and `loss/test` if they were evaluated; of several objectives `accuracy/NAME` (%),
        `loss/SPLIT/NAME` and the other measures of objectives in the last evaluated round; `improved`, the mean share
        of improved participants, attackers included, over the evaluated rounds, and `improved_late`, the same over the
        last tenth of these; `backdoor`, the success of a backdoor at the end (%); `uploaded`, the bytes that each
        participant sent (MB); `upload/d`, the same as floats per round and parameter of the model; `agreement`, the
        mean over the rounds; `rate/first` and `rate/last`, the server's learning rate in the first and the last step;
        `moved`, the share of private steps whose coefficients were moved towards plain averaging (%), and
        `rule_share`, the mean of s (%);
        `rounds`, `skipped`, `stationary` rounds, and `undisclosed`, those in which privacy hides numbers, if any;
        `refusals` of updates; `seconds`. Of private evaluations only means are known.
    """
    evaluated = rounds(history, exclude=exclude)
    tested = _accuracies(history, exclude)
    clients = tested[max(tested)] if tested else {}
    records = history.round_records
    improved = [100 * record["improved"] for record in records if _known(record.get("improved"))]
    rates = [float(record["step/rate"]) for record in records if _known(record.get("step/rate"))]
    shares = [record["private/rule_share"] for record in records if _known(record.get("private/rule_share"))]
    last = evaluated[-1] if evaluated else _means_on_record(records)
    uploads, agreements = _uploads(history).values(), _agreements(history).values()
    optional = {
        "improved": _mean(improved),
        "improved_late": _mean(improved[-math.ceil(len(improved) / 10) :]),
        "uploaded": sum(uploads) / _MEGABYTE if uploads else math.nan,
        "upload/d": _mean(uploads) / (_FLOAT * len(history.model)),
        "agreement": _mean(agreements),
        "rate/first": rates[0] if rates else math.nan,
        "rate/last": rates[-1] if rates else math.nan,
        "moved": _mean([100.0 * (share < 1) for share in shares]),
        "rule_share": 100 * _mean(shares),
    }
    hidden = sum(bool(record.get("undisclosed")) for record in records)
    return {
        **{key: value for key, value in last.items() if re.fullmatch(_OF_THE_LAST_ROUND, key)},
        **{f"client/{name}": 100 * value for name, (value, _) in clients.items() if len(clients) <= FEW},
        **{name: value for name, value in optional.items() if _known(value)},
        "rounds": float(len(records)),
        "skipped": float(sum(record["state"] == "SKIPPED" for record in records)),
        **({"undisclosed": float(hidden)} if hidden else {}),
        "stationary": float(sum(record.get("stationary") or 0.0 for record in records)),
        "refusals": float(sum(not record["accepted"] for record in history.reply_records)),
        "seconds": float(sum(record["seconds"] or 0.0 for record in records)),
    }


def rounds(history: "History", *, exclude: Collection[str] = ()) -> list[Measures]:
    """The measures of every evaluated round; `round` counts the rounds that have ended, from 1.

    `steps` is the number of local steps of a client up to the round, if the specification gives one; `uploaded` is the
    amount that each participant sent up to the round (MB): over the rounds, the sum of the bytes of all phases divided
    by the participants. `agreement` is the mean over the participants of the cosine of the update with the direction.
    It is small if clients disagree, and also if few steps on minibatches make the updates noisy. Accuracies and losses
    of excluded clients do not count.
    """
    tested, losses = _accuracies(history, exclude), _losses(history, exclude)
    records = {record["round"]: record for record in history.round_records}
    uploads, agreements = _uploads(history), _agreements(history)
    steps = history.spec.train.steps
    evaluated = []
    for number in sorted({record["round"] for record in history.client_records}):
        record, clients = records[number], tested.get(number, {})
        measures = {
            "round": float(number + 1),
            **({"steps": float((number + 1) * steps)} if steps else {}),
            **({"uploaded": sum(uploads[t] for t in uploads if t <= number) / _MEGABYTE} if uploads else {}),
            **_percent([value for value, _ in clients.values()]),
            **({"pooled": 100 * _pooled(clients.values())} if clients else {}),
            **{f"loss/{split}": _mean(values) for split, values in losses.get(number, {}).items()},
            **{name: 100 * record[name] for name in _SHARES_OF_ROUNDS if _known(record.get(name))},
            **{name: float(record[name]) for name in _OF_ROUNDS if _known(record.get(name))},
            **_of_objectives(record),
            **({"agreement": agreements[number]} if number in agreements else {}),
        }
        evaluated.append(measures)
    return evaluated


def _means_on_record(records: Sequence[Mapping[str, Any]]) -> Measures:
    """The means of the last private evaluation."""
    measured = [record for record in records if _known(record.get("evaluated"))]
    record: Mapping[str, Any] = measured[-1] if measured else {}
    means = {name: float(record[name]) for name in ("loss/train", "loss/validation", "loss/test") if name in record}
    return means | ({"mean": 100 * record["accuracy/mean"]} if "accuracy/mean" in record else {})


def hides(final: Measures, measure: str) -> bool:
    """Whether privacy may be why a finished run lacks a measure of what members measured or sent."""
    return final.get("undisclosed", 0) > 0 and re.fullmatch(_OF_MEMBERS, measure) is not None


def all_skipped(final: Measures) -> bool:
    """Whether a finished run made no step."""
    return 0 < final.get("rounds", 0) == final.get("skipped")


def _of_objectives(record: Mapping[str, Any]) -> Measures:
    known = {key: value for key, value in record.items() if isinstance(value, int | float) and _known(value)}
    return {
        **{f"accuracy/{key.removeprefix(_ACCURACY)}": 100 * known[key] for key in known if key.startswith(_ACCURACY)},
        **{key: float(known[key]) for key in known if re.fullmatch(_OF_OBJECTIVES, key)},
    }


def _uploads(history: "History") -> dict[int, float]:
    """By round: the bytes of all phases, per participant."""
    participants: dict[int, set[str]] = defaultdict(set)
    for reply in history.reply_records:
        participants[reply["round"]].add(reply["client"])
    return {
        record["round"]: record["bytes/up"] / len(participants[record["round"]])
        for record in history.round_records
        if participants[record["round"]] and _known(record.get("bytes/up"))
    }


def _agreements(history: "History") -> dict[int, float]:
    """By round: the mean cosine between a participant's update and the direction."""
    cosines: dict[int, list[float]] = defaultdict(list)
    for reply in history.reply_records:
        if _known(reply.get("cosine")):
            cosines[reply["round"]].append(reply["cosine"])
    return {number: _mean(values) for number, values in cosines.items()}


def _percent(values: Sequence[float]) -> Measures:
    shares = {name.rpartition("/")[2]: value for name, value in accuracies(values).items()}
    scale = dict.fromkeys(_SHARES, 100.0) | {"variance": 10_000.0}
    return {name: scale.get(name, 1.0) * value for name, value in shares.items()}


def _accuracies(history: "History", exclude: Collection[str]) -> dict[int, dict[str, tuple[float, int]]]:
    """By evaluated round and client: the accuracy on its test split, in [0, 1], and the number of its samples."""
    found: dict[int, dict[str, tuple[float, int]]] = defaultdict(dict)
    for record in history.client_records:
        if record["split"] == "test" and record["client"] not in exclude and _known(record["accuracy"]):
            found[record["round"]][record["client"]] = record["accuracy"], record["samples"]
    return found


def _losses(history: "History", exclude: Collection[str]) -> dict[int, dict[str, list[float]]]:
    """By evaluated round and split: the clients' losses."""
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in history.client_records:
        if record["client"] not in exclude and record["loss"] is not None:
            found[record["round"]][record["split"]].append(record["loss"])
    return found


def _pooled(clients: Collection[tuple[float, int]]) -> float:
    samples = sum(count for _, count in clients)
    return sum(value * count for value, count in clients) / samples if samples else math.nan


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)
