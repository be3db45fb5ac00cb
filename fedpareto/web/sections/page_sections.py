"""The sections of a run's page, in order: the report writes all of them into a file, the console shows them live."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from fedpareto.web.pages.html import Html, join, tag
from fedpareto.web.sections import (
    described_data,
    figures,
    heat_maps,
    measured_models,
    member_results,
    metric_figures,
    objective_figures,
    run_words,
    traffic,
)
from fedpareto.web.sections.shown_run import ShownRun

Content = Callable[[ShownRun, Sequence[ShownRun]], Html]


class Pace(Enum):
    """How often an open page of the console gets a section anew."""

    ALWAYS = "when it has changed"
    SELDOM = "when the run has a tenth more rounds"
    NEVER = "when the page is loaded"
    OWN = "the console has something of its own in its place"


@dataclass(frozen=True)
class PageSection:
    """A section; its content is made of a run and those beside it, and is empty where the run has none."""

    anchor: str
    title: str
    pace: Pace
    content: Content

    def html(self, data: ShownRun, beside: Sequence[ShownRun] = ()) -> Html:
        """The section with its heading; empty if it has no content."""
        content = self.content(data, beside)
        return join([tag("h2", self.title), content]) if content else content


def _figures(parts: Iterable[Html]) -> Html:
    parts = list(parts)
    return tag("div", *parts, class_="figures") if parts else Html("")


def _card(content: Html) -> Html:
    return tag("div", content, class_="card")


def _with_rounds(content: Content) -> Content:
    """A content that a run without a round has not."""
    return lambda data, beside: content(data, beside) if data.lines else Html("")


def _with_steps(content: Content) -> Content:
    """A content that a run without steps has not, either: one that only measures models, or describes data."""
    return lambda data, beside: (
        content(data, beside) if data.lines and not (data.evaluates or data.describes) else Html("")
    )


def _with_scores(content: Content) -> Content:
    """A content that a run that describes data has not."""
    return lambda data, beside: content(data, beside) if data.lines and not data.describes else Html("")


def _members(data: ShownRun) -> Html:
    results = tag("div", member_results.results(data), class_="figures one")
    return join([Html("") if data.has_means_alone else results, _card(member_results.members_table(data))])


def _course(data: ShownRun) -> Html:
    return Html("") if data.has_means_alone else figures.course(data)


def _models(data: ShownRun) -> Html:
    content = measured_models.models(data)
    return _card(content) if content else content


def _data(data: ShownRun) -> Html:
    content = described_data.data(data)
    return _card(content) if content else content


def _objectives(data: ShownRun, beside: Sequence[ShownRun]) -> Html:
    return _figures(objective_figures.figures(data, beside) if data.objectives else ())


def _metrics(data: ShownRun, beside: Sequence[ShownRun]) -> Html:
    return _figures(metric_figures.figures(data) if data.own_metrics else ())


SECTIONS = (
    PageSection("alerts", "Alerts", Pace.ALWAYS, lambda data, _: run_words.alerts(data)),
    PageSection("models", "The models", Pace.ALWAYS, _with_rounds(lambda data, _: _models(data))),
    PageSection("data", "The data", Pace.ALWAYS, _with_rounds(lambda data, _: _data(data))),
    PageSection("course", "How each member fares", Pace.OWN, _with_scores(lambda data, _: _course(data))),
    PageSection("members", "Members", Pace.ALWAYS, _with_scores(lambda data, _: _members(data))),
    PageSection("heat", "Members and rounds", Pace.OWN, _with_scores(lambda data, _: heat_maps.maps(data))),
    PageSection("objectives", "The objectives", Pace.SELDOM, _with_scores(_objectives)),
    PageSection("rounds", "Round by round", Pace.SELDOM, _with_scores(lambda data, _: _figures(figures.rounds(data)))),
    PageSection("metrics", "The task's own metrics", Pace.SELDOM, _with_rounds(_metrics)),
    PageSection("weights", "Who decided", Pace.SELDOM, _with_steps(lambda data, _: _figures([figures.entropy(data)]))),
    PageSection(
        "conflicts",
        "Whether a step served everybody",
        Pace.SELDOM,
        _with_steps(lambda data, _: _figures(figures.conflicts(data))),
    ),
    PageSection(
        "traffic",
        "Replies, bytes and time",
        Pace.SELDOM,
        _with_rounds(lambda data, beside: _figures(traffic.figures(data, beside))),
    ),
    PageSection("failures", "Rounds", Pace.OWN, _with_rounds(lambda data, _: _card(run_words.failures(data)))),
    PageSection("replies", "Who took part", Pace.SELDOM, lambda data, _: _card(member_results.took_part(data))),
    PageSection("run", "The run itself", Pace.ALWAYS, lambda data, _: _card(run_words.itself(data))),
    PageSection("definitions", "What the numbers mean", Pace.NEVER, lambda data, _: run_words.definitions()),
)
