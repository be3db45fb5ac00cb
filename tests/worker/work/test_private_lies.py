"""A coordinator that lies to five real workers over TLS: they give it no sum of one member, and no second sum."""

from collections.abc import Iterator
from typing import Any

import pytest

from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureMaskWork
from tests.worker.work.scene import POLICY, Members, scene, specification

VICTIM = "m0"
MODEL_SUMS = POLICY.replace("sums_per_model = 1000", "sums_per_model = 1")
LIES = """
from pathlib import Path

from federation.aggregation.phases import Voided
from federation.aggregation.secure import session
from federation.aggregation.secure.covered import Covered
from fedpareto.cli.main import main

lie, covered, check = Path({path!r}), session.covered, session._Session._check_sum


def alone(rule, least, cohort, coefficients):
    if lie.read_text() != "alone":
        return covered(rule, least, cohort, coefficients)
    return Covered((2**11, *[0] * (len(cohort.members) - 1)), 1.0)


def void(self, answers):
    if lie.read_text() == "void":
        raise Voided("the coordinator says that a check failed")
    return check(self, answers)


session.covered, session._Session._check_sum = alone, void
main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    directory = tmp_path_factory.mktemp("lies")
    with scene(directory, 5, program=LIES.format(path=str(directory / "lie")), policy=MODEL_SUMS) as found:
        yield found


def submitted(made: Members, name: str, seed: int) -> str:
    """A run from a model of its own."""
    privacy = {"secure": "sum", "disclose": ["evaluation"]}
    train = {"steps": 1, "batch_size": 20, "deadline_seconds": 120.0}
    more: dict[str, Any] = {"train": train, "limits": {"skipped_rounds": 1}}
    return made.fed.submit(name, specification(5, {"name": "fedavg-n"}, privacy, seed=seed, **more))


def lies(made: Members, what: str) -> None:
    (made.fed.directory / "lie").write_text(what)


def test_five_workers_refuse_a_sum_of_one_and_their_owners_are_alerted(made: Members) -> None:
    lies(made, "alone")
    run = submitted(made, "alone", 1)
    assert made.fed.wait_ended(run) == "FAILED"
    record = made.round(run)
    told = {part["client_id"]: part.get("reason", "") for part in record["participations"]}
    assert all(reason.startswith("coefficients") for reason in told.values())
    assert set(told) == set(made.clients)
    mask = record["phases"][-1]
    assert (mask["kind"], mask["asked"], mask.get("replied", 0)) == ("secure-mask", 5, 0)
    for client, process in made.fed.workers.items():
        process.wait_for_text("the coordinator asked for what would show this member's update, and was refused")
        (kept,) = (made.fed.directory / client).rglob("coefficients-*.order")
        order = AssignmentManifest.FromString(SignedEnvelope.FromString(kept.read_bytes()).manifest)
        asked = SecureMaskWork.FromString(order.work)
        assert dict(zip(asked.members, asked.coefficients, strict=True)) == dict.fromkeys(made.clients, 0) | {
            VICTIM: 2**11
        }


@pytest.mark.full
def test_after_an_attempt_that_was_voided_with_its_sum_the_run_waits_for_the_owners(made: Members) -> None:
    lies(made, "void")
    run = submitted(made, "void", 2)
    assert made.fed.wait_ended(run) == "PAUSED"
    first, *others = ((one["attempt"], one["reason"]) for one in made.round(run)["voided"])
    assert first == (0, "the coordinator says that a check failed")
    assert all("their data sets have been in as many private rounds" in reason for _, reason in others), others
    for process in made.fed.workers.values():
        process.wait_for_text(
            "declined, model-sums: for a sum of train from this model, 1 sums have been unmasked; 1 are allowed"
        )
    reason = made.fed.query("select reason from runs where run_id = :run", run=run)[0][0]
    assert "the owners may raise the limits in policy.toml; then resume the run" in reason
    lies(made, "")
    for client in made.clients:
        (made.fed.directory / client / "policy.toml").write_text(POLICY)
        made.fed.workers[client].stop()
        made.work(client)
    made.fed.attending(*made.clients)
    made.fed.admin("resume", run)
    made.fed.wait_completed(run)
    assert list(made.settled(run).survivors) == list(made.clients)
