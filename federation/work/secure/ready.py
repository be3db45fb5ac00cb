"""READY: make the vector that the session sums, and keys for the session."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.owners_code import described, passes
from federation.record import bound_fields
from federation.record.bound_fields import repeated
from federation.secure import hashing
from federation.secure.derivation import Purpose, own
from federation.secure.thresholds import Mode
from federation.spec.computation import AtBase, Computation, Measure
from federation.statistics.words import Integers, word_count
from federation.work.base import Demand, Result, RowSchema, Shape, Shows, Terms, Work, WorkError, WorkingClient
from federation.work.evaluate.work import Evaluate
from federation.work.secure import failing, limits, member_checks, vector
from federation.work.secure.journal import Journal, session_names
from federation.work.secure.terms import SessionStage, SessionTerms, Statement
from federation.work.statistics import one_sum
from federation.work.statistics.work import Statistics

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

SPECIFICATION = "specification"
"""The input of READY: the specification of the run, as it was submitted."""
MAX_SPECIFICATION = 64 << 10  # bytes


@dataclass(frozen=True, kw_only=True)
class Ready(Work):
    """READY: make the vector, and keys for the session.

    Attributes:
        agreed: the terms.
        terms_bytes: the terms as received; the session is named by their digest.
    """

    name: ClassVar[str] = SessionStage.READY.value
    doing: ClassVar[str] = "preparing a private round"
    shows: ClassVar[Shows] = Shows.NOTHING
    sends_update: ClassVar[bool] = True
    # Section 3, rule 2: then the session is over, also if the coordinator never goes on: secrets do not stay.
    ends_after: ClassVar[timedelta | None] = timedelta(days=1)
    # Section 3, rule 2: once in all attempts together, or a voided attempt could be asked for again.
    once_ever: ClassVar[bool] = True
    # Section 2d: a computation that fails is answered like one that succeeds: a decline would tell something of the
    # data.
    conceals: ClassVar[bool] = True

    agreed: SessionTerms
    terms_bytes: bytes

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """The deadline of `[train]` or `[statistics]`; the conversation decides how many replies it needs."""
        deadline = spec.statistics.deadline_seconds if spec.describes else spec.train.deadline_seconds
        return Terms(deadline, None)

    @property
    def inner(self) -> Work:
        """The work whose result is the vector."""
        return self.agreed.work

    @property
    def from_round_model(self) -> bool:
        return self.inner.from_round_model

    @property
    def session(self) -> bytes:
        """The digest of the session."""
        return hashing.session(self.terms_bytes)

    @property
    def evaluates(self) -> bool:
        """True if the vector holds the metrics of an evaluation."""
        return isinstance(self.inner, Evaluate)

    @property
    def describes(self) -> bool:
        """True if the vector holds statistics of the data."""
        return isinstance(self.inner, Statistics)

    def once(self) -> str:
        return f"{self.session.hex()}/{self.name}/0"

    def kept_under(self) -> str:
        return session_names(self.session)

    def session_vector(self) -> tuple[str, str]:
        return self.session.hex(), self.inner.name

    def demand(self, samples: int) -> Demand | None:
        return self.inner.demand(samples)

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        return {SPECIFICATION: MAX_SPECIFICATION}

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        """None: the vector stays here. Errors are those of the work."""
        inner = self.inner.rows(shape)  # raises where the work makes no sense
        if not self.describes and any(row.dtype != "F32" for row in inner):
            raise WorkError("a private round sums rows of float32 only")
        return ()

    def length(self, shape: Shape) -> int:
        """The number of coordinates of the vector."""
        if isinstance(self.inner, Evaluate):
            return len(vector.entries(self.inner, shape.objectives))
        if isinstance(self.inner, Statistics):
            return word_count(self.inner.columns, self.inner.bins)
        return sum(row.length for row in self.inner.rows(shape))

    def computation(self, client: WorkingClient) -> Computation | None:
        """The computation of the inner work, seeded by the session's secret."""
        # Section 3: all that can be refused is refused here, before the data are used: a later refusal could depend on
        # them.
        evaluates, updates = self.evaluates, not (self.evaluates or self.describes)
        member_checks.check_terms(client, self.agreed, self.length(client.shape), updates=updates)
        # Section 8: the specification first: bounds, terms and noise are compared with what it says, and not with what
        # the terms say.
        spec = member_checks.specification(client, bytes(client.inputs[SPECIFICATION]))
        member_checks.check_algorithm(client, spec, self.inner.name)
        member_checks.check_asked(client, spec, self.agreed, self.length(client.shape))
        if isinstance(self.inner, Statistics):
            # Section 3, rule 8: before the samples are read: a later refusal could depend on them.
            one_sum.check_ready(client, self.session.hex(), self.inner.question, self.agreed.ids)
        else:
            member_checks.check_noise(client, spec, evaluation=evaluates)
            # Section 3, rule 5: checked, not counted: nothing has left yet, and a session that ends here shows nothing.
            limits.check_sessions(client, self.session.hex(), work=self.inner.name, count=False)
        # Section 2d: before the model is used, so `failing` tells of earlier models, and nothing of this one.
        failing.check_failing(client, self.session.hex())
        journal = Journal(client.memory, self.session)
        if not journal.known:
            # Section 3, rule 2: with a new secret, the same vector would get other shares and masks: two sums of it.
            if client.again:
                raise WorkError("this member answered in this session, and keeps nothing of it", reason="session-over")
            new_secret = client.site.new_secret
            # On the disk before anything follows from it: keys, training, noise and masks must survive a restart.
            journal.begin(secrets.token_bytes(32) if new_secret is None else new_secret(self.session.hex()))
        if self.describes:
            return None  # section 2e: no model is read, and no trainer starts
        computation = self.inner.computation(client)
        if isinstance(computation, Measure):
            # Section 2b: a metric that is not finite stays, as the worst value: if it were left out, the set of metrics
            # would tell of the model.
            return replace(computation, undefined=True)
        if computation is None:
            return None
        # Section 3: not the run's seed: everybody knows it, and could repeat the training and compute its noise again.
        seed = int.from_bytes(own(journal.secret, Purpose.TRAINING, self.session)[:8], "big") >> 1
        return replace(computation, secret_seed=seed) if isinstance(computation, AtBase) else computation

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        journal, agreed = Journal(client.memory, self.session), self.agreed
        member_checks.check_order(journal, SessionStage.READY, 0, again=client.again)
        if agreed.disclose:  # the reply shows numbers of this member
            limits.check_sessions(client, self.session.hex(), work=self.inner.name, count=True)
        made = self._made(client, journal, computed)
        # Section 2d: before the reply, and before a failure is shown: a decline has to count like an answer.
        failing.count(client, self.session.hex(), self.inner.name, made.result.failure)
        # Section 2d: a stand-in has no loss and no accuracy, and invented ones in the clear would steer the rule. So
        # this failure shows.
        if made.result.failure and agreed.disclose:
            raise failing.FailureShown(made.result.failure)
        result, divisor = made.result, made.divisor / client.site.stretch
        # The vector before the facts that name it: after a crash in between, READY is done again, and nothing refers to
        # a missing vector.
        vector_digest = journal.keep_vector(made.values, divisor)
        spec = member_checks.specification(client, bytes(client.inputs[SPECIFICATION]))
        # Section 3.5: kept with the facts below: MASK is checked by the bounds that the owner allowed when the member
        # trained.
        allowed = member_checks.check_algorithm(client, spec, self.inner.name)
        journal.agree(
            SessionStage.READY,
            0,
            {
                "mode": agreed.mode.value,
                "length": agreed.length,
                **repeated(agreed, bound_fields.SESSION),
                "origin": member_checks.origin_facts(client),
                "invited": list(agreed.ids),
                "work": self.inner.name,
                "question": self.inner.question if isinstance(self.inner, Statistics) else "",
                "bounds": asdict(allowed),
                "noise": spec.privacy.evaluation_noise if self.evaluates else 0.0,
                "clip": agreed.clip,
                "blur": agreed.blur,
                "vector": vector_digest,
            },
        )
        public = journal.keys.public
        # Section 3, rule 0: only what the terms name, which `check_terms` has compared with the policy; all others
        # would leave in the clear.
        shown = tuple(f"train/{name}" for name in agreed.disclose)
        metrics = {name: value for name, value in result.metrics.items() if name.startswith(shown)} if shown else {}
        if "norm" in agreed.disclose:
            metrics["norm"] = divisor
        return replace(
            result,
            rows={},
            seconds=0.0,  # section 2d: the time would tell that a computation failed
            losses=result.losses if "loss" in agreed.disclose else {},  # section 3, rule 0: as above
            metrics=metrics,
            statement=Statement(
                session=self.session,
                stage=SessionStage.READY,
                keys=public.c + public.s,
                measured=made.measured,
                blur=agreed.blur,
                signed=allowed.signed,  # section 3.5, rule 3: the others may ask for none otherwise
            ),
        )

    def _made(self, client: WorkingClient, journal: Journal, computed: Result) -> "_Made":
        """The vector of the session. A computation that failed, or whose vector cannot be used, gets another one."""
        clip, failure = self.agreed.clip, computed.failure
        if isinstance(self.inner, Statistics):
            # Section 2e: no stand-in. The question and the data decide, and no model that the coordinator chose; so a
            # decline says which column or rule it is.
            return _Made(computed, self.inner.words(client), 1.0)
        if isinstance(self.inner, Evaluate):
            # Section 2b: also of a failed evaluation: each metric that this member computes is there, and counts as the
            # worst.
            values, measured = vector.of_metrics(computed.metrics, self.inner, client.shape.objectives)
            return _Made(computed, values, vector.divisor(values, clip, sketched=False), measured)
        if not failure:
            try:
                return self._made_of_rows(client, computed)
            except BaseException as error:  # not finite, zero, not to be sketched, no memory: all follow from the model
                if passes(error):
                    raise
                failure = described(error)
        # Section 2d: no loss, metric or state of a failed training is kept or sent.
        nothing = Result({}, {}, {}, computed.samples, failure=failure)
        values = failing.stand_in(journal, clip, self.agreed.length)
        # Section 2d: not sketched: zero is allowed here, since `Journal.direction` gives it a random direction.
        return _Made(nothing, values, vector.divisor(values, clip, sketched=False))

    def _made_of_rows(self, client: WorkingClient, computed: Result) -> "_Made":
        """The rows of the work as one vector. Raises WorkError if it cannot be used, and what the work raises."""
        result = self.inner.answer(client, computed)
        values = vector.joined([result.rows[row.name] for row in self.inner.rows(client.shape)])
        return _Made(
            result, values, vector.divisor(values, self.agreed.clip, sketched=self.agreed.mode is not Mode.SUM)
        )


@dataclass(frozen=True, eq=False)
class _Made:
    """What READY was made of.

    Attributes:
        result: what may be shown and kept; it says if the computation failed.
        values: the vector, (n,).
        divisor: of the vector.
        measured: of an evaluation, a byte for each metric.
    """

    result: Result
    values: NDArray[np.float32] | Integers
    divisor: float
    measured: bytes = b""
