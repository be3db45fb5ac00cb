"""Applies another rule to the updates of a run: computes its directions from the signed K and the signed replies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from federation.aggregation.phases import Step
from federation.aggregation.registry import algorithm
from federation.record.bundle import BundleReader
from federation.spec.sharing import BUFFERS
from federation.v1.common_pb2 import StepManifest
from verification.arithmetic import Matrix
from verification.errors import VerificationError
from verification.replay import open_step
from verification.run import OpenedRun
from verification.signed import SignedRound

Place = tuple[str, int]  # a row: the digest of its reply's envelope, and its place in the reply


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The direction of a round, compared with that of another rule.

    Attributes:
        number: of the round, from 0.
        counterfactual: True if the other rule would have made another model before, so that the clients would have sent
            other updates.
        clients: the clients of the combined updates, in the order of the rows.
        done, other: the part of each client in the direction: coefficient times length, as a share of the sum.
        cosine: of both directions; NaN if one of them is zero.
        ratio: the length of the other direction divided by that of the direction taken; NaN if the latter is zero.
        worse_done, worse_other: the clients against whose updates the direction points: it makes them worse.
    """

    number: int
    counterfactual: bool
    clients: tuple[str, ...]
    done: tuple[float, ...]
    other: tuple[float, ...]
    cosine: float
    ratio: float
    worse_done: tuple[str, ...]
    worse_other: tuple[str, ...]


def counterfactual(
    bundle: BundleReader, name: str, values: Mapping[str, Any], number: int | None = None
) -> Iterator[Replayed]:
    """Yields the direction of another rule in each round, or in one round alone.

    Args:
        bundle: the record of a run whose updates were sent in the clear.
        name: of the other rule.
        values: its hyper-parameters.
        number: of the round; None for all.

    Raises:
        BlobAbsent: the rule reads more than K, and the bundle has no payloads.
        HyperparameterError: there is no such rule, or a hyper-parameter is wrong.
        VerificationError: the record differs from the signed messages, or the rule cannot use its replies.
    """
    opened = OpenedRun.of(bundle)
    facts = opened.facts
    if facts.spec.privacy.secure != "off":
        raise VerificationError(
            "nobody knows the updates of a private round, so no other rule can be evaluated on them"
        )
    if facts.spec.privacy.client_noise:
        raise VerificationError("the noise of a run that protects clients suits its own rule alone")
    run = replace(facts, rule=algorithm(name, values))
    state: Mapping[str, Any] = {}
    same = True  # while the other rule takes the same steps
    model, previous_step = bundle.about.initial_model, ""
    for record in bundle.rounds():
        signed = SignedRound.of(opened.reader.read(record, model, previous_step))
        if signed.step is None:
            continue
        model, previous_step = signed.step.result_model, signed.step_digest
        if number not in (None, record.number):
            continue
        made = open_step(run, signed, signed.step, state, asked=False)
        state = dict(made.combination.state)
        compared = _compared(signed.step, signed, made, name, counterfactual=not same and number is None)
        same = same and compared.cosine > 1 - 1e-12 and abs(compared.ratio - 1) < 1e-9
        yield compared


def _compared(step: StepManifest, signed: SignedRound, made: Step, made_by: str, *, counterfactual: bool) -> Replayed:
    if made.combination.coordinates is not None or not step.coefficients:
        raise VerificationError("a direction that is made coordinate by coordinate has no coefficients to compare")
    rows: list[tuple[Place, str]] = [
        ((reply.envelope, at), reply.client_id) for reply in made.replies for at in range(len(reply.rows))
    ]
    rows += [((past.envelope, 0), past.client_id) for past in made.history]
    done = dict(zip(_places(step, signed), step.coefficients, strict=True))
    places = {place for place, _ in rows}
    if any(value for place, value in done.items() if place not in places):
        raise VerificationError(f"round {step.round} combined updates of earlier rounds, which {made_by} does not read")
    c, other = np.array([done.get(place, 0.0) for place, _ in rows]), made.combination.coefficients
    K = made.replies.gram_with(made.history)  # of all rows, also where the rule reads less
    lengths = np.sqrt(np.maximum(np.diagonal(K), 0.0))
    norms = [float(np.sqrt(max(float(direction @ K @ direction), 0.0))) for direction in (c, other)]
    clients = [client for _, client in rows]
    return Replayed(
        number=step.round,
        counterfactual=counterfactual,
        clients=tuple(clients),
        done=_shares(c * lengths),
        other=_shares(other * lengths),
        cosine=float(c @ K @ other / (norms[0] * norms[1])) if all(norms) else float("nan"),
        ratio=norms[1] / norms[0] if norms[0] else float("nan"),
        worse_done=_against(K @ c, clients),
        worse_other=_against(K @ other, clients),
    )


def _places(step: StepManifest, signed: SignedRound) -> list[Place]:
    """The rows of a step in the order of its coefficients."""
    places: list[Place] = []
    for name in step.replies:
        reply = signed.replies.get(name)
        count = 1 if reply is None else sum(row.name != BUFFERS for row in reply.manifest.rows)
        places += ((name, at) for at in range(count))
    return places


def _shares(parts: Matrix) -> tuple[float, ...]:
    total = float(np.abs(parts).sum())
    return tuple((parts / total).tolist()) if total else tuple(0.0 for _ in parts)


def _against(products: Matrix, clients: list[str]) -> tuple[str, ...]:
    scale = float(np.abs(products).max(initial=0.0))
    return tuple(sorted({client for client, value in zip(clients, products, strict=True) if value < -1e-12 * scale}))
