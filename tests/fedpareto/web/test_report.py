"""The report: a page from a real run on both databases, charts of any data, and nobody's text as markup."""

import math
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from federation.v1.admin_pb2 import Client, ClientScores, ExportRoundsResponse, Participation, PhaseProgress, Run
from federation.v1.common_pb2 import ROUND_STATE_COMPLETED, AssignmentState
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.report import _check_comparable
from fedpareto.demo import demo_page
from fedpareto.demo.hospitals import HOSPITALS
from fedpareto.demo.story import TITLES, HospitalAccuracies, Story
from fedpareto.run_table import MemberNumber
from fedpareto.series import equals
from fedpareto.turnout import MemberTurnout, Turnout
from fedpareto.web.pages import charts, heat, marks, plane, scales, small, timeline
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.html import Html, tag, text
from fedpareto.web.pages.scales import Axis
from fedpareto.web.pages.verdict import Standing, verdict
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from storage.states import RoundState
from tests.browsers import NARROW, WIDE, Scheme, chromium, fits, smallest_text, violations
from tests.fedpareto.scene import troubled_run
from tests.few import few
from tests.stage import LAYOUT, Stage

VOID = {"meta", "br"}
EVIL = """</title></style><script>alert("1")</script><img src=http://evil.example/x onerror='x'>"""


class Page(HTMLParser):
    """What a browser would make of a page; fails where elements are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.drawings: list[list[tuple[str, str | None]]] = []
        self.titles: list[str] = []  # of figures
        self.words = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "svg" and ("role", "img") in attrs:
            self.drawings.append(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open[-1:] == ["h3"]:
            self.titles.append(data)

    @property
    def labels(self) -> list[str]:
        """The names of the drawings for screen readers."""
        return [dict(attributes)["aria-label"] or "" for attributes in self.drawings]


def check_needs_nothing(made: Page) -> None:
    """No element that loads or runs anything, no address but anchors of the page itself."""
    assert not {"script", "img", "link", "iframe", "object", "image", "use", "form", "base"} & set(made.tags)
    for name, value in made.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset", "xlink:href", "style")
        assert name != "href" or (value or "").startswith("#")


def test_a_run_becomes_a_page_with_every_figure(stage: Stage) -> None:
    run = troubled_run(stage, "report", 3, "training", EVIL)
    data = ShownRun.read(stage._admin, run)
    assert data.numbers == [0, 1, 2]
    first = data.lines[0]
    assert first.summary.metrics["bytes/refused"] == pytest.approx(first.summary.metrics["bytes/up"] / 2)
    for line in data.lines:
        accuracies = {name: data.row(MemberNumber.SCORE, name)[line.number] for name in data.names}
        assert line.summary.worst_client == min(accuracies, key=lambda name: accuracies[name])
        assert line.summary.metrics["accuracy/worst"] == pytest.approx(min(accuracies.values()))
        assert line.summary.metrics["stationarity"] <= line.summary.metrics["stationarity/relative"] * 20
    assert data.final is not None
    assert (data.final.round, data.final.split, data.final.measure) == (2, "test", "accuracy")
    made = Page(page(data))
    check_needs_nothing(made)
    assert made.tags.count("figure") == made.tags.count("figcaption") == 17
    assert len(made.labels) == 17
    assert set(made.labels) <= set(made.titles)
    assert {"Each member over the rounds", "Weight", "Against the step", "Loss", "Failures"} <= set(made.labels)
    task = f'task = "task-{stage.count}"'
    for words in ("refused", "zero", "declined", "cleo", "fedmgda+", task, "Pareto-stationary"):
        assert words in made.words, words


def test_a_round_that_was_skipped_has_its_bytes_and_its_remark(stage: Stage) -> None:
    run, (player,) = stage.begin("dora")
    player.submit_zeros(player.order())
    stage.wait_round(run, 0, RoundState.SKIPPED)
    data = ShownRun.read(stage._admin, run)
    numbers = data.lines[0].summary.metrics
    assert numbers["bytes/up"] == numbers["bytes/refused"] > 4 * LAYOUT.size
    made = Page(page(data))
    assert "quorum: 0 of 1" in made.words
    assert "No round of this run has made a step." in made.words


def made_up(rounds: int, clients: int, name: str = "client", objectives: Sequence[str] = ()) -> ShownRun:
    """A run with any number of rounds, evaluated every third one, whose every text is `name`."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(rounds):
        item = ExportRoundsResponse()
        item.summary.round, item.summary.state = number, ROUND_STATE_COMPLETED
        item.summary.reason = name
        item.summary.accepted = clients
        item.summary.worst_client = name
        item.summary.metrics.update({"entropy": 1.0, "conflicts": 2.0, "conflict_depth": -0.5, "direction_norm": 0.0})
        if number % 3 == 0:
            item.summary.metrics.update({"accuracy/mean": 0.5, "accuracy/worst5": 0.2, "loss/train": 1e250})
            item.summary.metrics.update({"accuracy/std": 0.1, "improved": 1.0})
            item.summary.metrics.update({f"loss/train/{one}": 2.0 + rng.random() for one in objectives})
            item.summary.metrics.update({f"accuracy/objective/{one}": rng.random() for one in objectives})
        if objectives:
            item.summary.metrics.update({f"weight/{one}": 1 / len(objectives) for one in objectives[1:]})
            item.summary.metrics.update({"objective/conflict_depth": -0.25, "bytes/up": 1e4, "bytes/down": math.nan})
            item.objectives.results.add(name=objectives[0], left_out=name)
            item.objectives.notes.append(name)
            item.phases.add(kind="jacobian", asked=clients, replied=clients, round=number)
        for i in range(clients):
            part = Participation(client_id=f"{name}{i}", weight=rng.random(), update_norm=math.nan, reason=name)
            part.state = AssignmentState.ASSIGNMENT_STATE_FULFILLED if i else AssignmentState.ASSIGNMENT_STATE_REFUSED
            part.answered.append(0)
            item.participations.append(part)
            item.scores.append(ClientScores(client_id=f"{name}{i}", scores={"train/loss": rng.random()}))
        found.append(item)
    run = Run(run_id=name, name=name, algorithm=name, task=name, spec=name, reason=name, model=name)
    run.objectives.extend(objectives)
    if found:
        run.latest.CopyFrom(found[-1].summary)
    return ShownRun.of(run, found, [Client(client_id=f"{name}0", device=name, software=name)])


