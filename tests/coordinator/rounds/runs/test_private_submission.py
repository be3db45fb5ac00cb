"""Which algorithms have private rounds, in which mode, and what is refused when a run is submitted."""

from datetime import UTC, datetime
from typing import Any

import pytest

from coordinator.rounds.fleets.base import Question
from coordinator.rounds.runs.specification import cautions, parse_run
from federation.aggregation.secure.phases import MaskPhase, UnmaskPhase
from federation.spec.run_spec import SpecError
from federation.transport.transfer_times import SLOWEST_BYTES_PER_SECOND
from federation.vectors import Layout, Tensor
from storage.models import Round

RUN = 'name = "x"\ntask = "digits"\nrounds = 7\nevaluate.every = 2\n'


def spec(name: str, secure: str, algorithm: str = "", privacy: str = "") -> str:
    return f'{RUN}[algorithm]\nname = "{name}"\n{algorithm}\n[privacy]\nsecure = "{secure}"\n{privacy}\n'


BY_GRAM = ("fedmgda+", "fedmgda", "fedmgda+auto", "dual-cone", "geometric-median", "centred-clipping", "multi-krum")


@pytest.mark.parametrize("secure", ["private", "verified"])
@pytest.mark.parametrize("name", [*BY_GRAM, "fedavg-n"])
def test_rules_over_the_gram_matrix_are_accepted(name: str, secure: str) -> None:
    parse_run(spec(name, secure))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            spec("fedmgda+", "private", algorithm='preferences = ["a >= 0.5"]'),
            "privacy.secure: algorithm.preferences: members of a private round bound each other's weights alike",
        ),
        (spec("krum", "private"), "krum has no private rounds: it takes one member's update"),
        (spec("median", "sum"), "median has no private rounds: it reads single coordinates"),
        (spec("trimmed-mean", "verified"), "trimmed-mean has no private rounds"),
        (spec("fedmdfg", "private"), "its line search"),
        (spec("scalarised", "sum"), "privacy.clip: scalarised needs the length"),
        (spec("scalarised", "private", privacy="clip = 1.0"), 'scalarised needs nothing but sums: use "sum"'),
        (spec("scalarised", "sum", "exact_stationarity = true", "clip = 1.0"), "exact_stationarity: .* false"),
        (spec("norm-clipping", "sum"), "fedavg with privacy.clip does the same with a fixed length"),
        (spec("fedcmoo", "private", 'bound = "none"', "clip = 1.0"), 'fedcmoo needs nothing but sums: use "sum"'),
        (spec("fedcmoo", "sum", 'bound = "none"'), "privacy.clip: fedcmoo needs the length"),
        (spec("fsmgda", "sum", privacy="clip = 1.0"), 'algorithm.bound: in a private round it is "none"'),
        (spec("fedcmoo", "sum", 'bound = "none"\nsketch = "svd"', "clip = 1.0"), "algorithm.sketch"),
        (spec("fedcmoo", "sum", 'bound = "none"\nlatecomers = true', "clip = 1.0"), "latecomers: .* it is false"),
        (spec("fedcmoo-pref", "sum", 'bound = "none"', "clip = 1.0"), 'disclose: fedcmoo-pref needs "loss"'),
        (spec("fedmgda+", "sum"), 'fedmgda\\+ needs the Gram matrix: use "private" or "verified"'),
        (spec("fedavg", "sum"), "privacy.clip: fedavg needs the length"),
        (spec("fedavg-n", "sum", privacy="clip = 1.0"), "privacy.clip"),
        (spec("fedavg-n", "sum", algorithm='pre = ["nnm"]'), "leave out the stages before the rule"),
        (spec("fedmgda+", "private", algorithm='pre = ["arc"]'), "arc clips by the lengths"),
        (spec("dual-cone", "private", algorithm="tau = 2"), "leave tau out"),
        (spec("afl", "sum"), 'privacy.disclose: afl needs "loss"'),
        (spec("fedfa", "sum", privacy='disclose = ["loss"]'), 'fedfa needs "accuracy"'),
        (spec("q-fedavg", "sum", privacy='disclose = ["loss"]'), 'q-fedavg needs "norm"'),
        (spec("fedfv", "private", privacy='disclose = ["loss"]'), 'fedfv needs "norm".*or the stage "normalize"'),
        (spec("fedmgda+", "sometimes"), "privacy.secure"),
        (spec("fedmgda+", "private", privacy='disclose = ["data"]'), "privacy.disclose"),
        (RUN + "[privacy]\nclip = 1.0\n", 'secure is "off"'),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(document: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_run(document)


def test_an_operator_is_told_what_private_rounds_need() -> None:
    told = "; ".join(cautions(*parse_run(spec("fedmgda+", "private", algorithm='prior = "samples"'))))
    assert "experimental until an outside cryptographer" in told
    assert "the run needs 7 of training and 4 of evaluation" in told
    assert "is not covered by them" in told
    assert "the mean accuracy of 10 members has noise of 0.016, of 20 members 0.0079" in told
    shown = spec("fedmgda+", "private", privacy='disclose = ["evaluation"]')
    assert "the run needs 7 of training of the sessions" in "; ".join(cautions(*parse_run(shown)))


@pytest.mark.parametrize(
    ("train", "noise", "told"),
    [("batch_size = 0", "", True), ("", "", False), ("batch_size = 0", "sample_noise = 1", False)],
)
def test_an_operator_is_told_that_full_batches_make_the_same_update_again(train: str, noise: str, told: bool) -> None:
    text = f"{spec('fedmgda+', 'private', privacy=noise)}[train]\n{train}\n"
    found = "; ".join(cautions(*parse_run(text)))
    assert ("a member that trains on all its samples at a time makes the same update again" in found) == told


def test_the_time_for_masked_vectors_grows_with_the_model() -> None:
    run, _ = parse_run(spec("fedmgda+", "private", privacy="stage_seconds = 60.0"))
    started = datetime(2026, 1, 1, tzinfo=UTC)
    session: dict[str, Any] = {"session": bytes(32), "members": ("a",), "clients": ("a",)}
    of_round: dict[str, Any] = {"current": Round(round_id=1, attempt=0), "layout": Layout((Tensor("w", (1,)),))}

    def seconds(phase: MaskPhase | UnmaskPhase) -> float:
        question = Question(number=0, phase=phase, clients=["a"], wanted=1, base_model="", **of_round)
        return float((question.row(run, started).deadline - started).total_seconds())

    masking = MaskPhase(**session, coefficients=(2**32,), length=11_200_000)
    assert seconds(masking) == pytest.approx(60 + 4 * 11_200_000 / SLOWEST_BYTES_PER_SECOND) == 508
    assert seconds(UnmaskPhase(**session, lost=())) == 60
