"""The numbers that a round records: the meaning, name and unit of each."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

SCORED = ("test", "validation", "train")  # a round is judged by the first split that a client measured
OWN = "metric/"  # begins the names of the task's own metrics
EVALUATION = "evaluation"  # the field of `Participation` with what a member measured


class Unit(Enum):
    """The unit in which a number is written."""

    NUMBER = "a number, with decimals"
    COUNT = "a whole number"
    SHARE = "a share in [0, 1], written in percent"
    BYTES = "bytes"


class Basis(Enum):
    """The facts from which a number follows, so that a verifier can compute it again."""

    MODEL = "the signed replies of the members that measured the new model, and the specification"
    STEP = "the signed step and K, and the specification"
    RULE = "the rule, evaluated again on the signed replies and the signed K"
    REPLIES = "all signed replies of the round"
    COORDINATOR = "no signed fact: only the coordinator measures it"


@dataclass(frozen=True)
class Definition:
    """A number that a round records.

    Attributes:
        meaning: one sentence, in Markdown.
        unit: the unit in which it is written.
        source: the paper or the page that defines it.
        label: its name in its group; empty: the last part of its name.
        title: its name as a column of a table; empty: the label.
        group: the line of `fedpareto admin round` that shows it; empty for a number with a place of its own.
    """

    meaning: str
    unit: Unit = Unit.NUMBER
    source: str = "this project"
    label: str = ""
    title: str = ""
    group: str = ""


_COUNT, _SHARE, _BYTES = Unit.COUNT, Unit.SHARE, Unit.BYTES
_JAIN = "Jain, 1984"
_HU = "Hu et al., 2022"
_DRAWN = "; in a large round, [of 200 of them](reference/metrics.md#edge-cases)"
_WANG = "Wang et al., 2021"
_YANG = "Yang et al., 2023"
_ASKIN = "Askin et al., 2025"

# Every number that a round records, whatever its algorithm, by group, in the order in which they are shown; last are
# those without a group. tools/tables.py writes the table of docs/reference/metrics.md from it, where links begin at
# docs/. "<objective>" stands for each of a task's objectives; those names are recorded where it has several.
_GROUPS: Mapping[str, Mapping[str, Definition]] = {
    "accuracy": {
        "accuracy/mean": Definition(
            "mean of the members' accuracies, each on its own test split (without one, on the validation or "
            "training split); every member counts the same",
            _SHARE,
        ),
        "accuracy/weighted": Definition(
            "mean of the accuracies weighted by the samples of the split that each member claims", _SHARE
        ),
        "accuracy/std": Definition(
            "standard deviation of these accuracies, of the population (ddof 0)", _SHARE, source=_WANG, label="std"
        ),
        "accuracy/variance": Definition("the square of `accuracy/std`"),
        "accuracy/worst5": Definition(
            "mean of the lowest 5 %: of floor(0.05 N) members, at least one", _SHARE, source=_WANG, label="worst 5 %"
        ),
        "accuracy/best5": Definition(
            "mean of the highest 5 %: of floor(0.05 N) members, at least one", _SHARE, source=_WANG, label="best 5 %"
        ),
        "accuracy/p5": Definition(
            "5th percentile of the accuracies, interpolated linearly",
            _SHARE,
            source=f"{_HU}, table 8",
            label="5th percentile",
        ),
        "accuracy/p95": Definition(
            "95th percentile of the accuracies, interpolated linearly",
            _SHARE,
            source=f"{_HU}, table 8",
            label="95th percentile",
        ),
        "accuracy/best": Definition("the highest accuracy of a member", _SHARE),
        "accuracy/jain": Definition(
            "(sum a)² / (N sum a²): 1 if all accuracies are equal, 1/N if all but one are 0",
            source=_JAIN,
            label="Jain's index",
        ),
        "backdoor": Definition(
            "share of the triggered test samples of other classes that the new model assigns to the attacker's "
            "class; in a simulation with such an attacker",
            _SHARE,
        ),
        "evaluated": Definition("number of members that evaluated the new model", _COUNT),
        "evaluation/noise": Definition(
            "of a private evaluation: the standard deviation of the noise on the mean accuracy; of a loss it is "
            "10 times, of another metric `largest` times as large (`privacy.evaluation_noise`)",
            _SHARE,
            source="[private rounds](member/privacy.md)",
            label="noise on the mean accuracy",
        ),
        "private/members": Definition(
            "members whose updates are in the sum of a private round", _COUNT, label="in the sum"
        ),
    },
    "loss": {
        "loss/train": Definition(
            "mean of the losses of the new model that the members measured on their training splits", title="train loss"
        ),
        "loss/validation": Definition("the same on their validation splits", title="validation loss"),
        "loss/test": Definition("the same on their test splits", title="test loss"),
        "loss/jain": Definition(
            "(sum F)² / (N sum F²) of the members' losses, for a task without accuracy",
            source=_JAIN,
            label="Jain's index",
        ),
        "improved": Definition(
            "share of the round's participants whose training loss did not rise in the step; an equal loss "
            "counts as improved, a loss that is no longer finite does not. Missing for `afl`, whose members "
            "train from one model and evaluate another, and if the training split is not evaluated",
            _SHARE,
            source=_HU,
        ),
    },
    "direction": {
        "direction_norm": Definition(
            "length of the direction d that the algorithm computed from the updates", label="norm", title="||d||"
        ),
        "stationarity": Definition(
            "length of the shortest vector in the convex hull of the participants' updates: 0 if and only if no "
            f"direction is good for all of them; measured for up to 512 updates{_DRAWN}",
            source=_HU,
        ),
        "stationarity/relative": Definition(
            "`stationarity` divided by the length of the longest of these updates, in [0, 1]", label="relative"
        ),
        "descent_min": Definition(
            "the least cosine between d and an update: if negative, the step raises the loss of some member, to "
            "first order",
            label="least cosine with an update",
        ),
        "descent_share": Definition(
            "share of the updates that have no negative cosine with d",
            _SHARE,
            label="not against it",
            title="not against d",
        ),
    },
    "conflicts": {
        "conflicts": Definition(
            f"number of pairs of updates with a negative inner product{_DRAWN}",
            _COUNT,
            source=_WANG,
            label="pairs",
            title="conflicts",
        ),
        "conflict_depth": Definition(
            "the least cosine of such a pair; 0 without conflicts", source=_WANG, label="least cosine"
        ),
        "conflict_mean": Definition(
            "the mean cosine of such pairs; 0 without conflicts", source=_WANG, label="mean cosine"
        ),
    },
    "weights": {
        "entropy": Definition(
            "- sum lambda log lambda of the weights: log m if all m weights are equal, 0 if one member has all "
            "the weight"
        ),
        "private/blur": Definition(
            "c of the [blur](reference/private-protocol.md#2c-the-blur-of-an-update) of each member's update in a "
            "private round (`privacy.blur`)",
            label="blur of updates",
        ),
        "private/rule_share": Definition(
            "how much of the rule is left in the coefficients of a private round, from 0, plain averaging, to "
            "1: they move towards plain averaging until every member's update is covered",
            _SHARE,
            label="the rule's share (the rest is plain averaging)",
            title="the rule's share",
        ),
        "step/rate": Definition(
            "the server's learning rate of the round, times the step size that a line search chose, or the bound of "
            '[`"auto"`](research/algorithms.md#the-length-of-a-step)',
            label="server's rate",
        ),
    },
    "stopping": {
        "stop/value": Definition("the value by which `[stop]` ends the run"),
        "stop/best": Definition("the best of these values so far"),
        "stop/since": Definition(
            "evaluations since the last one that counted as better (`stop.improvement`); 0 if it is this one",
            _COUNT,
            label="evaluations since it got better",
        ),
    },
    "required members": {
        "required/missing": Definition(
            "in a skipped round: the required members that it lacks", _COUNT, source="`selection.required`"
        ),
    },
    "epsilon": {
        "epsilon/clients": Definition(
            "what the noise on the steps has spent so far, for `privacy.client_delta`",
            source="[differential privacy](member/differential-privacy.md)",
            label="of members",
        ),
        "epsilon/samples": Definition(
            "the largest epsilon that a reply states of its member's samples over all runs, each for its own delta",
            source="[differential privacy](member/differential-privacy.md)",
            label="of samples, the largest of a member",
        ),
    },
    "objectives": {
        "objective/conflicts": Definition(
            "number of pairs of objectives whose gradients (or averaged updates) have a negative inner product, "
            "by the algorithm's estimate",
            _COUNT,
            label="pairs in conflict",
        ),
        "objective/conflict_depth": Definition(
            "the least cosine of such a pair; 0 without conflicts", label="least cosine"
        ),
        "objective/conflict_mean": Definition(
            "the mean cosine of such pairs; 0 without conflicts", label="mean cosine of these"
        ),
        "objective/stationarity": Definition(
            "sqrt(lambda' G lambda), the length of the weighted sum of the objectives' gradients (or averaged "
            "updates); of their exact gradients with `algorithm.exact_stationarity`",
            source=_YANG,
            label="length of their weighted sum",
        ),
        "preference/divergence": Definition(
            "KL divergence of the shares r_k F_k / sum r F from equal shares: 0 if the losses are as preferred, "
            "at most log M",
            source=_ASKIN,
            label="divergence from the preference",
        ),
    },
    "bytes": {
        "bytes/up": Definition(
            "bytes of the payloads that members sent, accepted or refused (a refused one with its declared "
            "size); without the signed envelopes, about 1 kB each, and without TLS",
            _BYTES,
        ),
        "bytes/refused": Definition("the part of `bytes/up` that was refused", _BYTES, label="of it refused"),
        "bytes/down": Definition(
            "bytes of the model files that members fetched. A model counts once for each member that replied to "
            "an assignment with it, in the first such round, since workers keep the last models. The sums that "
            "`svd-two-way` sends back count, too. Fetched models without a reply are not counted, nor, in a "
            "simulation, models that only evaluations need",
            _BYTES,
        ),
    },
    "algorithm": {
        "iterations": Definition("iterations in which the algorithm found the weights", _COUNT),
        "residual": Definition(
            "by how much these weights violate the conditions of the optimum, relative to the updates; 0 is exact"
        ),
    },
    "": {
        "accuracy/worst": Definition("the lowest accuracy of a member; the record names the member", _SHARE),
        "loss/worst": Definition("the highest loss of a member, for a task without accuracy"),
        "stationary": Definition("1 if the algorithm found no direction and the model stayed as it was, else 0"),
        "loss/train/<objective>": Definition(
            "mean of the losses of the new model in that objective, on the training splits of the members that serve it"
        ),
        "loss/validation/<objective>": Definition("the same on their validation splits"),
        "loss/test/<objective>": Definition("the same on their test splits"),
        "accuracy/objective/<objective>": Definition(
            "mean of the accuracies in that objective, over the members that serve it, on the splits of "
            "`accuracy/mean`",
            _SHARE,
        ),
        "metric/<metric>/mean": Definition(
            "mean of a metric of the task over the members, on the first of the test, validation and training "
            "splits that was evaluated; `<metric>/<key>` for each value of a metric with several"
        ),
        "metric/<metric>/weighted": Definition("the same weighted by the samples that each member claims"),
        "metric/<metric>/worst": Definition("the worst of these values; `[evaluate.metrics]` says which is better"),
        "metric/<metric>/best": Definition("the best of these values"),
        "weight/<objective>": Definition(
            "lambda of the objective in the step, absent in a round that left it out; the weights sum to 1, or "
            "to less if weights are fixed and an objective was left out",
            source=f"{_YANG}; {_ASKIN}",
        ),
    },
}
DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {name: replace(known, group=group) for group, metrics in _GROUPS.items() for name, known in metrics.items()}
)
SUMMARIES = tuple(name.rpartition("/")[2] for name in DEFINITIONS if name.startswith(OWN))  # of the members' values


# The names of numbers by their basis; all others follow from the rule.
_BASES: Mapping[Basis, str] = {
    Basis.MODEL: "(accuracy|loss|metric|stop)/.+|evaluated|evaluation/noise|improved",
    Basis.STEP: "step/rate|direction_norm|descent_.+|stationarity.*|conflict.*|weight/.+|epsilon/clients",
    Basis.REPLIES: "epsilon/samples|bytes/up|bytes/refused",
    Basis.COORDINATOR: "bytes/down|iterations|residual|required/missing|backdoor",
}


def basis(name: str) -> Basis:
    """The facts from which a recorded number follows."""
    return next((basis for basis, names in _BASES.items() if re.fullmatch(names, name)), Basis.RULE)


def definition(name: str) -> Definition:
    """The definition of a recorded number, with its label and title; a number of an algorithm's own has no meaning."""
    defined = DEFINITIONS.get(pattern(name), Definition("", source="the algorithm", group="algorithm"))
    label = defined.label or name.rpartition("/")[2].replace("_", " ")
    return replace(defined, label=label, title=defined.title or label)


def pattern(name: str) -> str:
    """The name in `DEFINITIONS`: "loss/test/<objective>" for "loss/test/left". Another name is returned as it is."""
    if name in DEFINITIONS:
        return name
    general = (patterns for patterns in DEFINITIONS if "<" in patterns)
    return next((patterns for patterns in general if re.fullmatch(re.sub("<[a-z]+>", ".+", patterns), name)), name)


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
