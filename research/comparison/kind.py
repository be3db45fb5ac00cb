"""The kind "comparison" of experiments."""

from comparison.specification import ComparisonSpecification
from fedpareto.experiments.kinds import ExperimentKind


class Comparison(ExperimentKind):
    """Rules on tasks of ten members, honest and attacked."""

    specification = ComparisonSpecification

    def measure(self, specification: ComparisonSpecification) -> tuple[dict[str, float], list[dict[str, float]]]:
        """As `comparison.laboratory.measure`."""
        from comparison.laboratory import measure  # noqa: PLC0415 - it imports PyTorch

        return measure(specification, self.data)
