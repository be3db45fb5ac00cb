"""A run specification and the algorithm that it names."""

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.registry import algorithm, rule_code
from coordinator.aggregation.rules import HyperparameterError
from federation.objectives import JOINT
from federation.runs import RunSpec, SpecError


def parse_run(text: str | bytes) -> tuple[RunSpec, Algorithm]:
    """Reads a TOML document, the algorithm's hyper-parameters included.

    Raises:
        SpecError: it cannot be used; the message names each key that is wrong.
    """
    spec = RunSpec.parse(text)
    with _named():
        rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    if (rule.reads_losses or rule.reads_accuracies) and not spec.train.measure:
        raise SpecError(f"train.measure: {rule.name} needs what clients measure before they train; leave it out")
    if spec.privacy.sample_noise and rule.measures_samples:
        raise SpecError(
            f"privacy.sample_noise: {rule.name} asks clients for losses or gradients on their samples without noise; "
            "choose an algorithm that needs updates only, such as fedmgda+ or fedavg"
        )
    with _named(), rule_code(rule, "asking it for an optimiser"):
        optimiser = rule.optimiser()
    if optimiser is not None and spec.server.optimiser != "sgd":
        raise SpecError(f"server.optimiser: {rule.name} brings its own; leave it out")
    return spec, rule


def cautions(spec: RunSpec, rule: Algorithm) -> tuple[str, ...]:
    """What an operator should know of a run: claims of members that steer it, and a decay without effect."""
    with _named(), rule_code(rule, "asking it for cautions"):
        found = tuple(rule.cautions())
    if spec.server.decay and spec.rounds <= spec.server.decay_every:
        found += (
            f"server.decay = {spec.server.decay:g} has no effect: the rate changes every {spec.server.decay_every} "
            f"rounds, and the run has {spec.rounds}; server.decay_every = {max(1, spec.rounds // 20)} makes about 20 "
            "reductions",
        )
    keys = []
    if spec.selection.by == "samples" and spec.selection.method != "all":
        keys.append('selection.by = "samples"')
    if spec.algorithm.prior == "samples":
        keys.append('algorithm.prior = "samples"')
    if keys:
        found += (
            f"{' and '.join(keys)}: members claim their numbers of training samples, and nobody can verify them; a "
            f"claim counts up to limits.samples = {spec.limits.samples}: set that near the largest honest number",
        )
    return found


def fitting_objectives(spec: RunSpec, rule: Algorithm, objectives: tuple[str, ...]) -> tuple[str, ...]:
    """The objectives of a run: those that the specification names, otherwise those of the task, in its order.

    Raises:
        SpecError: they do not suit the rule or the specification.
    """
    named = spec.objectives.names or objectives or (JOINT,)
    if len(set(named)) < len(named):
        raise SpecError(f"objectives.names: {', '.join(named)}: each once")
    if objectives and set(named) != set(objectives):
        raise SpecError(
            f"objectives.names: {', '.join(named)} are not those of {spec.task}, which has {', '.join(objectives)}"
        )
    for client, served in spec.objectives.serve.items():
        if unknown := [name for name in served if name not in named]:
            raise SpecError(f"objectives.serve.{client}: no objective {unknown[0]!r}; there are {', '.join(named)}")
    with _named(), rule_code(rule, "fitting it to the objectives"):
        rule.fit(named)
    return named


@contextmanager
def _named() -> Iterator[None]:
    """Puts the section in front of the key that is wrong."""
    try:
        yield
    except HyperparameterError as error:
        raise SpecError(f"algorithm.{error}") from error
