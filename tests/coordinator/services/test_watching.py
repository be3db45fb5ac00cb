"""Following a run: whom a round waits for, across a restart of the coordinator, and no number that is not known."""

import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from federation.trust.identity import Role
from federation.v1 import admin_pb2 as messages
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.admin import watch
from fedpareto.cli.document import dumps, line
from fedpareto.cli.show import envelope_lines, round_tables, tables
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from tests.running import wait_for
from tests.stage import Stage, spec


class Watcher:
    """Somebody who follows a run in a thread, with or without a terminal."""

    def __init__(self, stage: Stage, run: str, *, terminal: bool = False) -> None:
        self._text = io.StringIO()
        self.run: messages.Run | None = None
        channel = stage.served.administrator(Role.VIEWER)
        console = Console(file=self._text, width=200, force_terminal=terminal, legacy_windows=False)

        def follow() -> None:
            self.run = watch.show(AdminStub(channel), run, console, quiet_seconds=0.0)

        self.thread = threading.Thread(target=follow, daemon=True)
        self.thread.start()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def lines(self, pattern: str) -> list[str]:
        return [text for text in self.text.splitlines() if re.search(pattern, text)]

    def wait(self, pattern: str) -> str:
        return wait_for(lambda: self.lines(pattern), f"{pattern!r} in {self.text}")[-1]


@contextmanager
def watched(stage: Stage, run: str, *, terminal: bool = False) -> Iterator[Watcher]:
    watcher = Watcher(stage, run, terminal=terminal)
    yield watcher
    watcher.thread.join(60)
    assert not watcher.thread.is_alive()


def test_whoever_watches_without_a_terminal_is_told_whom_the_round_waits_for_and_how_long(stage: Stage) -> None:
    more = "selection.minimum = 3\nselection.quorum = 0.3"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", more=more)
    orders = {player: player.order() for player in (ann, ben, cleo)}
    with watched(stage, run) as watcher:
        waiting = watcher.wait("waiting since .* for ann, ben, cleo$")
        assert re.search(r"round 0: train, 0 of 3 replied, 1[0-5] min left; waiting since \d\d:\d\d:\d\d for", waiting)
        ann.reply(orders[ann])
        watcher.wait("1 of 3 replied, .* for ben, cleo$")
        cleo.leave()
        watcher.wait(r"1 of 3 replied, .* for ben, cleo \(away since \d\d:\d\d:\d\d\)$")
        ben.reply(orders[ben])
        cleo.attend(**cleo.tasks)
        cleo.reply(orders[cleo])
        stage.play(run, ann, ben, cleo)
    assert len(watcher.lines("train, 1 of 3 replied, .* for ben, cleo$")) == 1  # once, however many signs of life came
    assert len(watcher.lines(r"^ +0 .* 3/3")) == 1
    assert "nan" not in "".join(watcher.lines(""))


def test_a_terminal_shows_at_its_bottom_whom_the_round_waits_for_and_the_time_running_down(stage: Stage) -> None:
    task, (ann,) = stage.crew("ann")
    document = spec(f"live-{stage.count}", task, 1)
    run = stage.submit(document.replace(b"deadline_seconds = 900", b"deadline_seconds = 90"))
    order = ann.order()
    with watched(stage, run, terminal=True) as watcher:
        watcher.wait(r"0 of 1 replied, [78]\d s left; waiting since .* for ann")
        wait_for(lambda: len(set(re.findall(r"\d+ s left", watcher.text))) > 1, "the time to run down")
        ann.reply(order)
        stage.play(run, ann)
    assert "COMPLETED" in watcher.lines("")[-1]


def test_watching_goes_on_when_the_coordinator_restarts_and_shows_each_round_once(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", rounds=3)
    stage.play(run, ann, until=lambda: len(stage.rounds(run)) > 1)
    with watched(stage, run) as watcher:
        watcher.wait("^ +0 ")
        stage.stop()
        watcher.wait("lost the coordinator, trying again")
        stage.start()
        stage.come_back()
        stage.play(run, ann)  # a round may end before the watcher is back
    assert watcher.lines("the coordinator answers again")
    assert [text.split()[0] for text in watcher.lines(r"^ +\d+ ")] == ["0", "1", "2"]
    assert watcher.run is not None
    assert watcher.run.rounds_done == 3


def test_an_open_round_shows_no_number_that_is_not_known(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=1, more="selection.minimum = 2")
    order = ann.order()
    check_known(stage._admin, run)
    ann.reply(order)
    check_known(stage._admin, run)
    stage.play(run, ann, ben)


def check_known(admin: AdminStub, run: str) -> None:
    """Every number in what the commands and the report show of a run whose first round is open."""
    single = admin.GetRound(messages.GetRoundRequest(run=run, round=0))
    rounds = admin.ListRounds(messages.ListRoundsRequest(run=run))
    whole = admin.GetRun(messages.GetRunRequest(run=run))
    runs = admin.ListRuns(messages.ListRunsRequest())
    updates = next(admin.ListReplies(messages.ListRepliesRequest(run=run)), messages.ListRepliesResponse())
    pictures = [round_tables.round_(single), round_tables.rounds(rounds.rounds)]
    pictures += [tables.run(whole.run), tables.runs(runs.runs)]
    text = io.StringIO()
    Console(file=text, width=tables.WIDTH).print(*pictures, envelope_lines.replies(updates.replies))
    texts = [text.getvalue(), page(ShownRun.read(admin, run))]
    texts += [dumps(message) for message in (single, rounds, whole, runs, updates)]
    assert "not over yet" in texts[0]
    assert json.loads(dumps(rounds))["rounds"][0]["seconds"] is None
    for one in texts:
        assert not re.search(r"\bnan\b", one, re.IGNORECASE)


def test_a_stream_of_json_repeats_nothing_and_ends_with_the_run(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", rounds=2)
    stream = watch.changes(watch.messages(stage._admin, run, pytest.fail))
    updates = [next(stream)]
    assert updates[0].now.seconds > 0
    stage.play(run, ann)
    updates += stream
    lines = [json.loads(line(update)) for update in updates]
    assert [item["ended"]["round"] for item in lines if item["ended"]] == [0, 1]
    assert lines[-1]["run"]["state"] == "COMPLETED"
    assert [member["client_id"] for member in lines[-1]["run"]["members"]] == ["ann"]
    assert "\n" not in line(updates[-1])


def test_signs_of_life_are_no_changes() -> None:
    def update(now: int, seen: int, replied: int) -> messages.WatchRunResponse:
        made = messages.WatchRunResponse(phase=messages.PhaseProgress(replied=replied))
        made.now.seconds = now
        made.phase.outstanding.add(client_id="a", attending=True).last_seen.seconds = seen
        return made

    updates = [update(1, 1, 0), update(2, 2, 0), update(3, 3, 1), update(4, 3, 1)]
    assert [one.now.seconds for one in watch.changes(updates)] == [1, 3]
    assert updates[1].phase.outstanding[0].last_seen.seconds == 2


def test_the_line_about_a_run_counts_down_between_two_words_of_the_coordinator() -> None:
    update = messages.WatchRunResponse(run=messages.Run(name="x", rounds_total=2))
    update.phase.asked = 1
    update.now.seconds, update.phase.deadline.seconds = 100, 160
    assert "60 s left" in watch.status(update).plain
    assert "18 s left" in watch.status(update, 42.0).plain
    assert "0 s left" in watch.status(update, 90.0).plain
    update.phase.deadline.seconds = 100 + 7260
    assert "2 h 1 min left" in watch.status(update).plain
