"""The rules by which a member tells counts: few samples tell nothing, and small counts are told as 0."""

from dataclasses import dataclass, fields, replace

from federation.statistics.sums import ColumnSums, empty


@dataclass(frozen=True, kw_only=True)
class MemberRules:
    """The rules of an owner.

    Attributes:
        samples: the fewest samples that are described at all.
        samples_per_bin: the fewest samples for each bin of a histogram.
        smallest: the smallest count of a bin, of a class, or of values outside the range that is told as it is.

    Raises:
        ValueError: one is below 1.
    """

    samples: int = 50
    samples_per_bin: int = 10
    smallest: int = 5

    def __post_init__(self) -> None:
        if wrong := [item.name for item in fields(self) if getattr(self, item.name) < 1]:
            raise ValueError(f"{wrong[0]} = {getattr(self, wrong[0])}: a rule of statistics is a number from 1")

    def problem(self, samples: int, bins: int) -> tuple[str, str] | None:
        """The reason and the message of a decline, for these samples and bins; None if they are described."""
        if samples < self.samples:
            return "statistics:samples", f"statistics are told of at least {self.samples} samples"
        if bins * self.samples_per_bin > samples:
            most = f"{bins} bins are asked for; there is at most one for {self.samples_per_bin} samples"
            return "statistics:bins", most
        return None

    def told(self, sums: ColumnSums) -> ColumnSums:
        """The sums of a column as they leave the site.

        Of a channel, all values of a sample may be alike, so that a count is divided by the values of one sample. A
        column with most of its values outside its range is told as one without values: a narrow range would ask for
        the samples beyond a threshold.
        """
        if 2 * sums.outside > sums.count:
            return empty(sums)
        outside, *cells = (0 if count < self.smallest * sums.unit else count for count in (sums.outside, *sums.cells))
        return replace(sums, outside=outside, cells=tuple(cells))
