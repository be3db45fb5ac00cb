"""What an approved run may be asked for: no update in the clear in a private run, and its own initial model alone.

The coordinator signs what it likes. Its worker is real, over TLS, and its owner has pinned a roster.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import UInt64Value

from federation.digests import digest
from federation.spec.run_sections import Scalar
from federation.spec.run_spec import RunSpec, with_models
from federation.tasks import buffers_of, initial_model, scale_layer_of, task
from federation.training.own import run_model
from federation.v1.common_pb2 import (
    EvaluateWork,
    JacobianWork,
    ResidualWork,
    Row,
    SearchWork,
    StatisticsWork,
    TrainWork,
)
from federation.v1.secure_pb2 import (
    SecureConfirmWork,
    SecureDealWork,
    SecureMaskWork,
    SecureOpenWork,
    SecureReadyWork,
    SecureTerms,
    SecureUnmaskWork,
)
from federation.vectors import to_bytes
from federation.work.base import Shape, Shows
from federation.work.registry import BUILT_IN, STAGES, decode
from federation.work.site import SecurePolicy, Site
from federation.work.statistics import wire as statistics
from federation.work.statistics.work import Statistics
from fedpareto.starter.visits import Visits
from tests.paths import OWNERS_CODE
from tests.scripted import assignment
from tests.worker.scene import ALLOWED, Scene, Trained, command, gradients, reason, run_request, training
from tests.worker.site.scene import EACH_RUN, Hospital
from tests.worker.work.scene import DOCUMENT
from tests.works import offer_input, set_work
from worker.site import specified
from worker.site.policy_file import Policy
from worker.site.run_requests import RunRequest, RunsFile

OPEN = DOCUMENT.replace(b'privacy.secure = "sum"\n', b"")
DISCLOSED = DOCUMENT + b'privacy.disclose = ["evaluation"]\n'
LOYAL = Policy(algorithms=("fedavg-n",))


@pytest.fixture
def five(scene: Scene) -> Hospital:
    return Hospital(scene)


# --- updates in the clear


def test_an_approved_private_run_gets_no_result_in_the_clear_and_the_owner_is_alerted(five: Hospital) -> None:
    running = five.approved(DOCUMENT)
    jacobian = JacobianWork(batch_size=8, objectives=("loss",), sketch="exact", budget=1)
    for message in (None, jacobian, SearchWork(steps=[1.0]), EvaluateWork(splits=["train"])):
        assert five.told(five.work(DOCUMENT, message)) == "policy:approved"
    assert five.told(five.work(DOCUMENT, round=7, **five.other_model())) == "policy:approved", "in any round"
    alerts = running.wait_for("alert", 5)
    assert "results in the clear, in a run whose specification asks for private rounds" in alerts[0]["message"]
    assert five.evidence() == [("policy-approved", f"assignment-{number}") for number in range(1, 6)]
    assert running.events("training") == []
    assert five.told(five.ready()) == "", "the private round that was specified goes on"


@pytest.mark.parametrize("policy", [EACH_RUN, LOYAL], ids=["each-run", "algorithms"])
def test_another_specification_of_an_approved_private_run_opens_nothing(five: Hospital, policy: Policy) -> None:
    running = five.approved(DOCUMENT, policy)
    five.approve(OPEN)
    for document in (DOCUMENT, OPEN):
        assert five.told(five.work(document)) == "policy:approved"
    running.stop()
    five.start(policy=Policy())  # the owner decides about runs no more, and the specifications are still here
    for document in (DOCUMENT, OPEN, b"that never asked"):
        assert five.told(five.work(document)) == "policy:approved"
    assert five.told(five.ready()) == ""


def test_only_what_a_private_run_discloses_and_its_owner_allows_is_evaluated_in_the_clear() -> None:
    evaluation = training()
    del evaluation.rows[:]
    set_work(evaluation, EvaluateWork(splits=["test"]))
    shown: Sequence[tuple[bytes, tuple[Scalar, ...], str]] = (
        (DISCLOSED, ("evaluation",), ""),
        (DISCLOSED, ("loss",), "policy:disclose"),
        (DOCUMENT, ("evaluation",), "policy:approved"),
        (OPEN, (), ""),
        (b"rounds =", ("evaluation",), "policy:approved"),
    )
    for document, allowed, why in shown:
        site = Site(policies={"digits": SecurePolicy(disclose=allowed)})
        assert reason(evaluation, site=site, kept=[run_request(document=document)]) == why


def test_work_of_a_kind_that_does_not_say_what_it_shows_is_not_done_in_an_approved_private_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(OWNERS_CODE / "lottery"))
    ticket = training()
    ticket.kind, ticket.work = "ticket", UInt64Value(value=1).SerializeToString()
    required = Site(policies={"digits": SecurePolicy(required=True)})
    for site in (Site(), required):  # no coordinator asks for it by mistake, so the owner is alerted of it at both
        for asked in (ticket, gradients(8), training()):
            assert reason(asked, site=site, kept=[run_request(document=DOCUMENT)]) == "policy:approved"


def test_a_worker_that_keeps_no_specifications_tells_its_owner_once_for_each_run_what_leaves_in_the_clear(
    five: Hospital,
) -> None:
    running = five.attending()
    (told,) = running.events("policy")
    assert "the coordinator may ask for updates of digits in the clear" in told["message"]
    for _ in range(2):
        assert five.told(five.work(DOCUMENT)) == ""
    assert five.told(five.work(DOCUMENT, EvaluateWork(splits=["test"]), run_id="other")) == ""
    (said,) = running.events("in-the-clear")
    assert (said["run_id"], said["task"]) == ("run", "digits")
    running.stop()
    five.home.policy.write_text("[secure.tasks.digits]\nrequired = true\n")
    for quiet in (five.attending(), five.approved(OPEN)):
        assert quiet.events("policy") == []
        quiet.stop()


# --- the initial model


def test_round_0_of_an_approved_run_starts_from_the_model_with_which_it_asked(five: Hospital) -> None:
    running = five.approved(OPEN)
    other = five.other_model()
    assert five.told(five.work(OPEN, **other)) == "initial-model"
    assert "work from another model than the one with which the run asked" in running.wait_for("alert")[0]["message"]
    assert five.evidence() == [("initial-model", "assignment-1")]
    assert running.events("training") == []
    assert five.told(five.work(OPEN, attempt=1)) == "", "also in a later attempt"
    evaluation = five.work(OPEN, EvaluateWork(splits=["test"]), attempt=1, **other)
    assert five.told(evaluation) == "", "of the model after the round"
    assert five.told(five.work(OPEN, round=1, **other)) == "", "no later model is compared"


def test_an_approved_run_that_evaluates_gets_measurements_of_the_models_that_it_names_and_nothing_else(
    five: Hospital,
) -> None:
    other, measure = five.other_model(), EvaluateWork(splits=["test"])
    models = [digest(five.model[1]), other["base_model"]]
    document = with_models(b'name = "run"\ntask = "digits"\nkind = "evaluate"\n', models)
    running = five.approved(document)
    assert five.told(five.work(document, measure)) == ""
    assert five.told(five.work(document, measure, round=1, **other)) == ""
    for asked in (
        five.work(document, measure, round=1),
        five.work(document, measure, round=2),
        five.work(document, round=1, **other),
        five.work(document, SearchWork(steps=[1.0]), round=1, **other),
    ):
        assert five.told(asked) == "evaluates-only"
    assert "other work than to measure the models" in running.wait_for("alert")[0]["message"]
    assert running.events("training") == []


def test_only_the_owners_own_approval_lets_a_run_measure_models_privately() -> None:
    models = [digest(b"one"), digest(b"two")]
    head = b'name = "run"\ntask = "digits"\n'
    fields: dict[str, Any] = dict.fromkeys(
        ("run", "spec", "initial_model", "submitted_by", "asked", "owner", "words", "decided"), ""
    )
    document = with_models(head + b'kind = "evaluate"\nprivacy.secure = "sum"\n', models)
    run = RunRequest(**fields, name="run", task="digits", document=document)
    assert run.verdict(Policy(algorithms=("evaluate",))).answer == "accepted"
    assert run.approved_models == replace(run, owner="refused").approved_models == ()
    assert replace(run, owner="approved").approved_models == tuple(models)
    assert replace(run, owner="approved", document=head + b"rounds = 1\n").approved_models == ()


def test_an_owner_that_names_algorithms_allows_runs_that_evaluate_by_the_name_of_their_kind() -> None:
    document = b'name = "run"\ntask = "digits"\nkind = "evaluate"\n'
    fields: dict[str, Any] = dict.fromkeys(
        ("run", "spec", "initial_model", "submitted_by", "asked", "owner", "words", "decided"), ""
    )
    run = RunRequest(**fields, name="run", task="digits", document=document)
    assert run.verdict(LOYAL).reason == "policy:algorithm"
    assert run.verdict(Policy(algorithms=("fedavg-n", "evaluate"))).answer == "accepted"


def test_a_private_round_0_starts_from_the_model_with_which_the_run_asked(five: Hospital) -> None:
    five.approved(DOCUMENT)
    other = five.other_model()
    for changes, why in ((other, "initial-model"), ({}, "")):
        assert five.told(five.ready(**changes)) == why


def test_a_run_that_asks_again_with_another_initial_model_keeps_the_first_one(five: Hospital) -> None:
    running = five.approved(OPEN)
    other = five.other_model()
    five.coordinator.ask(OPEN, "run", initial_model=other["base_model"])
    assert "and asks again with" in running.wait_for("run-invalid")[0]["message"]
    assert five.told(five.work(OPEN, **other)) == "initial-model"
    five.coordinator.ask(OPEN, "nameless", initial_model="")
    running.wait_for("run-invalid", 2)
    assert {said.run_id for said in five.coordinator.consents} == {"run"}


def stages(terms: SecureTerms) -> dict[str, Message]:
    """The messages of a session, by the name of the kind."""
    members = ["a", "b", "c", "d", "e"]
    return {
        "secure-ready": SecureReadyWork(terms=terms.SerializeToString()),
        "secure-deal": SecureDealWork(session=bytes(32), mode="sum", members=members),
        "secure-open": SecureOpenWork(session=bytes(32), members=members),
        "secure-mask": SecureMaskWork(session=bytes(32), members=members, coefficients=[1] * 5, length=9),
        "secure-confirm": SecureConfirmWork(session=bytes(32), members=members),
        "secure-unmask": SecureUnmaskWork(session=bytes(32), members=members),
    }


def test_all_work_but_evaluations_and_later_stages_starts_from_the_model_of_its_round() -> None:
    train, evaluate = TrainWork(steps=1, learning_rate=0.1), EvaluateWork(splits=["test"])
    jacobian = JacobianWork(objectives=["left"], sketch="exact", budget=1)
    messages: dict[str, Message] = {
        "train": train, "evaluate": evaluate, "jacobian": jacobian, "search": SearchWork(steps=[1.0]),
        "residual": ResidualWork(jacobian=jacobian, objectives=["left"]), "statistics": StatisticsWork(),
        **stages(SecureTerms(mode="sum", train=train)),
    }  # fmt: skip
    assert set(messages) == {*BUILT_IN, *STAGES}
    starts = {
        name: decode(name, message.SerializeToString(), ALLOWED["digits"].shape).from_round_model
        for name, message in messages.items()
    }
    assert {name for name, start in starts.items() if start} == {
        "train", "jacobian", "residual", "search", "secure-ready",
    }  # fmt: skip
    ready = stages(SecureTerms(mode="sum", evaluate=evaluate))["secure-ready"].SerializeToString()
    evaluation = decode("secure-ready", ready, ALLOWED["digits"].shape)
    assert (evaluation.from_round_model, evaluation.shows) == (False, Shows.NOTHING)
    run, asked = run_request(document=DOCUMENT), training()
    asked.round = 0
    assert specified.problem(run, asked, evaluation, SecurePolicy()) is None


def test_only_phases_of_a_private_description_need_no_treatment_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the tabular task has a layer Standardise, whose tensors every other run has to name."""
    visits = Visits()
    layout, _ = initial_model(visits, 0)

    class Tabular(Trained):
        shape, buffers = Shape(layout, ("loss",), ("loss",)), frozenset(buffers_of(visits))
        scale_layer = scale_layer_of(visits)

    monkeypatch.setitem(ALLOWED, "digits", Tabular())
    described = b'name = "run"\ntask = "digits"\nkind = "statistics"\nprivacy.secure = "sum"\nstatistics.bins = 2\n'
    described += b'statistics.columns = ["age"]\nselection.minimum = 5\n'
    asked_for = statistics.to_proto(Statistics.of(RunSpec.parse(described)))

    def told(name: str, terms: SecureTerms, *documents: bytes) -> str:
        asked = assignment(layout, bytes(layout.file_bytes), 3)
        del asked.rows[:]
        message = stages(terms)[name]
        asked.kind, asked.work, asked.max_payload_bytes = name, message.SerializeToString(), 1 << 30
        work = decode(name, asked.work, Tabular.shape)
        asked.rows.extend(Row(name=row.name, dtype=row.dtype, length=row.length) for row in work.rows(Tabular.shape))
        for needed in work.input_sizes(Tabular.shape):
            offer_input(asked, needed, b"content")
        asked.spec = digest(documents[-1]) if documents else ""
        return reason(asked, kept=[run_request(document=one, spec=digest(one)) for one in documents])

    sums, trains = (SecureTerms(mode="sum", statistics=asked_for), SecureTerms(mode="sum", train=TrainWork(steps=1)))
    for name in STAGES:
        assert told(name, sums, described) == ""
        assert told(name, trains, DOCUMENT) == "parameters"
        assert told(name, trains, described, DOCUMENT) == "parameters", "not by another specification of the run"
    assert told("secure-ready", trains, described) == "parameters"
    assert told("secure-mask", sums) == "parameters", "no run is kept, so READY was not approved"


