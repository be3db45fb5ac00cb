"""The report: a page from a real run on both databases, charts of any data, and nobody's text as markup."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from running import refused
from stage import LAYOUT, Stage, spec

from federation.v1.admin_pb2 import Client, ClientScores, ExportRoundsResponse, Participation, Run
from federation.v1.common_pb2 import AssignmentState
from fedpareto.report import charts
from fedpareto.report.charts import Axis, Series
from fedpareto.report.data import RunData
from fedpareto.report.html import Html, tag, text
from fedpareto.report.page import page
from storage.models import RoundState

VOID = {"meta", "br"}
EVIL = """</title></style><script>alert("1")</script><img src=http://evil.example/x onerror='x'>"""


class Page(HTMLParser):
    """What a browser would make of a page; fails where elements are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def must_need_nothing(made: Page) -> None:
    """No element that loads or runs anything, no address but anchors of the page itself."""
    assert not {"script", "img", "link", "iframe", "object", "image", "use", "form", "base"} & set(made.tags)
    for name, value in made.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "xlink:href")
        assert name != "href" or (value or "").startswith("#")


def test_a_run_becomes_a_page_with_every_figure(stage: Stage) -> None:
    task = stage.task()
    ann, ben, cleo = stage.cast(task, "ann", "ben", "cleo")
    run = stage.submit(spec(f"report-{stage.count}", task, 3, more="selection.minimum = 3\nselection.quorum = 0.1"))
    orders = {player: player.order() for player in (ann, ben, cleo)}
    ann.reply(orders[ann])
    with refused("INVALID_ARGUMENT", "zero"):
        ben.submit(orders[ben], np.zeros(LAYOUT.size, dtype=np.float32))
    cleo.decline(orders[cleo], "training", EVIL)
    stage.play(run, ann, ben, cleo)
    data = RunData.read(stage._admin, run)
    assert data.numbers == [0, 1, 2]
    first = data.rounds[0]
    assert first.summary.metrics["bytes/refused"] == pytest.approx(first.summary.metrics["bytes/up"] / 2)
    for item in data.rounds:
        accuracies = {one.client_id: one.scores["test/accuracy"] for one in item.scores}
        assert item.summary.worst_client == min(accuracies, key=lambda name: accuracies[name])
        assert item.summary.metrics["accuracy/worst"] == min(accuracies.values())
        assert item.summary.metrics["stationarity"] <= item.summary.metrics["stationarity/relative"] * 20
    assert data.final is not None
    assert (data.final.round, data.final.split, data.final.measure) == (2, "test", "accuracy")
    made = Page(page(data))
    must_need_nothing(made)
    assert made.tags.count("figure") == made.tags.count("svg") == made.tags.count("figcaption") == 12
    assert made.tags.count("details") == 12
    for words in ("rejected", "zero", "declined", "cleo", "fedmgda+", f'task = "{task}"', "Pareto-stationary"):
        assert words in made.words, words


def test_a_round_that_was_skipped_has_its_bytes_and_its_remark(stage: Stage) -> None:
    task = stage.task()
    (player,) = stage.cast(task, "dora")
    run = stage.submit(spec(f"skipped-{stage.count}", task, 1))
    with refused("INVALID_ARGUMENT", "zero"):
        player.submit(player.order(), np.zeros(LAYOUT.size, dtype=np.float32))
    stage.wait_round(run, 0, RoundState.SKIPPED)
    data = RunData.read(stage._admin, run)
    numbers = data.rounds[0].summary.metrics
    assert numbers["bytes/up"] == numbers["bytes/refused"] > 4 * LAYOUT.size
    made = Page(page(data))
    assert "quorum: 0 of 1" in made.words
    assert "No round of this run has made a step." in made.words


def made_up(rounds: int, clients: int, name: str = "client") -> RunData:
    """A run with any number of rounds, evaluated every third one, whose every text is `name`."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(rounds):
        item = ExportRoundsResponse()
        item.summary.round = number
        item.summary.reason = name
        item.summary.accepted = clients
        item.summary.worst_client = name
        item.summary.metrics.update({"entropy": 1.0, "conflicts": 2.0, "conflict_depth": -0.5, "direction_norm": 0.0})
        if number % 3 == 0:
            item.summary.metrics.update({"accuracy/mean": 0.5, "accuracy/worst5": 0.2, "loss/train": 1e250})
            item.summary.metrics.update({"accuracy/std": 0.1, "improved": 1.0})
        for i in range(clients):
            part = Participation(client_id=f"{name}{i}", weight=rng.random(), update_norm=math.nan, reason=name)
            part.state = AssignmentState.ASSIGNMENT_STATE_FULFILLED if i else AssignmentState.ASSIGNMENT_STATE_REJECTED
            item.participations.append(part)
            item.scores.append(ClientScores(client_id=f"{name}{i}", scores={"train/loss": rng.random()}))
        found.append(item)
    run = Run(run_id=name, name=name, algorithm=name, task=name, spec=name, reason=name, model=name)
    if found:
        run.latest.CopyFrom(found[-1].summary)
    return RunData(run, found, {f"{name}0": Client(client_id=f"{name}0", device=name, software=name)})


@pytest.mark.parametrize("rounds", [0, 1, 2, 400])
def test_a_page_is_made_of_any_number_of_rounds(rounds: int) -> None:
    made = Page(page(made_up(rounds, 3)))
    must_need_nothing(made)
    assert ("This run has no rounds yet." in made.words) == (rounds == 0)
    assert not re.search(r"\bnan\b", made.words)


def test_a_page_of_hundreds_of_clients_stays_small() -> None:
    assert len(page(made_up(100, 300))) < 2_000_000


def test_what_members_and_operators_wrote_is_text_and_never_markup() -> None:
    source = page(made_up(2, 3, EVIL))
    made = Page(source)
    must_need_nothing(made)
    assert EVIL in made.words
    assert "<script" not in source
    assert source.count("<style>") == 1
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'") in (
        made.attributes
    )


def test_elements_escape_their_text_and_their_attributes() -> None:
    assert tag("p", "a < b", class_='"x"') == '<p class="&quot;x&quot;">a &lt; b</p>'
    assert tag("p", Html("<b>c</b>"), text("&")) == "<p><b>c</b>&amp;</p>"
    assert tag("rect", stroke_width=1.50, x=-0.001) == '<rect stroke-width="1.5" x="-0"></rect>'


@pytest.mark.parametrize(
    "values",
    [[0.0], [1.0, 1.0], [math.nan, 2.0], [math.nan], [1e-300, 1e300], [-1.0, 1.0], [1e-9, 1.0], [3.0, 4.0], [math.inf]],
)
@pytest.mark.parametrize("log", [False, True])
def test_lines_stay_within_their_frame(values: list[float], log: bool) -> None:
    rounds = list(range(len(values)))
    chart = charts.lines(rounds, [Series("x", values, 0)], Axis("y", charts.general, log=log))
    for height in re.findall(r'cy="([^"]+)"', chart):
        assert charts.TOP - 0.01 <= float(height) <= charts.HEIGHT - charts.BOTTOM + 0.01
    assert len(re.findall(r'class="grid"', chart)) >= 2
    assert "nan" not in chart
