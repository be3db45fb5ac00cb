"""Signed envelopes: verified, or the reason why not."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from federation.v1.admin_pb2 import EnvelopeCheck, GetRoundResponse, Participation, Reply
from federation.v1.common_pb2 import Code
from fedpareto.cli.show.tables import new_table
from fedpareto.formatting import short, size, when

UNSIGNED = "unsigned"  # the reason of a reply of a simulated client


def step(item: GetRoundResponse) -> Text:
    """The result of verifying the coordinator's signature of a step."""
    check = item.step_check
    if check.verified:
        return Text(f"verified, signed by the coordinator's key {short(check.key_id)}")
    return Text(why_not(check), style="red")


def code(item: Code) -> Text:
    """The code that was used, such as "worst_first:WorstFirst, of example 1.0, file blake3:..."."""
    package = f"{item.package} {item.version}".strip()
    parts = (item.class_name, f"of {package}" if package else "", f"file {short(item.digest)}" if item.digest else "")
    return Text(", ".join(filter(None, parts)))


def tally(parts: Iterable[Participation]) -> Text:
    """The number of envelopes of a round that are verified."""
    checks = [check for part in parts for check in part.envelopes]
    if all(check.reason == UNSIGNED for check in checks):
        return Text("none is signed: the members are simulated")
    verified = sum(check.verified for check in checks)
    text = f"{verified} of {len(checks)} verified: assignments, declines, replies and receipts of the members below"
    return Text(text, style="" if verified == len(checks) else "red")


def signed_by(part: Participation) -> str:
    """The key under the reply that is shown."""
    if part.key_id:
        return f"{part.key_id[:8]} ✓"
    doubted = [check for check in part.envelopes if check.kind == "reply" and not check.verified]
    return "✗" if any(check.reason != UNSIGNED for check in doubted) else "–"


def doubts(named: Sequence[tuple[str, Sequence[EnvelopeCheck]]]) -> Iterator[Text]:
    """A line for each of the named envelopes that is not verified; none if all members are simulated."""
    pairs = [(client, check) for client, checks in named for check in checks]
    if any(check.reason != UNSIGNED for _, check in pairs):
        for client, check in pairs:
            if not check.verified:
                yield Text(f"{client}: {check.kind} of phase {check.phase} {why_not(check)}", style="red")


def why_not(check: EnvelopeCheck) -> str:
    """The reason why an envelope is not verified."""
    return f"not verified because {check.reason}: {check.message}"


def replies(items: Iterable[Reply]) -> RenderableType:
    """Replies as they were received; below, their envelopes that are not verified."""
    table = new_table(">round", ">phase", "member", "counts", "payload", ">bytes", "received", "envelope", "signed by")
    listed = list(items)
    for reply in listed:
        verdict = Text("yes", style="green") if reply.accepted else Text(f"no: {reply.reason}", style="red")
        own = [check for check in reply.envelopes if check.kind == "reply"]
        key = f"{reply.envelope.key_id.hex()[:8]} {'✓' if own and own[0].verified else '✗'}"
        table.add_row(
            str(reply.round),
            str(reply.phase),
            reply.client_id,
            verdict,
            short(reply.payload) or "–",
            size(reply.payload_bytes),
            when(reply, "received"),
            short(reply.envelope_digest),
            "–" if own and own[0].reason == UNSIGNED else key,
        )
    notes = doubts([(f"round {reply.round}, {reply.client_id}", reply.envelopes) for reply in listed])
    return Group(table, *notes) if table.row_count else Text("no replies")
