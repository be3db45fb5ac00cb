"""The record of a run as one file: an outsider verifies it with no more than the file."""

import json
from pathlib import Path

import pytest
from stage import Stage, spec

from federation.bundle import BundleReader
from federation.v1 import admin_pb2 as admin
from storage.models import RunState
from verification.run import verify

RULES = {
    "fedavg": "",
    "fedmgda": "",
    "fedmgda+": "algorithm.epsilon = 0.1\nalgorithm.prior = 'samples'",
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
    "momentum": "server = { optimiser = 'momentum', learning_rate = 0.5 }",
    "adam": "server = { optimiser = 'adam', learning_rate = 0.01 }",
    "yogi": "server = { optimiser = 'yogi', learning_rate = 0.01 }",
    "adagrad": "server = { optimiser = 'adagrad', learning_rate = 0.01 }",
    "decay": "server = { learning_rate = 0.7, decay = 0.5, decay_every = 1 }",
}
NAMES = ("ann", "ben", "cleo", "dan", "eve")


def played(stage: Stage, algorithm: str, more: str, rounds: int = 3) -> str:
    """A run that has ended."""
    task = stage.task()
    players = stage.cast(task, *NAMES, samples=(10, 20, 30, 40, 50))
    for place, player in enumerate(players):
        player.losses.update({"loss": 1.0 + place / 7})
    more = f"selection.minimum = {len(NAMES)}\n{more}"
    run = stage.submit(spec(f"bundle-{stage.count}", task, rounds, algorithm=algorithm, more=more))
    stage.play(run, *players)
    stage.wait_state(run, RunState.COMPLETED)
    return run


def exported(stage: Stage, run: str, path: Path, *, payloads: bool = True) -> Path:
    """The bundle of a run, as an administrator gets it."""
    request = admin.ExportBundleRequest(run=run, payloads=payloads)
    pieces = list(stage._admin.ExportBundle(request, timeout=120))
    assert [piece.end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    path.write_bytes(b"".join(piece.chunk for piece in pieces))
    return path


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_verified_from_its_bundle(stage: Stage, tmp_path: Path, rule: str) -> None:
    run = played(stage, rule, RULES[rule])
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto")) as bundle:
        found = list(verify(bundle))
    assert [one.number for one in found] == [0, 1, 2]
    assert [one.missing for one in found] == [()] * 3
    assert all("the model, 6 numbers" in one.words or "numbers" in one.words for one in found)


@pytest.mark.parametrize("server", SERVERS)
def test_every_server_optimiser_is_verified_from_its_bundle(stage: Stage, tmp_path: Path, server: str) -> None:
    run = played(stage, "fedmgda+", SERVERS[server])
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto")) as bundle:
        assert [one.missing for one in verify(bundle)] == [()] * 3


def test_without_payloads_the_rule_is_verified_and_the_rest_is_named(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "fedmgda+", "")
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto", payloads=False)) as bundle:
        found = list(verify(bundle))
        assert json.loads(json.dumps(bundle.about.payloads)) is False
    assert all("coefficients" in one.words for one in found)
    assert all(len(one.missing) == 1 and one.missing[0].startswith("K and the model:") for one in found)
