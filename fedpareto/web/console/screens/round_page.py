"""A round: a lane for each member, refusals with what to do, signatures, cosines, objectives, and private phases."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from federation.record.results import accepted
from federation.text import counted, escaped
from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import AssignmentState, ReplyManifest, StepManifest
from federation.v1.secure_pb2 import SecureTerms
from fedpareto import formatting
from fedpareto.admin_messages import duration, name_of
from fedpareto.formatting import natural
from fedpareto.web.console.federation_reader import Reader
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.alert_list import with_code
from fedpareto.web.pages.heat import heat
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.timeline import TimelineLane, TimelineSpan, timeline

_COLOURS = {
    "fetch and wait": (5, 2),
    "train": (0, 0),
    "evaluate": (2, 0),
    "describe": (2, 1),
    "send": (4, 0),
    "no reply": (1, 3),
}
_DOCTOR = "its owner starts its worker; `fedpareto worker doctor` on its machine says what is wrong."
_REMEDIES = {
    "disk": "The member's disk is full: ask its owner to free some space.",
    "policy": "The owner's policy does not allow it: ask the owner, or change the specification.",
    "closed": "The member was closed: its owner has set the hours.",
    "paused": "The member's owner has paused it, and resumes it.",
    "absent": f"It was not connected: {_DOCTOR}",
    "away": f"It is not connected now: {_DOCTOR}",
    "deadline": "It took longer than the deadline: look at the member's lane, or give `train.deadline_seconds` more.",
    "non-finite": "The update held numbers that are not finite: look at the member's data and learning rate.",
    "zero": "The update was all zeros: the member may have no data, or a learning rate of 0.",
    "signature": "The signature did not hold: the member's key may have changed.",
    "training": "The training failed at the member: its log says why.",
    "task": "The member does not offer the task: ask its owner to install it.",
}
_OUTCOMES = {"EXPIRED": "did not reply", "FULFILLED": "not used", "CANCELLED": "cancelled"}
_MOST_COSINES = 60  # members whose cosines are drawn


@dataclass(frozen=True)
class _Refusal:
    """A member whose reply did not come or did not count."""

    name: str
    outcome: str
    reason: str
    remedy: Html


def _view(reader: Reader, asked: PageRequest) -> PageView:
    number = asked.number("number", default=-1, least=-(2**31), most=2**31)
    run_name = asked.parameters["run"]
    item = reader.call(lambda stub: stub.GetRound(v1.GetRoundRequest(run=run_name, round=number)))
    number = item.summary.round
    pages = reader.call(lambda stub: list(stub.ListReplies(v1.ListRepliesRequest(run=item.run.run_id, round=number))))
    replies = [reply for page in pages for reply in page.replies]
    return PageView(
        f"{reader.names.named(item.run.run_id, item.run.name)}, round {number}",
        "round.html",
        {
            "run": item.run,
            "item": item,
            "summary": item.summary,
            "last": max(item.run.rounds_done, number + 1) - 1,
            "sentence": _sentence(item),
            "lanes": _lanes(item, replies),
            "refusals": list(_refusals(item, _away(reader))),
            "argument": reader.names.argument(item.run),
            "rows": _rows(item),
            "signatures": _signatures(item),
            "doubts": list(_doubts(item)),
            "private": list(_private(item)),
            "cosines": _cosines(item),
            "durations": [(phase, duration(phase)) for phase in item.phases],
            "objectives": item.objectives if item.HasField("objectives") else None,
        },
    )


def _sentence(item: v1.GetRoundResponse) -> str:
    summary = item.summary
    state = name_of(summary, "state")
    told = f"{summary.accepted} of {counted(summary.asked, 'member')} replied"
    if state == "SKIPPED":
        return f"No step was made: {summary.reason or 'too few replies'}. {told}."
    if state == "OPEN":
        return f"The round goes on: {told}."
    took = f" in {formatting.span(summary.seconds)}" if math.isfinite(summary.seconds) else ""
    return f"{told}{took}{'' if summary.accepted == summary.asked else '; the others are named below'}."


# --- lanes


def _seconds(time: Timestamp) -> float:
    return time.ToNanoseconds() / 1e9


def _lanes(item: v1.GetRoundResponse, replies: Sequence[v1.Reply]) -> Html:
    """A lane for each member: from each question to its receipt. When it trained is the member's word."""
    if not item.summary.HasField("started") or not item.phases:
        return Html("")
    began = _seconds(item.summary.started)
    ended = max((_seconds(phase.ended) for phase in item.phases if phase.HasField("ended")), default=math.nan)
    spans: dict[str, list[TimelineSpan]] = {part.client_id: [] for part in item.participations}
    receipts: dict[str, float] = {}
    phases = {phase.phase: phase for phase in item.phases}
    for reply in replies:
        phase = phases.get(reply.phase)
        if phase is None or not phase.HasField("started"):
            continue
        received = _seconds(reply.received)
        spans.setdefault(reply.client_id, []).extend(_spans(phase, reply, began, received))
        receipts[reply.client_id] = received - began
    for part in item.participations:
        if not spans[part.client_id] and part.state != AssignmentState.ASSIGNMENT_STATE_OPEN:
            first = item.phases[0]
            end = _seconds(first.ended) - began if first.HasField("ended") else 0.0
            title = f"{part.client_id}: {part.reason or name_of(part, 'state').lower()}"
            spans[part.client_id].append(
                TimelineSpan("no reply", title, _seconds(first.started) - began, end, *_COLOURS["no reply"])
            )
    lanes = [
        TimelineLane(name, _receipt(receipts.get(name)), spans[name], ended - began)
        for name in sorted(spans, key=natural)
    ]
    alt = f"What each of {len(lanes)} members did in round {item.summary.round}, and when"
    return timeline(lanes, alt=alt) if lanes else Html("")


