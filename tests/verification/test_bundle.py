"""The record of a run as one file: an outsider verifies it with no more than the file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from federation.record.bundle import BundleReader
from federation.vectors import Layout, Tensor, to_bytes, update_rows
from fedpareto.offline_aggregation import HyperparameterError, aggregate
from storage.states import RunState
from tests.compared_metrics import differences
from tests.coordinator.rounds.scene import EXACT, begin
from tests.few import few, few_of
from tests.stage import Stage
from tests.verification import independent_metrics
from tests.verification.scene import NAMES, exported, played, verified
from verification.counterfactual import Replayed, counterfactual
from verification.errors import VerificationError
from verification.model import CHOSEN
from verification.run import verify

RULES = {
    "fedavg": "",
    "fedmgda": "algorithm.epsilon = 0.4\nalgorithm.epsilon_decay = 0.5\nalgorithm.preferences = ['ann >= 0.45']",
    "fedmgda+": "algorithm.epsilon = 0.1\nalgorithm.epsilon_decay = 1.0\nalgorithm.prior = 'samples'",
    "fedmgda+auto": "",
    "dual-cone": "algorithm.tau = 2",
    "nash-mtl": "",
    "q-fedavg": "",
    "afl": "",
    "fedfa": "",
    "fedfv": "algorithm.tau = 2",
    "adafed": "",
    "krum": "algorithm.byzantine = 1",
    "multi-krum": "algorithm.byzantine = 1",
    "median": "",
    "trimmed-mean": "algorithm.byzantine = 1\nalgorithm.pre = ['nnm']",
    "geometric-median": "",
    "centred-clipping": "",
    "norm-clipping": "",
}
SERVERS = {
    "momentum": "server = { optimizer = 'momentum', learning_rate = 0.5 }",
    "adam": "server = { optimizer = 'adam', learning_rate = 0.01 }",
    "yogi": "server = { optimizer = 'yogi', learning_rate = 0.01 }",
    "adagrad": "server = { optimizer = 'adagrad', learning_rate = 0.01 }",
    "inverse": "server = { learning_rate = 0.7, schedule = 'inverse' }",
    "decay": "server = { learning_rate = 0.7, decay = 0.5, decay_every = 1 }",
}
FORMS = {
    **{rule: (rule, more) for rule, more in RULES.items()},
    **{f"fedmgda+ with {server}": ("fedmgda+", more) for server, more in SERVERS.items()},
    "q-fedavg with a local rate of each round": (
        "q-fedavg",
        "train.round_schedule = 'decay'\ntrain.round_warm_up = 2",
    ),
}


@pytest.mark.parametrize("form", few_of(FORMS, "fedmgda+"))
def test_every_rule_server_optimiser_and_local_rate_is_verified_from_its_bundle(
    stage: Stage, tmp_path: Path, form: str
) -> None:
    run = played(stage, *FORMS[form])
    assert [one.number for one in verified(stage, run, tmp_path)] == [0, 1, 2]
    assert differences(stage, run) == []


def test_a_run_that_was_stopped_within_a_round_is_verified(stage: Stage, tmp_path: Path) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    ann.reply(ann.order())
    ben.order()
    stage.stop_run(run, "enough")
    stage.wait_state(run, RunState.STOPPED)
    (found,) = verified(stage, run, tmp_path)
    assert found.words.startswith("skipped: the run ended: enough")
    assert differences(stage, run) == []


def test_without_payloads_the_rule_is_verified_and_the_rest_is_named(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedmgda+", "")
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto", payloads=False)) as bundle:
        found = list(verify(bundle))
        assert not bundle.about.payloads
    assert all("coefficients" in one.words for one in found)
    assert all(len(one.missing) == 1 and one.missing[0].startswith("K and the model:") for one in found)


OVER_OBJECTIVES = {
    "fsmgda": "",
    "fsmgda-samples": "algorithm.prior = 'samples'",
    "scalarised": "",
    "fedcmoo": "",
    "fedcmoo-exact": EXACT,
    "fedcmoo-svd": "algorithm.sketch = 'svd-two-way'\nalgorithm.exact_stationarity = true",
    "fedcmoo-unbiased": "algorithm.unbiased = true",
}


@pytest.mark.parametrize("name", few_of(OVER_OBJECTIVES, "fedcmoo-svd"))
@pytest.mark.full
def test_rules_over_objectives_are_verified(stage: Stage, tmp_path: Path, name: str) -> None:
    run, players = begin(stage, name.partition("-")[0], OVER_OBJECTIVES[name], rounds=2)
    stage.play(run, *players.values())
    stage.wait_state(run, RunState.COMPLETED)
    assert len(verified(stage, run, tmp_path)) == 2
    assert differences(stage, run) == []


@pytest.mark.full
def test_of_noise_for_clients_all_is_verified_but_who_chose_it(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedmgda+", "privacy.client_noise = 2.0\nalgorithm.epsilon = 0.05")
    for payloads in (True, False):
        with BundleReader(exported(stage, run, tmp_path / "run.fedpareto", payloads=payloads)) as bundle:
            found = list(verify(bundle))
        assert [one.missing[-1] for one in found] == [CHOSEN] * 3
        assert [len(one.missing) == 1 for one in found] == [payloads] * 3
        assert ["the model from its noise, 45 numbers, K" in one.words for one in found] == [payloads] * 3
        assert independent_metrics.check(tmp_path / "run.fedpareto") >= {"epsilon/clients", "step/rate"}
    assert differences(stage, run) == []


@pytest.mark.full
def test_averaged_buffers_are_verified(stage: Stage, tmp_path: Path) -> None:
    layout = Layout((Tensor("weight", (6,)), Tensor("norm.running_mean", (2,))))
    model = to_bytes(layout, np.linspace(-1, 1, 8, dtype=np.float32))
    run = played(stage, "afl", "parameters.buffers = 'averaged'", model=model)
    # The model and the mean of the models, each with two buffers.
    assert all("the model, 16 numbers" in one.words for one in verified(stage, run, tmp_path))


# --- another rule on the same updates


def replayed(path: Path, rule: str, values: Mapping[str, object], number: int | None = None) -> list[Replayed]:
    with BundleReader(path) as bundle:
        return list(counterfactual(bundle, rule, values, number))


OWN: dict[str, dict[str, float]] = {"fedavg": {}, "fedmgda+": {"epsilon": 0.1}, "afl": {}, "krum": {"byzantine": 1}}


@pytest.mark.parametrize("rule", few_of(OWN, "fedmgda+"))
def test_the_rule_of_the_run_replays_what_was_done(stage: Stage, tmp_path: Path, rule: str) -> None:
    more = "\n".join(f"algorithm.{name} = {value}" for name, value in OWN[rule].items())
    path = exported(stage, played(stage, rule, more), tmp_path / "run.fedpareto", payloads=False)
    found = replayed(path, rule, OWN[rule])
    assert [one.counterfactual for one in found] == [False] * 3
    assert [(one.cosine, one.ratio) for one in found] == [pytest.approx((1.0, 1.0))] * 3
    assert all(one.done == pytest.approx(one.other) for one in found)
    assert all(one.worse_done == one.worse_other for one in found)


@pytest.mark.full
def test_another_rule_is_replayed_on_the_same_updates(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "krum", "algorithm.byzantine = 1")
    path = exported(stage, run, tmp_path / "krum", payloads=False)
    found = replayed(path, "fedmgda+", {})
    assert [one.counterfactual for one in found] == [False, True, True]
    for number, one in enumerate(found):
        assert one.clients == NAMES
        assert sorted(one.done) == [0, 0, 0, 0, 1]
        assert sum(one.other) == pytest.approx(1)
        payloads = [stage.replies(run, number)[name].payload for name in NAMES]
        U = np.array([update_rows(stage.blobs.local(payload))["loss"].read() for payload in payloads])
        chosen = U[one.done.index(1)].astype(np.float64)
        direction = aggregate("fedmgda+", list(U)).coefficients @ U
        length = float(np.linalg.norm(chosen) * np.linalg.norm(direction))
        assert one.cosine == pytest.approx(float(chosen @ direction) / length)
        assert one.worse_done == tuple(name for name, row in zip(NAMES, U, strict=True) if row @ chosen < 0)
        assert one.worse_other == tuple(name for name, row in zip(NAMES, U, strict=True) if row @ direction < 0)
    (alone,) = replayed(path, "fedmgda+", {}, 2)
    assert (alone.number, alone.counterfactual) == (2, False)
    assert replayed(path, "fedmgda+", {}, 3) == []


@few("median", "no-such-rule")
@pytest.mark.parametrize(
    ("rule", "values", "error", "words"),
    [
        ("median", {}, VerificationError, "coordinate by coordinate"),
        ("fedcmoo", {}, VerificationError, "fedcmoo asks for jacobian; the run asked for train"),
        ("fedmgda+", {"epsilon": -1}, HyperparameterError, "epsilon"),
        ("no-such-rule", {}, HyperparameterError, "no-such-rule"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    stage: Stage, tmp_path: Path, rule: str, values: dict[str, object], error: type[Exception], words: str
) -> None:
    path = exported(stage, played(stage, "fedavg", "", rounds=1), tmp_path / "fedavg", payloads=False)
    with pytest.raises(error, match=words):
        replayed(path, rule, values)


@pytest.mark.full
def test_a_step_of_earlier_updates_is_compared_with_rules_that_read_them_alone(stage: Stage, tmp_path: Path) -> None:
    more = "algorithm.tau = 3\nselection.method = 'count'\nselection.count = 2\nselection.over_selection = 1.0"
    path = exported(stage, played(stage, "dual-cone", more, rounds=4), tmp_path / "run.fedpareto")
    again = replayed(path, "dual-cone", {"tau": 3})
    assert [one.cosine for one in again] == [pytest.approx(1)] * 4
    assert any(any(one.done[2:]) for one in again)  # the updates of the round come first, then earlier ones
    with pytest.raises(VerificationError, match="combined updates of earlier rounds, which fedavg does not read"):
        replayed(path, "fedavg", {})
