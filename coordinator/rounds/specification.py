"""A run specification with the algorithm that it names: what a run needs to be taken."""

from coordinator.aggregation.registry import Algorithm, HyperparameterError, algorithm
from federation.objectives import JOINT
from federation.runs import RunSpec, SpecError


def parse_run(text: str | bytes) -> tuple[RunSpec, Algorithm]:
    """Reads a TOML document, the algorithm's hyper-parameters included.

    Raises:
        SpecError: it cannot be used; the message names each key that is wrong.
    """
    spec = RunSpec.parse(text)
    try:
        rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    except HyperparameterError as error:
        raise SpecError(f"algorithm.{error}") from error
    if (rule.reads_losses or rule.reads_accuracies) and not spec.train.measure:
        raise SpecError(f"train.measure: {rule.name} needs what clients measure before they train; leave it out")
    if rule.optimiser() is not None and spec.server.optimiser != "sgd":
        raise SpecError(f"server.optimiser: {rule.name} brings its own; leave it out")
    return spec, rule


def cautions(spec: RunSpec, rule: Algorithm) -> tuple[str, ...]:
    """What an operator should know of a run before members take part: which of their claims steer it.

    Args:
        spec: of the run.
        rule: that it names.
    """
    keys = []
    if spec.selection.by == "samples" and spec.selection.method != "all":
        keys.append('selection.by = "samples"')
    if spec.algorithm.prior == "samples":
        keys.append('algorithm.prior = "samples"')
    if not keys:
        return rule.cautions()
    return (
        *rule.cautions(),
        f"{' and '.join(keys)}: members claim their numbers of training samples, and nobody can verify them; a claim "
        f"counts up to limits.samples = {spec.limits.samples}: set that near the largest honest number",
    )


def fitting_objectives(spec: RunSpec, rule: Algorithm, objectives: tuple[str, ...]) -> tuple[str, ...]:
    """The objectives of a run.

    Args:
        spec: of the run.
        rule: that it names.
        objectives: of the task, in its order, as whoever submits knows them; the specification's own come first.

    Raises:
        SpecError: they suit neither the rule nor what the specification says of them.
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
    try:
        rule.fit(named)
    except HyperparameterError as error:
        raise SpecError(f"algorithm.{error}") from error
    return named
