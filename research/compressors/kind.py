"""The kind "compressors" of experiments."""

from compressors.specification import CompressorSpecification
from fedpareto.experiments.kinds import ExperimentKind


class Compressors(ExperimentKind):
    """Sketches of Jacobians at equal bytes."""

    specification = CompressorSpecification

    def measure(self, specification: CompressorSpecification) -> tuple[dict[str, float], list[dict[str, float]]]:
        """As `compressors.laboratory.measure`."""
        from compressors.laboratory import measure  # noqa: PLC0415 - it imports PyTorch

        return measure(specification, self.data)
