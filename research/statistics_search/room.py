"""Members with data, and a coordinator that asks them for private sums of statistics as it likes.

The members are those of a worker: `Work.computation` and `Work.answer`, with signed envelopes, a memory that survives,
and a ledger. The coordinator's own part is the conversation of a real coordinator, with what it may choose chosen here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import (
    AlgorithmPhase,
    Asked,
    PhaseReply,
    PrivateSetting,
    Replies,
    RoundContext,
    Selected,
    Setting,
    Voided,
    Waiting,
)
from federation.aggregation.secure.described import description
from federation.aggregation.secure.settled import Sum
from federation.digests import digest
from federation.secure.derivation import taus
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.statistics.data_columns import Column
from federation.statistics.held import HeldData
from federation.statistics.result import StatisticsResult
from federation.statistics.rules import MemberRules
from federation.trust.envelope import sign
from federation.v1.common_pb2 import ReplyManifest
from federation.vectors import payload_bytes, update_layout
from federation.work.base import Memory, Origin, Result, Shape, Work, WorkError, WorkingClient, payload_layout
from federation.work.registry import decode, encode, encode_statement
from federation.work.secure.terms import SessionStage, SessionTerms
from federation.work.secure.wire import terms_bytes
from federation.work.site import SecurePolicy
from federation.work.statistics.work import Statistics
from fedpareto.simulation.simulated_members import SimulatedMembers

Numbers = NDArray[np.float64]
TASK, MODEL = "held", digest(b"model")
SHAPE = Shape(update_layout([("w", 1)]), ("loss",), ("loss",))


class MemberTable(HeldData):
    """A table with a column of classes as its target."""

    def __init__(self, x: Numbers, y: Numbers, columns: Sequence[Column]) -> None:
        self.x, self.y, self._columns = x, y, tuple(columns)

    @property
    def columns(self) -> tuple[Column, ...]:
        """As the task names them."""
        return self._columns

    def parts(self, split: str) -> Iterator[tuple[Any, Any]]:
        """All samples, in the training split."""
        yield self.x, self.y


class KeptValues(Memory):
    """The memory of a member."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """The value under a name."""
        return self.values.get(name)

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value."""
        self.values[name] = value


def document(run: str, columns: Sequence[Column], bins: int) -> bytes:
    """The specification of a run with a private sum of these columns."""
    lines = [f'name = "{run}"', f'task = "{TASK}"', 'kind = "statistics"', 'privacy.secure = "sum"']
    lines += ["[statistics]", f"bins = {bins}", "columns = [", *(f'"{one.name}",' for one in columns), "]"]
    lines += [f'ranges."{one.name}" = [{one.low!r}, {one.high!r}]' for one in columns if one.low is not None]
    lines += [f'classes."{one.name}" = {one.classes}' for one in columns if one.classes]
    return "\n".join(lines).encode()


@dataclass(frozen=True)
class SumQuestion:
    """What the coordinator asks for, and whom.

    Attributes:
        columns, bins: as the specification of the run names them.
        run: its name; the same name is the same run.
        invited: the members; none for all.
        lost: members of W whose masked vectors are said not to have arrived.
        late: members whose shares are said not to have arrived.
        approved: False if no owner has approved the run.
    """

    columns: tuple[Column, ...]
    bins: int = 2
    run: str = "run"
    invited: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    approved: bool = True


