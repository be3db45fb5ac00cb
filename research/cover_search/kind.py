"""The kind "search" of experiments."""

from cover_search.specification import SearchSpecification
from fedpareto.experiments.kinds import ExperimentKind


class CoverSearch(ExperimentKind):
    """Searches for what a malicious coordinator can make a private sum show."""

    specification = SearchSpecification

    def measure(self, specification: SearchSpecification) -> tuple[dict[str, float], list[dict[str, float]]]:
        """As `cover_search.laboratory.measure`."""
        from cover_search.laboratory import measure  # noqa: PLC0415 - it imports PyTorch

        return measure(specification), []
