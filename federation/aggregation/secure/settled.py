"""The members of a session before the sum, and the sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.phases import PhaseReply, Record, Replies
from federation.secure import masks
from federation.secure.blocks import blocks
from federation.secure.fields import Reals
from federation.secure.thresholds import ONE, Thresholds
from federation.secure.wire import Words
from federation.work.secure.terms import Invited


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The members W before the sum.

    Attributes:
        thresholds: of the members that are ready.
        replies: to READY, of W in order.
        gram: of their sketches, (|W|, |W|); None in mode `sum`.
    """

    thresholds: Thresholds
    replies: Replies
    gram: Reals | None

    @property
    def members(self) -> tuple[str, ...]:
        """W, sorted."""
        return tuple(reply.client_id for reply in self.replies)


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The unmasked sum.

    Attributes:
        words: R as words of Z_2^32, or Z_2^64 of integers, (n,); zeros where nothing was summed.
        cohort: W, with G.
        survivors: the replies to MASK of V, in order.
        consulted: the replies to all other phases, and those to MASK that were left out, since they had another view.
        record: the results, for the signed step.
        named: members whose answers were wrong and were corrected, with the reason.
        share: the rule's part in the coefficients, from 0, plain averaging, to 1.
    """

    words: Words
    cohort: Cohort
    survivors: Replies
    consulted: tuple[PhaseReply, ...]
    record: Record
    named: Mapping[str, str]
    share: float

    @cached_property
    def weights(self) -> Reals:
        """A of V, (|V|,)."""
        by_member = dict(zip(self.record.members, self.record.coefficients, strict=True))
        weights: Reals = np.array([by_member[name] for name in self.record.survivors], np.float64) / ONE
        return weights

    def vector(self, scale: float) -> NDArray[np.float32]:
        """R times a factor, (n,), float32."""
        scaled = np.empty(len(self.words), np.float32)
        start = 0
        for block in blocks(self.words):
            # Section 1: the integers first, then the public factor in float64: scaled before, the sum would not be
            # exact.
            scaled[start : start + len(block)] = masks.reals(block) * scale
            start += len(block)
        return scaled


def invitation(keys: Mapping[str, bytes]) -> tuple[Invited, ...]:
    """Members by id, and the ids of their signing keys, sorted."""
    # Section 2a: sorted: members refuse terms in another order.
    return tuple(Invited(name, keys[name]) for name in sorted(keys))
