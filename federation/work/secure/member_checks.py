"""The refusals of a member (section 3 of the protocol): each check raises WorkError with a stable reason."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from fractions import Fraction
from typing import Any

from federation.digests import digest, parse
from federation.record import bound_fields
from federation.record.bound_fields import difference, repeated
from federation.secure import bounds
from federation.secure.bounds import Bounds
from federation.secure.cover import cover, covers
from federation.secure.errors import Malformed
from federation.secure.hashing import PublicKeys
from federation.secure.member_keys import check_keys
from federation.secure.thresholds import ONE, Mode, smallest_cohort
from federation.spec.run_spec import RunSpec, SpecError
from federation.work.base import Origin, WorkError, WorkingClient
from federation.work.secure import sessions
from federation.work.secure.allowed import known_bounds
from federation.work.secure.journal import Journal
from federation.work.secure.terms import SessionStage, SessionTerms
from federation.work.site import EVALUATE, PeerReply


def require(holds: bool, reason: str, message: str) -> None:
    """Raises WorkError unless the condition holds."""
    if not holds:
        raise WorkError(message, reason=reason)


def check_terms(client: WorkingClient, terms: SessionTerms, length: int, *, evaluation: bool) -> None:
    """Checks the terms against the assignment, the pinned roster and the owner's policy.

    Args:
        client: the member.
        terms: of the session.
        length: the number of coordinates of the vector that the work gives.
        evaluation: True if the session sums the metrics of an evaluation.
    """
    origin, site = client.origin, client.site
    policy = site.policy(origin.task)
    require(terms.round == client.round, "terms", f"the terms are for round {terms.round}, the work for {client.round}")
    name = difference(origin, terms, (field.name for field in fields(Origin)))
    require(not name, "terms", f"the terms are for another {name} than the work")
    require(terms.length == length, "terms", f"the terms say {terms.length} coordinates; the work gives {length}")
    require(len(terms.nonce) == 16, "terms", f"the nonce has {len(terms.nonce)} bytes, not 16")
    require(terms.clip >= 0, "terms", f"vectors cannot be clipped to {terms.clip}")
    require(bool(site.roster), "roster", "no roster is pinned here: `fedpareto worker roster pin FILE`")
    ids = terms.ids
    require(list(ids) == sorted(set(ids)), "terms", "the members invited are not sorted, or one is named twice")
    require(client.client_id in ids, "terms", "this member is not invited")
    for member in terms.invited:
        require(
            site.key_id(member.client_id) == member.key_id,
            "roster",
            f"{member.client_id} is not in the pinned roster with the key {member.key_id.hex()[:16]}",
        )
    require(terms.mode in policy.modes, "policy:mode", f"the owner does not allow the mode {terms.mode}")
    require(terms.mode is Mode.SUM or not evaluation, "policy:mode", "an evaluation is a sum, and needs no other mode")
    hidden = sorted(set(terms.disclose) - policy.disclose)
    require(not hidden, "policy:disclose", f"the owner does not disclose {', '.join(hidden)}")
    require(not (evaluation and terms.disclose), "terms", "an evaluation shows no number of one member")
    check_cohort(client, terms.mode, len(ids), "are invited")


def check_cohort(client: WorkingClient, mode: Mode, members: int, doing: str) -> None:
    """Checks that enough members take part for the colluders that the owner assumes."""
    policy, colluders = client.site.policy(client.origin.task), client.site.assumed(client.origin.task)
    least = max(policy.smallest, smallest_cohort(mode, colluders))
    require(
        members >= least,
        "cohort",
        f"{members} members {doing}; against {colluders} colluding members, the mode {mode} needs {least}",
    )


def specification(client: WorkingClient, document: bytes) -> RunSpec:
    """Reads the specification of the run, which limits the questions of the coordinator.

    It imports no code that the specification names.
    """
    name = client.origin.spec
    require(digest(document, parse(name)[0]) == name, "terms", "the specification is not the one of the assignment")
    try:
        return RunSpec.parse(document)
    except SpecError as error:
        message = f"this worker cannot read the specification of the run: {error}"
        raise WorkError(message[:400], reason="policy:algorithm") from error


def check_asked(client: WorkingClient, spec: RunSpec, terms: SessionTerms, length: int) -> None:
    """Checks that the terms, the work among them, are those that the specification gives for this round and phase.

    `length` is the number of coordinates of the vector that the work gives.
    """
    by_name = spec.algorithm.name in client.site.policy(client.origin.task).algorithms
    wrong = sessions.difference(spec, terms, client.origin, client.shape.objectives, length, by_name=by_name)
    require(not wrong, "terms", wrong)


def check_noise(client: WorkingClient, spec: RunSpec, *, evaluation: bool) -> None:
    """Checks that the noise on an evaluation, or the blur of an update, is at least the owner's minimum."""
    policy, privacy = client.site.policy(client.origin.task), spec.privacy
    if evaluation:
        require(
            privacy.evaluation_noise >= policy.evaluation_noise,
            "policy:evaluation-noise",
            f"privacy.evaluation_noise is {privacy.evaluation_noise:g}; the owner asks for "
            f"{policy.evaluation_noise:g} (secure.evaluation_noise)",
        )
        return
    require(
        privacy.blur >= policy.blur,
        "policy:blur",
        f"privacy.blur is {privacy.blur:g}; the owner asks for {policy.blur:g} (secure.blur)",
    )


