"""The sizes of the minibatches of a training, and of the parts in which a minibatch passes through the model."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Samples that are cut into pieces: `full` pieces of `size` samples, then those of the sizes in `last`."""

    size: int
    full: int
    last: tuple[int, ...] = ()

    @classmethod
    def of(cls, samples: int, size: int, *, even: bool = False) -> "Cut":
        """At least one sample in pieces of `size`, 0 for a single piece; what remains is a piece of its own.

        With `even`, a remainder below half a piece and the full piece before it become two halves: the statistics of a
        few samples are far from those of the others, and one sample has none. There are as many pieces as without.
        """
        size = min(size or samples, samples)
        full, rest = divmod(samples, size)
        if even and 0 < 2 * rest < size:
            return cls(size, full - 1, _equal(size + rest, 2))
        return cls(size, full, (rest,) if rest else ())

    @property
    def sizes(self) -> list[int]:
        """The sizes of the pieces, in order."""
        return [self.size] * self.full + list(self.last)

    def sizes_among(self, first: int) -> set[int]:
        """The different sizes of the first pieces, one or more of them, or of all if there are fewer."""
        return {self.size for _ in range(min(1, self.full))} | set(self.last[: max(0, first - self.full)])

    @property
    def smallest(self) -> int:
        """The size of the smallest piece."""
        return min(self.last, default=self.size)

    def samples_in(self, first: int) -> int:
        """The samples in so many first pieces, or in all if there are fewer."""
        return self.size * min(first, self.full) + sum(self.last[: max(0, first - self.full)])


def shares(samples: int, processes: int, *, even: bool = False) -> tuple[int, ...]:
    """The samples of a minibatch that each process gets; with `even` none gets one sample, if there are two or more."""
    used = min(processes, max(1, samples // 2)) if even else processes
    return _equal(samples, used) + (0,) * (processes - used)


@dataclass(frozen=True, kw_only=True)
class Forming:
    """How a training forms its minibatches.

    Attributes:
        samples: of the training split, at least one.
        batch_size: of a minibatch; 0 is the whole split.
        steps: minibatches that are formed.
        micro_batch: the most samples that pass through the model at a time; 0 is any number.
        processes: that train together.
    """

    samples: int
    batch_size: int
    steps: int
    micro_batch: int = 0
    processes: int = 1

    def parts(self, *, even: bool) -> dict[int, list[Cut]]:
        """For each size of a minibatch that is formed: how each process cuts its samples."""
        formed = Cut.of(self.samples, self.batch_size, even=even).sizes_among(self.steps)
        return {size: list(self._cuts(size, even=even)) for size in formed}

    def _cuts(self, size: int, *, even: bool) -> Iterator[Cut]:
        for share in shares(size, self.processes, even=even):
            if share:
                yield Cut.of(share, self.micro_batch, even=even)

    def smallest_minibatch(self, *, even: bool) -> int:
        """The samples in the smallest minibatch that is formed."""
        return min(self.parts(even=even))

    def smallest_part(self, *, even: bool) -> int:
        """The fewest samples that pass through the model at a time."""
        return min(cut.smallest for cuts in self.parts(even=even).values() for cut in cuts)


def _equal(samples: int, pieces: int) -> tuple[int, ...]:
    """The sizes of pieces that differ by at most one sample, the larger ones first."""
    size, rest = divmod(samples, pieces)
    return (size + 1,) * rest + (size,) * (pieces - rest)
