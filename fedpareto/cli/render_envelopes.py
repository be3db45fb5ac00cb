"""Signed envelopes: verified, or why not."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from federation.v1.admin_pb2 import EnvelopeCheck, GetRoundResponse, Participation, Update
from federation.v1.common_pb2 import Code
from fedpareto.cli.render import new_table
from fedpareto.formatting import short, size, when

UNSIGNED = "unsigned"  # the reason of an update of a simulated client


def step(item: GetRoundResponse) -> Text:
    """Whether the step of a round is the coordinator's."""
    check = item.step_check
    if check.verified:
        return Text(f"verified, signed by the coordinator's key {short(check.key_id)}")
    return Text(why_not(check), style="red")


def code(item: Code) -> Text:
    """The code that was used, such as "worst_first:WorstFirst, of example 1.0, file blake3:..."."""
    package = f"{item.package} {item.version}".strip()
    words = (item.class_name, f"of {package}" if package else "", f"file {short(item.digest)}" if item.digest else "")
    return Text(", ".join(filter(None, words)))


def tally(parts: Iterable[Participation]) -> Text:
    """The number of envelopes of a round that are verified."""
    checks = [check for part in parts for check in part.envelopes]
    if all(check.reason == UNSIGNED for check in checks):
        return Text("none is signed: the clients are simulated")
    held = sum(check.verified for check in checks)
    words = f"{held} of {len(checks)} verified: assignments, declines, updates and receipts of the clients below"
    return Text(words, style="" if held == len(checks) else "red")


def signed_by(part: Participation) -> str:
    """The key under the update that is shown."""
    if part.key_id:
        return f"{part.key_id[:8]} ✓"
    doubted = [check for check in part.envelopes if check.kind == "update" and not check.verified]
    return "✗" if any(check.reason != UNSIGNED for check in doubted) else "–"


def doubts(named: Sequence[tuple[str, Sequence[EnvelopeCheck]]]) -> Iterator[Text]:
    """A line for each of the named envelopes that is not verified; none if all clients are simulated."""
    pairs = [(client, check) for client, checks in named for check in checks]
    if any(check.reason != UNSIGNED for _, check in pairs):
        for client, check in pairs:
            if not check.verified:
                yield Text(f"{client}: {check.kind} of phase {check.phase} {why_not(check)}", style="red")


def why_not(check: EnvelopeCheck) -> str:
    """Why an envelope is not verified."""
    return f"not verified because {check.reason}: {check.message}"


def updates(items: Iterable[Update]) -> RenderableType:
    """Updates as they were received; below, their envelopes that are not verified."""
    table = new_table(">round", ">phase", "client", "counts", "payload", ">bytes", "received", "envelope", "signed by")
    listed = list(items)
    for update in listed:
        verdict = Text("yes", style="green") if update.accepted else Text(f"no: {update.reason}", style="red")
        own = [check for check in update.envelopes if check.kind == "update"]
        key = f"{update.envelope.key_id.hex()[:8]} {'✓' if own and own[0].verified else '✗'}"
        table.add_row(
            str(update.round),
            str(update.phase),
            update.client_id,
            verdict,
            short(update.payload) or "–",
            size(update.payload_bytes),
            when(update, "received"),
            short(update.envelope_digest),
            "–" if own and own[0].reason == UNSIGNED else key,
        )
    notes = doubts([(f"round {update.round}, {update.client_id}", update.envelopes) for update in listed])
    return Group(table, *notes) if table.row_count else Text("no updates")
