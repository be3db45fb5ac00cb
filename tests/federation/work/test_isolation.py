"""A coordinator that wants a sum to show one member: it tells members different things, or asks a session again."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.aggregation.phases import Setting
from coordinator.aggregation.secure.phases import ReadyPhase
from federation.digests import digest
from federation.secure import hashing
from federation.secure.payloads import join_envelopes
from federation.secure.thresholds import Mode
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, UnsharedParameters
from federation.v1.secure_pb2 import SecureReadyWork, SecureTerms
from federation.work.base import Origin, Result, WorkError, WorkingClient
from federation.work.evaluate.work import Evaluate
from federation.work.registry import encode
from federation.work.secure import member_checks
from federation.work.secure.deal import Deal
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.wire import terms_bytes
from federation.work.site import SecurePolicy
from federation.work.train.work import Train
from tests.federation.work.scene import ORIGIN, TRAIN, Cast, Member, cast, setting
from worker.site.assignments import Order
from worker.work.memory import WorkerMemory

VICTIM = "silo-02"
UNSHARED = UnsharedParameters(frozen=["w"]).SerializeToString(deterministic=True)


def ready(made: Setting) -> Ready:
    return Ready(agreed=made.agreed, terms_bytes=made.terms_bytes)


def told(scene: Cast, lines: str = "", **changed: Any) -> Setting:
    """What a member is told, from a specification with these lines; `changed` are fields of the terms."""
    document = b"\n".join([setting(scene, Mode.SUM).specification, lines.encode()])
    spec = RunSpec.parse(document)
    fields: dict[str, Any] = {
        "spec": digest(document),
        "work": Train.of(spec, 0, joint_target(("loss",))),
        "seed": spec.seed,
    }
    agreed = replace(setting(scene, Mode.SUM).agreed, **fields | changed)
    return replace(setting(scene, Mode.SUM), agreed=agreed, terms_bytes=terms_bytes(agreed), specification=document)


def replied(scene: Cast, member: Member, made: Setting) -> bytes:
    """A member's signed reply to READY."""
    agreed, document = made.agreed, made.specification
    phase = ReadyPhase(agreed=agreed, terms_bytes=made.terms_bytes, specification=document, clients=agreed.ids)
    member.origin = Origin(**{item.name: getattr(agreed, item.name) for item in fields(Origin)})
    return scene.reply(member, phase, member.do(ready(made), {SPECIFICATION: document})).signed


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        ("train.learning_rate = 0.5", {}),
        ("algorithm.prior = 'samples'", {}),
        ("", {"work": replace(TRAIN, targets={"loss": {"loss": 0.5}})}),
        ("seed = 1", {}),
        ("", {"unshared": UNSHARED}),
        ("", {"base_model": "model-1"}),
    ],
    ids=["training", "algorithm", "work", "seed", "unshared", "base_model"],
)
def test_a_member_that_is_told_something_else_of_its_work_is_in_another_session(
    lines: str, changed: Mapping[str, Any]
) -> None:
    scene = cast(5, assumed=1)
    mine, theirs = told(scene), told(scene, lines, **changed)
    others = [member for who, member in scene.members.items() if who != VICTIM]
    victim = scene.members[VICTIM]
    envelopes = [replied(scene, victim, mine), *(replied(scene, member, theirs) for member in others)]
    deal = Deal(session=ready(mine).session, mode=Mode.SUM, members=tuple(scene.members))
    with pytest.raises(WorkError, match="is of another session or stage"):
        victim.do(deal, {"replies": join_envelopes(envelopes)})


def test_a_member_makes_its_vector_of_the_work_in_the_terms_alone() -> None:
    """READY carries no other work, and the terms must have the seed and the parameters of the assignment."""
    scene = cast(5, assumed=1)
    victim, made = scene.members[VICTIM], setting(scene, Mode.SUM)
    assert [field.name for field in SecureReadyWork.DESCRIPTOR.fields] == ["terms"]
    for name, value in (("seed", 1), ("unshared", UNSHARED)):
        victim.origin = replace(scene.origin, **dict[str, Any]({name: value}))
        with pytest.raises(WorkError, match=f"the terms are for another {name} than the work") as declined:
            victim.do(ready(made), {SPECIFICATION: made.specification})
        assert declined.value.reason == "terms"


def test_every_field_of_the_terms_names_another_session() -> None:
    scene = cast(5, assumed=1)
    invited = setting(scene, Mode.SUM).agreed.invited
    changed: dict[str, Any] = {
        "nonce": b"1" * 16,
        "federation_id": "other",
        "run_id": "other",
        "round": 1,
        "mode": Mode.VERIFIED,
        "base_model": "other",
        "spec": "other",
        "task": "other",
        "length": 2,
        "clip": 1.0,
        "disclose": ("loss",),
        "invited": invited[1:],
        "work": Evaluate(splits=("train",)),
        "seed": 1,
        "unshared": UNSHARED,
    }
    kinds = {"train", "jacobian", "evaluate"}
    assert set(changed) == {field.name for field in SecureTerms.DESCRIPTOR.fields} - kinds | {"work"}
    made = setting(scene, Mode.SUM).agreed
    terms = [made, *(replace(made, **{name: value}) for name, value in changed.items())]
    assert len({hashing.session(terms_bytes(one)) for one in terms}) == len(changed) + 1


def test_every_field_of_an_assignment_is_in_the_terms_or_shapes_no_vector() -> None:
    in_terms = {"federation_id", "run_id", "round", "base_model", "spec", "task", "seed", "unshared", "work"}
    of_one_member = {"assignment_id", "client_id"}
    follow = {"base_model_bytes", "kind", "rows", "inputs"}  # from the kind, the work and the model
    unread = {"phase", "attempt", "previous_step", "objectives", "members", "submitted_by", "max_payload_bytes"}
    times = {"deadline", "created"}
    fields = {field.name for field in AssignmentManifest.DESCRIPTOR.fields}
    assert fields == in_terms | of_one_member | follow | unread | times


# --- a session that is asked again


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[WorkerMemory]:
    made = WorkerMemory(tmp_path / "memory.db", Ed25519PrivateKey.generate())
    yield made
    made.close()


def test_a_session_that_is_asked_again_in_another_attempt_is_over(memory: WorkerMemory) -> None:
    scene = cast(5, assumed=1)
    victim = scene.members[VICTIM]
    policy = SecurePolicy(assumed=1, sessions=1, sessions_per_model=1)
    site = replace(victim.site, new_secret=None, policies={ORIGIN.task: policy})
    work, keys, reasons = ready(setting(scene, Mode.SUM)), [], []
    for attempt in range(3):
        manifest = AssignmentManifest(
            run_id="run", attempt=attempt, kind=work.name, base_model=ORIGIN.base_model, work=encode(work)
        )
        deadline = datetime.now(UTC) + timedelta(hours=1)
        order = Order(SignedEnvelope(), manifest, work, victim.shape, (), deadline)
        client = WorkingClient(
            client_id=VICTIM,
            round=0,
            attempt=attempt,
            shape=victim.shape,
            memory=memory.begin(order),
            origin=scene.origin,
            site=site,
            inputs={SPECIFICATION: scene.specification},
            again=memory.answered(order),
        )
        try:
            work.computation(client)
        except WorkError as error:
            reasons.append(error.reason)
            continue
        memory.answer(order)
        keys.append(work.answer(client, Result({"loss": victim.vector}, {}, {}, 100)).statement.keys)
        member_checks.check_sessions(client, work.session.hex(), work="train", count=True)  # as MASK does
    assert (len(keys), reasons) == (1, ["session-over"] * 2)