@pytest.mark.parametrize("rounds", [0, 1, 2, 400])
def test_a_page_is_made_of_any_number_of_rounds(rounds: int) -> None:
    made = Page(page(made_up(rounds, 3)))
    check_needs_nothing(made)
    assert ("This run has no rounds yet." in made.words) == (rounds == 0)
    assert not re.search(r"\bnan\b", made.words)


@few(1, 2)
@pytest.mark.parametrize("rounds", [1, 2, 40])
@few(2, 40)
@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_a_page_is_made_of_any_number_of_objectives_beside_other_runs(rounds: int, count: int) -> None:
    names = [f"objective-{k}" for k in range(count)]
    data = made_up(rounds, 3, objectives=names)
    for beside in ([], [made_up(rounds, 2, "other", names)]):
        made = Page(page(data, beside))
        check_needs_nothing(made)
        assert not re.search(r"\bnan\b", made.words)
        assert set(made.labels) <= set(made.titles)
        assert ("The way through the plane of losses" in made.words) == (count == 2)
        assert ("All objectives at once" in made.words) == (count > 2)
        assert ("Progress against uploaded bytes" in made.words) == bool(beside)
        assert "objective-0 was left out of" in made.words


def run_of(algorithm: str, hyperparameters: str, points: Sequence[tuple[float, float]]) -> ShownRun:
    """A run of two objectives whose training losses went that way."""
    spec = f'name = "{algorithm}"\ntask = "two-digits"\nrounds = 9\n[algorithm]\nname = "{algorithm}"\n'
    run = Run(name=algorithm, algorithm=algorithm, task="two-digits", objectives=["left", "right"])
    run.spec, run.parameters = spec + hyperparameters, 100
    rounds = []
    for number, (left, right) in enumerate(points):
        item = ExportRoundsResponse()
        item.summary.round, item.summary.state = number, ROUND_STATE_COMPLETED
        item.summary.metrics.update({"loss/train/left": left, "loss/train/right": right, "bytes/up": 1600.0})
        item.participations.add(client_id="a", payload_bytes=800, answered=[0])
        item.participations.add(client_id="b", payload_bytes=800, answered=[0])
        rounds.append(item)
    return ShownRun.of(run, rounds)


