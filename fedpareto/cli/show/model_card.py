"""The card of a model: what it is, who made it and how, how good it is, what it may reveal, and how to check it.

A card goes to people outside the federation. It holds only what the run discloses to its reader.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from federation.record.metric_definitions import OWN, SCORED
from federation.spec.run_spec import RunSpec
from federation.text import counted, escaped
from fedpareto.cli.failure import failing
from fedpareto.cli.whole_file import whole_file
from fedpareto.formatting import number, size

_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_{}[]<>()#+!|~&"})


@dataclass(frozen=True, kw_only=True)
class CardScore:
    """What the members measured on one split; NaN where it is not told. `worst_member` is empty if it is not named."""

    split: str
    metric: str
    members: int
    mean: float
    worst: float
    worst_member: str = ""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The facts of a card.

    Attributes:
        federation, run, name, state: of the run.
        round: that made the model; None for the model that the run began with.
        model, size: digest and bytes of the model on record.
        step: the digest of the signed step; empty where it is not known.
        record: the digest of the run's record; empty where there is none.
        spec, spec_digest: the specification.
        members: whose updates the step was made from, by number; 0 where that is not told.
        names: the same by name; empty where they are not told.
        scores: of the model.
        numbers: "epsilon/clients".
        source: who says so.
    """

    federation: str
    run: str
    name: str
    state: str
    round: int | None
    model: str
    size: int
    step: str
    record: str
    spec: RunSpec
    spec_digest: str
    members: int
    names: Sequence[str]
    scores: Sequence[CardScore]
    numbers: Mapping[str, float]
    source: str


def recorded_scores(metrics: Mapping[str, float], spec: RunSpec, worst_member: str) -> Iterator[CardScore]:
    """The scores in the metrics of a round on record."""
    judged = next((split for split in SCORED if split in spec.evaluated), "")
    members = int(metrics.get("evaluated", 0))
    own = {name.split("/", 1)[1].rpartition("/")[0] for name in metrics if name.startswith(OWN)}
    for split in spec.evaluated:
        worst = metrics.get("loss/worst", math.nan) if split == judged else math.nan
        if f"loss/{split}" in metrics:
            yield CardScore(
                split=split, metric="loss", members=members, mean=metrics[f"loss/{split}"], worst=worst,
                worst_member="" if math.isnan(worst) else worst_member,
            )  # fmt: skip
    for metric, begin in {"accuracy": "accuracy", **{name: f"{OWN}{name}" for name in sorted(own)}}.items():
        if f"{begin}/mean" in metrics:
            worst = metrics.get(f"{begin}/worst", math.nan)
            named = worst_member if metric == "accuracy" and not math.isnan(worst) else ""
            yield CardScore(
                split=judged, metric=metric, members=members, mean=metrics[f"{begin}/mean"], worst=worst,
                worst_member=named,
            )  # fmt: skip


def write_card(facts: CardFacts, path: Path, model: Path, *, as_json: bool) -> None:
    """Writes the card of the model in the file `model`: JSON if that is asked for or the path ends so, else Markdown.

    Raises:
        CommandFailure: the file cannot be written.
    """
    text = _json(facts, model) if as_json or path.suffix.lower() == ".json" else markdown(facts, model)
    with failing(OSError, what=f"cannot write {path}"), whole_file(path) as file:
        file.write(text.encode())


def document(facts: CardFacts, model: Path) -> dict[str, Any]:
    """The card as values for JSON; numbers that are not told are None."""
    spec = facts.spec
    return {
        "federation": facts.federation,
        "run": {"id": facts.run, "name": facts.name, "state": facts.state, "specification": facts.spec_digest},
        "model": {
            "file": model.name, "digest": facts.model, "bytes": facts.size, "round": facts.round, "step": facts.step,
            "record": facts.record,
        },
        "task": spec.task,
        "trained_by" if spec.trains else "measured_by": {"members": facts.members or None, "names": list(facts.names)},
        "rule": {"name": spec.algorithm.name, **spec.algorithm.hyperparameters} if spec.trains else None,
        "rounds": spec.rounds,
        "seed": spec.seed,
        "metrics": [
            {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
            for row in map(asdict, facts.scores)
        ],
        "privacy": {"words": list(privacy_words(facts)), "epsilon_clients": _epsilon(facts)},
        "limits": list(limit_words(facts)),
        "verify": list(verify_words(facts, model)),
        "load": list(load_words(facts, model)),
        "source": facts.source,
    }  # fmt: skip


def markdown(facts: CardFacts, model: Path) -> str:
    """The card as a page in Markdown."""
    spec, end = facts.spec, "the model that the run began with" if facts.round is None else f"after round {facts.round}"
    if not spec.trains:
        end = f"measured in round {facts.round}"
    rule = ", ".join(f"{name} = {value}" for name, value in spec.algorithm.hyperparameters.items())
    who = "not told"
    if facts.members:
        who = counted(facts.members, "member") + (f": {', '.join(facts.names)}" if facts.names else "")
    about = {
        "Federation": facts.federation,
        "Run": f"{facts.name} ({facts.run}), {facts.state.lower()}",
        "Model": f"{end}, {size(facts.size)}, {facts.model}",
        "Task": spec.task,
        "Trained by" if spec.trains else "Measured by": who,
    }
    if spec.trains:
        about["Rule"] = spec.algorithm.name + (f" ({rule})" if rule else "")
        about["Rounds"] = f"{spec.rounds} at most, seed {spec.seed}"
    parts = [
        f"# {_safe(facts.name)}, {end}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_safe(value)} |" for name, value in about.items())]),
        "## How good it is",
        _table(facts),
        *_section("Privacy", privacy_words(facts)),
        *_section("Limits", limit_words(facts)),
        *_section("How to verify it", verify_words(facts, model)),
        *_section("How to load it", load_words(facts, model)),
        facts.source,
    ]
    return "\n\n".join(parts) + "\n"


