"""The gradients of the objectives on all of the clients' training samples: what Pareto stationarity is measured on."""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.objectives import Service
from coordinator.aggregation.phases import Gradients, Phase, Replies, Reply, RoundContext
from coordinator.aggregation.rules import Matrix
from coordinator.aggregation.streaming import Row
from federation.sketches import ClientSketch, sketch
from federation.vectors import RowFile


@dataclass(frozen=True)
class Exact:
    """The gradients of the objectives at the round's model.

    Attributes:
        names: of the M objectives that somebody serves.
        gram: the Gram matrix of their mean gradients over all parameters, shape (M, M).
        replies: those that it was made from.
    """

    names: tuple[str, ...] = ()
    gram: Matrix | None = None
    replies: tuple[Reply, ...] = ()

    def of(self, names: tuple[str, ...]) -> Matrix | None:
        """The Gram matrix of these objectives: None where it was not asked for, NaN where one of them is unknown."""
        if self.gram is None:
            return None
        if not set(names) <= set(self.names):
            return np.full((len(names), len(names)), np.nan)
        places = [self.names.index(name) for name in names]
        found: Matrix = self.gram[np.ix_(places, places)]
        return found


def exact_gradients(context: RoundContext, asked: bool) -> Generator[Phase, Replies, Exact]:
    """A phase in which every client sends its gradients, of its whole training split and of all parameters.

    Args:
        context: of the round.
        asked: whether they are wanted; otherwise there is no such phase.
    """
    if not asked:
        return Exact()
    made = sketch("exact", d=context.parameters, objectives=context.objectives)
    replies = yield Gradients(sketch=made.name, budget=made.budget, batch_size=0)
    service = Service.among(replies, context)

    def client_sketch(reply: Reply) -> ClientSketch:
        weights = np.array([service.weight(reply.client_id, name) for name in reply.objectives])
        rows = zip(reply.names, reply.rows, strict=True)
        return ClientSketch(reply.objectives, weights, {name: _array(row) for name, row in rows})

    gram = made.gram(map(client_sketch, replies), service.objectives, shared_seed=0)
    return Exact(service.objectives, gram, tuple(replies))


def _array(row: Row) -> NDArray[np.float32]:
    return row.read() if isinstance(row, RowFile) else np.asarray(row, dtype=np.float32)
