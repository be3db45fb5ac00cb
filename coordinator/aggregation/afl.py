"""AFL, agnostic federated learning (Mohri et al., 2019, Algorithm 1)."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, conclude
from coordinator.aggregation.phases import RoundContext, RoundGenerator, Step, Training
from coordinator.aggregation.rules import Combination, Rows, Vector

_FAR = -2.0  # of a share: what lies more than 1 below the largest is 0 after the projection


@dataclass(frozen=True, kw_only=True)
class AFL(Rule):
    """Minimises the loss of the worst mixture of clients: max over lambda in the simplex of sum lambda_i F_i(w).

    Two steps in each round, both from where it began: w <- w - gamma_w sum lambda_i g_i with g_i = u_i / eta_l, and
    lambda <- Proj(lambda + gamma_lambda F), the nearest point of the simplex. The direction is sum lambda_i u_i, so the
    factor gamma_w / eta_l is the server's learning rate; at 1 the clients' models are averaged. The model is the mean
    of the models after all steps. lambda begins uniform, whatever the prior.

    The paper takes everybody in every round. Of some, the shares are renormalised for the step, and only they move,
    among themselves: who is absent keeps its lambda. A newcomer gets 1/N of N known clients, and the others' shares
    shrink alike. Where nobody has a share left, all count alike in the step. What a client held that has been revoked
    goes to the others, in proportion to theirs, or evenly where they have none.
    """

    name: ClassVar[str] = "afl"
    reads_losses: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    gamma_lambda: float = field(
        default=0.1,
        metadata={"help": "how fast weight moves to clients with a high loss; server.learning_rate is γ_w/η_l"},
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gamma_lambda) and self.gamma_lambda > 0):
            raise HyperparameterError(f"gamma_lambda must be finite and positive; got {self.gamma_lambda!r}")

    def cautions(self) -> tuple[str, ...]:
        """See the base."""
        return (
            *super().cautions(),
            "afl is made for rounds in which every client takes part: with some of them, lambda moves among those only",
        )

    def round(self, context: RoundContext) -> RoundGenerator:
        """See the base; and the shares of revoked clients are forgotten."""
        replies = self.usable((yield Training()))
        shares: dict[str, float] = dict(context.state.get("lambda", {}))
        gone = context.revoked() & shares.keys() - {reply.client_id for reply in replies}
        left = {client: share for client, share in shares.items() if client not in gone}
        if gone:
            total = sum(left.values())
            left = {client: share / total if total > 0 else 1.0 / len(left) for client, share in left.items()}
        answer = self.decide(replace(replies.rows(context), state={**context.state, "lambda": left}))
        return Step(replies, answer, forgotten=tuple(sorted(gone)))

    def decide(self, rows: Rows) -> Combination:
        """See the class; the state is {"lambda": {client: share}}."""
        if rows.losses is None:
            raise ValueError("afl needs losses, one per row")
        if not rows.clients:
            raise ValueError("afl needs the names of the clients, one per row")
        shares = _known(rows.state.get("lambda", {}), rows.clients)
        own = np.array([shares[client] for client in rows.clients])
        present = set(rows.clients)
        absent = sum(share for client, share in shares.items() if client not in present)
        total = max(0.0, 1.0 - absent)
        prior = own / own.sum() if own.sum() > 0 else np.full(len(own), 1.0 / len(own))
        with np.errstate(over="ignore"):
            rise = np.maximum(_FAR, self.gamma_lambda * (rows.losses - rows.losses.max()))
        moved = onto_simplex(own + rise, total)
        answer = super().decide(replace(rows, prior=prior))
        state: dict[str, Any] = {"lambda": shares | dict(zip(rows.clients, moved.tolist(), strict=True))}
        return replace(answer, state=state)

    def combine(self, rows: Rows) -> Combination:
        """The mean of the updates by their prior, which `decide` has made lambda."""
        return conclude(rows.gram, rows.prior, rows.prior)


def onto_simplex(values: Vector, total: float = 1.0) -> Vector:
    """The nearest point with elements that are not negative and sum to `total`, shape (m,)."""
    descending = np.sort(values)[::-1]
    missing = total - np.cumsum(descending)
    counts = np.arange(1, len(values) + 1)
    positive = np.flatnonzero(descending + missing / counts > 0)
    if not len(positive):  # total is 0
        return np.zeros(len(values))
    last = int(positive[-1])
    nearest: Vector = np.maximum(values + missing[last] / counts[last], 0.0)
    return nearest


def _known(shares: dict[str, float], clients: tuple[str, ...]) -> dict[str, float]:
    """The shares of all clients that are known by now; newcomers begin with 1/N."""
    newcomers = [client for client in clients if client not in shares]
    count = len(shares) + len(newcomers)
    grown = {client: share * len(shares) / count for client, share in shares.items()} if newcomers else dict(shares)
    return grown | dict.fromkeys(newcomers, 1.0 / count)
