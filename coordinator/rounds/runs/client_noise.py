"""Noise that protects clients: Gaussian noise on the direction of every step, and the epsilon that is spent.

A client's update enters the direction scaled to norm 1, with a weight of at most L = min(1, lambda0 + epsilon). So the
direction moves by at most 2 L if that update is replaced by another one, or by zero (`Algorithm.sensitivity`).

The noise of a round is drawn once: a blob of standard normal numbers, whose digest is recorded before a model is made
with it. A coordinator that is restarted in between uses the same noise, so no round gives two models with different
noise, whose difference would show what the noise hides.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import Fleet
from federation.aggregation.streaming import Row
from federation.spec.accounting import gaussian_epsilon
from federation.spec.noise import Noise
from federation.spec.run_sections import PrivacySpec
from federation.vectors import update_layout, update_rows
from storage.blobs import BlobStore
from storage.models import Round

_BLOCK = 1 << 20  # elements that are drawn at a time


@dataclass(frozen=True)
class ClientNoise:
    """The noise of a round.

    Attributes:
        digest: of its blob.
        row: standard normal numbers, (d,).
        scale: the standard deviation of the noise on each coordinate of the direction.
    """

    digest: str
    row: Row
    scale: float


def noise_of(fleet: Fleet, current: Round, sensitivity: float | None) -> ClientNoise | None:
    """The noise for the step of a round; None for a run without noise.

    `sensitivity` is that of the algorithm for the updates of this step (`Algorithm.sensitivity`).

    Raises:
        Held: the run is not RUNNING.
        BlobMissing: the round's noise is on record, and is not kept.
    """
    multiple, context = fleet.run.spec.privacy.client_noise, fleet.context
    if not multiple:
        return None
    if sensitivity is None:  # refused when the run was submitted
        raise RuntimeError(f"{fleet.run.spec.algorithm.name} has no bound for one client")
    with context.database.read() as session:
        digest = session.get_one(Round, current.round_id).noise
    if digest is None:
        digest = _drawn(context.blobs, fleet.run.parameters)
        with context.database.begin() as session:
            fleet.run.running(session)
            session.get_one(Round, current.round_id).noise = digest
    (row,) = update_rows(context.blobs.local(digest)).values()
    return ClientNoise(digest, row, multiple * sensitivity)


def _drawn(blobs: BlobStore, size: int) -> str:
    """The digest of a new blob of standard normal numbers, (size,)."""
    noise = Noise()
    with blobs.writer() as writer:
        writer.write(update_layout([("noise", size)]).header)
        for start in range(0, size, _BLOCK):
            block = noise.gaussian(min(_BLOCK, size - start)).astype("<f4")
            writer.write(block.data.cast("B"))
        return writer.commit()


def spent(privacy: PrivacySpec, steps: int) -> float:
    """The epsilon of clients after this number of steps with noise."""
    return gaussian_epsilon(privacy.client_noise, steps, privacy.client_delta)


def noisy_steps(session: Session, run_id: str) -> int:
    """The steps of a run that were made with noise."""
    query = select(func.count()).where(
        Round.run_id == run_id, Round.noise.is_not(None), Round.result_model.is_not(None)
    )
    return session.scalar(query) or 0


def over_budget(privacy: PrivacySpec, steps: int) -> str:
    """The reason why another step after this number of steps would overspend the budget; empty if it would not."""
    if affordable(privacy, steps + 1) > steps:
        return ""
    return (
        f"privacy: {steps} steps have spent epsilon = {spent(privacy, steps):.4g} of {privacy.client_epsilon:g} "
        f"(privacy.client_epsilon, delta = {privacy.client_delta:g}); another one would bring it to "
        f"{spent(privacy, steps + 1):.4g}"
    )


def affordable(privacy: PrivacySpec, rounds: int) -> int:
    """The number of these rounds that the budget allows."""
    if not (privacy.client_noise and privacy.client_epsilon):
        return rounds
    low, high = 0, rounds
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spent(privacy, middle) <= privacy.client_epsilon else (low, middle - 1)
    return low