def test_the_plane_of_losses_shows_what_was_preferred_and_how_far_each_objective_can_come() -> None:
    data = run_of("fedcmoo-pref", "preference = [1.0, 2.0]", [(2.0, 2.0), (1.0, 0.5)])
    left = run_of("scalarised", "weights = [1, 0]", [(0.5, 3.0), (0.25, 4.0)])
    right = run_of("scalarised", "weights = [0.0, 0.5]", [(3.0, 0.5), (4.0, 0.4)])
    both = run_of("scalarised", "", [(2.0, 1.0), (1.0, 1.0)])
    assert (data.preference, left.preference) == ([1.0, 2.0], None)
    assert (left.alone, right.alone, both.alone, data.alone) == ("left", "right", None, None)
    made = Page(page(data, [left, right, both]))
    assert "1 · left = 2 · right" in made.words
    assert "left alone" in made.words
    assert "For left alone, scalarised comes down to 0.250." in made.words
    # Delta_M over the losses: (1 - 0.25) / 0.25 and (0.5 - 0.4) / 0.4; (1 - 0.25) / 0.25 and (1 - 0.4) / 0.4.
    assert "+162.50 %" in made.words
    assert "+225.00 %" in made.words
    assert "2.00" in made.words  # models that a client sent: 800 bytes of 4 x 100
    assert "fedcmoo-pref from (2, 2) to (1, 0.5); scalarised from (2, 1) to (1, 1)" in made.words
    assert "left alone" not in Page(page(data)).words


def test_only_runs_of_one_task_compare() -> None:
    data = made_up(1, 1)
    _check_comparable(data, made_up(2, 3))
    with pytest.raises(CommandFailure, match="only runs of the same task and objectives compare"):
        _check_comparable(data, run_of("fsmgda", "", []))


@pytest.mark.parametrize("slope", [0.01, 0.5, 1.0, 2.0, 1e3])
def test_paths_and_rays_stay_within_the_plane(slope: float) -> None:
    path = plane.Path("x", [0.5, math.nan, 2.0, 1e200], [1.0, 1.0, 0.25, 1.0], list("abcd"), 5)
    axis = Axis("loss", scales.general, low=0.0)
    drawn = plane.plane([path], axis, axis, guides=[plane.Guide("r", slope=slope), plane.Guide("x", x=0.1)], alt="x")
    for x, y in re.findall(r'x2="([^"]+)%" y2="([^"]+)"', drawn):
        assert 0 <= float(x) <= 100
        assert 0 <= float(y) <= plane.HEIGHT
    assert "nan" not in drawn
    assert drawn.count("<circle") == 3  # two points and the ring


def polygons(drawn: str, look: str) -> list[list[float]]:
    """The heights of the corners of each polygon of a class."""
    found = re.findall(rf'<polygon points="([^"]*)" class="{look}"', drawn)
    return [[float(pair.split(",")[1]) for pair in one.split()] for one in found]


