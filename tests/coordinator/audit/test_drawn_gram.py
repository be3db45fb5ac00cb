"""Rounds whose K is of some rows alone: which rows, their products and all lengths follow from the record."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation import diagnostics
from federation.aggregation.diagnostics import drawn_rows
from federation.digests import digest
from federation.record.bundle import BundleReader
from federation.spec.run_spec import RunSpec
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.v1.record_pb2 import RoundRecord
from tests.compared_metrics import differences
from tests.few import few_of
from tests.stage import Stage
from tests.verification import independent_verifier
from tests.verification.record_vectors import vector
from tests.verification.scene import Edited, exported, played, refusal, signed_again, verified
from verification.counterfactual import counterfactual
from verification.errors import VerificationError
from verification.run import OpenedRun, _check_suits, verify

RULES = {
    "fedavg": "",
    "fedavg of samples": "algorithm.prior = 'samples'",
    "fedavg of shortened updates": "algorithm.pre = ['clip', 'arc']",
    "fedavg in groups": "algorithm.pre = ['bucket']",
    "fedavg-n": "",
    "q-fedavg": "",
    "afl": "",
    "fedfa": "",
    "median": "",
    "median in groups": "algorithm.pre = ['bucket']",
    "trimmed-mean": "algorithm.byzantine = 1",
    "norm-clipping": "",
}
WHOLE = {
    "fedavg after a stage that reads K": ("fedavg", "algorithm.pre = ['nnm']"),
    "norms of updates that were mixed": ("norm-clipping", "algorithm.pre = ['bucket']"),
    "krum": ("krum", "algorithm.byzantine = 1"),
    "a rate that K bounds": ("fedavg", "server.learning_rate = 'auto'"),
}


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five updates are compared, as 200 of more are."""
    for module in (diagnostics, independent_verifier):
        monkeypatch.setattr(module, "MOST_COMPARED", 3)


def test_the_draw_is_of_the_seed_and_the_round_and_of_all_rows_where_these_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnostics, "MOST_COMPARED", 200)
    assert drawn_rows(7, 0, 200) == ()
    rows = drawn_rows(7, 0, 201)
    assert len(rows) == 200 == len({*rows})
    assert [*rows] == sorted(rows)
    assert drawn_rows(7, 0, 1000) not in {drawn_rows(8, 0, 1000), drawn_rows(7, 1, 1000)}
    times = np.zeros(1000)
    for number in range(100):
        times[list(drawn_rows(7, number, 1000))] += 1
    assert times.min() >= 4
    assert times.max() <= 40


@pytest.mark.parametrize("form", few_of(RULES, "fedavg"))
def test_a_round_of_which_some_rows_are_compared_is_verified_whatever_its_rule_reads(
    stage: Stage, tmp_path: Path, form: str
) -> None:
    run = played(stage, form.partition(" ")[0], RULES[form])
    found = verified(stage, run, tmp_path)
    assert all("K of 3 rows, 5 lengths" in one.words for one in found)
    assert differences(stage, run) == []
    for number in range(3):
        step = stage.step(run, number)
        K = np.load(io.BytesIO(stage.blobs.read(step.gram)))
        assert K.shape == (3, 3)
        assert [*step.gram_rows] == [*drawn_rows(RunSpec.parse(stage.run(run).spec).seed, number, 5)]
        assert len(step.squared_norms) == 5
        np.testing.assert_allclose(np.diag(K), np.array(step.squared_norms)[list(step.gram_rows)], rtol=1e-12)
    with BundleReader(exported(stage, run, tmp_path / "bare", payloads=False)) as bundle:
        bare = list(verify(bundle))
    for one in bare:
        assert "coefficients" in one.words or "the rule" in one.words
        assert "descent_min" in one.unchecked
        assert "conflicts" not in one.unchecked


