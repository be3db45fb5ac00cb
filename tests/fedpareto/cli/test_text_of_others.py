"""Whatever members and other operators say, the administrator's terminal, documents and pages obey none of it."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from fedpareto.cli import document, logs
from fedpareto.cli.admin import watch
from fedpareto.cli.show import envelope_lines, member_tables, round_tables, tables
from fedpareto.escaping import escaping_stub, make_safe
from fedpareto.run_names import RunNames
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from tests.fedpareto.cli.scene import shown
from tests.few import few

NOW = datetime(2026, 6, 1, tzinfo=UTC)
HOSTILE = [
    "[red]",
    "[/red]",
    "[/]",
    "[link=https://example.org]",
    ":warning:",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\r\n",
    "\n",
    "\u2028",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ufeff",
    "\x7f",
    "\U000e0041",
    "<script>",
    "\\",
    "kept",
    "東京",
]
text = st.lists(
    st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4
).map("".join)
numbers = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 7),
}


def value(draw: st.DrawFn, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw(text)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.binary(max_size=40))
    return draw(numbers[field.cpp_type])


def fill(draw: st.DrawFn, message: Message) -> None:
    """Gives a message any text, any bytes and any numbers."""
    for field in message.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            for _ in range(draw(st.integers(0, 2))):
                getattr(message, field.name)[draw(text)] = draw(st.floats())
        elif inner is not None:
            into = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(draw(st.integers(0, 2))):
                    fill(draw, into.add())
            elif draw(st.booleans()):
                into.SetInParent()
                fill(draw, into)
        elif field.is_repeated:
            getattr(message, field.name).extend(value(draw, field) for _ in range(draw(st.integers(0, 3))))
        elif draw(st.booleans()):
            setattr(message, field.name, value(draw, field))


@st.composite
def any_message(draw: st.DrawFn, kind: type[Message]) -> Message:
    """A message as the command line gets it from the channel."""
    message = kind()
    fill(draw, message)
    message = kind.FromString(message.SerializeToString())
    make_safe(message)
    return message


def check_safe(words: str) -> None:
    assert words.replace("\n", "").isprintable(), words


PICTURES: dict[str, tuple[type[Message], Callable[[Any], Any]]] = {
    "clients": (admin_pb2.ListClientsResponse, lambda found: member_tables.clients(found.clients, NOW, RunNames())),
    "join_strings": (admin_pb2.ListJoinStringsResponse, lambda found: member_tables.join_strings(found.join_strings)),
    "coordinators": (
        admin_pb2.ListCoordinatorsResponse,
        lambda found: member_tables.coordinators(found.coordinators, RunNames()),
    ),
    "admins": (admin_pb2.ListAdministratorsResponse, lambda found: member_tables.administrators(found.administrators)),
    "runs": (admin_pb2.ListRunsResponse, lambda found: tables.runs(found.runs)),
    "run": (admin_pb2.GetRunResponse, lambda found: tables.run(found.run)),
    "rounds": (admin_pb2.ListRoundsResponse, lambda found: round_tables.rounds(found.rounds)),
    "round": (admin_pb2.GetRoundResponse, round_tables.round_),
    "replies": (admin_pb2.ListRepliesResponse, lambda found: envelope_lines.replies(found.replies)),
    "watch": (admin_pb2.WatchRunResponse, watch.status),
    "watch, a round": (admin_pb2.WatchRunResponse, lambda found: watch.row(found.ended)),
}


@few("run", "runs", "watch")
@pytest.mark.parametrize("command", PICTURES)
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_a_command_shows_hostile_text_as_text(command: str, data: st.DataObject) -> None:
    kind, picture = PICTURES[command]
    check_safe(shown(picture(data.draw(any_message(kind)))))


@few(admin_pb2.ListRepliesResponse)
@pytest.mark.parametrize(
    "kind", [admin_pb2.ListClientsResponse, admin_pb2.GetRoundResponse, admin_pb2.ListRepliesResponse]
)
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_a_document_of_hostile_text_is_json_without_a_control_character(
    kind: type[Message], data: st.DataObject
) -> None:
    found = document.dumps(data.draw(any_message(kind)))
    check_safe(found)
    json.loads(found)


@pytest.mark.full
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_a_page_of_hostile_text_is_html_without_a_control_character(data: st.DataObject) -> None:
    run = data.draw(any_message(admin_pb2.Run))
    rounds = data.draw(st.lists(any_message(admin_pb2.ExportRoundsResponse), max_size=2))
    client = data.draw(any_message(admin_pb2.Client))
    assert isinstance(run, admin_pb2.Run)
    assert isinstance(client, admin_pb2.Client)
    items = [item for item in rounds if isinstance(item, admin_pb2.ExportRoundsResponse)]
    for number, item in enumerate(items):
        item.summary.round = number
    found = page(ShownRun.of(run, items, [client]))
    check_safe(found.replace("\t", ""))
    assert "<script" not in found


def test_a_time_that_is_none_and_bytes_that_are_no_manifest_are_shown_as_such() -> None:
    update = admin_pb2.Reply(round=3)
    manifest = common_pb2.ReplyManifest(task="digits")
    manifest.created.seconds, manifest.created.nanos = 2**62, -1
    update.envelope.manifest = manifest.SerializeToString()
    update.received.seconds = -(2**62)
    found = json.loads(document.dumps(update))
    assert found["envelope"]["decoded"]["created"] == "not a time: 4611686018427387904 s and -1 ns"
    assert found["received"] == "not a time: -4611686018427387904 s and 0 ns"
    assert "not a time" in shown(envelope_lines.replies([update]))
    update.envelope.manifest = b"\xff\xff"
    assert json.loads(document.dumps(update))["envelope"]["decoded"] is None


def test_what_is_printable_and_a_specification_with_its_lines_stay_as_they_are() -> None:
    said = admin_pb2.GetRunResponse()
    said.run.name = "Universität [1] :smile: 東京"
    said.run.spec = 'name = "x"\n\ttask = "y\x1b"\n'
    make_safe(said)
    assert said.run.name == "Universität [1] :smile: 東京"
    assert said.run.spec == 'name = "x"\n\ttask = "y\\x1b"\n'
    assert "Universität [1] :smile: 東京" in shown(tables.run(said.run))


class Talker(admin_pb2_grpc.AdminServicer):
    """A coordinator whose words are hostile."""

    def ListClients(self, request: Any, context: Any) -> admin_pb2.ListClientsResponse:  # noqa: N802
        return admin_pb2.ListClientsResponse(clients=[admin_pb2.Client(device="\x1b[31m\u202e")])

    def ExportRounds(self, request: Any, context: Any) -> Iterator[admin_pb2.ExportRoundsResponse]:  # noqa: N802
        found = admin_pb2.ExportRoundsResponse()
        found.participations.add(evaluation={"\x1b[2J": 0.5, "test/loss": 1.0})
        yield found


def test_every_call_through_the_channel_of_the_command_line_is_escaped() -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        admin_pb2_grpc.add_AdminServicer_to_server(Talker(), server)  # type: ignore[abstract]
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = escaping_stub(lambda kind, method, **made: getattr(channel, kind)(method, **made))
            (client,) = stub.ListClients(admin_pb2.ListClientsRequest()).clients
            (item,) = stub.ExportRounds(admin_pb2.ExportRoundsRequest())
        server.stop(None).wait()
    assert client.device == "\\x1b[31m\\u202e"
    assert dict(item.participations[0].evaluation) == {"\\x1b[2J": 0.5, "test/loss": 1.0}


def test_no_map_of_the_contract_has_text_as_its_values() -> None:
    """Of maps, the keys are escaped."""

    def maps(kind: Descriptor) -> Iterator[FieldDescriptor]:
        for field in kind.fields:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                yield field.message_type.fields_by_name["value"]

    for file in (admin_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR):
        for kind in file.message_types_by_name.values():
            assert all(found.type == FieldDescriptor.TYPE_DOUBLE for found in maps(kind)), kind.full_name


def test_a_line_of_the_log_stays_a_line() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.OneLine("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("%s declines", "x\nINFO forged \x1b[31m\u202e")
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError:
        logger.exception("failed")
    first, second, *trace = written.getvalue().splitlines()
    assert first == "INFO x\\nINFO forged \\x1b[31m\\u202e declines"
    assert second == "ERROR failed"
    assert trace[-1] == "ValueError: a\\x1b[2Jb"
