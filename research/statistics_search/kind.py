"""The kind "statistics" of experiments."""

from fedpareto.experiments.kinds import ExperimentKind
from statistics_search.specification import StatisticsSearchSpecification


class StatisticsSearch(ExperimentKind):
    """Searches for what private sums of statistics show of one member and of one sample."""

    specification = StatisticsSearchSpecification

    def measure(self, specification: StatisticsSearchSpecification) -> tuple[dict[str, float], list[dict[str, float]]]:
        """As `statistics_search.samples.told` or `statistics_search.sets.reached`."""
        from statistics_search.samples import told  # noqa: PLC0415 - it imports the code of members
        from statistics_search.sets import reached  # noqa: PLC0415 - as above

        return (reached if specification.attack == "members" else told)(specification), []