# --- where the initial model comes from


def made(document: bytes, algorithm: str = "blake3") -> str:
    """The digest of the model that the task of a specification makes."""
    spec = RunSpec.parse(document)
    layout, vector = run_model(task(spec.task), spec.seed, spec.parameters)
    return digest(to_bytes(layout, vector), algorithm)


FROZEN = OPEN + b'parameters.frozen = ["*bias*"]\n'


@pytest.mark.parametrize(
    ("run", "source", "words"),
    [
        (run_request(document=OPEN, initial_model=made(OPEN)), "task", "from task and seed, checked"),
        (run_request(document=OPEN, initial_model=made(OPEN, "sha256")), "task", "from task and seed, checked"),
        (run_request(document=FROZEN, initial_model=made(FROZEN)), "task", "from task and seed, checked"),
        (run_request(document=FROZEN, initial_model=made(OPEN)), "submitter", "given by the submitter"),
        (run_request(document=OPEN), "submitter", "makes another model from the seed 7"),
        (run_request(document=OPEN, task="mnist"), "unknown", "the specification is for the task digits"),
        (run_request(document=b"rounds ="), "unknown", "not checked"),
        (
            run_request(document=OPEN.replace(b"digits", b"clinic:Clinic"), task="clinic:Clinic"),
            "unknown",
            "not checked, as this machine cannot make the model from task and seed",
        ),
        (run_request(document=OPEN + b'parameters.frozen = ["no-such"]\n'), "unknown", "no-such"),
    ],
)
def test_an_owner_sees_where_the_initial_model_of_a_run_comes_from(
    scene: Scene, run: RunRequest, source: str, words: str
) -> None:
    place = ("--home", scene_home(scene))
    with closing(RunsFile(scene.home.runs)) as file:
        file.add(replace(run, spec=digest(run.document)))
    shown = command("runs", "run-1", *place)
    assert words in shown
    assert ("warning: initial model" in shown) is (source != "task")
    (document,) = json.loads(command("runs", "run-1", *place, "--json"))
    assert document["origin"]["source"] == source
    assert words in document["origin"]["message"]
    (listed,) = json.loads(command("runs", *place, "--json"))
    assert (listed["origin"], listed["initial_model"]) == (None, run.initial_model)


def scene_home(scene: Scene) -> str:
    scene.home.directory.mkdir(exist_ok=True)
    return scene.joined()
