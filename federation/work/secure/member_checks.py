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
from federation.work.site import EVALUATE, STATISTICS, PeerReply


def require(holds: bool, reason: str, message: str) -> None:
    """Raises WorkError unless the condition holds."""
    if not holds:
        raise WorkError(message, reason=reason)


def check_terms(client: WorkingClient, terms: SessionTerms, length: int, *, updates: bool) -> None:
    """Checks the terms against the assignment, the pinned roster and the owner's policy.

    Args:
        client: the member.
        terms: of the session.
        length: the number of coordinates of the vector that the work gives.
        updates: False if the session sums the metrics of an evaluation, or statistics of the data.
    """
    origin, site = client.origin, client.site
    policy = site.policy(origin.task)
    # Section 3, rule 1: limits and policies go by the assignment, vectors by the terms. If they differ, the wrong
    # session counts.
    require(terms.round == client.round, "terms", f"the terms are for round {terms.round}, the work for {client.round}")
    # Section 2: the terms name the session. If they could differ, a member with another model or seed would be in the
    # session of the others.
    name = difference(origin, terms, (field.name for field in fields(Origin)))
    require(not name, "terms", f"the terms are for another {name} than the work")
    # Section 8: with fewer coordinates, the session would sum a part of the vector that the coordinator chose.
    require(terms.length == length, "terms", f"the terms say {terms.length} coordinates; the work gives {length}")
    # Section 8: it keeps sessions apart: without one, an honest second attempt would have the name of a session that is
    # over.
    require(len(terms.nonce) == 16, "terms", f"the nonce has {len(terms.nonce)} bytes, not 16")
    # Section 2: vectors are divided by it; `>=` also refuses NaN, by which nothing would be shortened.
    require(terms.clip >= 0, "terms", f"vectors cannot be clipped to {terms.clip}")
    # Section 3, rule 0: without pinned keys, a coordinator could play all other members, and the sum is this member's
    # vector.
    require(bool(site.roster), "roster", "no roster is pinned here: `fedpareto worker roster pin FILE`")
    ids = terms.ids
    # Section 2a: a name that stands twice counts twice for m, so fewer members than the owner requires would do.
    require(list(ids) == sorted(set(ids)), "terms", "the members invited are not sorted, or one is named twice")
    require(client.client_id in ids, "terms", "this member is not invited")
    # Section 3, rule 1: the key that the owner pinned, not one from the terms: else the coordinator signs in the name
    # of known members.
    for member in terms.invited:
        require(
            site.key_id(member.client_id) == member.key_id,
            "roster",
            f"{member.client_id} is not in the pinned roster with the key {member.key_id.hex()[:16]}",
        )
    # Section 3, rule 0: the mode decides what is opened beside the sum, so the owner decides on the mode.
    require(terms.mode in policy.modes, "policy:mode", f"the owner does not allow the mode {terms.mode}")
    # Section 2b: metrics have no sketch. Opened products of metrics would show how alike two members are.
    require(terms.mode is Mode.SUM or updates, "policy:mode", f"{terms.work.name} is a sum, and needs no other mode")
    # Section 3, rule 0: these numbers leave in the clear with READY, before any cover is known.
    hidden = sorted(set(terms.disclose).difference(policy.disclose))
    require(not hidden, "policy:disclose", f"the owner does not disclose {', '.join(hidden)}")
    # Section 3, rule 4: the numbers that could be disclosed are the vector itself.
    require(updates or not terms.disclose, "terms", f"{terms.work.name} shows no number of one member")
    # Section 3, rule 1: before the data are used: too few are invited, and those that are ready cannot be more.
    check_cohort(client, terms.mode, len(ids), "are invited")


def check_cohort(client: WorkingClient, mode: Mode, members: int, doing: str) -> None:
    """Checks that enough members take part for the colluders that the owner assumes."""
    policy, colluders = client.site.policy(client.origin.task), client.site.assumed(client.origin.task)
    # Section 1: so that t is at least what the owner assumes: nothing here protects against more than t colluders.
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
    # Section 7: by the digest in the terms, so all members read the same one. A copy for one member could allow more.
    require(digest(document, parse(name)[0]) == name, "terms", "the specification is not the one of the assignment")
    try:
        # After the digest: what nobody has signed is not parsed.
        return RunSpec.parse(document)
    except SpecError as error:
        message = f"this worker cannot read the specification of the run: {error}"
        raise WorkError(message[:400], reason="policy:algorithm") from error


