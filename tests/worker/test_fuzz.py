"""A coordinator that was taken over sends a worker anything, signed or not: the worker lives, and does honest work."""

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from federation.digests import digest
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, CancelManifest, RunManifest
from federation.v1.federation_pb2 import AttendResponse
from tests.harness import wait_for
from tests.mutation import mutated, warp
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator
from tests.worker.scene import Scene
from tests.works import MESSAGES, set_work
from worker.site import consents
from worker.site.policy_file import Policy, WorkLimits

SEED = 20261122
COUNT = 150
SPEC = b'name = "trial"\ntask = "digits"\nrounds = 1\n'


def hostile(coordinator: ScriptedCoordinator, order: AssignmentManifest, rng: random.Random) -> AttendResponse | None:
    """A message of the stream that is wrong somewhere; None where the change left no message."""
    manifest: Any = AssignmentManifest()
    manifest.CopyFrom(order)
    kind = rng.random()
    if kind < 0.4:
        work = rng.choice(list(MESSAGES.values()))()
        warp(work, rng)
        set_work(manifest, work)
    elif kind < 0.7:
        warp(manifest, rng)
    elif kind < 0.85:
        manifest = CancelManifest(federation_id=FEDERATION, client_id=CLIENT, assignment_id="hostile")
        warp(manifest, rng)
    else:
        manifest = RunManifest(federation_id=FEDERATION, run_id="hostile", spec=digest(SPEC), task="digits")
        manifest.initial_model = coordinator.initial_model
        warp(manifest, rng)
    envelope = sign(manifest, coordinator.signing_key)
    field = {CancelManifest: "cancel", RunManifest: "run"}.get(type(manifest), "assignment")
    response = AttendResponse(**dict[str, Any]({field: envelope}))
    if rng.random() < 0.3:
        try:
            response = AttendResponse.FromString(mutated(response, rng))
        except DecodeError:
            return None
    return response if response.WhichOneof("message") != "welcome" else None


@pytest.mark.full
def test_a_flood_of_runs_whose_specification_is_nowhere_does_not_grow_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consents, "MAX_WAITING", 20)
    policy = Policy(submitters=("alice",))
    running = scene.attending(policy=policy)
    asked = running.worker._consents
    for number in range(60):
        manifest = RunManifest(federation_id=FEDERATION, run_id=f"run-{number}", task="digits")
        manifest.initial_model = scene.coordinator.initial_model
        manifest.spec = digest(b"%d" % number)
        asked.asked(sign(manifest, scene.coordinator.signing_key))
        if number % 20 == 19:  # as many as wait at a time
            wait_for(asked._asked.empty, "the questions to be looked at")
    wait_for(lambda: len(asked._open) >= 20, "20 questions")
    asked.asked(sign(manifest, scene.coordinator.signing_key))
    wait_for(asked._asked.empty, "the last question to be looked at")
    assert len(asked._open) == 20
    running.stop()
    assert running.failure is None


@pytest.mark.parametrize("policy", [{}, {"submitters": ("alice",)}], ids=["any run", "runs of alice"])
def test_a_worker_survives_any_messages_of_its_coordinator_and_does_honest_work_afterwards(
    scene: Scene, policy: dict[str, Any]
) -> None:
    chosen = Policy(limits=WorkLimits(max_steps=5, hours=0.001), **policy)
    running = scene.attending(policy=chosen)
    rng = random.Random(SEED)
    order = scene.order()
    for number in range(COUNT):
        order.assignment_id = f"hostile-{number}"
        order.run_id = f"run-{number % 50}"
        if (response := hostile(scene.coordinator, order, rng)) is not None:
            wait_for(lambda: scene.coordinator._outboxes, "an attendance")  # some messages end the stream
            scene.coordinator._say(response)
        if number % 20 == 0:
            wait_for(lambda: all(outbox.empty() for outbox in list(scene.coordinator._outboxes)), "the worker to read")
    wait_for(lambda: len(scene.coordinator.declines) > 10, "declines")

    def answered() -> bool:
        scene.coordinator.ask(SPEC, "honest")
        return "honest" in {one["run_id"] for one in running.events("run-answered")}

    if policy:
        wait_for(answered, "the answer")
    honest = scene.order(7, run_id="honest", spec=digest(SPEC))

    def done() -> bool:
        assert running.failure is None
        assert running.thread.is_alive()
        # While much waits, it is declined with `limit:waiting`.
        scene.coordinator._say(AttendResponse(assignment=sign(honest, scene.coordinator.signing_key)))
        return any(one.manifest.run_id == "honest" for one in scene.coordinator.submissions)

    wait_for(done, "the honest work")
    running.stop()
    assert running.failure is None
    assert "Traceback" not in running.out.getvalue()