def _receipt(seconds: float | None) -> str:
    return formatting.seconds(seconds) if seconds is not None else formatting.UNKNOWN


def _spans(phase: v1.PhaseProgress, reply: v1.Reply, began: float, received: float) -> Iterator[TimelineSpan]:
    asked = _seconds(phase.started)
    try:
        manifest = ReplyManifest.FromString(reply.envelope.manifest)
    except DecodeError:
        manifest = ReplyManifest()
    work = {"evaluate": "evaluate", "statistics": "describe"}.get(phase.kind, "train")
    title = f"{reply.client_id}, {phase.kind}"
    if not manifest.HasField("created") or not math.isfinite(manifest.seconds):
        yield TimelineSpan(
            work, f"{title}: until {received - asked:.2f} s", asked - began, received - began, *_COLOURS[work]
        )
        return
    # By the member's clock, which may be wrong: its spans stay between the question and the receipt.
    made = min(max(_seconds(manifest.created), asked), received)
    start = min(max(made - max(manifest.seconds, 0.0), asked), made)
    parts = (("fetch and wait", asked, start), (work, start, made), ("send", made, received))
    for name, first, last in parts:
        yield TimelineSpan(name, f"{title}: {name} {last - first:.2f} s", first - began, last - began, *_COLOURS[name])


# --- who failed


def _away(reader: Reader) -> frozenset[str]:
    """The members that are not connected now, as far as that is known."""
    clients = reader.lists.clients if reader.lists and reader.connection.live else ()
    return frozenset(client.client_id for client in clients if not client.attending)


def _refusals(item: v1.GetRoundResponse, away: Container[str]) -> Iterator[_Refusal]:
    for part in sorted(item.participations, key=lambda part: natural(part.client_id)):
        if accepted(item.phases, part) or part.state == AssignmentState.ASSIGNMENT_STATE_OPEN:
            continue
        outcome = _OUTCOMES.get(name_of(part, "state"), name_of(part, "state").lower())
        stem = part.reason.partition(":")[0].strip()
        fallback = "deadline" if outcome == "did not reply" else ""
        cause = stem if stem in _REMEDIES else fallback
        if cause == "deadline" and part.client_id in away:  # more time is no help
            cause = "away"
        yield _Refusal(part.client_id, outcome, part.reason, with_code(_REMEDIES.get(cause, "")))
    for absent in item.not_asked:
        yield _Refusal(absent.client_id, "not asked", absent.reason, Html(""))


