"""What members say is bounded at the door: a Hello, names of metrics, times, declines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.rounds.replies.content import MAX_NUMBERS
from federation.digests import digest
from federation.v1.common_pb2 import TaskLayout
from federation.v1.federation_pb2 import (
    AttendRequest,
    AttendResponse,
    Hello,
    NoiseBudget,
    SpentNoise,
    TaskOffer,
    WorkLimits,
)
from storage.models import Client, Consent
from tests.coordinator.rounds.runs.scene import answer, asked, attends, say
from tests.few import few
from tests.harness import Attending
from tests.running import refused, wait_for
from tests.stage import Player, Stage
from tests.verification.scene import verified

ESCAPES = "\x1b[2J[/red]\u202e\u200b\r\n"


def command(stage: Stage, *arguments: str) -> str:
    said = stage.served.command(*arguments)
    assert said.replace("\n", "").isprintable()
    return said


class Speaker(Attending):
    """Attends with a Hello of its own."""

    def __init__(self, player: Player, hello: Hello) -> None:
        self._hello = hello
        super().__init__(player.member, {})

    def say(self, request: AttendRequest) -> None:
        super().say(AttendRequest(hello=self._hello) if request.HasField("hello") else request)


def offers(count: int, objectives: int, task: str = "task", objective: str = "objective") -> Hello:
    names = [f"{objective}-{i}" for i in range(objectives)]
    return Hello(tasks=[TaskOffer(task=f"{task}-{i}", samples=1, objectives=names) for i in range(count)])


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (offers(100, 1000), "limit:hello"),
        (offers(100, 11), "limit:tasks"),
        (offers(101, 0), "limit:tasks"),
        (Hello(software="x" * 70_000), "limit:hello"),
        (offers(1, 0, task="[/red]"), "limit:tasks"),
        (offers(1, 0, task="t" * 120), "limit:tasks"),
        (offers(1, 1, objective=ESCAPES), "limit:tasks"),
        (Hello(tasks=[TaskOffer(task="")]), "limit:tasks"),
    ],
    ids=["huge", "objectives", "tasks", "software", "markup", "long", "escapes", "empty"],
)
def test_a_hello_beyond_its_bounds_is_refused_and_not_kept(stage: Stage, hello: Hello, reason: str) -> None:
    (player,) = stage.cast("kept", "ann")
    stream = Speaker(player, hello)
    found = stream.end()
    stream.close()
    assert (found.status, found.reason) == ("RESOURCE_EXHAUSTED", reason)
    assert found.message.isprintable()
    assert stage.look(lambda session: session.get_one(Client, "ann").tasks) == {"kept": 10}


MODEL = TaskLayout(digest=digest(b""), tensors=3, elements=100)


def with_layout(**changes: Any) -> Hello:
    fields: dict[str, Any] = {"digest": MODEL.digest, "tensors": 3, "elements": 100} | changes
    layout = TaskLayout(**fields)
    return Hello(tasks=[TaskOffer(task="task-0", samples=1, layout=layout)])


def with_budget(**budget: Any) -> Hello:
    return Hello(tasks=[TaskOffer(task="task-0", samples=1, noise_budget=NoiseBudget(**budget))])


@few("digest", "elements", "samples", "nan", "epsilon", "rate", "time")
@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (with_layout(digest=""), "the layout of task task-0: not a digest: ''"),
        (with_layout(digest=ESCAPES), "the layout of task task-0: not a digest: '\\x1b[2J[/red]"),
        (with_layout(digest="blake3:" + "A" * 64), "not a digest"),
        (with_layout(tensors=0), "0 tensors with 100 elements"),
        (with_layout(elements=2), "3 tensors with 2 elements"),
        (with_layout(elements=2**48 + 1), f"3 tensors with {2**48 + 1} elements"),
        (Hello(limits=WorkLimits(samples=2**53 + 1)), f"limits: samples = {2**53 + 1}: a bound is a number from 0 to"),
        (Hello(limits=WorkLimits(max_bytes=2**64 - 1)), f"limits: max_bytes = {2**64 - 1}"),
        (Hello(limits=WorkLimits(max_epochs=float("nan"))), "limits: max_epochs = nan"),
        (Hello(limits=WorkLimits(max_epochs=-1.0)), "limits: max_epochs = -1.0"),
        (Hello(limits=WorkLimits(max_epochs=float("inf"))), "limits: max_epochs = inf"),
        (with_budget(), "the budget of task task-0: noise = 0, epsilon = 0, delta = 0"),
        (with_budget(noise=1, epsilon=float("nan"), delta=1e-5), "the budget of task task-0: noise = 1, epsilon = nan"),
        (
            with_budget(noise=1, epsilon=8, delta=1e-5, spent=[SpentNoise()] * 17),
            "17 trainings that were spent; at most",
        ),
        (
            with_budget(noise=1, epsilon=8, delta=1e-5, spent=[SpentNoise(noise=1, rate=2)]),
            "spent: noise = 1, rate = 2",
        ),
        (Hello(paused=True, closed_until=Timestamp(seconds=2**62)), "closed_until does not exist"),
    ],
    ids=[
        *("empty", "digest", "upper", "none", "fewer", "elements", "samples", "bytes", "nan", "negative", "infinite"),
        *("no-budget", "epsilon", "long", "rate", "time"),
    ],
)
def test_a_layout_a_bound_or_a_time_that_cannot_be_is_refused_and_not_kept(
    stage: Stage, hello: Hello, words: str
) -> None:
    (player,) = stage.cast("kept", "ann")
    stream = Speaker(player, hello)
    found = stream.end()
    stream.close()
    assert (found.status, found.reason) == ("INVALID_ARGUMENT", "hello")
    assert words in found.message
    assert found.message.isprintable()
    assert stage.look(lambda session: session.get_one(Client, "ann").tasks) == {"kept": 10}


def test_a_hello_within_its_bounds_is_taken_and_its_text_is_shown_escaped(stage: Stage) -> None:
    player = stage.player("ben")
    hello = offers(100, 10)
    hello.device = f"cuda:0 {ESCAPES}"
    hello.software = "x" * 1000
    hello.tasks[0].layout.CopyFrom(MODEL)
    hello.tasks[1].private_only = True
    hello.tasks[2].noise_budget.CopyFrom(NoiseBudget(noise=1.0, epsilon=8.0, delta=1e-5))
    hello.limits.CopyFrom(WorkLimits(samples=2**53, max_epochs=0.5))
    stream = Speaker(player, hello)
    assert isinstance(stream.inbox.get(timeout=60), AttendResponse)
    stream.close()
    row = stage.look(lambda session: session.get_one(Client, "ben"))
    assert len(row.tasks) == 100
    assert row.device == "cuda:0 \\x1b[2J[/red]\\u202e\\u200b\\r\\n"
    assert len(row.software) == 200
    assert row.layouts == {"task-0": {"digest": MODEL.digest, "tensors": 3, "elements": 100}}
    assert row.private_only == ["task-1"]
    assert row.noise_budgets == {"task-2": {"noise": 1.0, "epsilon": 8.0, "delta": 1e-5, "spent": []}}
    assert (len(row.limits), row.limits["samples"], row.limits["max_epochs"]) == (7, 2**53, 0.5)
    assert "[/red]" in "".join(command(stage, "client", "ben").split())
    (shown,) = [one for one in json.loads(command(stage, "clients", "--json"))["clients"] if one["client_id"] == "ben"]
    assert shown["device"] == row.device


def in_a_round(stage: Stage, act: Callable[[Player, Any], None], *, more: str = "") -> str:
    """Two clients are asked to train; one of them acts, the other one replies as it should."""
    run, (cleo, dora) = stage.begin("cleo", "dora", more="selection.minimum = 2\nselection.quorum = 0.1" + more)
    act(cleo, cleo.order())
    dora.answer()
    stage.play(run, cleo, dora)
    return run


@few("many", "escapes")
@pytest.mark.parametrize(
    "names",
    [[f"test/{i}" for i in range(MAX_NUMBERS)], ["x" * 121], [f"test/{ESCAPES}"], [""], ["\0"]],
    ids=["many", "long", "escapes", "empty", "nul"],
)
def test_numbers_that_a_member_reports_have_names_within_bounds(stage: Stage, names: list[str]) -> None:
    def act(player: Player, order: Any) -> None:
        with refused("RESOURCE_EXHAUSTED", "limit:metrics") as words:
            player.submit(order, metrics=dict.fromkeys(names, 0.5))
        assert words[0].isprintable()

    run = in_a_round(stage, act)
    assert stage.outcomes(run)["cleo"] == ("REFUSED", "limit:metrics")
    assert stage.outcomes(run)["dora"] == ("FULFILLED", "")
    for arguments in (("round", run, "0"), ("replies", run), ("replies", run, "--json")):
        command(stage, *arguments)


@few(2**62, -1)
@pytest.mark.parametrize(("seconds", "nanos"), [(2**62, 0), (-(2**62), 0), (0, -1), (0, 2_000_000_000)])
def test_a_time_that_is_none_is_refused_and_the_assignment_stays_open(stage: Stage, seconds: int, nanos: int) -> None:
    def act(player: Player, order: Any) -> None:
        manifest = player.member.manifest(order)
        manifest.created.seconds, manifest.created.nanos = seconds, nanos
        with refused("INVALID_ARGUMENT", "manifest") as words:
            player.member.submit(player.member.sign(manifest), b"")
        assert words == [f"created is not a time: {seconds} s and {nanos} ns"]
        player.reply(order)

    run = in_a_round(stage, act)
    assert stage.outcomes(run)["cleo"] == ("FULFILLED", "")
    assert len(json.loads(command(stage, "replies", run, "--json"))["replies"]) == 4


def test_a_decline_with_a_hostile_reason_is_malformed_and_its_words_are_one_line(stage: Stage) -> None:
    def act(player: Player, order: Any) -> None:
        player.decline(order, ESCAPES, "why" * 1000)

    run = in_a_round(stage, act)
    row = stage.assignments(run)["cleo"]
    assert (row.reason, len(row.message) <= 400, row.message.isprintable()) == ("malformed", True, True)
    assert row.message.startswith("\\x1b[2J[/red]\\u202e\\u200b\\r\\n: whywhy")
    wait_for(lambda: "malformed" in command(stage, "round", run, "0"), "the round to show it")


def test_a_text_of_a_member_or_an_administrator_that_is_cut_still_verifies(stage: Stage, tmp_path: Path) -> None:
    text = "CUDA out of memory.\n" * 50  # PyTorch describes a full device in some 700 characters

    run = in_a_round(stage, lambda player, order: player.decline(order, "error", text))
    assert stage.assignments(run)["cleo"].message.endswith(f"... ({len(text)} characters)")
    parts = stage.served.document("round", run, "0")["participations"]
    assert all(check["verified"] for part in parts for check in part["envelopes"])

    stopped, (eve, finn) = stage.begin("eve", "finn")
    stream = attends(eve, *eve.tasks)
    say(eve, stream, answer(eve, asked(eve, stream), "refused", reason="owner", message=text))
    wait_for(lambda: stage.look(lambda session: session.get(Consent, (stopped, "eve"))), "the answer")
    finn.order()
    stage.stop_run(stopped, reason=text * 3)
    assert len(stage.run(stopped).reason) == len(stage.rounds(stopped)[0].reason) == 400
    stream.close()
    stage.revoke("eve", reason=text)
    assert stage.served.document("audit", "verify")["problems"] == []
    for ended in (run, stopped):
        verified(stage, ended, tmp_path)
