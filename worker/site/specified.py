"""What a coordinator may ask for a run whose specification and initial model are kept at this site.

The checks do not depend on which specification an assignment names: a run has one, so what one of its specifications
rules out stays ruled out.
"""

from federation.spec.sharing import Unshared
from federation.v1.common_pb2 import AssignmentManifest
from federation.work.base import Shows, Work
from federation.work.secure.ready import Ready
from federation.work.secure.stage import StageWork
from federation.work.site import SecurePolicy
from federation.work.statistics.work import Statistics
from worker.site.run_requests import RunRequest


def problem(run: RunRequest, manifest: AssignmentManifest, work: Work, policy: SecurePolicy) -> tuple[str, str] | None:
    """The reason and the message with which work for a run is declined; None if the run may ask for it.

    Args:
        run: the run as it asked this site.
        manifest: the assignment.
        work: the work of the assignment.
        policy: the permissions of the owner for the task of the assignment.
    """
    # Section 7, the initial model: the owner saw this one. From another, made for it, updates can show more of the
    # data.
    if manifest.round == 0 and work.from_round_model and manifest.base_model != run.initial_model:
        return (
            "initial-model",
            f"the run asked this site with the initial model {run.initial_model}; {work.name!r} in round 0 is to start "
            f"from {manifest.base_model}",
        )
    # Section 7: the owner saw which tensors stay here, which are fixed, and by which statistics they are filled.
    if run.unshared is not None and Unshared.of(manifest.unshared) != run.unshared:
        return "parameters", f"the specification {run.spec} says otherwise which tensors of the model the run shares"
    if models := run.evaluates:
        # Section 7: the owner accepted a run that measures these models: it trains nothing, and measures no others.
        if work.shows not in (Shows.METRICS, Shows.NOTHING):
            return "evaluates-only", f"the run {run.run} only measures models, and {work.name!r} is no measurement"
        if manifest.round >= len(models) or manifest.base_model != models[manifest.round]:
            return (
                "evaluates-only",
                f"the specification {run.spec} names the models to measure; {manifest.base_model} is not that of round "
                f"{manifest.round}",
            )
    # Section 7: statistics tell of the samples what neither a training nor an evaluation does, and the other way round.
    described = run.describes
    # Section 7: of a private run, the terms of READY name the work, and all later phases are of such a session.
    asked = work.inner if isinstance(work, Ready) else work
    later = described is not None and described.privacy.secure != "off" and isinstance(work, StageWork)
    if (
        described is not None
        and not later
        and (asked != Statistics.of(described) or isinstance(work, Ready) == (described.privacy.secure == "off"))
    ):
        return (
            "statistics-only",
            f"the run {run.run} only describes the columns that its specification {run.spec} names, and {work.name!r} "
            "is other work",
        )
    if described is None and isinstance(asked, Statistics):
        return "statistics-only", f"the specification {run.spec} asks for no statistics"
    discloses = run.discloses
    # Section 3, rule 4: an open run, or work that shows nothing, as the phases of private rounds.
    if described is not None or discloses is None or work.shows is Shows.NOTHING:
        return None
    # Section 3, rule 4: the run asks for private rounds. An update in the clear is what the masks are there to prevent.
    if work.shows is not Shows.METRICS:
        return (
            "policy:approved",
            f"the specification {run.spec} asks for private rounds, and {work.name!r} shows an update or a gradient in "
            "the clear",
        )
    # Section 3, rule 4: the run and the owner have to allow it, each for itself.
    if "evaluation" not in discloses:
        return (
            "policy:approved",
            f"the specification {run.spec} asks for private rounds, and does not disclose evaluations in the clear",
        )
    if "evaluation" not in policy.disclose:
        return (
            "policy:disclose",
            "the run discloses evaluations in the clear, which the owner does not (secure.disclose)",
        )
    return None
