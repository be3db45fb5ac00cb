"""Answers on the disk, and on runs before they are taken."""

from sqlalchemy.orm import Session

from coordinator import disk
from coordinator.rounds.submission import Submission
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import RunState
from storage.blobs import BlobStore


def get_disk(session: Session, blobs: BlobStore, *, keep_rounds: int) -> messages.GetDiskResponse:
    """What the record takes."""
    found = disk.usage(session, blobs)
    return messages.GetDiskResponse(
        models=found.models,
        updates=found.updates,
        other=found.other,
        database=found.database,
        free=found.free,
        needed=found.needed,
        keep_rounds=keep_rounds,
        runs=[
            messages.RunDisk(
                run_id=run.run_id,
                name=run.name,
                state=RunState.Value(f"RUN_STATE_{run.state}"),
                models=run.models,
                updates=run.updates,
                needed=run.needed,
            )
            for run in found.runs
        ],
    )


def outlook(
    session: Session, blobs: BlobStore, submission: Submission, *, model_bytes: int, attending: set[str], other: int
) -> messages.SubmitRunResponse:
    """What a run will ask and take, and what the operator should know; without the run itself.

    Args:
        session: reads.
        blobs: where they are, whose disk counts.
        submission: the run.
        model_bytes: of its initial model.
        attending: the members that attend.
        other: bytes that other runs will still take.
    """
    members = submission.members(session, attending)
    needed = disk.run_bytes(
        submission.spec, model=model_bytes, members=len(members), objectives=len(submission.objectives)
    )
    free = blobs.free_bytes() - other
    warnings = list(submission.warnings)
    if needed > free:
        warnings.append(
            f"the run will take about {needed / 1e9:.1f} GB on the coordinator's disk, where "
            f"{max(free, 0) / 1e9:.1f} GB are free beside what other runs will still take: free some space, or set "
            "keep_rounds; see `fedpareto admin disk`"
        )
    return messages.SubmitRunResponse(
        warnings=warnings,
        members=members,
        asked=submission.asked(len(members)),
        minimum=submission.spec.selection.minimum,
        disk_needed=needed,
        disk_free=free,
    )