def check_algorithm(client: WorkingClient, spec: RunSpec, *, evaluation: bool) -> Bounds:
    """The bounds on coefficients of the run's algorithm, which must be known here. Raises WorkError."""
    if evaluation:
        return bounds.EVALUATION
    algorithm = spec.algorithm
    try:
        known = known_bounds(spec, by_name=algorithm.name in client.site.policy(client.origin.task).algorithms)
    except (TypeError, ValueError) as error:
        raise WorkError(f"algorithm.epsilon: {error}", reason="policy:algorithm") from error
    if known is None:
        raise WorkError(
            f"this worker does not know the algorithm {algorithm.name}, so it cannot tell which coefficients suit it: "
            "compare versions, or name it in `algorithms` of policy.toml to rely on the cover of the sum alone",
            reason="policy:algorithm",
        )
    return known


def origin_facts(client: WorkingClient) -> dict[str, Any]:
    """The origin of the work and its round, as a journal keeps them."""
    facts: dict[str, Any] = json.loads(json.dumps({**asdict(client.origin), "round": client.round}))
    return facts


def check_origin(client: WorkingClient, journal: Journal) -> None:
    """Checks that a later stage is of the run, the round, the model and the task of READY.

    The assignment of a later stage names them, too, and limits and policies go by these names.
    """
    before, now = journal.agreed(SessionStage.READY)["origin"], origin_facts(client)
    wrong = [name for name in before if now[name] != before[name]]
    require(not wrong, "terms", f"the assignment names another {', '.join(wrong)} than that of the first stage")


def check_order(journal: Journal, stage: SessionStage, opening: int, *, again: bool) -> None:
    """Checks that stages only go forward; the last one may be asked again."""
    reached, position = journal.reached(), stage.place(opening)
    require(
        position > reached or (position == reached and again),
        "stage",
        f"{stage.value} is asked for after a later stage, or a second time",
    )


def peers(
    client: WorkingClient, journal: Journal, envelopes: Sequence[bytes], stage: SessionStage
) -> dict[str, PeerReply]:
    """The signed replies of other members to a stage, by id, verified with the keys of the pinned roster."""
    ready = journal.agreed(SessionStage.READY)
    replies: dict[str, PeerReply] = {}
    for envelope in envelopes:
        try:
            reply = client.site.open_reply(envelope, client.site.roster)
        except ValueError as error:
            raise WorkError(f"a reply of another member does not verify: {error}", reason="envelope") from error
        name, statement = reply.client_id, reply.statement
        same = repeated(reply, bound_fields.SESSION) == {field: ready[field] for field in bound_fields.SESSION}
        require(
            same and statement is not None and statement.session == journal.session and statement.stage is stage,
            "envelope",
            f"the reply of {name} is of another session or stage",
        )
        require(name in ready["invited"], "envelope", f"{name} is not invited")
        require(name not in replies, "envelope", f"{name} is named twice")
        replies[name] = reply
    return replies