def privacy_words(facts: CardFacts) -> Iterator[str]:
    """Who saw what of the members' updates, and the noise, in sentences."""
    privacy = facts.spec.privacy
    if not facts.spec.trains:
        told = (
            "The coordinator saw means over the members, with noise, and no member's own measurements."
            if facts.spec.evaluates_privately
            else "Each member told the coordinator its own measurements."
        )
        yield f"This run measured the model and did not train it. {told}"
        return
    yield {
        "off": "The coordinator saw the update of every member; its operators can read and export them.",
        "sum": "The coordinator saw one weighted sum of the updates of each round, and no member's own.",
        "private": "The coordinator saw one weighted sum of the updates of each round, and the inner products of "
        "sketches of them; no member's own update.",
        "verified": "The coordinator saw one weighted sum of the updates of each round, and the inner products of "
        "sketches of them; no member's own update. It checked the length of each.",
    }[privacy.secure]
    if privacy.client_noise:
        spent = _epsilon(facts)
        value = "an epsilon that is not told" if spent is None else f"epsilon {number(spent)}"
        yield (
            f"Noise on every step protects the members against those who see the models: {value} for delta "
            f"{privacy.client_delta:g}."
        )
    if privacy.sample_noise:
        yield (
            f"Noise on every gradient protects the members' samples: at least {privacy.sample_noise:g} times the clip "
            f"of {privacy.sample_clip:g}. Each member counts its own epsilon."
        )
    if not privacy.client_noise and not privacy.sample_noise:
        yield "No noise protects members or samples by this run: the model may reveal something of the training data."
    if facts.spec.results == "members":
        yield "Administrators can get the model, and each member with an accepted reply."
    else:
        yield "Administrators alone can get the model with a command; members that trained or evaluated have it, too."


def limit_words(facts: CardFacts) -> Iterator[str]:
    """What the card cannot promise, in sentences."""
    if facts.scores:
        yield (
            "Each member measured on its own data and told the result; nobody has checked these numbers. The quality "
            "on other data is not known."
        )
    else:
        yield "The card tells no measurement of the model: none was made, or the run does not disclose it."
    worst = [score for score in facts.scores if not math.isnan(score.worst)]
    if facts.scores and not worst:
        yield "The result of the worst member is not disclosed."
    if facts.spec.parameters.keeps:
        yield (
            "Each member keeps parameters of its own, which are not in the file; the numbers are of every member's own "
            "model."
        )
    if facts.spec.parameters.frozen:
        yield "Frozen parameters are not in the file: the task makes them from the seed of the run."
    yield "It was not made for uses other than its task."


def verify_words(facts: CardFacts, model: Path) -> Iterator[str]:
    """How somebody with the record of the run checks the model, in sentences."""
    yield (
        f"`fedpareto verify BUNDLE --model {_code(model.name)}` checks with the bundle of the run, which a security "
        "officer exports, from which updates the model was computed and with which weights."
    )
    if facts.step:
        yield f"The signed step that made the model has the digest {facts.step}."
    yield f"The digest of the model, {facts.model}, is BLAKE3 over the file without its metadata."


def load_words(facts: CardFacts, model: Path) -> Iterator[str]:
    """How to load the model, in sentences."""
    yield (
        "The file is in the safetensors format, with a float32 tensor for each parameter. Loading it executes no code: "
        f"`safetensors.torch.load_file({_code(model.name)!r})`."
    )
    strict = "" if facts.spec.parameters.shares_all else ", strict=False"
    yield (
        f"In PyTorch: `fedpareto.task({_code(facts.spec.task)!r}).model()`, then `load_state_dict(tensors{strict})`. "
        "Prepare the inputs as the task does."
    )


def _epsilon(facts: CardFacts) -> float | None:
    return facts.numbers.get("epsilon/clients")


def _table(facts: CardFacts) -> str:
    if not facts.scores:
        return "Nothing is told of how good the model is."
    rows = ["| Split | Metric | Members | Mean | Worst member |", "|---|---|---|---|---|"]
    for score in facts.scores:
        worst = number(score.worst) + (f" ({score.worst_member})" if score.worst_member else "")
        cells = (score.split, score.metric, str(score.members), number(score.mean), worst)
        rows.append(f"| {' | '.join(map(_safe, cells))} |")
    return "\n".join(rows)


def _section(title: str, sentences: Iterator[str]) -> tuple[str, str]:
    return f"## {title}", "\n".join(f"- {sentence}" for sentence in sentences)


def _safe(text: str) -> str:
    """A text of others on one line, which Markdown shows as it is."""
    return escaped(text).translate(_MARKDOWN)


def _code(text: str) -> str:
    """A text of others inside of a code span."""
    return escaped(text).replace("`", "'")


def _json(facts: CardFacts, model: Path) -> str:
    return json.dumps(document(facts, model), indent=2, allow_nan=False) + "\n"
