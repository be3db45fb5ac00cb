"""The bounds of a reply, each at its edge; `test_refusals.py` has the refusals as a client gets them."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.rounds.replies import content
from coordinator.rounds.replies.content import (
    MAX_NUMBERS,
    check_is_time,
    check_matches,
    content_problem,
    privacy_problem,
)
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.transport.payload_check import PayloadCheck
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, ReplyManifest, Row, SamplePrivacy, TrainWork
from federation.v1.secure_pb2 import SecureReadyWork, SecureTerms
from federation.work.base import Work
from federation.work.evaluate.work import Evaluate
from federation.work.train.work import Train

DIGEST = "blake3:" + "0" * 64
ROW = Row(name="loss", dtype="F32", length=9)


def document(more: str = "") -> RunSpec:
    return RunSpec.parse(f'name = "a"\ntask = "digits"\nrounds = 1\nlimits.samples = 10\nlimits.norm = 5.0\n{more}')


def problem(manifest: ReplyManifest, kind: type[Work] = Train) -> str:
    return reason_of(content_problem(manifest, kind, document().limits))


def reason_of(found: Refusal | None) -> str:
    return "" if found is None else found.reason


@pytest.mark.parametrize(
    ("seconds", "nanos", "fits"),
    [
        (-62_135_596_800, 0, True),  # year 1
        (-62_135_596_801, 0, False),
        (253_402_300_799, 999_999_999, True),  # the last second of year 9999
        (253_402_300_800, 0, False),
        (0, 1_000_000_000, False),
        (0, -1, False),
    ],
)
def test_a_time_lies_in_the_years_1_to_9999(seconds: int, nanos: int, fits: bool) -> None:
    says = f"^manifest: created is not a time: {seconds} s and {nanos} ns"
    with nullcontext() if fits else pytest.raises(Refusal, match=says):
        check_is_time(Timestamp(seconds=seconds, nanos=nanos))


@pytest.mark.parametrize(
    ("rows", "payload", "size", "reason"),
    [
        ([ROW], DIGEST, 36, ""),
        ([ROW], "", 0, "mismatch:payload"),
        ([ROW], DIGEST, 0, "mismatch:payload"),
        ([ROW], "", 36, "mismatch:payload"),
        ([ROW], "blake3:0", 36, "payload-digest"),
        ([], "", 0, ""),
        ([], DIGEST, 36, "mismatch:payload"),
        ([], DIGEST, 0, "mismatch:payload"),
        ([], "", 36, "mismatch:payload"),
    ],
)
def test_a_payload_comes_exactly_where_rows_are_asked_for(
    rows: list[Row], payload: str, size: int, reason: str
) -> None:
    manifest = ReplyManifest(rows=rows, payload=payload, payload_bytes=size)
    with pytest.raises(Refusal, match=f"^{reason}: ") if reason else nullcontext():
        check_matches(manifest, AssignmentManifest(rows=rows))


@pytest.mark.parametrize(
    ("kind", "samples", "reason"),
    [
        (Train, 0, "limit:samples"),
        (Train, 1, ""),
        (Train, 10, ""),
        (Train, 11, "limit:samples"),
        (Evaluate, 0, ""),
        (Evaluate, 11, "limit:samples"),
    ],
)
def test_samples_are_claimed_up_to_the_limit(kind: type[Work], samples: int, reason: str) -> None:
    assert problem(ReplyManifest(samples=samples), kind) == reason


def test_losses_and_metrics_are_limited_together() -> None:
    half = {f"n{i}": 0.0 for i in range(MAX_NUMBERS // 2)}
    assert problem(ReplyManifest(samples=1, losses=half, metrics=half)) == ""
    assert problem(ReplyManifest(samples=1, losses=half, metrics={**half, "more": 0.0})) == "limit:metrics"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("a" * 120, 0.0, ""),
        ("a" * 121, 0.0, "limit:metrics"),
        ("", 0.0, "limit:metrics"),
        ("_./:-", -1e308, ""),
        ("/a", 0.0, "limit:metrics"),
        ("a b", 0.0, "limit:metrics"),
        ("a", math.nan, "non-finite"),
        ("a", -math.inf, "non-finite"),
    ],
)
def test_names_and_numbers_of_losses_and_metrics_are_bounded(name: str, value: float, reason: str) -> None:
    assert problem(ReplyManifest(samples=1, losses={name: value})) == reason
    assert problem(ReplyManifest(samples=1, metrics={name: value})) == reason


def ready(**work: Any) -> SecureReadyWork:
    return SecureReadyWork(terms=SecureTerms(**work).SerializeToString())


STATED = {"noise": 1.0, "clip": 2.0, "rate": 0.5, "steps": 6, "epsilon": 0.5, "bound": 1.0, "delta": 0.5}
NOISY = TrainWork(epochs=3, batch_size=5, learning_rate=0.1, sample_noise=1.0, sample_clip=2.0)  # 6 steps on 10 samples
TRAINING = AssignmentManifest(kind="train", work=NOISY.SerializeToString())
PRIVATE_ROUND = AssignmentManifest(kind="secure-ready", work=ready(train=NOISY).SerializeToString())


def stating(**changes: float) -> ReplyManifest:
    return ReplyManifest(samples=10, privacy=SamplePrivacy(**{**STATED, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("rate", 1.1), ("delta", 1.0), ("epsilon", -0.1), ("bound", math.nan), ("noise", math.inf)]
)
def test_a_statement_on_noise_is_in_range(name: str, value: float) -> None:
    assert problem(stating()) == ""
    assert problem(stating(**{name: value})) == "privacy"


@pytest.mark.parametrize("order", [TRAINING, PRIVATE_ROUND], ids=["train", "secure-ready"])
@pytest.mark.parametrize(
    "weaker",
    [{"noise": 0.9}, {"clip": 2.1}, {"clip": 0.0}, {"rate": 0.51}, {"rate": 0.0}, {"steps": 7}, {"steps": 0}],
    ids=str,
)
def test_a_statement_below_what_the_run_asks_for_is_refused(
    order: AssignmentManifest, weaker: Mapping[str, float]
) -> None:
    assert privacy_problem(stating(), order) is None
    assert privacy_problem(stating(noise=2.0, clip=1.0, rate=0.2, steps=2), order) is None
    assert reason_of(privacy_problem(stating(**weaker), order)) == "privacy"


def test_a_run_that_asks_for_noise_is_told_nothing_less_and_one_that_does_not_takes_any_statement() -> None:
    found = privacy_problem(ReplyManifest(samples=10), TRAINING)
    assert found is not None
    assert found.message == (
        "the run asks for noise 1 and clip 2 (privacy.sample_noise) in at most 6 steps at the rate 0.5; the reply "
        "states noise 0 and clip 0 in 0 steps at the rate 0"
    )
    open_, evaluating = TrainWork(epochs=1, learning_rate=0.1), ready(evaluate=EvaluateWork())
    for kind, work in (("train", open_), ("secure-ready", evaluating), ("evaluate", EvaluateWork())):
        order = AssignmentManifest(kind=kind, work=work.SerializeToString())
        assert privacy_problem(ReplyManifest(samples=10), order) is None
    assert privacy_problem(stating(noise=0.1), AssignmentManifest(kind="train", work=open_.SerializeToString())) is None


def test_what_is_wrong_with_a_payload_is_told_before_its_norm() -> None:
    check = PayloadCheck(None)
    check.norms = {"loss": 5.0}
    limits = document().limits
    assert content.payload_problem(check, Train, limits) is None
    check.norms = {"loss": 5.1}
    assert reason_of(content.payload_problem(check, Train, limits)) == "limit:norm"
    check.problem = Refusal("non-finite", "an element is NaN")
    assert content.payload_problem(check, Train, limits) is check.problem
