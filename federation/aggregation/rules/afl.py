"""AFL, agnostic federated learning (Mohri et al., 2019, Algorithm 1)."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, Reads, Rows, Vector
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import RoundContext, RoundGenerator, Step
from federation.spec.options import option

_FAR = -2.0  # of a share: a value more than 1 below the largest is 0 after the projection


@dataclass(frozen=True, kw_only=True)
class AFL(Rule):
    """Minimises the loss of the worst mixture of clients: max over lambda in the simplex of sum lambda_i F_i(w).

    Two steps in each round, both from where it began: w <- w - gamma_w sum lambda_i g_i with g_i = u_i / eta_l, and
    lambda <- Proj(lambda + gamma_lambda F), the nearest point of the simplex. The direction is sum lambda_i u_i, so the
    factor gamma_w / eta_l is the server's learning rate; at 1 the clients' models are averaged. The model is the mean
    of the models after all steps. lambda begins uniform, whatever the prior.

    In the paper every client takes part in every round. Where only some do, their shares are renormalised for the step,
    and change among themselves; an absent client keeps its lambda. A newcomer gets 1/N of N known clients, and the
    others' shares shrink alike. Where no participant has a share left, all count alike in the step. The share of a
    revoked client goes to the others in proportion to theirs, or evenly where they have none.

    The state is {"lambda": {client: share}}.
    """

    name = "afl"
    reads = Reads.NOTHING
    private = "sum"
    reads_losses = True
    averages = True
    no_auto = "the rate is γ_w/η_l of its paper, which goes with gamma_lambda"

    gamma_lambda: float = option(
        0.1, "how fast weight moves to clients with a high loss; server.learning_rate is γ_w/η_l", "(0, inf)"
    )

    def cautions(self) -> tuple[str, ...]:
        return (
            *super().cautions(),
            "afl is made for rounds in which every client takes part: with some of them, lambda moves among those only",
        )

    def round(self, context: RoundContext) -> RoundGenerator:
        if context.private is not None:
            state, gone = _remaining(context, set())
            step = yield from super().round(replace(context, state=state))
            return replace(step, forgotten=gone)
        replies = self.usable((yield TrainingPhase()))
        state, gone = _remaining(context, {reply.client_id for reply in replies})
        answer = self.decide(replace(self.rows_of(replies, context), state=state))
        return Step(replies, answer, forgotten=gone, gram_rows=self.gram_rows(context, len(replies)))

    def staged(self, rows: Rows) -> Combination:
        losses = rows.reported("losses", self.name)
        shares = _known(rows.state.get("lambda", {}), rows.names(self.name))
        own_shares = np.array([shares[client] for client in rows.clients])
        present = set(rows.clients)
        absent = sum(share for client, share in shares.items() if client not in present)
        total = max(0.0, 1.0 - absent)
        prior = (
            own_shares / own_shares.sum() if own_shares.sum() > 0 else np.full(len(own_shares), 1.0 / len(own_shares))
        )
        with np.errstate(over="ignore"):
            rise = np.maximum(_FAR, self.gamma_lambda * (losses - losses.max()))
        moved = onto_simplex(own_shares + rise, total)
        answer = super().staged(replace(rows, prior=prior))
        return replace(answer, state={"lambda": shares | dict(zip(rows.clients, moved.tolist(), strict=True))})

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, rows.prior, rows.prior)  # `staged` has made lambda the prior


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


def _remaining(context: RoundContext, replied: Set[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The state without the shares of revoked clients, which go to the others, and who these are, sorted."""
    shares: dict[str, float] = dict(context.state.get("lambda", {}))
    gone = context.revoked() & shares.keys() - replied
    left = {client: share for client, share in shares.items() if client not in gone}
    if gone:
        total = sum(left.values())
        left = {client: share / total if total > 0 else 1.0 / len(left) for client, share in left.items()}
    return {**context.state, "lambda": left}, tuple(sorted(gone))


def _known(shares: dict[str, float], clients: tuple[str, ...]) -> dict[str, float]:
    """The shares of all clients that are known by now; newcomers begin with 1/N."""
    newcomers = [client for client in clients if client not in shares]
    count = len(shares) + len(newcomers)
    grown = {client: share * len(shares) / count for client, share in shares.items()} if newcomers else dict(shares)
    return grown | dict.fromkeys(newcomers, 1.0 / count)
