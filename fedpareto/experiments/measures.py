"""Measures of a simulation: accuracies in percent over clients, losses, bytes, and measures of its rounds."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from federation.aggregation.metrics.metrics import accuracies
from fedpareto.experiments.result_store import Measures

if TYPE_CHECKING:
    from fedpareto.simulation.history import History

FEW = 10  # up to this number, clients are shown one by one

_OF_ROUNDS = (
    *("direction_norm", "stationarity", "stationarity/relative", "stationary", "conflicts", "conflict_depth"),
    *("descent_min", "descent_share", "entropy", "step/rate"),
)
_SHARES_OF_ROUNDS = ("improved", "backdoor")
_NOT_OF_THE_LAST_ROUND = {"round", "steps", "uploaded", "improved", "agreement", *_OF_ROUNDS}
_OF_OBJECTIVES = r"loss/[a-z]+/.+|(weight|objective|preference)/.+"
_OF_MEMBERS = (
    "rises|std|worst|best|worst5|best5|p5|p95|variance|jain|pooled|client/.+|improved|improved_late|agreement"
    "|stationarity(/relative)?|conflicts|conflict_depth|descent_min|descent_share"
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
        last tenth of these; `rises`, the share of the evaluated rounds, without the first, in which the mean training
        loss rose (%); `backdoor`, the success of a backdoor at the end (%); `uploaded`, the bytes that each
        participant sent (MB); `upload/d`, the same as floats per round and parameter of the model; `agreement`, the
        mean over the rounds; `rate/first` and `rate/last`, the server's learning rate in the first and the last step;
        `moved`, the share of private steps whose coefficients were moved towards plain averaging (%), and
        `rule_share`, the mean of s (%);
        `rounds`, `skipped`, `stationary` rounds, and `undisclosed`, those in which privacy hides numbers, if any;
        `refusals` of updates; `seconds`. Of private evaluations only means are known.
    """
    evaluated = rounds(history, exclude=exclude)
    tested = [record for record in history.client_records if _is_tested(record) and record["client"] not in exclude]
    clients = [record for record in tested if record["round"] == tested[-1]["round"]]
    records = history.round_records
    improved = [100 * share for share in _values(records, "improved")]
    rates = _values(records, "step/rate") or [math.nan]
    shares = _values(records, "private/rule_share")
    last = evaluated[-1] if evaluated else _means_on_record(records)
    uploads, agreements = _uploads(history).values(), _means(history.reply_records, "cosine", by="round").values()
    losses = [record["loss/train"] for record in evaluated if "loss/train" in record]
    optional = {
        "improved": _mean(improved),
        "rises": _mean([100.0 * (after > before) for before, after in pairwise(losses)]),
        "improved_late": _mean(improved[-math.ceil(len(improved) / 10) :]),
        "uploaded": sum(uploads) / _MEGABYTE if uploads else math.nan,
        "upload/d": _mean(uploads) / (_FLOAT * len(history.model)),
        "agreement": _mean(agreements),
        "rate/first": rates[0],
        "rate/last": rates[-1],
        "moved": _mean([100.0 * (share < 1) for share in shares]),
        "rule_share": 100 * _mean(shares),
    }
    hidden = sum(bool(record.get("undisclosed")) for record in records)
    return {
        **{key: value for key, value in last.items() if key not in _NOT_OF_THE_LAST_ROUND},
        **{f"client/{record['client']}": 100 * record["accuracy"] for record in clients if len(clients) <= FEW},
        **{name: value for name, value in optional.items() if _known(value)},
        "rounds": float(len(records)),
        "skipped": float(sum(record["state"] == "SKIPPED" for record in records)),
        **({"undisclosed": float(hidden)} if hidden else {}),
        "stationary": float(sum(_values(records, "stationary"))),
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
    records = {record["round"]: record for record in history.round_records}
    uploads, agreements = _uploads(history), _means(history.reply_records, "cosine", by="round")
    steps = history.spec.train.steps
    evaluated = []
    for number, group in groupby(history.client_records, itemgetter("round")):
        record, clients = records[number], [item for item in group if item["client"] not in exclude]
        tested = list(filter(_is_tested, clients))
        samples = sum(item["samples"] for item in tested)
        measures = {
            "round": float(number + 1),
            **({"steps": float((number + 1) * steps)} if steps else {}),
            **({"uploaded": sum(uploads[t] for t in uploads if t <= number) / _MEGABYTE} if uploads else {}),
            **_percent([item["accuracy"] for item in tested]),
            **({"pooled": 100 * (sum(x["accuracy"] * x["samples"] for x in tested) / samples)} if samples else {}),
            **{f"loss/{split}": loss for split, loss in _means(clients, "loss", by="split").items()},
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
    record = measured[-1] if measured else dict[str, Any]()
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
    pairs = {(reply["round"], reply["client"]) for reply in history.reply_records}
    participants = Counter(number for number, _ in pairs)
    return {
        record["round"]: record["bytes/up"] / participants[record["round"]]
        for record in history.round_records
        if participants[record["round"]] and _known(record.get("bytes/up"))
    }


def _percent(values: Sequence[float]) -> Measures:
    scale = {"variance": 10_000.0, "jain": 1.0}
    shares = {name.removeprefix("accuracy/"): value for name, value in accuracies(values).items()}
    return {name: scale.get(name, 100.0) * value for name, value in shares.items()}


def _is_tested(record: Mapping[str, Any]) -> bool:
    """Whether the record of a client has its accuracy on the test split, in [0, 1]."""
    return record["split"] == "test" and _known(record["accuracy"])


def _values(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a column, without unknown ones."""
    return [float(record[name]) for record in records if _known(record.get(name))]


def _means(records: Iterable[Mapping[str, Any]], name: str, *, by: str) -> dict[Any, float]:
    """By another column: the mean of the values of a column, without unknown ones."""
    found: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        if record.get(name) is not None:
            found[record[by]].append(record[name])
    return {key: _mean(values) for key, values in found.items()}


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)