def _rows(item: v1.GetRoundResponse) -> list[dict[str, str]]:
    rows = []
    hidden = item.summary.undisclosed
    for part in sorted(item.participations, key=lambda part: natural(part.client_id)):
        counts = accepted(item.phases, part)
        outcome = "accepted" if counts else name_of(part, "state").lower()
        shown = {"samples": str(part.samples) if part.samples else formatting.UNKNOWN}
        fields = ("loss_before", "update_norm", "weight", "cosine")
        shown |= {field: formatting.number(getattr(part, field)) for field in fields}
        shown = {field: formatting.of_member(text, field, hidden if counts else ()) for field, text in shown.items()}
        signed = f"{part.key_id[:8]} ✓" if part.key_id else formatting.UNKNOWN
        rows.append({"name": part.client_id, "outcome": outcome, **shown, "signed": signed,
                     "bytes": formatting.size(part.payload_bytes)})  # fmt: skip
    return rows


# --- signatures, cosines, private sessions


def _signatures(item: v1.GetRoundResponse) -> str:
    checks = [check for part in item.participations for check in part.envelopes]
    if all(check.reason == "unsigned" for check in checks):
        return "No envelope is signed: the members are simulated." if checks else "There are no envelopes yet."
    verified = sum(check.verified for check in checks)
    step = ""
    if item.HasField("step_check"):
        held = item.step_check.verified
        step = f" The step is {'signed by the coordinator' if held else 'NOT verified: ' + item.step_check.message}."
    return f"{verified} of {len(checks)} signed envelopes hold.{step}"


def _doubts(item: v1.GetRoundResponse) -> Iterator[str]:
    for part in item.participations:
        for check in part.envelopes:
            if not check.verified and check.reason != "unsigned":
                yield f"{part.client_id}: {check.kind} of phase {check.phase}: {check.message} [{check.reason}]"


def _cosines(item: v1.GetRoundResponse) -> Html:
    side = len(item.gram_clients)
    if not 1 < side <= _MOST_COSINES:
        return Html("")
    rows = [[1.0 - value for value in item.cosines[row * side : (row + 1) * side]] for row in range(side)]
    alt = f"Conflict between the updates of {side} members: 1 less their cosine"
    return heat(
        list(item.gram_clients), list(item.gram_clients), rows, formatting.number, alt=alt, largest=2.0, named=True
    )


def _private(item: v1.GetRoundResponse) -> Iterator[tuple[str, str]]:
    """The sessions of a private round: who was ready, who is in the sum, and what was wrong."""
    try:
        step = StepManifest.FromString(item.step.manifest)
    except DecodeError:
        return
    for settled in step.secure:
        try:
            terms = SecureTerms.FromString(settled.terms)
            mode = f"{escaped(terms.mode)}, blur {terms.blur:g}"
        except DecodeError:
            mode = "?"
        ready, survivors = set(settled.ready), set(settled.survivors)
        text = f"{len(survivors)} of {counted(len(ready), 'ready member')} are in the sum"
        if lost := sorted(ready - survivors, key=natural):
            text += f"; lost on the way: {', '.join(map(escaped, lost))}"
        yield f"{mode}, {escaped(settled.purpose)}", text
        for alarm in settled.alarms:
            yield "alarm", escaped(alarm)
    for void in item.voided:
        named = "; ".join(f"named as a cheater: {client.client_id} ({client.reason})" for client in void.named)
        yield f"attempt {void.attempt}", f"{'paused' if void.paused else 'voided'}: {void.reason}. {named}".strip()


def _version(reader: Reader, asked: PageRequest) -> object:
    """The page is made again while its round goes on: its envelopes are verified each time."""
    held = reader.known(asked.parameters["run"])
    if held is None or held.phase is None or str(held.phase.round) != asked.parameters["number"]:
        return None if held is None else asked.parameters["number"] in map(str, [held.table.stop])
    return held.phase.phase, held.phase.replied


SCREEN = Screen(_view, _version, "/")
