"""Compares what the coordinator signs of a model with the assignments and receipts that it has signed for this member.

An assignment names the model that the work started from, and the signed step that made this model. So an assignment
that was made after the step proves that the member was told of the same step and model then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from federation.v1.common_pb2 import ModelManifest, RestoreManifest
from worker.receipts import Receipt
from worker.results.run_model import ModelDisputed, RunModel

_ADVICE = (
    "Keep receipts.jsonl, and ask the federation's security officer. If the coordinator was restored from a backup, "
    "start the worker, which learns of it, and ask again"
)


@dataclass(frozen=True)
class Compared:
    """What was found.

    Attributes:
        round: of the assignment that names the same step and model; None if none does.
        words: the same for people.
    """

    round: int | None
    words: str


def compared(answer: RunModel, receipts: Iterable[Receipt], restored: RestoreManifest | None) -> Compared:
    """Compares an answer with the receipts of its run that were kept before the question.

    Receipts from before a `restored` backup, of rounds that came again, count for nothing.

    Raises:
        ModelDisputed: the coordinator signs something else than before.
    """
    manifest = answer.manifest
    lost_from, until = _lost(manifest, restored)
    kept = [one for one in receipts if one.occasion[0] == manifest.run_id]
    kept = [one for one in kept if lost_from is None or one.occasion[1] < lost_from or _when(one) > until]
    confirming = [number for one in kept if (number := _confirms(answer, one)) is not None]
    _check_replies(manifest, kept)
    if confirming:
        number = min(confirming)
        return Compared(number, f"compared with this member's assignment of round {number}: the same step and model")
    return Compared(None, "by the coordinator's word: no assignment of this member names this step")


def _confirms(answer: RunModel, receipt: Receipt) -> int | None:
    """The round of an assignment that names the model's step; None if it tells nothing of this step."""
    manifest, number = answer.manifest, receipt.occasion[1]
    for what, told, now in (
        ("specification", receipt.spec, manifest.spec),
        ("task", receipt.task, manifest.task),
        ("size of the model", receipt.base_model_bytes, manifest.model_bytes),
    ):
        _require(told == now, number, f"the {what} {told}", str(now))
    if receipt.previous_step == manifest.step:
        # The step of a round is known from the evaluation of its model on.
        _require(number >= manifest.round, number, "this step", f"that round {manifest.round} made it")
        model = manifest.model if number == manifest.round else manifest.result_model
        _require(receipt.base_model == model, number, f"the model {receipt.base_model}", model)
        return number
    later = number == manifest.round + 1 or (answer.newest and number > manifest.round)
    step = receipt.previous_step or "(none)"
    _require(not later, number, f"the step {step} as the newest", f"{manifest.step} of round {manifest.round}")
    return None


def _require(holds: bool, number: int, told: str, now: str) -> None:
    if not holds:
        raise ModelDisputed(
            f"the coordinator contradicts itself: its assignment of round {number} names {told}, and now it signs "
            f"{now}. {_ADVICE}"
        )


def _check_replies(manifest: ModelManifest, receipts: Sequence[Receipt]) -> None:
    """Checks that the replies in the answer are this member's."""
    replies: dict[int, set[str]] = {}
    for receipt in receipts:
        if receipt.accepted:
            replies.setdefault(receipt.occasion[1], set()).add(receipt.reply)
    for share in manifest.shares:
        known = replies.get(share.round)
        if known is not None and share.reply not in known:
            raise ModelDisputed(
                f"the coordinator says that this member's reply {share.reply[:80]!r} entered round {share.round}; "
                f"its receipts of that round are for others. {_ADVICE}"
            )


def _lost(manifest: ModelManifest, restored: RestoreManifest | None) -> tuple[int | None, datetime]:
    """The first round of the run that came again after a restore, None without one; and when that was."""
    if restored is None:
        return None, datetime.min.replace(tzinfo=UTC)
    again = (run.next_round for run in restored.runs if run.run_id == manifest.run_id)
    return next(again, None), restored.restored.ToDatetime(tzinfo=UTC)


def _when(receipt: Receipt) -> datetime:
    """When its assignment was made; long ago if that time does not exist."""
    try:
        return datetime.fromisoformat(receipt.asked)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
