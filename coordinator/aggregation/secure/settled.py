"""The inputs and the results of a session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.phases import Replies, Reply
from federation.secure import masks
from federation.secure.blocks import blocks
from federation.secure.bounds import EVALUATION, Bounds
from federation.secure.fields import Reals
from federation.secure.thresholds import ONE, Thresholds
from federation.secure.wire import Words
from federation.work.secure.terms import Invited, SessionTerms


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a session needs of its coordinator.

    Attributes:
        purpose: what the session is for.
        agreed: the terms.
        terms_bytes: as they are sent.
        taus: tau1 and tau2 from the view of MASK, V and the digests of their masked vectors.
        specification: of the run, as it was submitted.
        bounds: what members allow of coefficients.
        effective_members: E*, as of `privacy.effective_members`.
        asked: the coefficients of W with which members have been asked for their masked vectors, in units of 2^-32;
            None where they have not been asked yet. Another processor may round the Gram matrix's solution otherwise.
    """

    purpose: str
    agreed: SessionTerms
    terms_bytes: bytes
    taus: Callable[[bytes, Sequence[str], Sequence[bytes]], tuple[bytes, bytes]]
    specification: bytes = b""
    bounds: Bounds = EVALUATION
    effective_members: float = 0.0
    asked: tuple[int, ...] | None = None


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
class Record:
    """What a session settled, for the signed step.

    Attributes:
        session: its digest.
        purpose: what it was for.
        agreed: the terms.
        terms: as they were sent.
        ready: U1.
        members: W.
        survivors: V; none where nothing was summed.
        coefficients: of W, in units of 2^-32; none where nothing was summed.
        tau1, tau2: the challenges; empty unless the mode is `verified`.
        alarms: what was wrong and did not void the session, for operators.
    """

    session: bytes
    purpose: str
    agreed: SessionTerms
    terms: bytes
    ready: tuple[str, ...]
    members: tuple[str, ...]
    survivors: tuple[str, ...]
    coefficients: tuple[int, ...]
    tau1: bytes = b""
    tau2: bytes = b""
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The unmasked sum.

    Attributes:
        words: R as words of Z_2^32, (n,); zeros where nothing was summed.
        cohort: W, with G.
        survivors: the replies to MASK of V, in order.
        consulted: the replies to all other stages that entered.
        record: what was settled.
        named: members whose answers were wrong and were corrected, with the reason.
        share: how much of the rule is left in the coefficients, from 0, plain averaging, to 1.
    """

    words: Words
    cohort: Cohort
    survivors: Replies
    consulted: tuple[Reply, ...]
    record: Record
    named: Mapping[str, str]
    share: float

    @cached_property
    def weights(self) -> Reals:
        """A of V, (|V|,)."""
        given = dict(zip(self.record.members, self.record.coefficients, strict=True))
        weights: Reals = np.array([given[name] for name in self.record.survivors], np.float64) / ONE
        return weights

    def vector(self, scale: float) -> NDArray[np.float32]:
        """R times a factor, (n,), float32."""
        made = np.empty(len(self.words), np.float32)
        start = 0
        for block in blocks(self.words):
            made[start : start + len(block)] = masks.reals(block) * scale
            start += len(block)
        return made


def invitation(keys: Mapping[str, bytes]) -> tuple[Invited, ...]:
    """Members by id, and the ids of their signing keys, sorted."""
    return tuple(Invited(name, keys[name]) for name in sorted(keys))
