"""Members of a private round in one process, with a coordinator that may lie and members that may cheat.

The members are those of a worker: `Work.computation` and `Work.answer`, from messages that went over the wire, with
signed envelopes and a durable memory. Only training is left out: each member has a vector.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.phases import (
    AlgorithmPhase,
    Asked,
    PhaseReply,
    PrivateSetting,
    Replies,
    RoundContext,
    Selected,
    Setting,
    Step,
)
from federation.aggregation.registry import algorithm
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Cohort, Sum, invitation
from federation.digests import digest
from federation.secure.derivation import taus
from federation.secure.thresholds import BLUR, Mode
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.trust.envelope import sign
from federation.v1.common_pb2 import ReplyManifest
from federation.vectors import payload_bytes, update_layout
from federation.work.base import Memory, Origin, Result, Shape, Work, WorkError, WorkingClient, payload_layout
from federation.work.evaluate.work import Evaluate
from federation.work.registry import decode, encode, encode_statement, statement_problem
from federation.work.secure.allowed import run_bounds
from federation.work.secure.journal import Journal
from federation.work.secure.terms import SessionStage, SessionTerms
from federation.work.secure.wire import terms_bytes
from federation.work.site import FAILURES, SecurePolicy
from federation.work.train.work import Train
from fedpareto.simulation.simulated_members import SimulatedMembers

_NONE: Mapping[str, Any] = MappingProxyType({})
FREE = "cast:Rule"
"""An algorithm of which members know nothing: they rely on the cover of the sum."""


def document(
    mode: Mode,
    algorithm: str = FREE,
    values: Mapping[str, Any] = _NONE,
    *,
    clip: float = 0.0,
    blur: float = BLUR,
    disclose: Sequence[str] = (),
) -> bytes:
    """The specification of a run with private rounds."""
    keys = {
        "algorithm.name": algorithm,
        **{f"algorithm.{key}": value for key, value in values.items()},
        "privacy.secure": mode.value,
        "privacy.clip": clip,
        "privacy.blur": blur,
        "privacy.disclose": list(disclose),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    head = 'name = "cast"\ntask = "digits"\nrounds = 1\ntrain.steps = 1\nevaluate.splits = ["test"]'
    return "\n".join([head, *lines]).encode()


def origin(specification: bytes, run_id: str = "run", base_model: str = digest(b"model-0")) -> Origin:
    """Where work of a run with this specification comes from."""
    return Origin(
        federation_id="cast",
        run_id=run_id,
        task="digits",
        spec=digest(specification),
        base_model=base_model,
        seed=0,
        unshared=Unshared(),
    )


ORIGIN = origin(document(Mode.SUM))
TRAIN = Train.of(RunSpec.parse(document(Mode.SUM)), 0, joint_target(("loss",)))


class Kept(Memory):
    """A memory that survives a restart, and counts what is written."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.writes = 0
        self.fails_at: int | None = None

    def get(self, name: str) -> bytes | None:
        return self.values.get(name)

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        assert durable
        if self.writes == self.fails_at:
            raise Killed
        self.writes += 1
        self.values[name] = value


class Killed(Exception):
    """The member's process died."""


