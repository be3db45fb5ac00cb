"""A member compares the scale of a model with the result of statistics that the coordinator has signed.

The worker is real, over TLS; the coordinator signs what it likes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from federation.digests import digest
from federation.spec.run_facts import unshared_parameters
from federation.spec.run_spec import RunSpec, with_scale
from federation.tasks import DataSource, Pool, Task, task
from federation.tasks.standardise import Standardise
from federation.training.own import run_model
from federation.transport.channels import CHUNK_BYTES
from federation.trust.envelope import envelope_digest, sign
from federation.v1.common_pb2 import AssignmentManifest, ResultManifest, TrainWork
from federation.vectors import Layout, to_bytes, update_layout
from tests.scripted import FEDERATION, ScriptedCoordinator, opened
from tests.worker.scene import Scene, serving
from tests.worker.site.scene import Hospital
from worker.service import prepare_offers
from worker.site.model_origin import model_origin
from worker.site.policy_file import Policy
from worker.site.run_requests import RunRequest, RunsFile

TASK = f"{__name__}:Scaled"
COLUMNS = [{"name": "age", "mean": 40.0, "deviation": 20.0}, {"name": "b", "mean": 1.0, "deviation": 2.0}]
TOLD = json.dumps({"format": 1, "columns": COLUMNS}).encode()
HEAD = f'name = "run"\ntask = "{TASK}"\nrounds = 2\nseed = 7\n'.encode()


class Scaled(Task):
    """A table of two features."""

    def model(self) -> nn.Module:
        return nn.Sequential(Standardise(["age", "b"]), nn.Linear(2, 2))

    def pool(self, source: DataSource) -> Pool:
        random = np.random.default_rng(0)
        x = random.normal([40, 1], [20, 2], (100, 2)).astype(np.float32)
        x[::9, 1] = np.nan
        return Pool(torch.from_numpy(x), torch.from_numpy((x[:, 0] > 40).astype(np.int64)))


class Site(Hospital):
    """A member that trains the task, and a coordinator that gives a result of statistics."""

    def __init__(self, coordinator: ScriptedCoordinator, home: Path, told: bytes = TOLD, replies: int = 0) -> None:
        offers, _ = prepare_offers([TASK], DataSource(), device="cpu", threads=1)
        name = self.signed(coordinator, told, replies=[digest(b"%d" % number) for number in range(replies)])
        self.document = with_scale(HEAD, name, ["0.mean", "0.deviation"])
        self.spec = RunSpec.parse(self.document)
        layout, vector = run_model(task(TASK), 7, self.spec.parameters, TOLD)
        super().__init__(Scene(coordinator, home, offers, (layout, to_bytes(layout, vector)), task=TASK))
        self.task = TASK

    @staticmethod
    def signed(coordinator: ScriptedCoordinator, told: bytes, **changes: Any) -> str:
        """Gives a result, and a document with it; returns the name of the result."""
        fields = {"federation_id": FEDERATION, "run_id": "held", "document": digest(told), "document_bytes": len(told)}
        key = changes.pop("key", coordinator.signing_key)
        envelope = sign(ResultManifest(**{**fields, **changes}), key)
        coordinator.blobs[envelope_digest(envelope)] = envelope.SerializeToString(deterministic=True)
        coordinator.blobs[digest(told)] = told
        return envelope_digest(envelope)

    def training(self, result: str = "", **changes: Any) -> AssignmentManifest:
        """To train in the run; with another result than its specification names, if one is given."""
        asked = self.work(self.document, TrainWork(steps=2, batch_size=10, learning_rate=0.1), **changes)
        asked.unshared.CopyFrom(unshared_parameters(self.spec.parameters))
        asked.unshared.statistics = result or asked.unshared.statistics
        asked.rows[0].length = 6
        return asked

    def refused(self, asked: AssignmentManifest) -> tuple[str, str]:
        """The reason and the message with which the worker declines."""
        reason = self.told(asked)
        return reason, self.coordinator.declines[-1].message if reason else ""


@pytest.fixture
def site(coordinator: ScriptedCoordinator, tmp_path: Path) -> Iterator[Site]:
    with serving(Site(coordinator, tmp_path / "home")) as made:
        yield made


def test_a_member_trains_a_model_that_is_filled_from_the_signed_result_and_sends_the_rest_alone(site: Site) -> None:
    site.attending(policy=Policy())
    assert site.told(site.training()) == ""
    reply = opened(site.coordinator.submissions[-1], site.member)
    assert [(row.name, row.length) for row in reply.rows] == [("loss", 6)]
    layout = update_layout([("loss", 6, "F32")])
    (row,) = layout.split(read_vector_of(site.coordinator.submissions[-1].payload, layout)).values()
    assert np.isfinite(row).all()
    assert np.abs(row).max() < 1, "inputs of hundreds would move it further"
    assert [*site.coordinator.hellos[-1].tasks[0].abilities].count("fixed") == 1
    fetched = len(site.coordinator.fetches)
    assert site.told(site.training(round=1)) == ""
    assert len(site.coordinator.fetches) == fetched, "the document is kept"


def read_vector_of(payload: bytes, layout: Layout) -> Any:
    return np.frombuffer(payload[len(layout.header) :], dtype=np.float32)


def test_a_model_with_other_numbers_or_a_result_that_is_none_is_declined_with_the_reason(site: Site) -> None:
    site.attending(policy=Policy())
    layout, data = site.model
    values = layout.split(np.frombuffer(data[len(layout.header) :], dtype=np.float32).copy())
    values["0.deviation"][1] = 2.5
    other = to_bytes(layout, layout.join(values))
    site.coordinator.blobs[digest(other)] = other
    reason, message = site.refused(site.training(base_model=digest(other)))
    assert (reason, "number 2 of '0.deviation' is 2.5, and the result gives 2" in message) == ("scale", True), message
    coordinator = site.coordinator
    swapped = json.dumps({"format": 1, "columns": COLUMNS[::-1]}).encode()
    forged = site.signed(coordinator, TOLD + b" ", key=Ed25519PrivateKey.generate())
    strange = site.signed(coordinator, TOLD + b"  ", federation_id="other")
    unreadable = site.signed(coordinator, b"{")
    changed = site.signed(coordinator, TOLD + b"   ")
    coordinator.blobs[digest(TOLD + b"   ")] = TOLD
    nothing = digest(b"nothing")
    coordinator.blobs[nothing] = b"something else"
    step = digest(b"x")
    for result, words in (
        (site.signed(coordinator, swapped), "column 1 of the model is 'age', and that of the result 'b'"),
        (forged, "no result that the coordinator has signed"),
        (strange, "is of another federation"),
        (unreadable, "the result is no JSON document"),
        (changed, "has another digest"),
        (nothing, "has another digest"),
        ("blake3:12", "no result that the coordinator has signed"),
    ):
        reason, message = site.refused(site.training(result))
        assert (reason, words in message) == ("scale", True), message
    coordinator.blobs[step] = b"x"
    assert site.refused(site.training(step))[0] == "scale", "bytes that are no envelope"
    assert site.told(site.training()) == "", "nothing of it harms the run"
    assert site.told(site.training(base_model=digest(other), round=1)) == "scale", "in each round"


def test_an_owner_sees_from_which_result_the_model_is_filled_and_it_is_checked_whole(site: Site) -> None:
    site.approved(site.document, task=TASK)
    file = RunsFile(site.home.runs)
    (run,) = file.runs()
    file.close()
    assert run.statistics == TOLD
    origin = model_origin(run)
    assert origin.source == "task"
    assert f"from task and seed, filled from the result {site.spec.parameters.statistics}, checked" == origin.message
    fields = vars(run)
    other = RunRequest(**{**fields, "initial_model": digest(b"other")})
    assert model_origin(other).source == "submitter"
    assert (
        "is not here; your worker checks that part" in model_origin(RunRequest(**{**fields, "statistics": b""})).message
    )
    assert (
        "column 1 of the model"
        in model_origin(RunRequest(**{**fields, "statistics": TOLD.replace(b'"age"', b'"aged"')})).message
    )
    # What the owner has approved names the result and the tensors: no assignment says otherwise.
    assert site.told(site.training()) == ""
    assert site.told(site.training(site.signed(site.coordinator, TOLD + b" "))) == "parameters"
    loose = site.training()
    loose.unshared.ClearField("statistics")
    assert site.told(loose) == "parameters"


def test_a_run_that_is_filled_from_a_result_of_thousands_of_replies_reaches_the_owner_who_approves(
    coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    coordinator.serve_blob = lambda blob, offset: (
        blob[start : start + CHUNK_BYTES] for start in range(offset, len(blob), CHUNK_BYTES)
    )
    with serving(Site(coordinator, tmp_path / "home", replies=10_000)) as site:
        assert len(coordinator.blobs[site.spec.parameters.statistics]) > 700_000
        site.approved(site.document, task=TASK)
        file = RunsFile(site.home.runs)
        (run,) = file.runs()
        file.close()
        assert run.statistics == TOLD
