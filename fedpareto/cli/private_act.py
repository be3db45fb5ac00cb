"""The demo's third part: an open and a private run of the same members, and what their coordinator can learn."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from federation.v1.admin_pb2 import GetRoundRequest, GetRunRequest, ListRepliesRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Array, model_row, update_rows
from fedpareto.cli.outcomes import Ended, how_it_ended
from fedpareto.cli.rehearsal import Rehearsal
from fedpareto.formatting import percent
from fedpareto.series import metric
from storage.directory import DirectoryStore

CLASSES = 10
PAIRS = 45  # of two different classes
MEMBERS = 10  # multi-gradient descent needs 8 in a private round, and one is left out
ATTACK = "scale=5"


@dataclass(frozen=True, kw_only=True)
class Private(Ended):
    """The result of an open or a private run: what the coordinator's record shows of its members.

    Attributes:
        private: whether its rounds were private.
        accuracy: the members' average after the last round, in [0, 1].
        guessed: members whose two most frequent digits can be told from the vector that the coordinator stores of them
            in the last round.
        guessed_from_sum: likewise from the step of the last round, the sum of all vectors.
        members: of whom something is stored.
        named: members that were named as cheaters, with the reason.
    """

    private: bool
    accuracy: float
    guessed: int
    guessed_from_sum: int
    members: int
    named: Mapping[str, str]


def frequent(rehearsal: Rehearsal, name: str) -> set[int]:
    """The two most frequent digits of a member."""
    labels = np.load(rehearsal.data(name) / "digits.npz")["y"]
    return {digit for digit, _ in Counter(labels.tolist()).most_common(2)}


def guess(content: Array) -> set[int]:
    """The two digits that an update tells, from the biases of the output layer, its last ten entries.

    A sample of a class raises the bias of its class, so the update w_t - w is negative there (Zhao et al., 2020). Of a
    masked vector, whose words are uniform, the same guess is blind.
    """
    biases = content[-CLASSES:].view(np.int32) if content.dtype.kind == "u" else content[-CLASSES:]
    return {int(digit) for digit in np.argsort(biases)[:2]}


def outcome(stub: AdminStub, rehearsal: Rehearsal, run_id: str, *, private: bool) -> Private:
    """Reads a run's result from the record and the blobs of the coordinator."""
    run = stub.GetRun(GetRunRequest(run=run_id)).run
    blobs = DirectoryStore(rehearsal.home / "blobs")
    named: dict[str, str] = {}
    for number in range(run.rounds_done):
        for void in stub.GetRound(GetRoundRequest(run=run_id, round=number)).voided:
            named |= {one.client_id: one.reason for one in void.named}
    stored: dict[str, Array] = {}
    request = ListRepliesRequest(run=run_id, round=max(0, run.rounds_done - 1))
    for response in stub.ListReplies(request):
        for reply in response.replies:
            if reply.accepted and reply.payload:
                rows = list(update_rows(blobs.local(reply.payload)).values())
                content = rows[0].read()
                if content.dtype != np.uint8:  # shares and ciphertexts
                    stored[reply.client_id] = np.array(content)
    right = sum(guess(content) == frequent(rehearsal, name) for name, content in stored.items())
    last = stub.GetRound(GetRoundRequest(run=run_id, round=request.round)).summary
    before, after = (model_row(blobs.local(model)).read() for model in (last.base_model, last.result_model))
    summed = guess(before - after)
    return Private(
        **how_it_ended(run),
        private=private,
        accuracy=metric(run.latest, "accuracy/mean"),
        guessed=right,
        guessed_from_sum=sum(summed == frequent(rehearsal, name) for name in stored),
        members=len(stored),
        named=named,
    )


def table(outcomes: list[Private], attacker: str) -> Table:
    """The runs side by side."""
    shown = Table(title="The same members in an open and in a private run", title_justify="left")
    shown.add_column("")
    for one in outcomes:
        shown.add_column("private" if one.private else "open", justify="right")
    shown.add_row("average accuracy", *(percent(one.accuracy) for one in outcomes))
    told = [f"of {one.guessed} of {one.members}" for one in outcomes]
    shown.add_row("digits told by a member's stored vector", *told)
    told = [f"of {one.guessed_from_sum} of {one.members}" for one in outcomes]
    shown.add_row("digits told by the round's sum", *told)
    shown.add_row("by chance", *(f"of {one.members / PAIRS:.1f} of {one.members}" for one in outcomes))
    named = [", ".join(f"{name}: {why}" for name, why in one.named.items()) or "–" for one in outcomes]
    shown.add_row("named as cheaters", *named)
    shown.caption_justify = "left"
    shown.caption = (
        f"In the private run, {attacker} makes its vector five times as long as allowed. The digits are the two most "
        "frequent ones of each member, guessed from the vector that the coordinator stores of it in the last round, "
        "and from the sum of all vectors, which it computes in both runs."
    )
    return shown
