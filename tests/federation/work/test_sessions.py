"""A member does only what the specification asks for in this round and phase: each field is compared."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from federation.aggregation.phases import PrivateSetting
from federation.aggregation.secure.private_rule import make_setting
from federation.secure.evaluation import clip
from federation.secure.thresholds import BLUR, EVALUATION_NOISE, Mode
from federation.v1 import common_pb2, secure_pb2
from federation.v1.secure_pb2 import SecureTerms
from federation.work.base import Work, WorkError
from federation.work.jacobian.work import Jacobian
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.sessions import EVALUATE, JACOBIAN, TRAIN
from federation.work.secure.terms import SessionTerms
from federation.work.secure.wire import read_terms, terms_bytes
from federation.work.site import SecurePolicy
from federation.work.train.work import Train
from tests.federation.work.scene import FREE, Cast, cast, context, document, settle, tried
from tests.paths import ROOT

VICTIM = "silo-02"
M = 8
FEDCMOO = {"bound": "none", "scope": "all", "sketch": "exact", "budget": 1.0}
TITLE = "## 8. The fields of a session's messages"
STAGES = ("Ready", "Deal", "Open", "Mask", "Confirm", "Unmask")


def table() -> dict[tuple[str, str], str]:
    """Where the value of each field comes from, by message and field."""
    page = (ROOT / "docs/reference/private-protocol.md").read_text()
    section = page.split(TITLE)[1]
    found: dict[tuple[str, str], str] = {}
    for message, names, source in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert (message, name) not in found, f"{message}.{name} has two rows"
            found[message, name] = source
    return found


def test_every_field_of_a_sessions_messages_has_a_row_that_says_where_its_value_comes_from() -> None:
    messages = [getattr(secure_pb2, f"Secure{stage}Work") for stage in STAGES]
    messages += [SecureTerms, common_pb2.TrainWork, common_pb2.JacobianWork]
    messages += [common_pb2.EvaluateWork, common_pb2.StatisticsWork]
    there = {(message.DESCRIPTOR.name, field.name) for message in messages for field in message.DESCRIPTOR.fields}
    assert set(table()) == there


# --- each field is compared


def scene_of(algorithm: str, **values: Any) -> Cast:
    """Members of a run of this algorithm; with several objectives for `fedcmoo` and the like."""
    scene = cast(M, assumed=1)
    if algorithm not in ("fedavg-n", FREE):
        for member in scene.members.values():
            member.gradients = {"a": member.vector, "b": member.vector}
    scene.specification = document(Mode.SUM, algorithm, values, clip=0.0 if algorithm == FREE else 10.0)
    return scene


def terms_of(scene: Cast, phase: str, **more: Any) -> SessionTerms:
    """The terms with which an honest coordinator asks in this phase."""
    around = context(scene, Mode.SUM)
    assert isinstance(around.private, PrivateSetting)
    d = len(scene.members[VICTIM].vector)
    length = {TRAIN: d, JACOBIAN: d * len(around.objectives), EVALUATE: 2 + 4 * (len(around.objectives) > 1)}[phase]
    weights = {"weights": dict.fromkeys(around.objectives, 0.5)} if "fedcmoo" in scene.spec.algorithm.name else {}
    given = {"measure": phase == TRAIN, **(weights if phase == TRAIN else {}), **more}
    private = replace(around.private, settle=settle)
    return make_setting(around, private, phase, length, sorted(scene.members), **given).agreed


def says(scene: Cast, terms: SessionTerms | bytes) -> str:
    """What a member says to READY with these terms, in an assignment of the run that fits them as far as it can."""
    member = scene.members[VICTIM]
    data = terms if isinstance(terms, bytes) else terms_bytes(terms)
    try:
        agreed = read_terms(data, member.shape)
    except WorkError as error:
        return error.reason or "malformed"
    chosen = {name: getattr(agreed, name) for name in ("base_model", "task", "seed", "unshared")}
    member.origin = replace(scene.origin, **chosen)
    question = (Ready(agreed=agreed, terms_bytes=data), {SPECIFICATION: scene.specification})
    return tried(member, question) or "malformed"


def others(field: Any, value: Any) -> list[Any]:
    """Other values of a field."""
    if field.type == field.TYPE_BOOL:
        return [not value]
    if field.type in (field.TYPE_DOUBLE, field.TYPE_UINT32, field.TYPE_UINT64):
        return [value + 1]
    return [value + (b"1" if field.type == field.TYPE_BYTES else "1")]


def edited(message: Any) -> Iterator[tuple[tuple[str, str], Message]]:
    """The message with one field changed, by the message and the name of the field; fields of its parts, too."""
    for field in message.DESCRIPTOR.fields:
        place = (message.DESCRIPTOR.name, field.name)
        if place[0] == "EvaluateWork" and field.name == "metrics":
            changed = type(message)()
            changed.CopyFrom(message)
            changed.metrics.add(name="other", better="higher", largest=1.0)
            yield place, changed
        elif field.is_repeated or field.message_type is not None:
            continue  # below, or by hand
        else:
            for value in others(field, getattr(message, field.name)):
                changed = type(message)()
                changed.CopyFrom(message)
                setattr(changed, field.name, value)
                yield place, changed


PHASES = [("fedavg-n", TRAIN), ("fedcmoo", JACOBIAN), ("fedcmoo", TRAIN), ("fedavg-n", EVALUATE)]


@pytest.mark.parametrize(("algorithm", "phase"), PHASES)
def test_a_member_declines_each_value_that_the_specification_does_not_give(algorithm: str, phase: str) -> None:
    scene = scene_of(algorithm, **(FEDCMOO if algorithm == "fedcmoo" else {}))
    honest, sources, tried_fields = terms_of(scene, phase), table(), set()
    assert says(scene, honest) in ("answers", "evaluations"), "an evaluation follows a training"
    whole = SecureTerms.FromString(terms_bytes(honest))
    for place, changed in edited(whole):
        tried_fields.add(place)
        if "*free*" not in sources[place].lower():
            assert says(scene, changed.SerializeToString()) not in ("answers", "evaluations"), place
    inner = getattr(whole, phase)
    for place, changed in edited(inner):
        tried_fields.add(place)
        if "*free*" not in sources[place].lower():
            other = SecureTerms.FromString(terms_bytes(honest))
            getattr(other, phase).CopyFrom(changed)
            assert says(scene, other.SerializeToString()) not in ("answers", "evaluations"), place
    assert len(tried_fields) > 12
    for wrong in ({"unshared": replace(honest.unshared, frozen=("w",))}, {"disclose": ("loss",)}):
        assert says(scene, replace(honest, **wrong)) in ("terms", "policy:disclose")


@pytest.mark.parametrize("weight", [-3.0, float("nan"), float("inf")])
def test_weights_of_objectives_are_finite_and_not_negative(weight: float) -> None:
    scene = scene_of("fedcmoo", **FEDCMOO)
    assert says(scene, terms_of(scene, TRAIN, weights={"a": 0.0, "b": 1.0})) == "answers"
    for weights in ({"a": 1.0, "b": weight}, {"a": 0.0, "b": 0.0}, {"a": 1.0}):
        assert says(scene, terms_of(scene, TRAIN, weights=weights)) in ("terms", "malformed")


@pytest.mark.parametrize(
    ("algorithm", "values", "targets"),
    [
        ("fedavg-n", {}, {"loss": {"a": 0.5, "b": 0.5}}),
        ("scalarised", {"weights": [1, 3]}, {"loss": {"a": 0.25, "b": 0.75}}),
        ("scalarised", {"weights": [0, 3]}, {"loss": {"b": 1.0}}),
        ("fsmgda", {"bound": "none"}, {"a": {"a": 1.0}, "b": {"b": 1.0}}),
    ],
)
def test_the_targets_of_a_training_are_those_of_the_algorithm(
    algorithm: str, values: dict[str, Any], targets: dict[str, dict[str, float]]
) -> None:
    scene = scene_of("fsmgda", bound="none")
    scene.specification = document(Mode.SUM, algorithm, values, clip=10.0)
    honest = terms_of(scene, TRAIN)
    training = honest.work
    assert isinstance(training, Train)
    assert training.targets == targets
    honest = replace(honest, length=len(targets) * len(scene.members[VICTIM].vector))
    assert says(scene, honest) == "answers"
    for other in ({"loss": {"a": 1.0}}, {"loss": {"a": 0.5, "b": -0.5}}, {"b": {"b": 1.0}}):
        wrong = replace(honest, work=replace(training, targets=other), length=len(scene.members[VICTIM].vector))
        assert says(scene, wrong) == "terms"


GRADIENTS = Jacobian(sketch="exact", budget=1.0, batch_size=10, objectives=("loss",))


@pytest.mark.parametrize("algorithm", ["fedavg-n", FREE])
def test_gradients_are_no_phase_of_an_algorithm_that_asks_for_updates(algorithm: str) -> None:
    scene = scene_of(algorithm)
    honest = terms_of(scene, TRAIN)
    assert says(scene, replace(honest, work=GRADIENTS)) == "terms"


def test_of_a_plug_in_that_the_owner_names_targets_and_gradients_are_free_and_all_else_is_compared() -> None:
    scene = scene_of(FREE)
    honest = terms_of(scene, TRAIN)
    assert isinstance(honest.work, Train)
    halves = replace(honest, work=replace(honest.work, targets={"loss": {"loss": 0.5}}))
    assert says(scene, halves) == "terms"
    scene.members[VICTIM].allow(SecurePolicy(assumed=1), FREE)
    assert says(scene, halves) == "answers"
    assert says(scene, replace(honest, work=GRADIENTS)) == "answers"
    wrong: list[Work] = [
        replace(honest.work, from_jacobian=True),
        replace(honest.work, sgd=honest.work.sgd.changed(learning_rate=9.0)),
        replace(GRADIENTS, batch_size=0),
    ]
    assert [says(scene, replace(honest, work=work)) for work in wrong] == ["terms"] * 3


def test_an_evaluation_is_a_sum_without_blur_and_its_clip_follows_from_its_metrics() -> None:
    terms = terms_of(scene_of("fedavg-n"), EVALUATE)
    assert (terms.mode, terms.blur, terms.clip) == (Mode.SUM, 0.0, clip(2, EVALUATION_NOISE))
    assert terms_of(scene_of("fedavg-n"), TRAIN).blur == BLUR
