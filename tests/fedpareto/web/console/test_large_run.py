"""A run of a thousand rounds and a hundred members: the elements and bytes of its page, and what a new round sends."""

import asyncio
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event
from starlette.datastructures import QueryParams

from federation.record.metric_definitions import DEFINITIONS
from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import RoundState, RunState
from fedpareto.run_table import OUTCOMES, MemberNumber, Outcome, RoundLine, RunTable
from fedpareto.web.console import page_events
from fedpareto.web.console.application import Console
from fedpareto.web.console.federation_reader import HeldRun, Lists, Reader
from fedpareto.web.console.render import ConsoleSite
from fedpareto.web.console.screens import run_page
from fedpareto.web.console.view import PageRequest
from fedpareto.web.sections.bins import POINTS
from fedpareto.web.sections.heat_maps import HEATS
from fedpareto.web.serving.security import EntranceKeys
from storage import audit
from tests.few import few
from tests.running import refused, wait_for
from tests.stage import Stage

ROUNDS, MEMBERS = 1000, 100
RUN = "0123456789abcdef"


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.count = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.count += 1


def a_round(number: int, members: int, rng: np.random.Generator) -> v1.ExportRoundsResponse:
    """A round in which everybody replied and was evaluated."""
    item = v1.ExportRoundsResponse()
    item.summary.round, item.summary.state = number, RoundState.ROUND_STATE_COMPLETED
    item.summary.asked = item.summary.accepted = members
    item.summary.metrics.update({name: rng.uniform(0.5, 0.9) for name in DEFINITIONS if "<" not in name})
    item.summary.metrics.update({"accuracy/mean": 0.8, "accuracy/worst": 0.5})
    item.phases.add(phase=0, decides=True)
    for at in range(members):
        name = f"hospital-{at + 1}"
        part = item.participations.add(client_id=name, state=2, update_norm=1 + rng.random(), loss_before=1.0)
        part.weight, part.cosine, part.coefficient = 1 / members, rng.uniform(-1, 1), 0.1
        part.answered.append(0)
        item.scores.add(client_id=name, scores={"test/accuracy": rng.uniform(0.5, 0.9)})
    return item


def summary_of(line: RoundLine, number: int) -> v1.RoundSummary:
    summary = v1.RoundSummary()
    summary.CopyFrom(line.summary)
    summary.round = number
    return summary


@pytest.fixture
def held() -> HeldRun:
    """The run in memory; all rounds but one are written into its arrays directly, which is faster."""
    rng = np.random.default_rng(3)
    table = RunTable()
    table.add(a_round(ROUNDS - 1, MEMBERS, rng))
    for measure in MemberNumber:
        table.values(measure)[:, : ROUNDS - 1] = rng.uniform(0.0, 1.0, (MEMBERS, ROUNDS - 1))
    table.outcomes()[:, : ROUNDS - 1] = OUTCOMES.index(Outcome.REPLIED)
    line = table.lines[ROUNDS - 1]
    table.lines |= {number: replace(line, summary=summary_of(line, number)) for number in range(ROUNDS)}
    table.whole |= set(range(ROUNDS))
    run = v1.Run(run_id=RUN, name="large", state=RunState.RUN_STATE_RUNNING, rounds_done=ROUNDS, rounds_total=1200)
    return HeldRun(run, table, followed=True)


@pytest.fixture
def console(held: HeldRun) -> Console:
    def nowhere() -> Iterator[None]:
        raise AssertionError("a page that is in memory asks the coordinator")

    reader = Reader(nowhere, lambda: None, "")  # type: ignore[arg-type]
    reader.held[RUN] = held
    reader.lists = Lists(at=held.run.created.ToDatetime(), runs=(held.run,))
    reader._begun.set()
    return Console(ConsoleSite("test", "admin"), reader, page_events.ChangeBell(), EntranceKeys(lambda: 0.0))


def asked(query: str = "") -> PageRequest:
    return PageRequest(f"/runs/{RUN}", {"run": RUN}, QueryParams(query))


@few("weight")
@pytest.mark.parametrize("measure", HEATS)
def test_the_page_has_few_elements_and_bytes_and_asks_for_nothing(console: Console, measure: str) -> None:
    page = console._made(run_page.SCREEN, asked(f"heat={measure}"))
    assert Elements(page).count < 4000
    scripts = sum(len(zlib.compress(body)) for body, _ in console._files.values())
    series = str(run_page.series(console.reader, asked())).replace(" ", "").encode()
    assert len(zlib.compress(page.encode())) + len(zlib.compress(series)) + scripts < 200_000


