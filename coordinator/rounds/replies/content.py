"""Bounds of a reply: its fields match its assignment, and its names, numbers and payload are within limits."""

import math
import re

from google.protobuf.timestamp_pb2 import Timestamp

from federation.digests import parse
from federation.record import bound_fields
from federation.record.bound_fields import difference
from federation.record.results import not_finite
from federation.refusals import Refusal
from federation.spec.run_sections import LimitsSpec
from federation.text import escaped
from federation.transport.payload_check import PayloadCheck
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.work.base import Work
from federation.work.registry import noise_asked

MAX_NUMBERS = 2000  # losses and metrics of one reply
NUMBER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]{0,119}")
_YEAR_1, _YEAR_10000 = -62_135_596_800, 253_402_300_800  # in seconds from 1970


def check_is_time(created: Timestamp) -> None:
    """Validates a client's timestamp.

    Raises:
        Refusal: `manifest`.
    """
    if not (_YEAR_1 <= created.seconds < _YEAR_10000 and 0 <= created.nanos < 1_000_000_000):
        raise Refusal("manifest", f"created is not a time: {created.seconds} s and {created.nanos} ns")


def check_matches(manifest: ReplyManifest, order: AssignmentManifest) -> None:
    """Raises if a reply differs from its assignment.

    Raises:
        Refusal: `mismatch:<field>`, or `payload-digest` for a payload that is not a digest.
    """
    if name := difference(order, manifest, bound_fields.REPLY):
        stated = getattr(manifest, name)
        if name == "rows":
            stated = [(row.name, row.dtype, row.length) for row in manifest.rows]
        raise Refusal(f"mismatch:{name}", f"the reply says {stated!r}, its assignment differs")
    if bool(manifest.payload) != bool(order.rows) or bool(manifest.payload_bytes) != bool(order.rows):
        raise Refusal("mismatch:payload", "the reply must carry a payload exactly when its assignment asks for rows")
    if manifest.payload:
        try:
            parse(manifest.payload)
        except ValueError as error:
            raise Refusal("payload-digest", str(error)) from None


def content_problem(manifest: ReplyManifest, kind: type[Work], limits: LimitsSpec) -> Refusal | None:
    """The problem of the numbers in the manifest of a reply to work of this kind; None if there is none."""
    if manifest.samples > limits.samples or (kind.needs_samples and manifest.samples == 0):
        return Refusal(
            "limit:samples",
            f"{manifest.samples} training samples claimed; between 1 and {limits.samples} are taken (limits.samples)",
        )
    numbers = [*manifest.losses.items(), *manifest.metrics.items()]
    if len(numbers) > MAX_NUMBERS:
        return Refusal("limit:metrics", f"{len(numbers)} losses and metrics; at most {MAX_NUMBERS}")
    for name, _ in numbers:
        if NUMBER_NAME.fullmatch(name) is None:
            rule = "at most 120 letters, digits and _ . / : -"
            shown = escaped(name, 80)  # no mutant: any length that is easy to read
            return Refusal("limit:metrics", f"'{shown}' cannot be the name of a loss or a metric: {rule}")
    if problem := not_finite(manifest):
        return Refusal("non-finite", problem)
    stated = manifest.privacy
    if not (
        all(value >= 0 and math.isfinite(value) for _, value in stated.ListFields())  # no mutant: it leaves out 0
        and stated.rate <= 1
        and stated.delta < 1
    ):
        return Refusal("privacy", "a number of its statement on noise is out of range")
    return None


def privacy_problem(manifest: ReplyManifest, order: AssignmentManifest) -> Refusal | None:
    """The problem of the noise that a reply states, if its assignment asks for noise; None if there is none.

    Less noise and a larger clip protect a sample less, and so do more steps and larger minibatches.
    """
    training = noise_asked(order.kind, order.work)
    if training is None:
        return None
    wanted, most, stated = training.private, training.mechanism(manifest.samples), manifest.privacy
    if (
        stated.noise >= wanted.noise
        and 0 < stated.clip <= wanted.clip
        and 0 < stated.rate <= most.rate
        and 0 < stated.steps <= most.steps
    ):
        return None
    return Refusal(
        "privacy",
        f"the run asks for noise {wanted.noise:g} and clip {wanted.clip:g} (privacy.sample_noise) in at most "
        f"{most.steps} steps at the rate {most.rate:g}; the reply states noise {stated.noise:g} and clip "
        f"{stated.clip:g} in {stated.steps} steps at the rate {stated.rate:g}",
    )


def payload_problem(check: PayloadCheck, kind: type[Work], limits: LimitsSpec) -> Refusal | None:
    """The problem of the content of a payload that arrived completely; None if there is none."""
    return check.problem or kind.problem(check.norms, limits)
