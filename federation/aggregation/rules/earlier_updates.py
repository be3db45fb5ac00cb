"""Updates of earlier rounds as rows of the present one, for FedFV and the dual cone.

The state refers to the last update of every client by the digest of its payload, as long as it is young enough to be
read again: {"history": {client: {"round": r, "envelope": ..., "payload": ...}}}. The updates of a revoked client enter
no later step, and the next step forgets them.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from federation.aggregation.base import Rule
from federation.aggregation.interface import HyperparameterError, Rows
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import Past, Replies, RoundContext, RoundGenerator, Step
from federation.spec.options import option


@dataclass(frozen=True, kw_only=True)
class Remembering(Rule, ABC):
    """An algorithm that also reads the last updates of absent clients, at most `tau` rounds back.

    Its `combine` finds them as the last rows, with their `ages`; the stages `normalize` and `clip` treat them like the
    others. Stages that compare or mix the updates of one round are refused: earlier updates are not of that round.
    """

    tau: int = option(0, "how many rounds an update counts after its own; 0 keeps none", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        mixing = [stage.name for stage in self.stages if stage.compares]
        if self.tau and mixing:
            raise HyperparameterError(
                f'tau: not together with the stage "{mixing[0]}", which mixes the updates of one round: updates of '
                "earlier rounds would stay unmixed"
            )

    @property
    def keeps_updates(self) -> bool:
        return self.tau > 0

    def blobs(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(sorted({entry["payload"] for entry in _entries(state).values()}))

    def window(self, number: int) -> int:
        """The number of rounds before round `number` whose updates it reads."""
        return self.tau

    def round(self, context: RoundContext) -> RoundGenerator:
        """One round, with the updates of earlier ones.

        Raises:
            LookupError: an update is gone, or those of this round were not stored. The window is never made smaller.
        """
        if context.private is not None:
            return (yield from super().round(context))
        replies = self.usable((yield TrainingPhase()))
        revoked = context.revoked()
        history = self._recall(context, replies, revoked)
        answer = self.decide(extended(replies, history, context))
        if not self.tau:
            return Step(replies, answer, history)
        entries = self._remember(context, replies)
        remembered = {client: entry for client, entry in entries.items() if client not in revoked}
        state = {**answer.state, "history": remembered}
        forgotten = tuple(client for client in entries if client in revoked)
        return Step(replies, replace(answer, state=state), history, forgotten=forgotten)

    def _recall(self, context: RoundContext, replies: Replies, revoked: frozenset[str]) -> tuple[Past, ...]:
        """The updates of absent clients in the window, oldest first, then by client."""
        apart, window = revoked | {reply.client_id for reply in replies}, self.window(context.number)
        recalled = (
            Past(client_id=client, row=context.recall(entry["payload"]), **entry)
            for client, entry in _entries(context.state).items()
            if client not in apart and 1 <= context.number - entry["round"] <= window
        )
        return tuple(sorted(recalled, key=lambda past: (past.round, past.client_id)))

    def _remember(self, context: RoundContext, replies: Replies) -> dict[str, dict[str, Any]]:
        """The updates that the next round may read."""
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
    """The input of a rule: the rows of the replies, and after them those of earlier rounds."""
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