def test_an_axis_of_accuracies_ends_at_0_and_100_percent_and_so_does_the_band() -> None:
    axis = Axis("accuracy", scales.general, low=0.0, high=1.0, bounded=True)
    edges = Series("", [-0.4, -0.2], 0), Series("", [1.4, 0.9], 0)
    drawn = charts.lines([0, 1], [Series("mean", [0.5, 0.4], 0)], axis, alt="x", band=edges)
    ticks = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert (ticks[0], ticks[-1]) == ("0", "1")
    (band,) = polygons(drawn, "band f0")
    assert min(band) >= 0
    assert max(band) <= charts.HEIGHT
    data = made_up(3, 3)
    for line in data.lines:
        line.summary.metrics.update({"accuracy/mean": 0.5, "accuracy/std": 0.9, "accuracy/worst5": 0.2})
    words = Page(page(data)).words
    assert "150 %" not in words
    assert "-50 %" not in words


@pytest.mark.parametrize(
    ("low", "high", "large", "small"),
    [(1.05, 1.15, 3, 0), (1.7, 2.3, 3, 0), (0.02, 0.6, 3, 5), (0.3, 40.0, 3, 10), (1e-12, 1.0, 5, 0)],
)
def test_a_log_axis_has_ticks_whatever_the_range(low: float, high: float, large: int, small: int) -> None:
    drawn = charts.lines([0, 1], [Series("x", [low, high], 0)], Axis("loss", scales.general, log=True), alt="x")
    ticks = [float(tick) for tick in re.findall(r'text-anchor="end">([^<]+)<', drawn)]
    assert len(ticks) >= large
    assert ticks[0] <= low < high <= ticks[-1]
    assert drawn.count('class="tick"') >= small


@pytest.mark.parametrize(("worst", "together"), [(0.1, False), (0.2, True)])
def test_the_worst_client_and_the_worst_5_percent_are_told_apart_unless_they_are_one(
    worst: float, together: bool
) -> None:
    data = made_up(4, 3)
    for line in data.lines:
        line.summary.metrics.update({"accuracy/mean": 0.5, "accuracy/worst5": 0.2, "accuracy/worst": worst})
    drawing = page(data).partition("Accuracy over the rounds")[2].partition("</figure>")[0]
    legend = re.sub("<[^>]+>", "", drawing.partition("</p>")[0])
    assert ("─■─ worst 5 %" in legend) != together
    assert ("┄▽┄ worst member" in legend) != together
    assert ("─■─ worst member" in legend) == together


def test_lines_differ_in_shape_and_bars_in_fill_besides_their_colours() -> None:
    axis = Axis("y", scales.general)
    drawn = charts.lines([0], [Series(str(k), [float(k)], k) for k in range(6)], axis, alt="x")
    corners = [frozenset((round(x), round(y)) for x, y in marks.outline(k, 0.0, 0.0, 100.0)) for k in range(6)]
    assert len(set(corners)) == 6
    assert drawn.count("<polygon") == 5
    assert drawn.count("<circle") == 1
    assert len(set(re.findall(r"─(.)─", drawn))) == 6
    assert 'class="hollow s2"' in charts.lines([0], [Series("x", [1.0], 2, dashed=True)], axis, alt="x")
    layers = [Series(name, [1.0], colour) for name, colour in (("a", 2), ("b", 1), ("c", 4))]
    ways = re.findall(r'<rect [^>]*class="f\d s\d (q\d)"', charts.stacked([0], layers, axis, alt="x"))
    assert len(set(ways)) == 3
    outcomes = small.strip(["replied", "declined", "refused", "missing", "not-needed", "other"], alt="x")
    assert len(set(re.findall(r' d="M\d+ ([^"]+)" class="([^"]+)"', outcomes))) == 5


@pytest.mark.parametrize("count", [1, 2, 9, 15, 100, 360, 1000])
def test_the_first_and_the_last_round_are_labelled_and_few_between(count: int) -> None:
    shown = scales.few(count)
    assert (shown[0], shown[-1]) == (0, count - 1)
    assert len(shown) <= 10
    assert shown == sorted(set(shown))


