"""A run specification with the algorithm that it names: what a run needs to be taken."""

from coordinator.aggregation.registry import Algorithm, HyperparameterError, algorithm
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
    if rule.optimiser() is not None and spec.server.optimiser != "sgd":
        raise SpecError(f"server.optimiser: {rule.name} brings its own; leave it out")
    return spec, rule
