"""A round's conversation, held again with the replies on record and the signed K: the rule's step once more.

A rule is a pure function of K and of numbers that the clients signed, so the updates themselves need not be there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from federation.aggregation.base import Algorithm
from federation.aggregation.interface import Matrix, Vector
from federation.aggregation.phases import AlgorithmPhase, Past, PhaseReply, Replies, RoundContext, Step
from federation.aggregation.streaming import one_thread
from federation.vectors import RowFile


class Absent(Sequence[RowFile]):
    """The rows of a payload that is not there. Their number is known; reading one raises `error`."""

    def __init__(self, error: Exception, count: int) -> None:
        self._error, self._count = error, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> RowFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowFile]: ...
    def __getitem__(self, index: int | slice) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[RowFile]:
        raise self._error


class _WithGram(Replies):
    """Replies whose Gram matrix, or squared lengths, are the signed ones if they are of as many rows."""

    def __init__(self, replies: Sequence[PhaseReply], signed: Matrix | None, squares: Vector | None) -> None:
        super().__init__(replies)
        self._signed, self._squares = signed, squares

    @property
    def squares(self) -> Vector:
        if self._squares is not None and len(self._squares) == sum(len(reply.rows) for reply in self):
            return self._squares
        return super().squares

    def gram_with(self, history: Sequence[Past]) -> Matrix:
        count = sum(len(reply.rows) for reply in self) + len(history)
        if self._signed is not None and len(self._signed) == count:
            return self._signed
        return super().gram_with(history)

    def reporting(self, what: Any) -> Replies:
        reporting = [reply for reply in self if np.isfinite(getattr(reply, what))]
        return self if len(reporting) == len(self) else _WithGram(reporting, self._signed, self._squares)


def replayed_step(
    rule: Algorithm,
    context: RoundContext,
    phases: Mapping[int, Sequence[PhaseReply]],
    K: Matrix | None,
    asks: Callable[[int, AlgorithmPhase], object] = lambda number, phase: None,
    squares: Vector | None = None,
) -> tuple[Step, int | None]:
    """The step that a rule makes of the replies of a round.

    Args:
        rule: the algorithm.
        context: of the round.
        phases: the replies that count, by the number of the phase.
        K: as signed; None where it is not there.
        asks: is called with the number of each phase, and with what the rule asks in it.
        squares: the squared lengths of the rows, (m,), as signed; None where K has them.

    Returns:
        The step; and the number of the first phase on record in which the rule asks nothing, None if there is none.

    Raises:
        LookupError: the rule asks for more than the record has.
        Voided, ArithmeticError, ValueError: no step follows.
        Exception: that of an `Absent` that the rule reads.
    """
    conversation, given = rule.round(context), None
    answers = iter(sorted(phases.items()))
    with one_thread():
        while True:
            try:
                phase = conversation.send(given)  # type: ignore[arg-type] # a generator that has not begun takes None
            except StopIteration as end:
                made: Step = end.value
                break
            number, replies = next(answers, (-1, ()))
            if number < 0:
                raise LookupError(f"the rule asks for {phase.kind.name} once more than the record has phases")
            asks(number, phase)
            given = _WithGram(replies, K, squares)
    return made, next(answers, (None,))[0]
