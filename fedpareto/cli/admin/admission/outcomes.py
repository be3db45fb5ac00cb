"""What one command does for several members or requests: each has its own result, and one failure stops no other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import typer
from rich.text import Text

from federation.line.channels import refusal_from_rpc_error
from federation.text import escaped_lines
from fedpareto.cli.document import dumps
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.show.tables import console
from fedpareto.standard_streams import print_document

FAILED = "failed"
NOT_WRITTEN = "not-written"  # the reason of a file that cannot be written
_ENDING = ("unreachable", NOT_WRITTEN)  # reasons for which the next one would fail, too


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """What became of one member or request.

    Attributes:
        name: of the member or the request, as messages name it.
        outcome: a word for programs: `FAILED`, or what was done.
        message: the same for people.
        reason: why it failed, as in the coordinator's refusals; empty if it did not fail.
        more: what else the JSON document has.
    """

    name: str
    outcome: str
    message: str
    reason: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def failed(cls, name: str, reason: str, message: str) -> "ItemResult":
        """The result of one that failed."""
        return cls(name=name, outcome=FAILED, reason=reason, message=message)


def one_by_one(names: Iterable[str], act: Callable[[str], ItemResult]) -> Iterator[ItemResult]:
    """Calls `act` for each name.

    A refused call fails for its name alone. Once the coordinator is lost, or a file cannot be written, the rest is not
    tried.
    """
    lost: ItemResult | None = None
    for name in names:
        if lost is not None:
            yield ItemResult.failed(name, lost.reason, f"not tried, because {lost.name} has failed")
            continue
        try:
            result = act(name)
        except grpc.RpcError as error:
            refusal = refusal_from_rpc_error(error)
            result = ItemResult.failed(name, refusal.reason or refusal.status, escaped_lines(refusal.message))
        lost = result if result.reason in _ENDING else None
        yield result


def report(results: Iterable[ItemResult], *, key: str, as_json: bool, closing: str = "", **more: Any) -> None:
    """Prints each result as soon as it is there, or one JSON document with all of them and with `more`.

    Args:
        results: may be made while they are printed.
        key: of a name in the document, such as "client_id".
        as_json: whether to print the document.
        closing: the last line for people, if something was done.
        more: what else the document has.

    Raises:
        CommandFailure: something failed. Of a single one, it has the message.
    """
    done = list[ItemResult]()
    for result in results:
        done.append(result)
        if not as_json and result.outcome != FAILED:
            console().print(Text(result.message))
    failures = [result for result in done if result.outcome == FAILED]
    if as_json:
        document = [
            {key: item.name, "outcome": item.outcome, "reason": item.reason, "message": item.message, **item.more}
            for item in done
        ]
        print_document(dumps({"results": document, **more}))
    elif closing and len(failures) < len(done):
        console().print(Text(closing))
    if len(done) == 1 and failures:
        raise CommandFailure(f"{failures[0].name}: {failures[0].message} [{failures[0].reason}]")
    for result in failures:
        typer.echo(f"{result.name}: {result.message} [{result.reason}]", err=True)
    if failures:
        raise CommandFailure(f"{len(failures)} of {len(done)} failed: {', '.join(item.name for item in failures)}")
