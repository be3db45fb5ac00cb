"""A kind of work of another package: each client is asked for a different number, in two rounds of messages.

First every client gets a ticket, a number of its own, keeps it, and answers with its square. Then it gets a sealed note
as an input, and answers with the number that it kept and the note. The tickets with the largest numbers train.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from google.protobuf.wrappers_pb2 import UInt64Value

from federation.aggregation import phases
from federation.aggregation.base import Algorithm
from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import Combination, Rows
from federation.aggregation.phase_kinds import TrainingPhase
from federation.vectors import RowFile
from federation.work.base import Lane, Result, RowSchema, Shape, Terms, Work, WorkError, WorkingClient
from federation.work.registry import Kind

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

NOTE_BYTES = 8
KEPT_BYTES = 8192  # of a ticket, so that a test can give it too little space


@dataclass(frozen=True, kw_only=True)
class Ticket(Work):
    """Keep a number and answer with its square; with the number 0, answer with what was kept, and the note."""

    name: ClassVar[str] = "ticket"
    doing: ClassVar[str] = "drawing lots"
    lane: ClassVar[Lane] = Lane.PROTOCOL

    number: int

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """Those of training."""
        return Terms(spec.train.deadline_seconds, spec.selection.quorum)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        """One number, or a number and the note."""
        return (
            (RowSchema("answer", 1, "U32"),)
            if self.number
            else (
                RowSchema("answer", 1, "U32"),
                RowSchema("note", NOTE_BYTES, "U8"),
            )
        )

    def input_sizes(self, shape: Shape) -> dict[str, int]:
        """The note, for the second round of messages."""
        return {} if self.number else {"note": NOTE_BYTES}

    def once(self) -> str:
        """Each of the two questions is answered once."""
        return "first" if self.number else "second"

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        if self.number:
            client.memory.put("number", str(self.number).rjust(KEPT_BYTES).encode(), durable=True)
            return Result({"answer": np.array([self.number**2], np.uint32)}, {}, {}, computed.samples)
        kept = client.memory.get("number")
        if kept is None:
            raise WorkError("there is no ticket")
        note = np.frombuffer(client.inputs["note"], np.uint8)
        return Result({"answer": np.array([int(kept)], np.uint32), "note": note}, {}, {}, computed.samples)


KIND = Kind(
    Ticket,
    UInt64Value,
    lambda work: UInt64Value(value=work.number),
    lambda message, shape: Ticket(number=message.value),
)


@dataclass(frozen=True, kw_only=True)
class Tickets(phases.AlgorithmPhase):
    """Hand out tickets, or ask for them again."""

    kind: ClassVar[type[Work]] = Ticket

    numbers: dict[str, int]
    again: bool = False

    def work(self, asked: phases.Asked) -> Ticket:
        """A number for each client."""
        return Ticket(number=0 if self.again else self.numbers[asked.client_id])

    def own_inputs(self, client_id: str) -> dict[str, bytes]:
        """A note for each client, the second time."""
        return {"note": note(self.numbers[client_id])} if self.again else {}

    def closes(self, asked: int) -> phases.Closing:
        """Everybody answers."""
        return phases.Closing(wanted=asked, needed=asked)


def note(number: int) -> bytes:
    """What only the client with this ticket is told."""
    return number.to_bytes(NOTE_BYTES, "little")


@dataclass(frozen=True, kw_only=True)
class Lottery(Algorithm):
    """The two largest tickets train, and their updates are averaged."""

    name: ClassVar[str] = "lottery"

    def combine(self, rows: Rows) -> Combination:
        """The plain average."""
        return Combination(rows.prior, rows.prior, {}, describe(rows.gram, rows.prior, rows.prior))

    def round(self, context: phases.RoundContext) -> phases.RoundGenerator:
        numbers = {name: 10 * (context.number + 1) + at for at, name in enumerate(sorted(context.selected))}
        squares = yield Tickets(numbers=numbers)
        kept = yield Tickets(numbers=numbers, again=True)
        assert {reply.client_id: read(reply, "answer")[0] for reply in squares} == {
            name: number**2 for name, number in numbers.items()
        }
        for reply in kept:
            assert read(reply, "answer")[0] == numbers[reply.client_id]
            assert bytes(read(reply, "note")) == note(numbers[reply.client_id])
        winners = sorted(numbers, key=numbers.__getitem__)[-2:]
        replies: phases.Replies = yield TrainingPhase(clients=tuple(winners))
        return phases.Step(replies, self.combine(replies.rows(context)), consulted=(*squares, *kept))


def read(reply: phases.PhaseReply, name: str) -> np.ndarray:
    """A row of a reply."""
    row = reply.rows[reply.names.index(name)]
    return row.read() if isinstance(row, RowFile) else row