def test_training_and_evaluation_have_two_colours() -> None:
    data = made_up(2, 1)
    for line in data.lines:
        assert isinstance(line.phases, list)
        for kind in ("train", "evaluate"):
            phase = PhaseProgress(kind=kind, asked=1, replied=1)
            phase.started.FromSeconds(1)
            phase.ended.FromSeconds(2)
            line.phases.append(phase)
    drawing = page(data).partition("The phases of the rounds")[2].partition("</figure>")[0]
    assert set(re.findall(r'<rect [^>]*class="(f\d)', drawing)) == {"f0", "f2"}


def test_a_dumbbell_joins_the_first_value_and_the_last() -> None:
    axis = Axis("accuracy", scales.general, low=0.0, high=1.0, bounded=True)
    rows = [Dumbbell("a", 0.25, 0.5, marked=True), Dumbbell("b", math.nan, 0.75)]
    drawn = dumbbells(rows, axis, names=("first", "last"), alt="x", line=("mean", 0.6))
    assert re.findall(r'x1="([\d.]+)%" x2="([\d.]+)%" [^>]*class="bell s1"', drawn) == [("25", "50")]
    assert re.findall(r'<circle cx="([\d.]+)%" [^>]*class="([^"]+)"', drawn) == [
        ("25", "hollow s1"), ("50", "f1"), ("75", "f0")
    ]  # fmt: skip


ALL = {"a": 0.3, "b": 0.4, "hospital-9": 0.2}


@pytest.mark.parametrize(
    ("lasts", "over", "sentence"),
    [
        ((0.9, 0.9, 0.6), True, "All three members gained; hospital-9 is 20 points below the mean"),
        ((0.9, 0.9, 0.9), True, "All three members gained, and nobody is far from the mean"),
        ((0.2, 0.9, 0.9), True, "Two of three members gained, a lost; a is 47 points below the mean"),
        ((0.1, 0.1, 0.1), True, "All three members lost, and nobody is far from the mean"),
        ((0.9, 0.9, 0.6), False, "hospital-9 is at 60 %, 20 points below the mean"),
        ((0.9, 0.9, 0.9), False, "Three members are close to each other; the mean accuracy is 90 %"),
        ((0.6,), True, "a gained"),
        ((math.nan,), True, "No member's result is known"),
    ],
)
def test_the_verdict_says_who_gained_and_who_is_left_behind(
    lasts: tuple[float, ...], over: bool, sentence: str
) -> None:
    last = dict(zip(ALL, lasts, strict=False))
    standing = Standing(measure="accuracy", first=ALL, last=last, higher=True, rounds=2)
    assert verdict(standing, over=over) == sentence


def turned_up(name: str, replied: int, **failed: int) -> MemberTurnout:
    return MemberTurnout(name=name, replied=replied, **failed)


FAILED = "declined in 30, did not reply in 10 of 40 rounds"
PRESENT = tuple(turned_up(name, 40) for name in ALL)
EVEN = "gained, and nobody is far from the mean"
LESS = "three of four members gained, d has no result, and nobody is far from the mean"
CLOSE = "three members are close to each other; the mean accuracy is 90 %"
NEVER = "no round asked it"


@pytest.mark.parametrize(
    ("others", "never_asked", "over", "sentence"),
    [
        ([turned_up("d", 0, declined=40)], [], True,
         f"d never took part: it declined in 40 of 40 rounds; all three others {EVEN}"),
        ([turned_up("d", 0, declined=30, missing=10)], ["e"], True,
         f"d ({FAILED}) and e ({NEVER}) never took part; all three others {EVEN}"),
        ([turned_up("d", 0, refused=2)], [], False,
         f"d has not taken part yet: it was refused in 2 of 2 rounds; {CLOSE}"),
        ([turned_up("d", 3, declined=37)], [], True,
         f"d took part in 3 of 40 rounds; {LESS}"),
        ([turned_up("d", 20, declined=20)], [], True,
         f"T{LESS[1:]}"),
        ([], ["v", "w", "x", "y", "z"], False,
         f"v ({NEVER}), w ({NEVER}), x ({NEVER}) and 2 more have not taken part yet; {CLOSE}"),
    ],
)  # fmt: skip
def test_the_verdict_begins_with_the_members_that_took_no_part(
    others: list[MemberTurnout], never_asked: list[str], over: bool, sentence: str
) -> None:
    standing = Standing(measure="accuracy", first=ALL, last=dict.fromkeys(ALL, 0.9), higher=True, rounds=40)
    assert (
        verdict(standing, over=over, turnout=Turnout([*PRESENT, *others], dict.fromkeys(never_asked, NEVER)))
        == sentence
    )


