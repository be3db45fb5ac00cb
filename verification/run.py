"""The verification of a whole run: round by round, each from the state after the one before."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np

from federation import digests
from federation.aggregation.base import Algorithm
from federation.aggregation.interface import UNREAD, HyperparameterError
from federation.aggregation.metrics.step_rate import step_rate
from federation.aggregation.phases import Step
from federation.aggregation.registry import algorithm
from federation.digests import digest
from federation.plugins import names_of_others
from federation.record.bundle import BlobAbsent, BundleReader
from federation.record.rounds import OpenedRound, RecordReader
from federation.record.withdrawals import withdrawal_problems
from federation.spec.run_facts import run_facts
from federation.spec.run_sections import AUTO
from federation.spec.run_spec import RunSpec, SpecError
from federation.v1.common_pb2 import ResultManifest, StepManifest
from federation.v1.record_pb2 import RoundRecord
from verification.arithmetic import Matrix, check_gram, check_squares, gram_and_squares
from verification.assignments import (
    RunCourse,
    check_description,
    check_in_order,
    check_measures,
    measured_in,
    metrics_of,
    round_problems,
    watched,
)
from verification.errors import VerificationError, Verified
from verification.keys import Keys, read_keys
from verification.log import RunLog, read_log
from verification.model import (
    CHOSEN,
    ReplayState,
    canonical,
    check_begins,
    check_filled,
    check_keeps,
    check_makes,
    check_noise_length,
    combined_rows,
    stands_still,
)
from verification.private import check_described, private_step, refusable_orders
from verification.recorded_metrics import MeasuredRound, MetricFindings, RecordedMetrics
from verification.replay import BundleRunFacts, compared_rows, open_step, read_compared, read_gram
from verification.signed import SignedRound

_CUT_SHORT = ("STOPPED", "FAILED")  # states of a run whose last round may have ended before its bytes were counted
_COEFFICIENTS = 1e-9  # the largest distance of two directions, relative to the longest row


def verify(bundle: BundleReader, fingerprint: str = "") -> Iterator[Verified]:
    """Verifies the rounds of a bundle in their order; arguments and errors are those of `OpenedRun.of` and `verify`."""
    yield from OpenedRun.of(bundle, fingerprint).verify()


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """The run of a bundle, whose certificates have been verified.

    Attributes:
        facts: never change during the run.
        keys: of the federation.
        reader: opens the envelopes of rounds.
        models: the digests of the models to use: the initial model, then the model after each verified round.
    """

    facts: BundleRunFacts
    keys: Keys
    reader: RecordReader
    models: list[str]

    @classmethod
    def of(cls, bundle: BundleReader, fingerprint: str = "") -> Self:
        """Opens the run.

        Args:
            bundle: the record of a run.
            fingerprint: the SHA-256 of the CA's certificate that the caller trusts; empty trusts the bundle's.

        Raises:
            VerificationError: a certificate or the specification is wrong.
        """
        keys = read_keys(bundle, fingerprint)
        facts = _facts(bundle, keys)
        of_all = run_facts(bundle.about.federation_id, bundle.about.run_id, bundle.specification, facts.spec)
        reader = RecordReader(keys.signers, of_all)
        return cls(facts=facts, keys=keys, reader=reader, models=[bundle.about.initial_model])

    @cached_property
    def log(self) -> RunLog:
        """The audit log of the run. Errors are those of `read_log`."""
        return read_log(self.facts.bundle, self.keys)

    def verify(self) -> Iterator[Verified]:
        """Verifies the rounds in their order, and then compares them with the audit log.

        Raises:
            VerificationError: something does not follow from the signed messages.
            BundleError: the file is damaged.
        """
        about, log = self.facts.bundle.about, self.log
        at = ReplayState(model=about.initial_model)
        bundle, spec, metrics = self.facts.bundle, self.facts.spec, RecordedMetrics(self.facts)
        course, named, grams = RunCourse(spec), {about.initial_model, *spec.models}, set[str]()
        # Verify, 1: before the rounds: `check_logged` judges each envelope by the entries of keys that are found here.
        log.check_keys_logged(self.keys)
        unfilled = check_filled(self.facts, self.keys.signers)
        for record in bundle.rounds():
            try:
                # Verify, a verifier of your own, in this order: form, signatures, arithmetic, log. Each relies on what
                # the one before has refused.
                check_in_order(record, spec)
                begin = replace(at, model=measured_in(spec, record.number, at.model))
                opened = self.reader.read(record, begin.model, begin.previous_step)
                signed = SignedRound.of(opened, log.gone(opened))
                verified, after = self._round(record, opened, signed, begin, metrics)
                model, at = after.evaluated, after if spec.trains else at
                log.check_logged(opened, record.reason)
                # Verify, 10 and 12: what no arithmetic depends on: it would pass although members were asked for
                # something else.
                self._check_fits(opened, model)
                course.check_goes_on(record)
                named |= _named(opened, at)
                grams |= {signed.step.gram} if signed.step is not None else set()
            except VerificationError as error:
                raise VerificationError(f"round {record.number}: {error}") from error
            self.models.append(model)
            forgotten = log.forgotten({client for _, client in signed.asked}) if about.payloads else []
            if forgotten:
                verified = replace(
                    verified,
                    missing=tuple(f"{reason} (forgotten: {', '.join(forgotten)})" for reason in verified.missing),
                )
            if signed.step is not None and signed.step.noise:
                verified = replace(verified, missing=(*verified.missing, CHOSEN))
            if begin.model in unfilled:
                verified = replace(verified, missing=(*verified.missing, unfilled[begin.model]))
            yield verified
        # Verify, a verifier of your own, 9: or the steps would verify, and the model that is handed on would be another
        # one.
        if about.model != at.model:
            raise VerificationError(
                f"the bundle says that the run ends with the model {about.model}; its steps end with {at.model}"
            )
        course.check_ends(about.state, watched(about, spec))
        consents = bundle.consents().consents
        answered = {name: self.reader.facts[name] for name in ("federation_id", "run_id", "spec")}
        log.check_consents_logged(consents, answered, self.keys)
        self._check_withdrawals()
        log.check_run_logged(self.facts.spec_digest, about, self.reader.submitted_by)
        # Verify, 15: at the end: only then is it known which entries no message of the record explains.
        log.check_all_logged()
        for name in bundle.blobs:
            if name not in named:
                raise VerificationError(f"no signed message names the blob {name}, which the bundle has")
            if not about.payloads and name not in grams:
                raise VerificationError(
                    f"the bundle says that it has neither updates nor models, and has the blob {name}"
                )
        # Verify, a verifier of your own, 6: also those that no check has read.
        bundle.verify_blobs(bundle.blobs)

    def _check_withdrawals(self) -> None:
        """Checks that each client that has left has signed it. Raises VerificationError."""
        bundle = self.facts.bundle
        withdrawals = bundle.withdrawals().withdrawals
        for problem in withdrawal_problems(
            self.log.entries, withdrawals, self.keys.signers, bundle.about.federation_id
        ):
            raise VerificationError(problem)

    @names_of_others()
    def _round(
        self,
        record: RoundRecord,
        opened: OpenedRound,
        signed: SignedRound,
        at: ReplayState,
        metrics: RecordedMetrics,
    ) -> tuple[Verified, ReplayState]:
        """Verifies one round. Returns the findings and the state of the run after it. Raises VerificationError."""
        run = self.facts
        count = f"{signed.envelopes} signatures"
        # Verify, 14: first, and for rounds without a step, too: a voided attempt can have asked for what shows an
        # update.
        for problem in refusable_orders(run.spec, opened):
            raise VerificationError(problem)
        if signed.step is None and record.state == "COMPLETED":
            if record.attempt:
                raise VerificationError(f"it says attempt {record.attempt + 1}; a round that makes no step has one")
            check_measures(run.spec, opened, signed.gone)
            if opened.result is not None:
                return self._described(record, signed, opened.result.manifest, metrics, at), at
            named = self._compared(metrics, record, signed, None, at, at).named
            members = dict(record.metrics).get("evaluated", 0)
            words = f"{members:.0f} members measured {at.model}; verified: {count}, {len(named.verified)} metrics"
            lacking = [f"metrics: {', '.join(named.unchecked)}: {named.why}"] if named.unchecked else []
            return (
                Verified(
                    number=record.number,
                    words=words,
                    missing=tuple(lacking),
                    measured=named.measured,
                    unchecked=named.unchecked,
                ),
                at,
            )
        if signed.step is None:
            reason = f": {record.reason}" if record.reason else ""
            measured = self._compared(metrics, record, signed, None, at, at).named.measured
            return Verified(
                number=record.number, words=f"{record.state.lower()}{reason}; {count}", measured=measured
            ), at
        step = signed.step
        _check_suits(run, step)
        if run.bundle.has(at.model):
            size = run.bundle.size(at.model)
            for order in signed.asked.values():
                if order.base_model_bytes != size:
                    raise VerificationError(
                        f"the model has {size} bytes; {order.client_id} was told {order.base_model_bytes}"
                    )
        payloads = (reply.manifest.payload for reply in signed.replies.values())
        # Verify, a verifier of your own, 6: before they are read: everything below computes with these bytes under
        # their signed names.
        run.bundle.verify_blobs([*payloads, step.base_model, step.result_model, step.combined, step.noise])
        missing: list[str] = []
        memory = _memory(record, step, at)
        after = ReplayState(model=step.result_model, memory=memory, previous_step=signed.step_digest)
        checks = [count]
        made: Step | None = None
        try:
            replayed = open_step if run.spec.privacy.secure == "off" else private_step
            made = replayed(run, signed, step, at.memory.get("rule", {}))
            _check_step(run, made, step, at, after)
            squares = np.array(step.squared_norms) if step.gram_rows else np.diagonal(made.gram)
            longest = float(np.sqrt(max(squares.max(initial=0.0), 0.0)))
            if run.spec.privacy.secure == "off" and longest > run.spec.limits.norm * (1 + _COEFFICIENTS):
                raise VerificationError(
                    f"an update of the length {longest:.6g} entered the step; limits.norm refuses it"
                )
            checks.append(f"the rule's {len(step.coefficients)} coefficients" if step.coefficients else "the rule")
        except BlobAbsent as error:
            missing.append(f"the coefficients: {error}")
        if step.noise:
            try:
                check_noise_length(run.bundle, step.noise)
                checks.append("the length and the extremes of the noise")
            except BlobAbsent as error:
                missing.append(f"the noise: {error}")
        try:
            rows = combined_rows(run, signed, step, at)
            products: tuple[Matrix, Matrix] | None = None
            try:
                if made is None:
                    missing.append("the model: the rule was not evaluated")
                else:
                    compared, K, squares = check_makes(run, step, made, rows, at, after)
                    products = K, squares
                    checks.append(f"the model{' from its noise' if step.noise else ''}, {compared:,} numbers")
            except BlobAbsent as error:
                missing.append(f"the model: {error}")
            some = compared_rows(run, signed, step)
            K, squares = products or gram_and_squares(rows, some)
            check_gram(read_compared(run, step), K)
            if some:
                check_squares(np.array(step.squared_norms), squares, range(len(rows)))
            checks.append(f"K of {len(some)} rows, {len(rows)} lengths" if some else "K")
        except BlobAbsent as error:
            missing.append(f"K and the model: {error}")
        found = self._compared(metrics, record, signed, made, at, after)
        named = found.named
        checks.append(f"{len(named.verified)} metrics")
        if named.unchecked:
            missing.append(f"metrics: {', '.join(named.unchecked)}: {named.why}")
        verified = f"{len(step.replies)} updates; verified: {', '.join(checks)}"
        reason = f", which says: {record.reason}" if record.reason else ""
        lacks = f"an evaluation of its model, for which evaluate.every = {run.spec.evaluate.every} asks{reason}"
        findings = Verified(
            number=record.number,
            words=verified,
            missing=tuple(missing),
            absent=(lacks,) if found.unmeasured else (),
            measured=named.measured,
            unchecked=named.unchecked,
        )
        return findings, after

    def _described(
        self,
        record: RoundRecord,
        signed: SignedRound,
        stated: ResultManifest,
        metrics: RecordedMetrics,
        at: ReplayState,
    ) -> Verified:
        """The findings about a round that describes data. Raises VerificationError."""
        run, missing, checks = self.facts, list[str](), [f"{signed.envelopes} signatures"]
        gone = {name for names in self.log.left_out(signed) for name in names}
        try:
            run.bundle.verify_blobs(
                [
                    reply.manifest.payload
                    for reply in signed.evaluations.values()
                    if run.bundle.has(reply.manifest.payload)
                ]
            )
            checks.append(f"{check_described(run, signed, stated, record.document, gone)} columns")
        except BlobAbsent as error:
            missing.append(f"the result: {error}")
        found = self._compared(metrics, record, signed, None, at, at)
        words = f"{len(stated.replies)} members described their data; verified: {', '.join(checks)}"
        return Verified(number=record.number, words=words, missing=tuple(missing), measured=found.named.measured)

    def _compared(
        self,
        metrics: RecordedMetrics,
        record: RoundRecord,
        signed: SignedRound,
        made: Step | None,
        at: ReplayState,
        after: ReplayState,
    ) -> MetricFindings:
        """Compares the metrics of a round. Raises VerificationError for the first difference."""
        recorded, about = dict(record.metrics), self.facts.bundle.about
        last = record.number == about.rounds - 1 and about.state in _CUT_SHORT
        found = metrics.compare(
            MeasuredRound(
                number=record.number,
                recorded=recorded,
                signed=signed,
                made=made,
                at=at,
                after=after,
                cut_short=record.state == "OPEN" or (last and "bytes/up" not in recorded),
                left_out=partial(self.log.left_out, signed),
                measures=signed.step is not None or (record.state == "COMPLETED" and self.facts.spec.measures),
            )
        )
        if found.problem:
            raise VerificationError(found.problem)
        return found

    @names_of_others()
    def _check_fits(self, opened: OpenedRound, model: str) -> None:
        """Checks the parts of a round on which its step does not depend. Raises VerificationError."""
        for problem in round_problems(self.facts, opened, model):
            raise VerificationError(problem)


def _named(opened: OpenedRound, after: ReplayState) -> set[str]:
    """The digests of the blobs that the signed messages of a round, and the state after it, name."""
    named = {answer.reply.manifest.payload for exchange in opened.exchanges for answer in exchange.answers}
    if opened.step is not None:
        step = opened.step.manifest
        named |= {step.base_model, step.result_model, step.gram, step.combined, step.noise, *after.vectors.values()}
    return named


@names_of_others()
def _facts(bundle: BundleReader, keys: Keys) -> BundleRunFacts:
    try:
        spec = RunSpec.parse(bundle.specification)
        rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    except (SpecError, HyperparameterError, LookupError) as error:
        raise VerificationError(f"the specification: {error}") from error
    check_description(bundle.about, spec)
    about = bundle.about
    return BundleRunFacts(
        source="bundle",
        blobs=bundle,
        bundle=bundle,
        federation_id=about.federation_id,
        run_id=about.run_id,
        document=bundle.specification,
        spec=spec,
        spec_digest=digest(bundle.specification),
        rule=rule,
        objectives=tuple(about.objectives),
        kinds=metrics_of(about),
        chain=keys.clients.get,
        clients=keys.clients,
    )


def _check_suits(run: BundleRunFacts, step: StepManifest) -> None:
    """Checks that the parts of a step are those of a private run, of one that protects clients, or of another one.

    A private run alone has sessions and a combined vector, and a K of all its rows; a run that protects clients noise.
    """
    for name in ("result_model", "gram", "combined", "noise"):
        try:
            digests.parse(getattr(step, name) or ("" if name in ("result_model", "gram") else step.base_model))
        except ValueError as error:
            raise VerificationError(f"the {name} of the signed step: {error}") from error
    privacy = run.spec.privacy
    private = privacy.secure != "off"
    # Verify, 14: an open step in a private run would need updates that nobody may have; sessions in an open run would
    # not be checked.
    if bool(step.combined) != private or bool(step.secure) != private:
        raise VerificationError(
            f'the sessions of the signed step do not suit a run with privacy.secure = "{privacy.secure}"'
        )
    # Verify, 6: the rows of a private round are in nobody's hands; only a step in the clear has some of them compared.
    if private and (step.gram_rows or step.squared_norms):
        raise VerificationError("the signed K is of some rows alone; a private step has one combined vector")
    scale = 0.0
    if privacy.client_noise:
        scale = privacy.client_noise * (run.rule.sensitivity(len(step.replies)) or math.nan)
    # Verify, 13: noise without a specification for it is a free choice of the model.
    if bool(step.noise) != bool(privacy.client_noise):
        raise VerificationError(
            f"the signed step has {'' if step.noise else 'no '}noise; the specification says otherwise"
        )
    if step.noise_scale != scale:
        raise VerificationError(
            f"noise_scale of the signed step is {step.noise_scale!r}; the specification gives {scale!r}"
        )


def _memory(record: RoundRecord, step: StepManifest, at: ReplayState) -> dict[str, Any]:
    """The remembered state of the run after a step, whose digest is signed. Raises VerificationError."""
    # Verify, 8: before the rule runs: from another state, it would give another step that fits.
    check_begins(step, at)
    try:
        memory = json.loads(record.state_after)
        data = canonical(memory)
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"the state after the step is not JSON: {str(error)[:100]}") from error
    # Verify, 8: the bytes as well: two texts of one value would be one state with two digests.
    if not isinstance(memory, dict) or data != record.state_after.encode() or digest(data) != step.state_after:
        raise VerificationError("the state after the step has another digest than the one that was signed")
    vectors = memory.get("vectors", {})
    if not isinstance(vectors, dict) or not all(
        isinstance(name, str) and _is_digest(name) for name in vectors.values()
    ):
        raise VerificationError("the state after the step does not name its vectors by their digests")
    return memory


def _is_digest(text: str) -> bool:
    try:
        digests.parse(text)
    except ValueError:
        return False
    return True


def _check_step(run: BundleRunFacts, made: Step, step: StepManifest, at: ReplayState, after: ReplayState) -> None:
    """Checks that the signed step, and the state after it, follow from the replies. Raises VerificationError."""
    memory = after.memory
    spec = run.spec
    rate = _rate(run, made, step)
    by_coordinates = made.combination.coordinates is not None
    streamed = by_coordinates or bool(step.gram_rows)  # whether there is a direction is seen with the model
    still = not streamed and stands_still(made, step, [])
    if step.rate != (0.0 if still else rate) and not (streamed and step.rate == 0.0):
        raise VerificationError(
            f"the learning rate is {step.rate!r}; "
            + ("the replies give no direction, so it is 0" if still else f"the specification gives {rate!r}")
        )
    if still and step.result_model != step.base_model:
        raise VerificationError("the replies give no direction, and the step changes the model")
    if not streamed:
        check_keeps(run, not still, at, after)
    weights = made.combination.objectives
    facts: dict[str, Any] = {
        "algorithm": spec.algorithm.name,
        "hyperparameters": canonical(spec.algorithm.hyperparameters).decode(),
        "replies": [part.envelope for part in (*made.replies, *made.history)],
        "consulted": [reply.envelope for reply in made.consulted],
        "forgotten": list(made.forgotten),
    }
    for name, value in facts.items():
        signed = getattr(step, name)
        if (signed if isinstance(signed, str) else list(signed)) != value:
            raise VerificationError(f"{name} of the signed step is not what follows from the replies")
    if weights is None and step.weights:
        raise VerificationError("the signed step has weights of objectives; the rule gives none")
    if weights is not None:
        named = [[part.objective, part.weight] for part in step.weights]
        expected = [[name, weight] for name, weight in zip(weights.names, weights.weights.tolist(), strict=True)]
        _close(named, expected, "the weights of the objectives")
    if not by_coordinates:
        _check_coefficients(made, step)
    elif step.coefficients:
        raise VerificationError("the signed step has coefficients; the rule works coordinate by coordinate")
    now = memory.get("rule", {})
    computed = expected_state(run.rule, made.combination.state, at.memory.get("rule", {}), now)
    _close(now, computed, "the rule's state after the step")
    kept = sorted({*memory.get("vectors", {}).values(), *run.rule.blobs(made.combination.state)})
    if memory.get("blobs") != kept or memory.keys() - {"averaged"} != {"blobs", "rule", "vectors"}:
        raise VerificationError("the state after the step keeps other values or blobs than its rule and its vectors")


def expected_state(rule: Algorithm, computed: Mapping[str, Any], before: Mapping[str, Any], now: Any) -> dict[str, Any]:
    """The rule's state after a step, without keys that the version which made the record did not have.

    Args:
        rule: of the run.
        computed: the state that it gives.
        before: the state on record before the step.
        now: that after it, any JSON.
    """
    # Verify, 4: a key that the state had before the step stays, or a coordinator could begin anew with its default.
    missing = rule.added_state.difference(before, now if isinstance(now, Mapping) else ())
    return {name: value for name, value in computed.items() if name not in missing}


def _rate(run: BundleRunFacts, made: Step, step: StepManifest) -> float:
    """The rate that follows from the specification and, with "auto", from the signed K and coefficients, to the bit.

    Raises:
        BlobAbsent: the bundle has no K.
        VerificationError: no rate follows.
    """
    try:
        K = read_gram(run.blobs, step.gram) if run.spec.server.learning_rate == AUTO else UNREAD
        return step_rate(run.spec, step.round, made, K, np.array(step.coefficients))
    except ValueError as error:  # a BlobAbsent or a VerificationError is none
        raise VerificationError(f"no learning rate follows from the replies: {error}") from error


def _check_coefficients(made: Step, step: StepManifest) -> None:
    """Compares directions, since two solvers may find different weights of one direction. Raises VerificationError."""
    signed, computed = np.array(step.coefficients), made.combination.coefficients
    if signed.shape != computed.shape:
        raise VerificationError(f"the step has {len(signed)} coefficients; the rule gives {len(computed)}")
    difference = signed - computed
    with np.errstate(over="ignore", invalid="ignore"):  # NaN if signed coefficients are too large
        if step.gram_rows:  # the difference of the directions is no longer than this
            squares = np.array(step.squared_norms)
            square = float(np.abs(difference) @ np.sqrt(squares)) ** 2
        else:
            squares = np.diagonal(made.gram)
            square = float(difference @ made.gram @ difference)
    if not (np.isfinite(signed).all() and square <= _COEFFICIENTS**2 * max(float(squares.max()), 0.0)):
        largest = int(np.argmax(np.abs(difference)))
        raise VerificationError(
            f"coefficient {largest} is {signed[largest]!r}; the rule gives {computed[largest]!r} from K"
        )


def _close(recorded: Any, computed: Any, label: str) -> None:
    """Compares JSON values; numbers may differ by rounding. Raises VerificationError."""
    if isinstance(recorded, Mapping) and isinstance(computed, Mapping) and recorded.keys() == computed.keys():
        for name in recorded:
            _close(recorded[name], computed[name], f"{label}: {name}")
    elif isinstance(recorded, list) and isinstance(computed, list | tuple) and len(recorded) == len(computed):
        for index, pair in enumerate(zip(recorded, computed, strict=True)):
            _close(*pair, f"{label}: {index}")
    elif isinstance(recorded, float) and isinstance(computed, float | int):
        if not math.isclose(recorded, computed, rel_tol=1e-9, abs_tol=1e-12):
            raise VerificationError(f"{label} is {recorded!r}; {computed!r} follows from the replies")
    elif recorded != computed:
        raise VerificationError(f"{label} is {recorded!r}; {computed!r} follows from the replies")