@pytest.mark.full
@pytest.mark.parametrize("form", WHOLE)
def test_k_is_of_all_rows_where_the_rule_a_stage_or_the_rate_reads_it(stage: Stage, tmp_path: Path, form: str) -> None:
    run = played(stage, *WHOLE[form])
    assert all(", K," in one.words for one in verified(stage, run, tmp_path))
    step = stage.step(run, 0)
    assert not step.gram_rows
    assert not step.squared_norms
    assert np.load(io.BytesIO(stage.blobs.read(step.gram))).shape == (5, 5)
    bundle = Edited.of(exported(stage, run, tmp_path / "run"))
    U = _updates(stage, run, tmp_path)
    part = _signing(stage, bundle, lambda step: _compare(step, [*drawn_rows(0, 0, 5)], U))
    said = refusal(part[0].having(part[1]), tmp_path)
    assert "the signed K is of some rows alone" in said


@pytest.mark.full
def test_noise_for_clients_is_verified_where_some_rows_are_compared(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedavg-n", "privacy.client_noise = 2.0")
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto")) as bundle:
        assert all("K of 3 rows, 5 lengths" in one.words for one in verify(bundle))
    assert differences(stage, run) == []


@pytest.mark.full
def test_another_rule_is_replayed_on_the_updates_where_the_signed_k_lacks_some(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedavg", "", rounds=1)
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto")) as bundle:
        (same,) = counterfactual(bundle, "fedavg", {})
        (other,) = counterfactual(bundle, "fedmgda+", {})
    assert same.cosine == pytest.approx(1.0)
    assert len(other.clients) == 5
    assert other.cosine < 1


def _updates(stage: Stage, run: str, tmp_path: Path) -> np.ndarray[Any, Any]:
    """The updates of round 0, in the order of the step."""
    with BundleReader(exported(stage, run, tmp_path / "read")) as bundle:
        (record, *_) = bundle.rounds()
        payloads = {}
        for phase in record.phases:
            for exchange in phase.exchanges:
                for answer in exchange.answers:
                    payloads[envelope_digest(answer.reply)] = ReplyManifest.FromString(answer.reply.manifest).payload
        step = StepManifest.FromString(record.step.manifest)
        rows = [next(iter(bundle.rows(payloads[name]).values())).read() for name in step.replies]
    return np.array(rows, dtype=np.float64)


def _npy(K: np.ndarray[Any, Any]) -> bytes:
    stored = io.BytesIO()
    np.save(stored, K, allow_pickle=False)
    return stored.getvalue()


def _compare(step: StepManifest, rows: list[int], U: np.ndarray[Any, Any]) -> bytes:
    """Makes a step say that these rows are compared, honestly; returns their K."""
    step.gram_rows[:] = rows
    step.squared_norms[:] = (U**2).sum(axis=1).tolist()
    K = _npy(U[rows] @ U[rows].T)
    step.gram = digest(K)
    return K


def _signing(
    stage: Stage, bundle: Edited, change: Callable[[StepManifest], bytes | None]
) -> tuple[Edited, dict[str, bytes | None]]:
    """A bundle whose first step the coordinator signs after a change, and its K."""
    made: list[tuple[str, bytes | None]] = []

    def edit(record: RoundRecord) -> None:
        def changed(step: StepManifest) -> None:
            before = step.gram
            K = change(step)
            if K is not None:
                made.append((step.gram, K))
                if step.gram != before:
                    made.append((before, None))

        signed_again(record.step, StepManifest, stage.served.home.signing_key, changed)

    edited = bundle.with_round(0, edit)
    return edited, {f"blobs/{name.replace(':', '-')}": data for name, data in made}


def _others(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, [row for row in range(5) if row not in {*step.gram_rows}][:1] + [*step.gram_rows][:2], U)


def _sorted_others(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, sorted({*range(5)} - {step.gram_rows[0]})[:3], U)


def _fewer(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, [*step.gram_rows][:2], U)


def _more(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, [*range(5)], U)


def _twice(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, [step.gram_rows[0], *step.gram_rows][:3], U)


def _beyond(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.gram_rows[2] = 5


def _other_order(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    return _compare(step, [*step.gram_rows][::-1], U)


def _other_k(step: StepManifest, U: np.ndarray[Any, Any]) -> bytes:
    rows = [*step.gram_rows]
    K = U[rows] @ U[rows].T
    K[0, 1] = K[1, 0] = K[0, 1] * (1 + 1e-6)
    step.gram = digest(_npy(K))
    return _npy(K)


def _other_length_inside(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.squared_norms[step.gram_rows[0]] *= 1 + 1e-6


def _outside(step: StepManifest) -> int:
    return next(row for row in range(5) if row not in step.gram_rows)


def _other_length_outside(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.squared_norms[_outside(step)] *= 1 + 1e-6


def _no_length(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.squared_norms[_outside(step)] = math.nan


def _negative_length(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.squared_norms[_outside(step)] *= -1


def _length_left_out(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    step.squared_norms.pop()


def _without_lengths(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    del step.squared_norms[:]


def _lengths_beside_no_rows(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    del step.gram_rows[:]


def _rows_not_said(step: StepManifest, U: np.ndarray[Any, Any]) -> None:
    del step.gram_rows[:], step.squared_norms[:]


OTHER_ROWS, LENGTHS = "other rows than the seed and the round draw", "squared length"
LIES: dict[str, tuple[Callable[[StepManifest, np.ndarray[Any, Any]], bytes | None], str]] = {
    "other rows": (_others, OTHER_ROWS),
    "other rows in their order": (_sorted_others, OTHER_ROWS),
    "fewer rows": (_fewer, OTHER_ROWS),
    "more rows": (_more, OTHER_ROWS),
    "a row twice": (_twice, OTHER_ROWS),
    "a row that is not there": (_beyond, OTHER_ROWS),
    "the rows in another order": (_other_order, OTHER_ROWS),
    "a K of other values": (_other_k, r"K\[0, 1\]"),
    "a wrong length of a row that is drawn": (_other_length_inside, LENGTHS),
    "a wrong length of a row that is not drawn": (_other_length_outside, LENGTHS),
    "a length that is no number": (_no_length, LENGTHS),
    "a length below 0": (_negative_length, LENGTHS),
    "a length left out": (_length_left_out, LENGTHS),
    "no lengths": (_without_lengths, LENGTHS),
    "lengths where all rows are said to be compared": (_lengths_beside_no_rows, OTHER_ROWS),
    "a part of K that is said to be all of it": (_rows_not_said, "K has"),
}


@pytest.mark.parametrize(
    "lies", [["other rows in their order"], pytest.param([*LIES], marks=pytest.mark.full)], ids=["one", "each"]
)
def test_a_step_that_lies_about_its_rows_their_products_or_lengths_is_refused(
    stage: Stage, tmp_path: Path, lies: list[str]
) -> None:
    run = played(stage, "fedavg", "", rounds=1)
    bundle, U = Edited.of(exported(stage, run, tmp_path / "run")), _updates(stage, run, tmp_path)
    for name in lies:
        lie, expected = LIES[name]
        edited, K = _signing(stage, bundle, lambda step, lie=lie: lie(step, U))  # type: ignore[misc]
        said = refusal(edited.having(K), tmp_path)
        assert re.search(expected, said), (name, said)


@pytest.mark.parametrize(("rows", "lengths"), [([0], [1.0] * 3), ([99], [math.nan]), ([0], []), ([], [1.0])])
def test_a_private_step_that_says_that_some_rows_are_compared_is_refused_before_anything_uses_them(
    rows: list[int], lengths: list[float]
) -> None:
    with BundleReader(vector("open")) as bundle:
        text = bundle.specification.replace(b'fedavg"', b'fedavg-n"').replace(b'algorithm.prior = "samples"\n', b"")
        run = replace(OpenedRun.of(bundle).facts, spec=RunSpec.parse(text + b'privacy.secure = "sum"\n'))
        step = StepManifest.FromString(next(bundle.rounds()).step.manifest)
    step.combined = step.base_model
    step.secure.add()
    _check_suits(run, step)
    step.MergeFrom(StepManifest(gram_rows=rows, squared_norms=lengths))
    with pytest.raises(VerificationError, match="a private step has one combined vector"):
        _check_suits(run, step)
