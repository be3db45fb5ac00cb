"""A member of five whose coordinator signs what it likes: for tests of what its worker does for a run."""

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message

from federation.digests import digest
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, SignedEnvelope
from federation.vectors import to_bytes
from tests.harness import wait_for
from tests.scripted import Submission
from tests.worker.scene import Running, Scene
from tests.worker.work.scene import DOCUMENT, keys_of_five, pin, session_terms, to_be_ready
from tests.works import set_work
from worker.site.policy_file import Policy
from worker.site.run_requests import RunsFile

EACH_RUN = Policy(approve="each-run")


class Hospital(Scene):
    """A member of five that have pinned a roster, and its coordinator, for the run `run`."""

    number = 0

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.coordinator, scene.home.directory, scene.offers, scene.model)
        self.member, self.started = scene.member, scene.started
        self.keys: dict[str, Ed25519PrivateKey] = keys_of_five(self.member)
        pin(self.home, self.member, self.keys)

    def approved(self, document: bytes, policy: Policy = EACH_RUN, **changes: str) -> Running:
        """A worker, after the run has asked with this specification and was approved."""
        running = self.attending(policy=policy)
        self.approve(document, **changes)
        return running

    def approve(self, document: bytes, **changes: str) -> None:
        """The run asks with this specification, and the owner approves it."""
        asked = self.coordinator.ask(document, "run", **changes)
        wait_for(lambda: any(said.spec == asked.spec for said in self.coordinator.consents), "an answer")
        with closing(RunsFile(self.home.runs)) as file:
            (run,) = [run for run in file.of("run") if run.spec == asked.spec]
            file.decide(run, "approved", "", datetime.now(UTC))
        wait_for(lambda: self.answer(asked.spec) == "accepted", "the run to be accepted")

    def answer(self, spec: str) -> str:
        return [said.answer for said in self.coordinator.consents if said.spec == spec][-1]

    def work(self, document: bytes, message: Message | None = None, **changes: Any) -> AssignmentManifest:
        """To do some work of the run in round 0, or to train."""
        self.number += 1
        fields = {"run_id": "run", "round": 0, "assignment_id": f"assignment-{self.number}", "spec": digest(document)}
        asked = self.order(**{**fields, **changes})
        if message is not None:
            set_work(asked, message)
        if isinstance(message, EvaluateWork):
            del asked.rows[:]
        return asked

    def ready(self, **changes: Any) -> AssignmentManifest:
        """To become ready for a session of the private run."""
        self.coordinator.blobs[digest(DOCUMENT)] = DOCUMENT
        terms = session_terms(self.order(**changes), self.keys, nonce=bytes(16))
        return to_be_ready(self.work(DOCUMENT, **changes), terms)

    def other_model(self) -> dict[str, Any]:
        """The fields of an assignment from another model of the same layout."""
        layout, data = self.model
        other = to_bytes(layout, np.ones(layout.size, np.float32))
        self.coordinator.blobs[digest(other)] = other
        assert len(other) == len(data)
        return {"base_model": digest(other)}

    def told(self, asked: AssignmentManifest) -> str:
        """The reason with which the worker declines; empty if it replies."""
        self.coordinator.assign(asked)

        def found() -> str | Submission | None:
            declines = {one.assignment_id: one.reason for one in self.coordinator.declines}
            replies = {one.manifest.assignment_id: one for one in self.coordinator.submissions}
            return declines.get(asked.assignment_id) or replies.get(asked.assignment_id)

        answer = wait_for(found, "an answer", 60)
        self.coordinator.open.clear()
        return answer if isinstance(answer, str) else ""

    def evidence(self) -> list[tuple[str, str]]:
        """The reason in the name of each kept order, and the assignment that it holds."""
        kept = sorted(self.home.evidence.glob("*.order"))
        orders = [SignedEnvelope.FromString(path.read_bytes()) for path in kept]
        ids = [AssignmentManifest.FromString(order.manifest).assignment_id for order in orders]
        return [(path.name.removesuffix(f"-{name}.order"), name) for path, name in zip(kept, ids, strict=True)]