def check_asked(client: WorkingClient, spec: RunSpec, terms: SessionTerms, length: int) -> None:
    """Checks that the terms, the work among them, are those that the specification gives for this round and phase.

    `length` is the number of coordinates of the vector that the work gives.
    """
    by_name = spec.algorithm.name in client.site.algorithms
    # Section 8: not whether the terms are possible, but whether they are those that the specification gives.
    wrong = sessions.difference(spec, terms, client.origin, client.shape.objectives, length, by_name=by_name)
    require(not wrong, "terms", wrong)


def check_noise(client: WorkingClient, spec: RunSpec, *, evaluation: bool) -> None:
    """Checks that the noise on an evaluation, or the blur of an update, is at least the owner's minimum."""
    policy, privacy = client.site.policy(client.origin.task), spec.privacy
    # Sections 2b and 2c: the run's noise is the submitter's choice, so the owner's least one is compared here.
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


def check_algorithm(client: WorkingClient, spec: RunSpec, work: str) -> Bounds:
    """The bounds on coefficients of a kind of work, or of the run's algorithm, if it is known. Raises WorkError."""
    if work in (EVALUATE, STATISTICS):
        return bounds.EVALUATION if work == EVALUATE else bounds.INTEGERS
    algorithm = spec.algorithm
    try:
        known = known_bounds(spec, by_name=algorithm.name in client.site.algorithms)
    except (TypeError, ValueError) as error:
        raise WorkError(f"algorithm.epsilon: {error}", reason="policy:algorithm") from error
    # Section 3.5: without bounds, any coefficients could be said to suit the algorithm. Only the owner may rely on the
    # cover alone.
    if known is None:
        raise WorkError(
            f"this worker does not know the algorithm {algorithm.name}, so it cannot tell which coefficients suit it: "
            "compare versions, or name it in `algorithms` of policy.toml to rely on the cover of the sum alone",
            reason="policy:algorithm",
        )
    return known


def origin_facts(client: WorkingClient) -> dict[str, Any]:
    """The origin of the work and its round, as a journal keeps them."""
    # Through JSON: a journal gives lists for tuples, and `check_origin` compares with what it gives.
    facts: dict[str, Any] = json.loads(json.dumps({**asdict(client.origin), "round": client.round}))
    return facts


def check_origin(client: WorkingClient, journal: Journal) -> None:
    """Checks that a later phase is of the run, the round, the model and the task of READY.

    The assignment of a later phase names them, too, and limits and policies go by these names.
    """
    # Section 3, rule 5: limits go by the model and the task of the assignment. A later phase under other names would
    # count there.
    before, now = journal.agreed(SessionStage.READY)["origin"], origin_facts(client)
    wrong = [name for name in before if not _agrees(before[name], now[name])]
    require(not wrong, "terms", f"the assignment names another {', '.join(wrong)} than that of the first phase")


def _agrees(before: Any, now: Any) -> bool:
    """True if a fact is as it was; a part that an older version did not keep at READY is not compared."""
    if isinstance(before, dict):
        return all(name in now and _agrees(part, now[name]) for name, part in before.items())
    return bool(before == now)


def check_order(journal: Journal, stage: SessionStage, opening: int, *, again: bool) -> None:
    """Checks that phases only go forward; the last one may be asked again."""
    # Section 2: after MASK no OPEN, after CONFIRM no MASK: with the coefficients known, an opening or a second y shows
    # more than section 5 lists.
    reached, position = journal.reached(), stage.place(opening)
    require(
        position > reached or (position == reached and again),
        "stage",
        f"{stage.value} is asked for after a later phase, or a second time",
    )


def peers(
    client: WorkingClient, journal: Journal, envelopes: Sequence[bytes], stage: SessionStage
) -> dict[str, PeerReply]:
    """The signed replies of other members to a phase, by id, verified with the keys of the pinned roster."""
    ready = journal.agreed(SessionStage.READY)
    replies: dict[str, PeerReply] = {}
    for envelope in envelopes:
        try:
            # Section 3, rule 0: by the pinned roster. A key that came with the reply would prove nothing.
            reply = client.site.open_reply(envelope, client.site.roster)
        except ValueError as error:
            raise WorkError(f"a reply of another member does not verify: {error}", reason="envelope") from error
        name, statement = reply.client_id, reply.statement
        # Section 3, rule 1: a signed reply of another run, session or phase is genuine, too. Replayed, it would bring
        # old keys or confirmations.
        same = repeated(reply, bound_fields.SESSION) == {field: ready[field] for field in bound_fields.SESSION}
        require(
            same and statement is not None and statement.session == journal.session and statement.stage is stage,
            "envelope",
            f"the reply of {name} is of another session or phase",
        )
        # Section 3, rule 1: the terms name who may take part. Others in the roster were not counted for the cohort.
        require(name in ready["invited"], "envelope", f"{name} is not invited")
        # Section 3, rule 1: a second reply of a member would replace the first one, and bring other keys or samples.
        require(name not in replies, "envelope", f"{name} is named twice")
        replies[name] = reply
    return replies


