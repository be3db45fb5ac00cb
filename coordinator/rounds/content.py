"""What a reply must hold: its fields those of its assignment, its numbers and its payload within bounds."""

import math
from collections.abc import Mapping

from coordinator.rounds.evidence import BOUND_FIELDS
from coordinator.rounds.reported import names_problem
from federation.digests import parse
from federation.refusals import Refusal
from federation.runs import LimitsSpec
from federation.v1.common_pb2 import AssignmentManifest, UpdateManifest
from federation.vectors import PayloadCheck


def must_match(manifest: UpdateManifest, order: AssignmentManifest) -> None:
    """Raises if an update differs from its assignment.

    Raises:
        Refusal: `mismatch:<field>`, or `payload-digest`: what it declares is no digest.
    """
    for name in BOUND_FIELDS:
        if getattr(manifest, name) != getattr(order, name):
            raise Refusal(f"mismatch:{name}", f"the update says {getattr(manifest, name)!r}, its assignment differs")
    rows = [(row.objective, row.dtype, row.length) for row in manifest.rows]
    if rows != [(row.objective, row.dtype, row.length) for row in order.rows]:
        raise Refusal("mismatch:rows", f"the update declares the rows {rows}, its assignment differs")
    if bool(manifest.payload) != bool(order.rows) or bool(manifest.payload_bytes) != bool(order.rows):
        raise Refusal("mismatch:payload", "the update must carry a payload exactly when its assignment asks for rows")
    if manifest.payload:
        try:
            parse(manifest.payload)
        except ValueError as error:
            raise Refusal("payload-digest", str(error)) from None


def content_problem(manifest: UpdateManifest, *, trains: bool, limits: LimitsSpec) -> Refusal | None:
    """What is wrong with the numbers in a manifest; None when nothing is. `trains`: it needs training samples."""
    if manifest.samples > limits.samples or (trains and manifest.samples == 0):
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


def payload_problem(check: PayloadCheck, *, trains: bool, limits: LimitsSpec) -> Refusal | None:
    """What is wrong with the content of a payload that arrived whole; None when nothing is.

    Args:
        check: of the payload.
        trains: the payload is an update. Sketches of gradients, and what they lost, may be zero and have any norm.
        limits: of the run.
    """
    if check.problem is not None or not trains:
        return check.problem
    if zero := [name for name, norm in check.norms.items() if norm == 0]:
        return Refusal("zero", f"every element is zero: {', '.join(zero)}; such an update has no direction")
    longest = max(check.norms, key=check.norms.__getitem__)
    if check.norms[longest] > limits.norm:
        return Refusal(
            "limit:norm",
            f"row {longest[:80]!r} has the norm {check.norms[longest]:.4g}; at most {limits.norm:g} is taken "
            "(limits.norm)",
        )
    return None


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """What JSON can hold: refused replies may carry NaN."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