@dataclass(eq=False)
class Member:
    """One member: what it keeps, and which questions it has answered.

    Its update is `vector`; of a task with several objectives, `gradients` has one vector for each. `origin` is that of
    the work that it is asked for. With a `failure`, its computations fail.
    """

    name: str
    members: SimulatedMembers
    vector: NDArray[np.float32]
    losses: Mapping[str, float] = field(default_factory=dict)
    memory: Kept = field(default_factory=Kept)
    asked: dict[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    origin: Origin = ORIGIN
    samples: int = 100
    failure: str = ""
    approved: Mapping[str, frozenset[str]] = field(default_factory=dict)  # the models of approved runs, by run

    @property
    def site(self) -> Any:
        return self.members.site(self.name)

    def allow(self, policy: SecurePolicy, *algorithms: str) -> None:
        """Its owner changes what it takes part in, and allows algorithms by name. The limits are those of a worker."""
        self.change_site(
            policies={ORIGIN.task: policy}, algorithms=frozenset(algorithms), evaluations_ahead=0, failures=FAILURES
        )

    def change_site(self, **values: Any) -> None:
        self.members._sites[self.name] = replace(self.site, **values)

    def do(self, work: Work, inputs: Mapping[str, bytes], *, round_: int = 0) -> Result:
        """What a worker does with an assignment. Raises WorkError where it declines."""
        message = encode(work)
        work = decode(work.name, message, self.shape)
        question = work.once()
        again = question in self.asked
        client = WorkingClient(
            client_id=self.name,
            round=round_,
            attempt=0,
            shape=self.shape,
            memory=self.memory,
            origin=self.origin,
            site=self.site,
            inputs=inputs,
            again=again,
            measures=self.approved.get(self.origin.run_id, frozenset()),
        )
        if sorted(inputs) != sorted(work.input_sizes(self.shape)):
            raise WorkError("other inputs", reason="inputs")
        work.rows(self.shape)
        work.computation(client)
        asked = message + b"".join(content for _, content in sorted(inputs.items()))
        if self.asked.setdefault(question, asked) != asked:
            raise WorkError("another question was answered", reason="answered")
        rows = {"loss": self.vector, **self.gradients} if work.name == SessionStage.READY else {}
        losses, metrics = dict(self.losses), dict(self.metrics)
        if self.failure:  # as a worker's Execution hands it in
            rows, losses, metrics = {}, {}, dict.fromkeys(metrics, math.nan)
        return work.answer(client, Result(rows, losses, metrics, self.samples, 1.0, failure=self.failure))

    @property
    def shape(self) -> Shape:
        return Shape(update_layout([("w", len(self.vector))]), self.objectives, self.objectives)

    @property
    def objectives(self) -> tuple[str, ...]:
        return tuple(self.gradients) or ("loss",)


Inputs = Mapping[str, bytes]
Question = tuple[Work, Inputs]
Change = Callable[[str, Member, Work, Inputs], Question | None]
Lie = Callable[[str, Member, Work, Result], Result | None]


_parsed = cache(RunSpec.parse)  # each phase asks for it several times for each member


@dataclass(eq=False)
class Cast:
    """All members, and what happens to what they are asked and answer.

    Attributes:
        members: by id.
        lost: for each stage, the members whose replies to it do not arrive.
        change: what a lying coordinator makes of the question to one member; None leaves it as it is.
        unasked: the stage whose questions no member hears.
        lie: what a cheating member makes of its answer, or of its memory; None is no answer.
        declined: the reasons of those that declined, by stage.
        sent: the replies of each stage that was answered.
        asked: the work that members were asked for at READY, by the envelope of the reply.
        specification, run_id, base_model: of the run.
    """

    members: dict[str, Member]
    specification: bytes = document(Mode.SUM)
    run_id: str = ORIGIN.run_id
    base_model: str = ORIGIN.base_model
    lost: Mapping[tuple[str, int], Sequence[str]] = field(default_factory=dict)
    change: Change | None = None
    unasked: SessionStage | None = None
    lie: Lie | None = None
    declined: dict[tuple[str, str], str] = field(default_factory=dict)
    sent: dict[tuple[str, int], Replies] = field(default_factory=dict)
    asked: dict[str, Work] = field(default_factory=dict)
    phases: list[AlgorithmPhase] = field(default_factory=list)

    @property
    def spec(self) -> RunSpec:
        return _parsed(self.specification)

    @property
    def origin(self) -> Origin:
        return origin(self.specification, self.run_id, self.base_model)

    @property
    def units(self) -> NDArray[np.float32]:
        """The updates with length 1, (m, d)."""
        return np.stack([member.vector / np.linalg.norm(member.vector) for member in self.members.values()])

    def ask(self, phase: AlgorithmPhase) -> Replies:
        """The replies to a phase, as a fleet gives them."""
        self.phases.append(phase)
        stage = phase.kind.name
        opening = getattr(phase, "opening", 0)
        replies, declines = [], {}
        shared = phase.inputs()
        for name in phase.clients or ():
            member = self.members[name]
            member.origin = self.origin
            work: Work = phase.work(Asked(name, member.objectives, self.spec, 0))
            inputs: Inputs = {**shared, **phase.own_inputs(name)}
            if self.change is not None:
                work, inputs = self.change(stage, member, work, inputs) or (work, inputs)
            if stage == self.unasked:
                continue
            try:
                result: Result | None = member.do(work, inputs)
            except WorkError as error:
                declines[name] = self.declined[stage, name] = error.reason
                continue
            except Killed:
                declines[name] = self.declined[stage, name] = "killed"
                continue
            if self.lie is not None and result is not None:
                result = self.lie(stage, member, work, result)
            if result is None or name in self.lost.get((stage, opening), ()):
                continue
            asked = encode(phase.work(Asked(name, member.objectives, self.spec, 0)))
            if statement_problem(stage, asked, encode_statement(stage, result.statement)):
                declines[name] = self.declined[stage, name] = "statement"
            else:
                replies.append(self.reply(member, phase, result))
                if stage == SessionStage.READY:
                    self.asked[replies[-1].envelope] = decode(stage, asked, member.shape)
        self.sent[stage, opening] = Replies(replies, declines=declines)
        return self.sent[stage, opening]

    def reply(self, member: Member, phase: AlgorithmPhase, result: Result) -> PhaseReply:
        """The signed reply."""
        work = phase.work(Asked(member.name, member.objectives, self.spec, 0))
        rows = work.rows(member.shape)
        payload = ""
        if rows:
            payload = digest(b"".join(payload_bytes(payload_layout(rows), result.rows)))
        manifest = ReplyManifest(
            federation_id=ORIGIN.federation_id,
            run_id=self.run_id,
            round=0,
            client_id=member.name,
            base_model=self.base_model,
            spec=self.origin.spec,
            task=ORIGIN.task,
            payload=payload,
            samples=result.samples,
            statement=encode_statement(work.name, result.statement),
        )
        envelope = sign(manifest, member.members.keys[member.name]).SerializeToString()
        return PhaseReply(
            client_id=member.name,
            samples=result.samples,
            losses=result.losses,
            metrics=result.metrics,
            rows=tuple(result.rows[row.name] for row in rows),
            names=tuple(row.name for row in rows),
            objectives=member.objectives,
            envelope=digest(envelope),
            statement=result.statement,
            signed=envelope,
            signed_payload=payload,
        )


def cast(m: int, d: int = 40, *, seed: int = 0, assumed: int | None = None, **fields: Any) -> Cast:
    """Members whose updates agree in part; `assumed` is what each owner assumes."""
    rng = np.random.default_rng(seed)
    names = [f"silo-{i:02}" for i in range(m)]
    members = SimulatedMembers(seed, names, ORIGIN.task, assumed=assumed)
    common = rng.standard_normal(d)
    vectors = {name: (common + 2 * rng.standard_normal(d)).astype(np.float32) for name in names}
    return Cast({name: Member(name, members, vectors[name]) for name in names}, **fields)


def setting(
    cast: Cast, mode: Mode, algorithm: str = FREE, values: Mapping[str, Any] = _NONE, **changed: Any
) -> Setting:
    """The setting of a session with all members, in a run of this algorithm; `changed` are fields of the terms."""
    first = next(iter(cast.members.values()))
    evaluates = isinstance(changed.get("work"), Evaluate)
    shown = {key: changed[key] for key in ("clip", "blur", "disclose") if key in changed and not evaluates}
    cast.specification = document(mode, algorithm, values, **shown)
    fields: dict[str, Any] = {
        **{item.name: getattr(cast.origin, item.name) for item in dataclasses.fields(Origin)},
        "nonce": bytes(16),
        "round": 0,
        "mode": mode,
        "work": TRAIN,
        "length": len(first.vector),
        "clip": 0.0,
        "blur": 0.0 if evaluates else BLUR,
        "disclose": (),
        "invited": invitation({name: first.members.key_ids()[name] for name in cast.members}),
    }
    agreed = SessionTerms(**{**fields, **changed})
    return replace(_set("step", agreed), specification=cast.specification, bounds=run_bounds(cast.spec))


def settle(purpose: str, terms: SessionTerms) -> Setting:
    """The setting of a session of a round; its nonce follows from its purpose."""
    return _set(purpose, replace(terms, nonce=purpose.encode().ljust(16, b"-")))


def _set(purpose: str, agreed: SessionTerms) -> Setting:
    return Setting(
        purpose=purpose,
        agreed=agreed,
        terms_bytes=terms_bytes(agreed),
        taus=lambda view, V, inputs: taus(bytes(32), view, V, inputs),
    )


def equal(cohort: Cohort) -> NDArray[np.float64]:
    """Equal coefficients."""
    return np.full(len(cohort.members), 1 / len(cohort.members))


def play(
    cast: Cast,
    mode: Mode,
    decide: Callable[[Cohort], NDArray[np.float64] | None] = equal,
    setting_: Setting | None = None,
) -> Sum:
    """A session. Raises what `secure_sum` raises."""
    conversation = secure_sum(setting_ or setting(cast, mode), decide)
    total: Sum = held(cast, conversation)
    return total


def exact(cast: Cast, total: Sum) -> NDArray[np.uint32]:
    """The words that the sum must have, from the members' blurred vectors."""
    expected = np.zeros(len(total.words), np.uint32)
    given = dict(zip(total.record.members, total.record.coefficients, strict=True))
    for name in total.record.survivors:
        v = np.concatenate(list(Journal(cast.members[name].memory, total.record.session).vector()))
        words = np.rint(v * np.ldexp(given[name], -32) * 2.0**28).astype(np.int64)
        expected += words.astype(np.uint32)
    return expected


STAGES = [
    (SessionStage.READY, 0),
    (SessionStage.DEAL, 0),
    (SessionStage.OPEN, 0),
    (SessionStage.OPEN, 1),
    (SessionStage.OPEN, 2),
    (SessionStage.MASK, 0),
    (SessionStage.CONFIRM, 0),
    (SessionStage.UNMASK, 0),
]


def names(members: Iterable[int]) -> list[str]:
    """The ids of members by their places."""
    return [f"silo-{i:02}" for i in members]


def context(scene: Cast, mode: Mode, **changed: Any) -> RoundContext:
    """The context of a private round with these members; `changed` are fields of `PrivateSetting`."""
    first = next(iter(scene.members.values()))
    private = PrivateSetting(
        spec=scene.spec,
        document=scene.specification,
        origin=scene.origin,
        keys=first.members.key_ids(),
        named=frozenset(),
        blind=0,
        settle=settle,
    )
    return RoundContext(
        number=0,
        total=1,
        parameters=len(first.vector),
        objectives=first.objectives,
        selected={name: Selected(100, first.objectives) for name in scene.members},
        private=replace(private, **changed),
    )


def round_of(scene: Cast, mode: Mode, name: str, *, values: Mapping[str, Any] = _NONE, **changed: Any) -> Step:
    """One round of a rule with these members, and these hyper-parameters."""
    keys = {key: changed.pop(key) for key in ("clip", "blur", "disclose") if key in changed}
    scene.specification = document(mode, name, values, **keys)
    step: Step = held(scene, algorithm(name, values).round(context(scene, mode, **changed)))
    return step


def held(scene: Cast, conversation: Generator[AlgorithmPhase, Replies, Any]) -> Any:
    """What a conversation with these members ends in."""
    replies: Any = None
    while True:
        try:
            phase = conversation.send(replies)
        except StopIteration as end:
            return end.value
        replies = scene.ask(phase)


VICTIM = "silo-02"


def tried(member: Member, question: Question) -> str:
    """The reason for which a member declines a question, which leaves no trace; "answers" when it does not decline."""
    values, asked = dict(member.memory.values), dict(member.asked)
    try:
        member.do(*question)
    except WorkError as error:
        return error.reason
    finally:
        member.memory.values, member.asked = values, asked
    return "answers"


class Liar:
    """A coordinator that tries wrong questions on one member before it asks the right ones."""

    def __init__(self, mode: Mode, m: int = 8) -> None:
        self.scene = cast(m, assumed=1, change=self.change)
        self.mode = mode
        self.questions: dict[str, Question] = {}
        self.tries: dict[str, dict[str, Any]] = {}
        self.reasons: dict[str, dict[str, str]] = {}

    def change(self, stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        name = f"{stage}/{getattr(work, 'opening', 0)}"
        if member.name == VICTIM:
            self.questions[name] = (work, inputs)
            for what, wrong in self.tries.get(name, {}).items():
                self.reasons.setdefault(name, {})[what] = tried(member, wrong(work, inputs))

    def hears(self, **tries: dict[str, tuple[str, Any]]) -> None:
        """Plays a session; each wrong question, by stage and name, must be declined for its reason."""
        by_stage = {name.replace("_", "-").replace("--", "/"): questions for name, questions in tries.items()}
        self.tries = {
            stage: {what: wrong for what, (_, wrong) in questions.items()} for stage, questions in by_stage.items()
        }
        play(self.scene, self.mode)
        assert not self.scene.declined
        assert self.reasons == {
            stage: {what: reason for what, (reason, _) in questions.items()} for stage, questions in by_stage.items()
        }