@dataclass(eq=False)
class Room:
    """The members by name, with their tables; and the sums that the coordinator has.

    Attributes:
        tables: by member.
        assumed: the colluders that each owner assumes.
        rules: of each owner.
        sums: each question that gave a sum, with the survivors, the result and the words.
        declined: the reason of each member that declined the last question, by phase and name.
        change: what a lying coordinator makes of the work of one member; None for the work as it is.
    """

    tables: dict[str, MemberTable]
    assumed: int = 1
    rules: MemberRules = MemberRules()  # noqa: RUF009 - frozen
    sums: list[tuple[SumQuestion, tuple[str, ...], StatisticsResult, NDArray[np.uint64]]] = field(default_factory=list)
    declined: dict[tuple[str, str], str] = field(default_factory=dict)
    change: Callable[[str, str, Work], Work] | None = None
    sessions: int = 0

    def __post_init__(self) -> None:
        self.members = SimulatedMembers(0, list(self.tables), TASK, assumed=self.assumed)
        policy = SecurePolicy(assumed=self.assumed)
        self.sites = {
            name: replace(
                self.members.site(name),
                policies={TASK: policy},
                evaluations_ahead=0,
                failures=3,
                summed={TASK: self.rules},
            )
            for name in self.tables
        }
        self.memories = {name: KeptValues() for name in self.tables}
        self.answered: dict[tuple[str, str], bytes] = {}

    def ask(self, question: SumQuestion) -> tuple[StatisticsResult, Sum] | None:
        """The result of a question, and the sum; None if there is none."""
        self.declined, self.sessions = {}, self.sessions + 1
        text = document(question.run, question.columns, question.bins)
        spec = RunSpec.parse(text)
        invited = question.invited or tuple(self.tables)
        conversation = description(self._context(spec, text, invited), Statistics.of(spec), sorted(invited))
        replies: Any = None
        try:
            while True:
                replies = self._answers(conversation.send(replies), question, spec, text)
        except StopIteration as end:
            found, total = end.value
        except (TooFewUpdatesError, Voided, Waiting):
            return None
        self.sums.append((question, total.record.survivors, found, total.words.astype(np.uint64)))
        return found, total

    def origin(self, run: str, columns: Sequence[Column], bins: int) -> Origin:
        """Where the work of a run comes from."""
        text = document(run, columns, bins)
        return self._origin(RunSpec.parse(text), text)

    def _origin(self, spec: RunSpec, text: bytes) -> Origin:
        return Origin("room", spec.name, TASK, digest(text), MODEL, spec.seed, Unshared())

    def _context(self, spec: RunSpec, text: bytes, invited: Sequence[str]) -> RoundContext:
        nonce = self.sessions.to_bytes(16, "big")

        def settle(purpose: str, terms: SessionTerms) -> Setting:
            agreed = replace(terms, nonce=nonce)
            return Setting(
                purpose=purpose,
                agreed=agreed,
                terms_bytes=terms_bytes(agreed),
                taus=lambda view, V, inputs: taus(bytes(32), view, V, inputs),
            )

        private = PrivateSetting(
            spec=spec,
            document=text,
            origin=self._origin(spec, text),
            keys=self.members.key_ids(),
            named=frozenset(),
            blind=0,
            settle=settle,
        )
        selected = {name: Selected(1, ("loss",)) for name in invited}
        return RoundContext(number=0, total=1, selected=selected, private=private)

    def _answers(self, phase: AlgorithmPhase, question: SumQuestion, spec: RunSpec, text: bytes) -> Replies:
        stage, replies, declines = phase.kind.name, [], {}
        away = {SessionStage.MASK: question.lost, SessionStage.UNMASK: question.late}.get(SessionStage(stage), ())
        for name in phase.clients or ():
            work = phase.work(Asked(name, ("loss",), spec, 0))
            if self.change is not None:
                work = self.change(stage, name, work)
            inputs = {**phase.inputs(), **phase.own_inputs(name)}
            try:
                result = self._do(name, work, inputs, question, self._origin(spec, text))
            except WorkError as error:
                declines[name] = self.declined[stage, name] = error.reason
                continue
            if name not in away:
                replies.append(self._reply(name, work, result, spec, text))
        return Replies(replies, declines=declines)

    def _do(self, name: str, work: Work, inputs: Mapping[str, bytes], question: SumQuestion, origin: Origin) -> Result:
        work = decode(work.name, message := encode(work), SHAPE)
        asked, key = message + b"".join(inputs.values()), (name, work.once())
        client = WorkingClient(
            client_id=name,
            round=0,
            attempt=0,
            shape=SHAPE,
            memory=self.memories[name],
            origin=origin,
            site=self.sites[name],
            inputs=inputs,
            again=key in self.answered,
            approved=question.approved,
            data=self.tables[name],
        )
        work.rows(SHAPE)
        if work.computation(client) is not None:
            raise AssertionError("statistics start no trainer")
        if self.answered.setdefault(key, asked) != asked:
            raise WorkError("another question was answered", reason="answered")
        return work.answer(client, Result({}, {}, {}, len(self.tables[name].y)))

    def _reply(self, name: str, work: Work, result: Result, spec: RunSpec, text: bytes) -> PhaseReply:
        rows = work.rows(SHAPE)
        payload = digest(b"".join(payload_bytes(payload_layout(rows), result.rows))) if rows else ""
        origin = self._origin(spec, text)
        manifest = ReplyManifest(
            federation_id=origin.federation_id,
            run_id=origin.run_id,
            client_id=name,
            base_model=MODEL,
            spec=origin.spec,
            task=TASK,
            payload=payload,
            samples=result.samples,
            statement=encode_statement(work.name, result.statement),
        )
        envelope = sign(manifest, self.members.keys[name]).SerializeToString()
        return PhaseReply(
            client_id=name,
            samples=result.samples,
            losses={},
            metrics={},
            rows=tuple(result.rows[row.name] for row in rows),
            names=tuple(row.name for row in rows),
            objectives=("loss",),
            envelope=digest(envelope),
            statement=result.statement,
            signed=envelope,
            signed_payload=payload,
        )