def check_blurred(journal: Journal, shown: Mapping[str, PeerReply]) -> None:
    """Checks that every member has signed that it blurs its vector as the terms say."""
    blur = journal.agreed(SessionStage.READY)["blur"]
    wrong = [name for name, reply in shown.items() if reply.statement.blur != blur]
    require(not wrong, "blur", f"{', '.join(wrong)}: the blur is not {blur:g}, as the terms say; compare versions")


def check_measured(journal: Journal, measured: Mapping[str, bytes]) -> None:
    """Checks that every member of an evaluation has signed the list of the metrics that it computes."""
    ready = journal.agreed(SessionStage.READY)
    length = ready["length"] if ready["work"] == EVALUATE else 0
    wrong = [name for name, entries in measured.items() if len(entries) != length or not set(entries) <= {0, 1}]
    require(not wrong, "metrics", f"{', '.join(wrong)}: there is not one byte, 0 or 1, for each metric")


def check_public_keys(me: str, own: PublicKeys, shown: Mapping[str, PublicKeys]) -> None:
    """Checks the keys of U1: this member's own are among them, and all are valid."""
    require(shown.get(me) == own, "keys", "this member's own keys are missing or changed")
    try:
        check_keys(shown.values())
    except Malformed as error:
        raise WorkError(str(error), reason="keys") from error


def check_members(members: Sequence[str], within: Sequence[str], me: str, least: int) -> None:
    """Checks a list of members: sorted, a subset of `within`, with this member, and long enough."""
    require(list(members) == sorted(set(members)), "members", "the members are not sorted, or one is named twice")
    require(set(members) <= set(within), "members", "the members are not among those of the stage before")
    require(me in members, "members", "this member is not among them")
    require(len(members) >= least, "members", f"{len(members)} members; at least {least} are needed")


def check_coefficients(client: WorkingClient, journal: Journal, coefficients: Mapping[str, int]) -> None:
    """Checks the coefficients of W at MASK: the bounds of the algorithm, and the cover of this member (section 3.5)."""
    ready, deal = journal.agreed(SessionStage.READY), journal.agreed(SessionStage.DEAL)
    rule = Bounds(**{**ready["bounds"], "kind": bounds.BoundKind(ready["bounds"]["kind"])})
    wrong = bounds.problem(rule, coefficients, deal["samples"], journal.thresholds)
    require(not wrong, "coefficients", wrong)
    me, cohort, least = client.client_id, journal.thresholds, _least_cover(client, journal)
    require(
        covers(coefficients, me, cohort.t, least),
        "cover",
        f"with this member's coefficient {coefficients[me] / ONE:.4f}, {cohort.t} colluding members would leave "
        f"{float(cover(coefficients, me, cohort.t)):.2f} effective members in the sum; {float(least):g} are needed",
    )


def check_survivors(client: WorkingClient, journal: Journal, coefficients: Mapping[str, int]) -> None:
    """Checks the cover of every member of V at CONFIRM (section 3.5).

    The masked vectors of V have been sent, and t_mask members can unmask their sum without the others. So a member
    whose cover has become too small cannot prevent the sum alone: each member requires the cover of all.
    """
    problem = bounds.uncovered(coefficients, journal.thresholds.t, _least_cover(client, journal))
    require(not problem, "cover", problem)


def _least_cover(client: WorkingClient, journal: Journal) -> Fraction:
    """E* of this member's owner."""
    chosen = client.site.policy(client.origin.task).effective_members
    return journal.thresholds.effective_members if chosen is None else Fraction(chosen)
