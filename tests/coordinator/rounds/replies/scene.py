"""A round that asks a hostile member and an honest one to train."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Table, update

from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest
from federation.vectors import to_bytes, update_layout
from storage import models
from storage.states import RunState
from tests.running import SECONDS
from tests.stage import MODEL, Player, Stage, vector


@dataclass(frozen=True)
class Scene:
    """The round, seen by mallory."""

    stage: Stage
    run: str
    mallory: Player
    honest: Player
    signed: SignedEnvelope  # mallory's assignment, as the coordinator signed it
    order: AssignmentManifest
    theirs: AssignmentManifest  # the honest member's

    @property
    def actor(self) -> str:
        return f"fedpareto://test/client/{self.mallory.name}"

    @property
    def outcome(self) -> tuple[str, str]:
        """State and reason of mallory's assignment."""
        return self.stage.outcomes(self.run)[self.mallory.name]

    def payload(self, update: NDArray[np.float32] | None = None) -> bytes:
        layout = update_layout([(row.name, row.length) for row in self.order.rows])
        return to_bytes(layout, vector(self.mallory.name, self.order) if update is None else update)

    def manifest(self, payload: bytes, /, **changes: object) -> ReplyManifest:
        """What mallory signs of a payload, with some fields changed."""
        manifest = self.mallory.member.manifest(self.order, payload)
        for name, value in changes.items():
            setattr(manifest, name, value)
        return manifest

    def sign(self, **changes: object) -> SignedEnvelope:
        """An update of mallory's, signed by it, with some fields changed."""
        return self.mallory.member.sign(self.manifest(self.payload(), **changes))

    def offer(self, envelope: SignedEnvelope) -> None:
        """Hands an update in, up to its payload."""
        list(self.mallory.member.stub.Submit(iter([SubmitRequest(reply=envelope)]), timeout=SECONDS))

    def hand_in(self, envelope: SignedEnvelope, payload: bytes | None = None) -> ReceiptManifest:
        return self.mallory.member.submit(envelope, self.payload() if payload is None else payload)

    def finish(self) -> None:
        """The honest member's update makes the step, and the run completes."""
        if self.outcome[0] == "OPEN":
            self.mallory.reply(self.order)
        self.stage.play(self.run, self.honest, self.mallory)
        self.stage.wait_state(self.run, RunState.COMPLETED)
        assert self.stage.replies(self.run)[self.honest.name].weight

    def refusals(self, reason: str) -> int:
        """How many refusals of mallory's submissions for this reason are on record."""
        entries = self.stage.served.refusals("Submit")
        return sum(one.times for one in entries if (one.actor, one.outcome) == (self.actor, reason))


def set_scene(stage: Stage, model: bytes = MODEL) -> Scene:
    more = "selection = { minimum = 2, quorum = 0.0 }"
    run, (mallory, honest) = stage.begin("mallory", "honest", more=more, model=model)
    theirs = honest.order()
    honest.reply(theirs)
    order = mallory.order()
    signed = stage.assignments(run)["mallory"].envelope
    return Scene(stage, run, mallory, honest, SignedEnvelope.FromString(signed), order, theirs)


def edit(stage: Stage, kind: type[models.Base], key: object, values: dict[str, Any]) -> None:
    table = kind.__table__
    assert isinstance(table, Table)
    (column,) = table.primary_key.columns
    with stage.served.database.begin() as session:
        session.execute(update(kind).where(column == key).values(values))