@pytest.mark.full
def test_a_new_round_sends_less_than_20_kb(console: Console, held: HeldRun) -> None:
    rng = np.random.default_rng(4)

    async def sent() -> list[int]:
        packer, sizes, size = zlib.compressobj(6, zlib.DEFLATED, 31), list[int](), 0
        bell = page_events.ChangeBell()
        stream = page_events.stream(bell, "", lambda: console._parts(run_page.SCREEN, asked()), pause=0.0)
        async for news in stream:
            size += len(packer.compress(news) + packer.flush(zlib.Z_SYNC_FLUSH))
            if not news.startswith(b"event: tail"):  # the last part
                continue
            sizes.append(size)
            size = 0
            if len(sizes) > 3:
                break
            held.table.add(a_round(held.table.stop, MEMBERS, rng))
            held.run.rounds_done += 1
            bell.ring()
        return sizes

    first, *rounds = asyncio.run(sent())
    assert max(rounds) < 20_000
    assert first < 60_000


def test_a_marked_part_has_every_round(console: Console) -> None:
    document = run_page.series(console.reader, asked("from=100&to=150"))
    assert document["rounds"] == list(range(100, 150))
    assert {len(line) for line in document["values"]} == {50}
    whole = run_page.series(console.reader, asked())
    assert whole["together"] == 6  # of the 1200 that are planned
    assert len(whole["rounds"]) <= POINTS


def test_lists_and_streams_for_the_console_leave_out_what_reads_every_round(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", name="cheap", rounds=3)
    stage.play(run, ann)
    rows: list[str] = []
    stage.look(lambda session: event.listen(session.get_bind(), "before_cursor_execute", lambda *a: rows.append(a[2])))
    for request in (
        lambda: stage._admin.ListRuns(v1.ListRunsRequest(brief=True)),
        lambda: stage._admin.GetRun(v1.GetRunRequest(run=run, brief=True)),
        lambda: list(stage._admin.WatchRun(v1.WatchRunRequest(run=run, parts=True))),
    ):
        request()
    assert not [row for row in rows if "assignments.message" in row]  # as `read_rounds` reads for the members' sums
    [full] = [item for item in stage._admin.ListRuns(v1.ListRunsRequest()).runs if item.run_id == run]
    assert full.members[0].replied == 3


def test_rounds_are_exported_from_one_on(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", name="from", rounds=3)
    stage.play(run, ann)
    rounds = stage._admin.ExportRounds(v1.ExportRoundsRequest(run=run, first=1))
    assert [item.summary.round for item in rounds] == [1, 2]


def test_the_newest_entries_of_the_log_are_searched_and_paged(stage: Stage) -> None:
    def entries(**fields: Any) -> list[int]:
        answers = stage._admin.ListAudit(v1.ListAuditRequest(**fields))
        return [entry.number for answer in answers for entry in answer.entries]

    everything = wait_for(entries, "entries")
    newest = entries(newest=3)
    assert newest == sorted(newest, reverse=True)
    assert entries(newest=2, before=newest[1])[0] < newest[1]
    assert set(entries(newest=500, text="ENROLL")) == set(entries(newest=500, text="enroll")) < set(everything)
    assert entries(newest=500, text="%") == []
    for fields in ({"newest": 501}, {"newest": 1, "follow": True}, {"text": "x"}, {"before": 1}):
        with refused("INVALID_ARGUMENT", "argument"):
            entries(**fields)


def test_the_system_names_its_version_and_the_limits_that_were_hit(stage: Stage) -> None:
    with stage.served.database.begin() as session:
        for reason in ("limit:calls", "limit:calls", "role"):
            audit.record(session, at=stage.clock(), actor="peer 10.0.0.1", action="Submit", outcome=reason)
        audit.record(session, at=stage.clock(), actor="test", action="backup.made")
    system = stage._admin.GetSystem(v1.GetSystemRequest())
    assert [(hit.reason, hit.actor, hit.times) for hit in system.limits if hit.actor == "peer 10.0.0.1"] == [
        ("limit:calls", "peer 10.0.0.1", 2)
    ]
    assert system.database.startswith(("SQLite 3", "PostgreSQL"))
    assert system.HasField("backed_up")
