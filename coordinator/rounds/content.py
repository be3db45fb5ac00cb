"""What a reply must hold: its fields those of its assignment, its numbers and its payload within bounds."""

import math

from coordinator.rounds.evidence import BOUND_FIELDS
from coordinator.rounds.reported import names_problem
from federation.digests import parse
from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from federation.runs import LimitsSpec
from federation.v1.common_pb2 import AssignmentManifest, UpdateManifest
from federation.work.base import Work


def must_match(manifest: UpdateManifest, order: AssignmentManifest) -> None:
    """Raises if an update differs from its assignment.

    Raises:
        Refusal: `mismatch:<field>`, or `payload-digest`: what it declares is no digest.
    """
    for name in BOUND_FIELDS:
        if getattr(manifest, name) != getattr(order, name):
            raise Refusal(f"mismatch:{name}", f"the update says {getattr(manifest, name)!r}, its assignment differs")
    rows = [(row.name, row.dtype, row.length) for row in manifest.rows]
    if rows != [(row.name, row.dtype, row.length) for row in order.rows]:
        raise Refusal("mismatch:rows", f"the update declares the rows {rows}, its assignment differs")
    if bool(manifest.payload) != bool(order.rows) or bool(manifest.payload_bytes) != bool(order.rows):
        raise Refusal("mismatch:payload", "the update must carry a payload exactly when its assignment asks for rows")
    if manifest.payload:
        try:
            parse(manifest.payload)
        except ValueError as error:
            raise Refusal("payload-digest", str(error)) from None


def content_problem(manifest: UpdateManifest, kind: type[Work], limits: LimitsSpec) -> Refusal | None:
    """What is wrong with the numbers in the manifest of a reply to work of this kind; None when nothing is."""
    if manifest.samples > limits.samples or (kind.needs_samples and manifest.samples == 0):
        return Refusal(
            "limit:samples",
            f"{manifest.samples} training samples claimed; between 1 and {limits.samples} are taken (limits.samples)",
        )
    if (problem := names_problem(manifest)) is not None:
        return problem
    for name, value in [*manifest.losses.items(), *manifest.metrics.items()]:
        if not math.isfinite(value):
            return Refusal("non-finite", f"{name[:80]} is {value}")
    return None


def payload_problem(check: PayloadCheck, kind: type[Work], limits: LimitsSpec) -> Refusal | None:
    """What is wrong with the content of a payload that arrived whole; None when nothing is."""
    return check.problem or kind.problem(check.norms, limits)