def check_blurred(journal: Journal, shown: Mapping[str, PeerReply]) -> None:
    """Checks that every member has signed that it blurs its vector as the terms say."""
    blur = journal.agreed(SessionStage.READY)["blur"]
    # Section 2c: a release that does not blur signs 0, and does not pass as one that does.
    wrong = [name for name, reply in shown.items() if reply.statement.blur != blur]
    require(not wrong, "blur", f"{', '.join(wrong)}: the blur is not {blur:g}, as the terms say; compare versions")


def check_measured(journal: Journal, measured: Mapping[str, bytes]) -> None:
    """Checks that every member of an evaluation has signed the list of the metrics that it computes."""
    ready = journal.agreed(SessionStage.READY)
    length = ready["length"] if ready["work"] == EVALUATE else 0
    # Section 2b: one byte for each entry: with lists of other lengths, members could not agree on the entries that are
    # summed.
    wrong = [name for name, entries in measured.items() if len(entries) != length or not set(entries) <= {0, 1}]
    require(not wrong, "metrics", f"{', '.join(wrong)}: there is not one byte, 0 or 1, for each metric")


def check_public_keys(me: str, own: PublicKeys, shown: Mapping[str, PublicKeys]) -> None:
    """Checks the keys of U1: this member's own are among them, and all are valid."""
    # Section 3, rule 1: under other keys in its name, the coordinator reads what the others encrypt for this member.
    require(shown.get(me) == own, "keys", "this member's own keys are missing or changed")
    try:
        # Section 2.2: also here, and not at the coordinator alone, which may be the one that cheats.
        check_keys(shown.values())
    except Malformed as error:
        raise WorkError(str(error), reason="keys") from error


def check_members(members: Sequence[str], within: Sequence[str], me: str, least: int) -> None:
    """Checks a list of members: sorted, a subset of `within`, with this member, and long enough."""
    # Section 2a: a name that stands twice would fill the list up to n_min.
    require(list(members) == sorted(set(members)), "members", "the members are not sorted, or one is named twice")
    # Section 3, rule 3: lists only shrink. Who comes back has pair masks that the others did not add.
    require(set(members) <= set(within), "members", "the members are not among those of the phase before")
    # Section 3, rule 3: a member that is not in the list would help to open a sum or a Gram matrix of others.
    require(me in members, "members", "this member is not among them")
    # Section 3, rule 3: with fewer, t colluders and the coordinator can be enough to single out one of the rest.
    require(len(members) >= least, "members", f"{len(members)} members; at least {least} are needed")


def check_coefficients(client: WorkingClient, journal: Journal, coefficients: Mapping[str, int]) -> None:
    """Checks the coefficients of W at MASK: the bounds of the algorithm, and the cover of this member (section 3.5)."""
    ready, deal = journal.agreed(SessionStage.READY), journal.agreed(SessionStage.DEAL)
    # Section 3.5: the bounds that were found at READY: what the policy says meanwhile changes no session that is under
    # way.
    rule = Bounds(**{**ready["bounds"], "kind": bounds.BoundKind(ready["bounds"]["kind"])})
    # Section 3.5: with the samples that the others signed at READY: lambda0 from an assignment would be the
    # coordinator's.
    wrong = bounds.problem(rule, coefficients, deal["samples"], journal.thresholds)
    require(not wrong, "coefficients", wrong)
    # Section 3.5, rule 1: over W, with t of U1. At CONFIRM it is checked for all members: see `check_survivors`.
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
    # Section 3.5: the owner's E*, also where the run asks for less.
    chosen = client.site.policy(client.origin.task).effective_members
    return journal.thresholds.effective_members if chosen is None else Fraction(chosen)
