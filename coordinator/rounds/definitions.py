"""The numbers that a round records: what each means, and under which name and in which unit it is shown."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

SCORED = ("test", "validation", "train")  # a round is judged by the first split that a client measured
OWN = "metric/"  # begins the names of the task's own metrics


class Unit(Enum):
    """The unit in which a number is written."""

    NUMBER = "a number, with decimals"
    COUNT = "a whole number"
    SHARE = "a share in [0, 1], written in percent"
    BYTES = "bytes"


@dataclass(frozen=True)
class Definition:
    """A number that a round records.

    Attributes:
        meaning: one sentence, in Markdown.
        source: the paper that defines it.
        group: the line of `fedpareto admin round` that shows it; empty for a number with a place of its own.
        label: its name in that line and in the tables of a report; empty: the last part of its name.
        title: its name as a column; empty: the label.
        unit: how it is written.
    """

    meaning: str
    source: str
    group: str = ""
    label: str = ""
    title: str = ""
    unit: Unit = Unit.NUMBER


_JAIN = "Jain, 1984"
_HU = "Hu et al., 2022"
_OURS = "this project"
_WANG = "Wang et al., 2021"
_YANG = "Yang et al., 2023"
_ASKIN = "Askin et al., 2025"

# Every number that a round records, whatever its algorithm, in the order in which they are shown. docs/metrics.md has
# this table, too. "<objective>" stands for each of a task's objectives; those names are recorded where it has several.
DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        "accuracy/mean": Definition(
            "mean of the clients' accuracies, each on its own test split (without one, on the validation or "
            "training split); every client counts the same",
            _OURS,
            group="accuracy",
            unit=Unit.SHARE,
        ),
        "accuracy/weighted": Definition(
            "mean of the accuracies weighted by the samples of the split that each client claims",
            _OURS,
            group="accuracy",
            unit=Unit.SHARE,
        ),
        "accuracy/std": Definition(
            "standard deviation of these accuracies, of the population (ddof 0)",
            _WANG,
            group="accuracy",
            label="std",
            unit=Unit.SHARE,
        ),
        "accuracy/variance": Definition("the square of `accuracy/std`", _OURS, group="accuracy"),
        "accuracy/worst5": Definition(
            "mean of the lowest 5 %: of floor(0.05 N) clients, at least one",
            _WANG,
            group="accuracy",
            label="worst 5 %",
            unit=Unit.SHARE,
        ),
        "accuracy/best5": Definition(
            "mean of the highest 5 %: of floor(0.05 N) clients, at least one",
            _WANG,
            group="accuracy",
            label="best 5 %",
            unit=Unit.SHARE,
        ),
        "accuracy/p5": Definition(
            "5th percentile of the accuracies, interpolated linearly",
            f"{_HU}, table 8",
            group="accuracy",
            label="5th percentile",
            unit=Unit.SHARE,
        ),
        "accuracy/p95": Definition(
            "95th percentile of the accuracies, interpolated linearly",
            f"{_HU}, table 8",
            group="accuracy",
            label="95th percentile",
            unit=Unit.SHARE,
        ),
        "accuracy/best": Definition("the highest accuracy of a client", _OURS, group="accuracy", unit=Unit.SHARE),
        "accuracy/worst": Definition(
            "the lowest accuracy of a client; the record names the client",
            _OURS,
            unit=Unit.SHARE,
        ),
        "accuracy/jain": Definition(
            "(sum a)² / (N sum a²): 1 if all accuracies are equal, 1/N if all but one are 0",
            _JAIN,
            group="accuracy",
            label="Jain's index",
        ),
        "backdoor": Definition(
            "share of the triggered test samples of other classes that the new model assigns to the attacker's "
            "class; in a simulation with such an attacker",
            _OURS,
            group="accuracy",
            unit=Unit.SHARE,
        ),
        "evaluated": Definition(
            "number of clients that evaluated the new model",
            _OURS,
            group="accuracy",
            unit=Unit.COUNT,
        ),
        "evaluation/noise": Definition(
            "of a private evaluation: the standard deviation of the noise on the mean accuracy; of a loss it is "
            "10 times, of another metric `largest` times as large (`privacy.evaluation_noise`)",
            "[private rounds](privacy.md)",
            group="accuracy",
            label="noise on the mean accuracy",
            unit=Unit.SHARE,
        ),
        "private/members": Definition(
            "members whose updates are in the sum of a private round",
            _OURS,
            group="accuracy",
            label="in the sum",
            unit=Unit.COUNT,
        ),
        "loss/train": Definition(
            "mean of the losses of the new model that the clients measured on their training splits",
            _OURS,
            group="loss",
            title="train loss",
        ),
        "loss/validation": Definition(
            "the same on their validation splits", _OURS, group="loss", title="validation loss"
        ),
        "loss/test": Definition("the same on their test splits", _OURS, group="loss", title="test loss"),
        "loss/worst": Definition("the highest loss of a client, for a task without accuracy", _OURS),
        "loss/jain": Definition(
            "(sum F)² / (N sum F²) of the clients' losses, for a task without accuracy",
            _JAIN,
            group="loss",
            label="Jain's index",
        ),
        "improved": Definition(
            "share of the round's participants whose training loss did not rise in the step; an equal loss counts "
            "as improved, a loss that is no longer finite does not. Missing for `afl`, whose clients train from "
            "one model and evaluate another, and if the training split is not evaluated",
            _HU,
            group="loss",
            unit=Unit.SHARE,
        ),
        "direction_norm": Definition(
            "length of the direction d that the algorithm computed from the updates",
            _OURS,
            group="direction",
            label="norm",
            title="||d||",
        ),
        "stationarity": Definition(
            "length of the shortest vector in the convex hull of the participants' updates: 0 if and only if no "
            "direction is good for all of them; measured for up to 512 updates",
            _HU,
            group="direction",
        ),
        "stationarity/relative": Definition(
            "`stationarity` divided by the length of the longest update, in [0, 1]",
            _OURS,
            group="direction",
            label="relative",
        ),
        "stationary": Definition("1 if the algorithm found no direction and the model stayed as it was, else 0", _OURS),
        "descent_min": Definition(
            "the least cosine between d and an update: if negative, the step raises the loss of some client, to "
            "first order",
            _OURS,
            group="direction",
            label="least cosine with an update",
        ),
        "descent_share": Definition(
            "share of the updates that have no negative cosine with d",
            _OURS,
            group="direction",
            label="not against it",
            title="not against d",
            unit=Unit.SHARE,
        ),
        "conflicts": Definition(
            "number of pairs of updates with a negative inner product",
            _WANG,
            group="conflicts",
            label="pairs",
            title="conflicts",
            unit=Unit.COUNT,
        ),
        "conflict_depth": Definition(
            "the least cosine of such a pair; 0 without conflicts",
            _WANG,
            group="conflicts",
            label="least cosine",
        ),
        "conflict_mean": Definition(
            "the mean cosine of such pairs; 0 without conflicts",
            _WANG,
            group="conflicts",
            label="mean cosine",
        ),
        "entropy": Definition(
            "- sum lambda log lambda of the weights: log m if all m weights are equal, 0 if one client has all "
            "the weight",
            _OURS,
            group="weights",
        ),
        "private/rule_share": Definition(
            "how much of the rule is left in the coefficients of a private round, from 0, plain averaging, to 1: "
            "they move towards plain averaging until every member's update is covered",
            _OURS,
            group="weights",
            label="the rule's share (the rest is plain averaging)",
            title="the rule's share",
            unit=Unit.SHARE,
        ),
        "step/rate": Definition(
            "the server's learning rate of the round, times the step size that a line search chose",
            _OURS,
            group="weights",
            label="server's rate",
        ),
        "stop/value": Definition("the value by which `[stop]` ends the run", _OURS, group="stopping"),
        "stop/best": Definition("the best of these values so far", _OURS, group="stopping"),
        "stop/since": Definition(
            "evaluations since the last one that counted as better (`stop.improvement`); 0 if it is this one",
            _OURS,
            group="stopping",
            label="evaluations since it got better",
            unit=Unit.COUNT,
        ),
        "required/missing": Definition(
            "in a skipped round: the required clients that it lacks",
            "`selection.required`",
            group="required members",
            unit=Unit.COUNT,
        ),
        "epsilon/clients": Definition(
            "what the noise on the steps has spent so far, for `privacy.client_delta`",
            "[differential privacy](differential-privacy.md)",
            group="epsilon",
            label="of clients",
        ),
        "epsilon/samples": Definition(
            "the largest epsilon that a reply states of its client's samples over all runs, each for its own delta",
            "[differential privacy](differential-privacy.md)",
            group="epsilon",
            label="of samples, the largest of a client",
        ),
        "objective/conflicts": Definition(
            "number of pairs of objectives whose gradients (or averaged updates) have a negative inner product, "
            "by the algorithm's estimate",
            _OURS,
            group="objectives",
            label="pairs in conflict",
            unit=Unit.COUNT,
        ),
        "objective/conflict_depth": Definition(
            "the least cosine of such a pair; 0 without conflicts",
            _OURS,
            group="objectives",
            label="least cosine",
        ),
        "objective/conflict_mean": Definition(
            "the mean cosine of such pairs; 0 without conflicts",
            _OURS,
            group="objectives",
            label="mean cosine of these",
        ),
        "objective/stationarity": Definition(
            "sqrt(lambda' G lambda), the length of the weighted sum of the objectives' gradients (or averaged "
            "updates); of their exact gradients with `algorithm.exact_stationarity`",
            _YANG,
            group="objectives",
            label="length of their weighted sum",
        ),
        "preference/divergence": Definition(
            "KL divergence of the shares r_k F_k / sum r F from equal shares: 0 if the losses are as preferred, "
            "at most log M",
            _ASKIN,
            group="objectives",
            label="divergence from the preference",
        ),
        "bytes/up": Definition(
            "bytes of the payloads that clients sent, accepted or refused (a refused one with its declared size); "
            "without the signed envelopes, about 1 kB each, and without TLS",
            _OURS,
            group="bytes",
            unit=Unit.BYTES,
        ),
        "bytes/refused": Definition(
            "the part of `bytes/up` that was refused",
            _OURS,
            group="bytes",
            label="of it refused",
            unit=Unit.BYTES,
        ),
        "bytes/down": Definition(
            "bytes of the model files that clients fetched. A model counts once for each client that replied to "
            "an assignment with it, in the first such round, since workers keep the last models. The sums that "
            "`svd-two-way` sends back count, too. Fetched models without a reply are not counted, nor, in a "
            "simulation, models that only evaluations need",
            _OURS,
            group="bytes",
            unit=Unit.BYTES,
        ),
        "iterations": Definition(
            "iterations in which the algorithm found the weights", _OURS, group="algorithm", unit=Unit.COUNT
        ),
        "residual": Definition(
            "by how much these weights violate the conditions of the optimum, relative to the updates; 0 is exact",
            _OURS,
            group="algorithm",
        ),
        "loss/train/<objective>": Definition(
            "mean of the losses of the new model in that objective, on the training splits of the clients that "
            "serve it",
            _OURS,
        ),
        "loss/validation/<objective>": Definition("the same on their validation splits", _OURS),
        "loss/test/<objective>": Definition("the same on their test splits", _OURS),
        "accuracy/objective/<objective>": Definition(
            "mean of the accuracies in that objective, over the clients that serve it, on the splits of "
            "`accuracy/mean`",
            _OURS,
            unit=Unit.SHARE,
        ),
        "metric/<metric>/mean": Definition(
            "mean of a metric of the task over the clients, on the first of the test, validation and training "
            "splits that was evaluated; `<metric>/<key>` for each value of a metric with several",
            _OURS,
        ),
        "metric/<metric>/weighted": Definition("the same weighted by the samples that each client claims", _OURS),
        "metric/<metric>/worst": Definition(
            "the worst of these values; `[evaluate.metrics]` says which is better",
            _OURS,
        ),
        "metric/<metric>/best": Definition("the best of these values", _OURS),
        "weight/<objective>": Definition(
            "lambda of the objective in the step, absent in a round that left it out; the weights sum to 1, or to "
            "less if weights are fixed and an objective was left out",
            f"{_YANG}; {_ASKIN}",
        ),
    }
)
SUMMARIES = tuple(name.rpartition("/")[2] for name in DEFINITIONS if name.startswith(OWN))  # of the members' values


def definition(name: str) -> Definition:
    """The definition of a recorded number, with its label and title; a number of an algorithm's own has no meaning."""
    known = DEFINITIONS.get(pattern(name), Definition("", "the algorithm", group="algorithm"))
    label = known.label or name.rpartition("/")[2].replace("_", " ")
    return replace(known, label=label, title=known.title or label)


def pattern(name: str) -> str:
    """The name in `DEFINITIONS`: "loss/test/<objective>" for "loss/test/left". Another name is returned as it is."""
    if name in DEFINITIONS:
        return name
    general = (known for known in DEFINITIONS if "<" in known)
    return next((known for known in general if re.fullmatch(re.sub("<[a-z]+>", ".+", known), name)), name)


def in_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of recorded numbers by their group, in the order of `DEFINITIONS`, an algorithm's own numbers last.

    Numbers without a group are left out.
    """
    recorded = set(names)
    ordered = [name for name in DEFINITIONS if name in recorded] + sorted(recorded - DEFINITIONS.keys())
    groups: dict[str, list[str]] = {}
    for name in ordered:
        if group := definition(name).group:
            groups.setdefault(group, []).append(name)
    return groups


def of_objective(name: str) -> bool:
    """True for a number of one objective out of several."""
    return "<objective>" in pattern(name)
