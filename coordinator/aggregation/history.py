"""Updates of earlier rounds as rows of the present one: what FedFV and the dual cone share.

The state refers to the last update of every client by the digest of its payload, and keeps of these what is young
enough to be looked at again: {"history": {client: {"round": r, "envelope": ..., "payload": ...}}}. The updates of a
client that has been revoked enter no later step, and the next one forgets them.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule
from coordinator.aggregation.phases import Past, Replies, RoundContext, RoundGenerator, Step, Training
from coordinator.aggregation.rules import Rows


@dataclass(frozen=True, kw_only=True)
class Remembering(Rule, ABC):
    """An algorithm that heeds the last updates of clients that do not take part now, `tau` rounds back at most.

    Its `combine` finds them as the last rows, with their `ages`; the stages `normalise` and `clip` treat them like the
    others. Stages that compare or mix the updates of one round are refused: earlier updates are not of that round.
    """

    tau: int = field(default=0, metadata={"help": "how many rounds an update counts after its own; 0 keeps none"})

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise HyperparameterError(f"tau must not be negative; got {self.tau}")
        mixing = [stage.name for stage in self.stages if stage.compares]
        if self.tau and mixing:
            raise HyperparameterError(
                f'tau: not together with the stage "{mixing[0]}", which mixes the updates of one round: one of an '
                "earlier round would come in unmixed"
            )

    @property
    def keeps_updates(self) -> bool:
        """See the base."""
        return self.tau > 0

    def blobs(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """See the base."""
        return tuple(sorted({entry["payload"] for entry in _entries(state).values()}))

    def window(self, number: int) -> int:
        """How many rounds back round `number` looks."""
        return self.tau

    def round(self, context: RoundContext) -> RoundGenerator:
        """One round, with the updates of earlier ones.

        Raises:
            LookupError: one of them is gone, or those of this round were not stored. No smaller window takes its place.
        """
        replies = self.usable((yield Training()))
        revoked = context.revoked()
        history = self._recall(context, replies, revoked)
        answer = self.decide(extended(replies, history, context))
        if not self.tau:
            return Step(replies, answer, history)
        known = self._remember(context, replies)
        kept = {client: entry for client, entry in known.items() if client not in revoked}
        state = {**answer.state, "history": kept}
        forgotten = tuple(client for client in known if client in revoked)
        return Step(replies, replace(answer, state=state), history, forgotten=forgotten)

    def _recall(self, context: RoundContext, replies: Replies, revoked: frozenset[str]) -> tuple[Past, ...]:
        """The updates in the window of members who are absent, oldest first, then by client."""
        apart, window = revoked | {reply.client_id for reply in replies}, self.window(context.number)
        found = []
        for client, entry in _entries(context.state).items():
            if client in apart or not 1 <= context.number - entry["round"] <= window:
                continue
            found.append(Past(client_id=client, row=context.recall(entry["payload"]), **entry))
        return tuple(sorted(found, key=lambda past: (past.round, past.client_id)))

    def _remember(self, context: RoundContext, replies: Replies) -> dict[str, dict[str, Any]]:
        """What the next round may look at."""
        for reply in replies:
            if not reply.payload:
                raise LookupError(f"{self.name} with tau = {self.tau}: the update of {reply.client_id} was not stored")
        now = {
            reply.client_id: {"round": context.number, "envelope": reply.envelope, "payload": reply.payload}
            for reply in replies
        }
        entries = _entries(context.state) | now
        return {
            client: entry
            for client, entry in sorted(entries.items())
            if context.number + 1 - entry["round"] <= self.tau
        }


def extended(replies: Replies, history: tuple[Past, ...], context: RoundContext) -> Rows:
    """What a rule sees: the rows of the replies, and after them those of earlier rounds."""
    rows = replies.rows(context)
    if not history:
        return rows
    nothing = np.zeros(len(history))
    ages = [0] * len(rows.prior) + [context.number - past.round for past in history]
    return replace(
        rows,
        gram=replies.gram_with(history),
        prior=np.concatenate([rows.prior, nothing]),
        samples=np.concatenate([rows.samples, nothing]),
        losses=None if rows.losses is None else np.concatenate([rows.losses, nothing]),
        accuracies=None,
        clients=(),
        ages=np.array(ages),
    )


def _entries(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(state.get("history", {}))