def test_who_was_never_asked_because_of_its_owner_is_named_with_this_reason() -> None:
    run = Run(never_asked=["a", "b", "c"])
    run.consents.add(client_id="a", answer="refused")
    run.consents.add(client_id="b", answer="waiting")
    told = "a (its owner has refused the run), b (its owner has not answered the run) and c (no round asked it)"
    assert Turnout.of(run).opening(over=True) == f"No member took part: {told}."


def test_a_run_in_which_nobody_took_part_says_so_first() -> None:
    turnout = Turnout([turned_up("a", 0, declined=2), turned_up("b", 0, missing=2)])
    nobody = "No member took part: a (declined in 2 of 2 rounds) and b (did not reply in 2 of 2 rounds)"
    assert verdict(None, over=True, turnout=turnout) == f"{nobody}; no member's result is known"
    assert turnout.opening(over=True) == f"{nobody}."
    assert Turnout(PRESENT).opening(over=True) == ""
    assert verdict(None, over=True, turnout=Turnout()) == "No member's result is known"


def test_equal_neighbours_in_a_list_of_rounds_are_told_once_with_their_number() -> None:
    said = {0: "a", 1: "a", 2: "a", 4: "b", 6: "b", 7: "c"}
    groups = equals(said, number=int, said=lambda number: said[number])
    told = [(group.rounds, group.said) for group in groups]
    assert told == [("rounds 0 to 2 (3 rounds)", "a"), ("2 of the rounds 4 to 6", "b"), ("round 7", "c")]


def test_a_heat_map_of_members_against_members_has_every_name_at_both_sides() -> None:
    names = [f"member-{k}" for k in range(60)]
    drawn = heat.heat(names, names, [[0.5] * 60] * 60, scales.general, alt="x", named=True)
    assert [drawn.count(f">{name}</text>") for name in names] == [1 + (k % 2 == 0) for k in range(60)]  # rows: 9 pixels
    assert drawn.count("wide-only") == 48  # a narrow screen has room for twelve
    assert ">round</text>" not in drawn


def test_of_losses_the_highest_is_the_worst_and_without_members_the_mean_is_told() -> None:
    standing = Standing(measure="loss", first={"a": 2.0, "b": 2.0}, last={"a": 0.5, "b": 1.5}, higher=False, rounds=2)
    assert verdict(standing, over=True) == "All two members gained; b is 0.500 above the mean"
    assert verdict(None, over=True, accuracy=0.7).startswith("The mean accuracy is 70 %")
    assert verdict(None, over=False) == "No member's result is known yet"


def test_a_heat_map_of_1000_rounds_and_100_members_has_an_element_for_each_shade() -> None:
    values = np.random.default_rng(0).random((100, 1000)).tolist()
    drawn = heat.heat(range(1000), [f"member-{k}" for k in range(100)], values, scales.general, alt="x")
    assert len(re.findall(r"<\w", drawn)) < 300


def test_a_lane_shows_spans_from_its_beginning() -> None:
    lane = timeline.TimelineLane("a", "1/1", [timeline.TimelineSpan("train", "t", 0.0, 5.0, 0)], 10.0)
    assert re.findall(r'<rect x="([^"]+)" [^>]*width="([^"]+)"', timeline.timeline([lane], alt="x")) == [("0%", "50%")]


