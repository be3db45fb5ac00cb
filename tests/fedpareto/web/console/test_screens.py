"""What the screens say: who took no part, whose runs are meant, rounds from 0, and one word for a member."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from federation.digests import digest
from federation.spec.run_spec import with_models
from federation.v1.admin_pb2 import MeasuredModel
from federation.v1.federation_pb2 import Heartbeat
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from storage.states import RunState
from tests.fedpareto.scene import play_without, run_without_some
from tests.fedpareto.web.console.scene import Served, served
from tests.running import wait_for
from tests.stage import MODEL, Stage

RUN_COMMANDS = ("run {run}", "rounds {run}", "replies {run}", "round {run} -1")
COMMANDS = ("runs", "clients", "client ann", "alerts --all", "disk", "join-strings --all", "coordinators", "admins")
OLD_WORDS = re.compile(r"(?<!/)\b(clients?|sites?|hospitals?)\b", re.IGNORECASE)  # not the metric epsilon/clients


@pytest.fixture(scope="module")
def console(_module_stage: Stage) -> Iterator[Served]:
    with served(_module_stage.served.home.directory / "admin") as made:
        yield made


def verdict_of(source: str) -> str:
    """The first sentence of a page."""
    found = re.search(r'<p class="verdict">(.*?)</p>', source, re.DOTALL)
    assert found, source[:500]
    return html.unescape(found[1]).replace("\u00a0", " ")


def words(source: str) -> str:
    """The text of a page, without commands, names of actions, and what a specification says."""
    shown = re.sub(r"<(pre|code|script|style)\b.*?</\1>", " ", source, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", shown))


def seen_ended(console: Served, *runs: str) -> None:
    """The console lists the runs as ended, and has read their rounds."""
    console.reader.hurry()

    def known() -> bool:
        listed = console.reader.lists
        ended = {item.run_id for item in listed.runs if item.HasField("ended")} if listed else set()
        return ended >= {*runs} and all((held := console.reader.run(run)).complete and held.over for run in runs)

    wait_for(known, "the console to know the end of the runs")


def in_phase(console: Served, run: str, number: int) -> bool:
    """True if the console follows a phase of this round, and has read the rounds before."""
    held = console.reader.known(run)
    if held is None or held.phase is None or held.phase.round != number:
        return False
    return held.complete and held.run.rounds_done == number and not held.outdated


def connected(console: Served, name: str) -> bool | None:
    """True if the console knows that a member is connected, False if it knows that it is not."""
    console.reader.hurry()
    lists = console.reader.lists
    return next((client.attending for client in lists.clients if client.client_id == name), None) if lists else None


@dataclass(frozen=True)
class Lacking:
    """A run of three rounds that has ended, in which cleo declined each time, and that never asked dora."""

    run: str
    after_one_round: str  # its page while the second round went on
    first_page: str  # of the console, at that moment
    status: Any  # the document of `admin status`, at that moment
    printed: str  # what `admin status` printed

    def __str__(self) -> str:
        return self.run


@pytest.fixture(scope="module")
def lacking(_module_stage: Stage, console: Served) -> Lacking:
    stage = _module_stage
    run, players, cleo = run_without_some(stage, "lacking", 3)
    play_without(players, cleo, lambda: stage.assignments(run, 1), rounds=1)
    console.reader.hurry()
    wait_for(lambda: in_phase(console, run, 1), "the console to follow the second round")
    status, printed = stage.served.document("status"), stage.served.command("status", columns=300)
    made = Lacking(run, console.page(f"/runs/{run}"), console.page("/"), status, printed)
    play_without(players, cleo, lambda: stage.run(run).state is RunState.COMPLETED)
    seen_ended(console, run)
    return made


def test_members_that_took_no_part_are_in_the_first_sentence_and_stay(
    stage: Stage, console: Served, lacking: Lacking
) -> None:
    after_one = "cleo (declined in 1 of 1 round) and dora (no round asked it) have not taken part yet; "
    assert verdict_of(lacking.after_one_round).startswith(after_one)
    absent = "cleo (declined in 3 of 3 rounds) and dora (no round asked it) never took part"
    on_console = verdict_of(console.page(f"/runs/{lacking}"))
    assert on_console.startswith(f"{absent}; ")
    assert "All two members gained" not in on_console
    report = page(ShownRun.read(stage._admin, lacking.run))
    assert verdict_of(report).startswith(f"{absent}; ")
    assert "2 of 4" in words(report)
    printed = stage.served.command("run", lacking.run, columns=200)
    assert printed.startswith(f"{absent}.\n")


def test_admin_status_says_what_the_first_page_of_the_console_says(lacking: Lacking) -> None:
    shown = " ".join(words(lacking.first_page).replace("\u00a0", " ").split())
    printed = " ".join(lacking.printed.split())
    status, (running,) = lacking.status, lacking.status["running"]
    assert "cleo (declined in 1 of 1 round) and dora (no round asked it) have not taken part yet" in running["verdict"]
    assert (running["run_id"], running["progress"]) == (lacking.run, "1 of 3 rounds done")
    assert running["waits"].startswith("round 1, train: 0 of 3 replied; waits since")
    said = [status["sentence"], status["counts"], *(need["sentence"] for need in status["needs"])]
    said += [running[name] for name in ("progress", "verdict", "waits")]
    for text in said:
        assert text in shown
        assert text in printed
    for need in status["needs"]:
        assert f"fedpareto admin {need['command']}" in printed
    assert {item["client_id"]: item["state"] for item in status["members"]}["dora"] == "not connected"
    assert "dora not connected" in printed


def test_a_member_that_is_not_connected_is_not_advised_to_get_more_time(stage: Stage, console: Served) -> None:
    more = "selection = { minimum = 3, quorum = 0.1, grace_seconds = 9000 }"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", name="away", more=more)
    ann.answer()
    slow = ben.order()
    cleo.order()
    stage.hang_up(cleo)
    stage.pass_deadline()
    stage.wait_outcome(run, "cleo", "EXPIRED")
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")
    assert stage.outcomes(run)["ben"] == ("EXPIRED", "deadline")
    stage.stop_run(run)
    stage.clock.ahead *= 0

    def advice() -> dict[str, str]:
        source = console.page(f"/runs/{run}/rounds/0")
        items = re.findall(r'<li class="alert warning">.*?members/(\w+)".*?</li>', source, re.DOTALL)
        parts = re.findall(r'<li class="alert warning">.*?</li>', source, re.DOTALL)
        return dict(zip(items, parts, strict=True))

    assert slow.round == 0
    wait_for(lambda: connected(console, "ben"), "the console to know that ben is connected")
    told = advice()
    assert "deadline_seconds" in told["ben"]
    assert "It was not connected" in told["cleo"]
    assert "deadline_seconds" not in told["cleo"]
    stage.hang_up(ben)
    wait_for(lambda: connected(console, "ben") is False, "the console to know that ben has left")
    told = advice()
    assert "It is not connected now" in told["ben"]
    assert "deadline_seconds" not in told["ben"]


def test_a_paused_member_is_shown_as_paused_and_not_as_closed(stage: Stage, console: Served) -> None:
    _, [ann] = stage.crew("ann")
    ann.say(heartbeat=Heartbeat(paused=True))
    path = "/members/ann"
    wait_for(lambda: "paused" in verdict_of(console.page(path)), "the pause to be shown")
    assert verdict_of(console.page(path)) == "Its owner has paused it."
    until = Heartbeat(paused=True)
    until.closed_until.FromDatetime(datetime(2100, 1, 1, 12, tzinfo=UTC))
    ann.say(heartbeat=until)
    wait_for(lambda: "until" in verdict_of(console.page(path)), "the time to be shown")
    assert "Its owner has paused it until 2100-01-01 " in " ".join(words(console.page(path)).split())
    ann.say(heartbeat=Heartbeat())


def test_equal_failures_are_one_entry_that_leads_to_each_round(stage: Stage, console: Served, lacking: Lacking) -> None:
    for path in (f"/runs/{lacking}", f"/runs/{lacking}?rounds=failed"):
        source = console.page(path)
        assert source.count("cleo declined: memory") == 1, path
        assert "Rounds 0 to 2 (3 rounds)" in words(source)
        assert [
            f'id="round-{number}" href="{console.root}/runs/{lacking}/rounds/{number}"' in source for number in range(3)
        ] == [True] * 3
    member = words(console.page("/members/cleo"))
    assert "lacking, rounds 0 to 2 (3 rounds)" in member
    assert member.count("declined: memory: no room on the device") == 1


def test_rounds_are_counted_from_0(lacking: Lacking) -> None:
    for source in (lacking.after_one_round, lacking.first_page):
        assert "1 of 3 rounds done" in source
        assert "round 1, train" in source
        assert "round 2 of 3" not in source


def test_the_matrix_of_conflicts_names_the_members(stage: Stage, console: Served, lacking: Lacking) -> None:
    source = console.page(f"/runs/{lacking}/rounds/0")
    matrix = source.partition("Who pulls against whom")[2].partition("<figcaption>")[0]
    assert [matrix.count(f">{name}</text>") for name in ("ann", "ben")] == [2, 2]  # of a row, and of a column
    assert not re.search(r">\d</text>", matrix)


def test_the_models_that_a_run_measured_are_on_its_page_and_beside_another_run(
    stage: Stage, console: Served, lacking: Lacking
) -> None:
    task, players = stage.crew("ann", "ben")
    text = f'name = "{task}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["test"]\n'.encode()
    named = with_models(text, [digest(MODEL)])
    run = stage.submit(named, models=[MeasuredModel(digest=digest(MODEL), size=len(MODEL))])
    stage.complete(run, *players)
    seen_ended(console, run)
    for path in (f"/runs/{run}", f"/compare?run={run}&run={lacking.run}"):
        source = console.page(path)
        assert ">spread<" in source, path
        assert digest(MODEL).partition(":")[2][:12] in source, path
    assert f"The models of {task}" in source


def test_runs_of_one_name_are_told_apart_by_id_and_date_and_commands_name_the_id(
    stage: Stage, console: Served, lacking: Lacking
) -> None:
    first = lacking.run
    second, _ = stage.begin("ann", "ben", name="lacking", paused=True)
    stage.stop_run(second)
    seen_ended(console, first, second)
    told = re.compile(rf"{first}, \d{{4}}-\d\d-\d\d \d\d:\d\d")
    of_run = (f"/runs/{first}", f"/runs/{first}/rounds/0", f"/compare?run={first}&run={second}")
    for path in ("/", "/compare", "/members/ann", *of_run):
        source = console.page(path)
        assert told.search(source), path
        assert not re.search(r"(admin \w+|report) lacking", source), path
    assert f"report {first}" in console.page(f"/runs/{first}")
    assert f"round {first} 0" in console.page(f"/runs/{first}/rounds/0")
    wait_for(
        lambda: "after 3 of 3 rounds" in stage.served.command("alerts", "--all", columns=200), "an alert of its end"
    )
    assert re.search(rf"lacking \({told.pattern}\)", stage.served.command("alerts", "--all", columns=200))
    data, beside = (ShownRun.read(stage._admin, run) for run in (first, second))
    report = words(page(data, [beside]))
    assert re.search(rf"lacking \({second}, \d{{4}}", report)


def test_the_log_shows_one_kind_of_entries(stage: Stage, console: Served, lacking: Lacking) -> None:
    def actions(kind: str) -> set[str]:
        source = console.page(f"/log?kind={kind}")
        return set(re.findall(r'data-label="what" class="what">([\w.-]+)', source))

    assert {"run.submitted", "run.completed"} <= actions("runs")
    assert all(action.startswith("run.") for action in actions("runs"))
    assert {"assignment.declined", "round.stepped"} <= actions("rounds")
    assert actions("members") >= {"Enroll", "join-string.created"}
    assert "run.completed" in actions("")
    source = console.page("/log?kind=runs&text=lacking&before=100000")
    assert '<option value="runs" selected>' in source
    assert "kind=runs" in source
    assert "audit --since 24h --kind runs" in source
    answer = console.ask("/log?kind=rnus")
    assert (answer.status, "kind must be one of members, administrators, runs" in answer.text) == (400, True)
    lines = stage.served.command("audit", "--kind", "exports").splitlines()
    assert lines
    assert all(".exported" in line for line in lines)


def test_the_report_has_the_sections_of_the_console_and_neither_form_nor_address(
    stage: Stage, console: Served, lacking: Lacking
) -> None:
    live = console.page(f"/runs/{lacking}")
    saved = page(ShownRun.read(stage._admin, lacking.run))
    headings, figures = ([re.findall(rf"<{name}\b[^>]*>(.*?)</{name}>", source) for source in (live, saved)]
                         for name in ("h2", "h3"))  # fmt: skip
    assert headings[0] == headings[1]
    assert len(headings[0]) > 9
    only_saved = {"Each member over the rounds", "Weight", "Against the step", "Loss", "Failures", "Every member"}
    assert {*figures[1]} - {*figures[0]} <= only_saved
    assert {"Accuracy over the rounds", "Pairs in conflict", "Bytes", "Who is left behind"} <= {*figures[0]}
    assert not [word for word in ("127.0.0.1", "localhost", "/members/", "token", "<form", "<button") if word in saved]
    assert str(stage.served.home.directory) not in saved


def test_screens_and_tables_call_a_member_a_member(stage: Stage, console: Served, lacking: Lacking) -> None:
    paths = (
        "/",
        f"/runs/{lacking}",
        f"/runs/{lacking}/rounds/0",
        "/members/ann",
        "/compare",
        "/system",
        "/log?kind=runs",
    )
    shown = {path: words(console.page(path)) for path in paths}
    shown["report"] = words(page(ShownRun.read(stage._admin, lacking.run)))
    for command in (*COMMANDS, *(command.format(run=lacking.run) for command in RUN_COMMANDS)):
        printed = stage.served.command(*command.split()).partition("specification")[0]
        shown[command] = re.sub(r"fedpareto admin clients?", " ", printed)
    found = {place: OLD_WORDS.findall(text) for place, text in shown.items()}
    assert {place: old for place, old in found.items() if old} == {}


def test_who_leaves_signs_out(console: Served) -> None:
    source = console.page("/")
    assert "Sign out" in source
    assert "Leave" not in source
