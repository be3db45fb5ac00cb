"""The owner's limits on private rounds: how many sessions, and how many sums of one model, a member takes part in.

A session counts from its first message that depends on the member's vector. All numbers are those of the ledger, which
outlives every run.
"""

from collections.abc import Sequence

from federation.digests import model_name
from federation.work.base import WorkError, WorkingClient
from federation.work.secure.member_checks import require
from federation.work.site import EVALUATE, SecurePolicy, SessionEntry

LOST_SESSIONS = 2
"""Sessions of one model and phase with MASK answered that may be lost before their sum, beside `sums_per_model`."""


def check_sessions(client: WorkingClient, session: str, *, work: str, count: bool) -> None:
    """Checks that the owner's limits allow one more session; `count` makes it count, durably.

    An evaluation is deterministic: two evaluations of one model, the second without one member, would show the values
    of this member. So each model is evaluated once. A run has as many evaluations as this member has trained in its
    private rounds; a run that only measures models has those of the models with which the owner has approved it.

    Args:
        client: the member.
        session: its name in the ledger; a session that counts is allowed again.
        work: the kind of work of the vectors; an evaluation may be shown in the clear.
        count: if true, the session counts from now on.

    Raises:
        WorkError: `base-model`, `sessions`, `model-sessions`, `model-sums`, `model-evaluated` or `evaluations`.
        OSError: the ledger cannot be written.
    """
    origin, site, evaluation = client.origin, client.site, work == EVALUATE
    policy, model = site.policy(origin.task), _model(client)
    noun, most = ("evaluation", policy.evaluations) if evaluation else ("training", policy.sessions)
    # Read and counted under one lock: two sessions at the same time could both be the last one that is allowed.
    with site.ledger.lock:
        others = _others(client, session)
        # Section 3, rule 1: trainings and evaluations have limits of their own, so neither can use up, or borrow from,
        # the other.
        alike = [entry for entry in others if entry.evaluation == evaluation]
        require(
            len(alike) < most,
            "sessions",
            f"this data set has been in all sessions of {noun} that its owner allows: {most}",
        )
        if evaluation:
            _check_evaluations(client, others)
        else:
            # Section 3, rule 5: two sums of one model that differ by a member show its vector, so sessions of one model
            # are few.
            rivals = _rivals(client, others, work)
            require(
                len(rivals) < policy.sessions_per_model,
                "model-sessions",
                f"{len(rivals)} sessions of {work} have begun from this model; {policy.sessions_per_model} are allowed",
            )
            # Section 3, rule 5: at READY already: a session that this member will not help to unmask must not be begun.
            _check_sums(rivals, policy, work)
            # Section 3, rule 5: masked vectors count, too: t_mask others can unmask a sum in which this member does not
            # help.
            _check_masks(rivals, policy, work)
        # Last: a session that is refused does not count. And before the caller replies: one that is answered always
        # does.
        if count:
            site.ledger.add(SessionEntry(session, origin.run_id, origin.task, model, work))


def mask(client: WorkingClient, session: str, *, work: str) -> None:
    """Checks and counts a session as `check_sessions`, and records durably that MASK is answered in it."""
    with client.site.ledger.lock:
        # Section 3, rule 1: MASK counts also in `sum`, where no opening has counted before.
        check_sessions(client, session, work=work, count=True)
        # Section 3, rule 5: noted before the vector is masked. After a crash the ledger has too many, never too few.
        client.site.ledger.mask(session)


def unmask(client: WorkingClient, session: str, *, work: str) -> None:
    """Records durably that the sum of a session is unmasked, if the owner's limits allow one more.

    If a member is in only one of two sums from one model, the two show its vector: see `docs/member/privacy.md`.
    Raises as `check_sessions`.
    """
    ledger = client.site.ledger
    # Section 3, rule 5: checked again. Several sessions of one model can have passed READY while none was unmasked.
    with ledger.lock:
        rivals = _rivals(client, _others(client, session), work)
        _check_sums(rivals, client.site.policy(client.origin.task), work)
        # Section 3, rule 5: on the disk before the shares leave: afterwards the sum is known, whatever happens here.
        ledger.unmask(session)


def _model(client: WorkingClient) -> str:
    """The name of the model in the ledger. A second name of it is refused, so that no model counts as two."""
    try:
        # Section 3, rule 5: one name for one model: under two names, each would have limits of its own.
        return model_name(client.origin.base_model)
    except ValueError as error:
        raise WorkError(str(error), reason="base-model") from None


def _others(client: WorkingClient, session: str) -> list[SessionEntry]:
    """The sessions of the data set that count, without this one."""
    return [entry for entry in client.site.counted(client.origin.task) if entry.session != session]


def _rivals(client: WorkingClient, others: Sequence[SessionEntry], work: str) -> list[SessionEntry]:
    """The sessions whose sums, beside that of this one, would show this member's vector.

    They are from the same model, and of the same kind of work, or of any kind in another run. The other kinds of the
    same run are no rivals, since the algorithm needs all of them.
    """
    run_id, model, evaluation = client.origin.run_id, _model(client), work == EVALUATE
    return [
        entry
        for entry in others
        if entry.base_model == model
        and entry.evaluation == evaluation
        # Section 3, rule 5: of another run, every kind of work counts: only within one run does the algorithm need
        # several sums of one model.
        and (entry.work == work or entry.run_id != run_id)
    ]


def _check_sums(rivals: Sequence[SessionEntry], policy: SecurePolicy, work: str) -> None:
    sums = sum(entry.unmasked for entry in rivals)
    require(
        sums < policy.sums_per_model,
        "model-sums",
        f"for a sum of {work} from this model, {sums} sums have been unmasked; {policy.sums_per_model} are allowed "
        "(secure.sums_per_model)",
    )


def _check_masks(rivals: Sequence[SessionEntry], policy: SecurePolicy, work: str) -> None:
    masked, most = sum(entry.masked for entry in rivals), policy.sums_per_model + LOST_SESSIONS
    require(
        masked < most,
        "model-sums",
        f"for a sum of {work} from this model, masked vectors have been sent in {masked} sessions; {most} are allowed "
        f"(secure.sums_per_model, and {LOST_SESSIONS} that are lost)",
    )


def _check_evaluations(client: WorkingClient, others: Sequence[SessionEntry]) -> None:
    """Checks that this model may be measured: once over all runs, and in a run that may ask for it."""
    model, run_id = _model(client), client.origin.run_id
    # Section 3, rule 4: over all runs: the second evaluation of a model, without one member, shows that member's
    # values.
    evaluated = any(entry.evaluation and entry.base_model == model for entry in others)
    require(not evaluated, "model-evaluated", "this model was evaluated here before; the numbers of then stand")
    # Section 3, rule 4: the owner has approved the run with the digests of its models: no other model is among them.
    if client.origin.base_model in client.measures:
        return
    # Section 3, rule 4: no more evaluations than trainings that counted: else a coordinator measures models of its
    # choice for nothing.
    measured, trained = (
        sum(entry.evaluation == kind and entry.run_id == run_id for entry in others) for kind in (True, False)
    )
    require(
        measured < trained + client.site.evaluations_ahead,
        "evaluations",
        f"this data set has been in {trained} private rounds of training of this run and in {measured} evaluations; "
        "there are no more evaluations than rounds, but for the models of a run that the owner has approved",
    )
