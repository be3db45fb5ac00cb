"""The kind "leakage" of experiments."""

from fedpareto.experiments.kinds import ExperimentKind
from leakage.specification import LeakageSpecification


class Leakage(ExperimentKind):
    """Attacks of an honest-but-curious coordinator."""

    specification = LeakageSpecification

    def measure(self, specification: LeakageSpecification) -> tuple[dict[str, float], list[dict[str, float]]]:
        """As `leakage.laboratory.measure`."""
        from leakage.laboratory import measure  # noqa: PLC0415 - it imports PyTorch

        return measure(specification)