def test_a_norm_and_a_loss_of_more_than_ten_times_the_median_stand_out() -> None:
    item = ExportRoundsResponse()
    item.summary.state = ROUND_STATE_COMPLETED
    for at, times in enumerate((1.0, 1.0, 30.0)):
        part = Participation(client_id=f"member-{at}", state=AssignmentState.ASSIGNMENT_STATE_FULFILLED)
        part.update_norm, part.loss_before = 2 * times, 1.5 * times
        item.participations.append(part)
    source = page(ShownRun.of(Run(name="x", rounds_done=1), [item]))
    assert re.findall(r'class="(?:small )?bad">([^<]*)<', source) == [" loss 30 times the median", "30.0 ×"]


def test_a_report_names_who_did_not_reply_and_warns() -> None:
    data = made_up(2, 2)
    last = {"last_reason": "zero: dull", "last_reason_round": 6}
    data.run.members.add(client_id="client0", asked=7, replied=3, refused=4, **last)
    data.run.alerts.add(client_id="client0", message="client0 failed in 4 rounds in a row")
    words = Page(page(data)).words
    assert "client0 failed in 4 rounds in a row." in words
    assert "zero: dull" in words
    assert "Why a reply last did not come" in words


@pytest.mark.full
def test_a_page_of_hundreds_of_clients_stays_small() -> None:
    assert len(page(made_up(100, 300))) < 2_000_000


def test_what_members_and_operators_wrote_is_text_and_never_markup() -> None:
    source = page(made_up(2, 3, EVIL))
    made = Page(source)
    check_needs_nothing(made)
    assert EVIL in made.words
    assert "<script" not in source
    assert source.count("<style>") == 1
    policy = next(value for name, value in made.attributes if name == "content" and value and "default-src" in value)
    sheet = source.partition("<style>")[2].partition("</style>")[0]
    digest = b64encode(sha256(sheet.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


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
    chart = charts.lines(rounds, [Series("x", values, 0)], Axis("y", scales.general, log=log), alt="x")
    for height in re.findall(r'cy="([^"]+)"', chart):
        assert -0.01 <= float(height) <= charts.HEIGHT + 0.01
    assert len(re.findall(r'class="grid"', chart)) >= 2
    assert "nan" not in chart


@pytest.mark.full
def test_a_report_fits_the_screen_of_a_telephone_and_can_be_read_by_everybody(tmp_path: Path) -> None:
    data, other = made_up(40, 12, "hospital"), made_up(5, 12, "other")
    remedy = "see `fedpareto admin run`"
    data.run.alerts.add(client_id="hospital0", message="hospital0 failed", remedy=remedy, severity=2)
    both, beside = (made_up(rounds, 3, name, ["left", "right"]) for rounds, name in ((40, "two"), (3, "x")))
    pages = {"one": page(data), "beside": page(data, [other]), "two": page(both, [beside])}
    columns = [HospitalAccuracies(title, dict.fromkeys(HOSPITALS, 0.5)) for title in TITLES.values()]
    pages["demo"] = demo_page.page(Story(columns, ["A sentence."]), None, ("A remark.", ""), ["fedpareto admin run"])
    looks: list[tuple[int, Scheme]] = [(NARROW, "dark"), (WIDE, "light"), (WIDE, "dark")]
    with chromium() as browser:
        for name, source in pages.items():
            file = tmp_path / f"{name}.html"
            file.write_text(source)
            for width, scheme in looks:
                size = {"width": width, "height": 900}
                with browser.new_context(viewport=size, color_scheme=scheme, bypass_csp=True) as context:
                    shown = context.new_page()
                    shown.goto(file.as_uri())
                    shown.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
                    assert fits(shown), (name, width)
                    assert smallest_text(shown) >= 11
                    assert violations(shown) == []


def test_the_policy_of_a_report_lets_its_style_pass_and_the_browser_does_not_complain(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(made_up(4, 3)))
    complaints: list[str] = []
    with chromium() as browser:
        shown = browser.new_page(viewport={"width": NARROW, "height": 900})
        shown.on("console", lambda message: complaints.append(message.text))
        shown.goto(file.as_uri())
        assert shown.evaluate("getComputedStyle(document.querySelector('main')).paddingTop") == "28px"
        assert fits(shown)
        assert smallest_text(shown) >= 11
    assert complaints == []
