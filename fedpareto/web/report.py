"""The report: the sections of a run's page in one HTML file, which needs no server, no script and no other file."""

from collections.abc import Sequence
from dataclasses import replace

from federation.text import counted
from fedpareto.admin_messages import name_of
from fedpareto.formatting import when
from fedpareto.run_names import RunNames
from fedpareto.web.pages.html import Html, tag
from fedpareto.web.pages.rendering import rendered
from fedpareto.web.pages.skeleton import Link, WebPage, in_one_file
from fedpareto.web.sections import run_words
from fedpareto.web.sections.page_sections import SECTIONS
from fedpareto.web.sections.shown_run import ShownRun


def page(data: ShownRun, beside: Sequence[ShownRun] = ()) -> Html:
    """A run as one HTML document that needs nothing else; other runs of its task are drawn beside it."""
    names = RunNames([data.run, *(other.run for other in beside)])
    data, *beside = (replace(one, origin=names.origin(one.run.run_id, one.run.name)) for one in (data, *beside))
    shown = _sections(data, beside)
    links = [Link(anchor.capitalize(), f"#{anchor}") for anchor in shown]
    body = _body(data, shown, _words(data, beside), run_words.cards(data))
    return in_one_file(WebPage(title=f"{data.run.name}: federated run", body=[body], nav=links))


def _sections(data: ShownRun, beside: Sequence[ShownRun] = ()) -> dict[str, Html]:
    """The sections of a run that have something to show."""
    made = {section.anchor: section.html(data, beside) for section in SECTIONS}
    return {anchor: html for anchor, html in made.items() if html}


def _body(data: ShownRun, shown: dict[str, Html], words: str, cards: str = "") -> Html:
    run = data.run
    return rendered(
        "report.html",
        data=data,
        run=run,
        state=name_of(run, "state").lower(),
        look=run_words.state_look(run),
        words=words,
        cards=cards,
        sections=shown,
    )


_SUMMARY = ("course", "members")  # the sections of `summary`
_SUMMARY_HEIGHT = 720  # pixels; the frame scrolls


def summary(data: ShownRun) -> Html:
    """A run as a part of a notebook: the verdict, the members' curves, and each member at the end."""
    shown = {anchor: html for anchor, html in _sections(data).items() if anchor in _SUMMARY}
    return framed(
        in_one_file(WebPage(title=f"{data.run.name}: federated run", body=[_body(data, shown, _words(data, ()))]))
    )


def framed(document: Html) -> Html:
    """A page as a part of another one: in a frame without rights, since the styles of both would mix."""
    style = f"width: 100%; height: {_SUMMARY_HEIGHT}px; border: 0; background: white"
    return tag("iframe", sandbox="", srcdoc=document, style=style)


def _words(data: ShownRun, beside: Sequence[ShownRun]) -> str:
    run = data.run
    others = ", ".join(f"{other.label} ({other.run.algorithm})" for other in beside)
    rounds = f"{run.rounds_done} of {counted(run.rounds_total, 'round')}"
    words = f"{run.algorithm} on {run.task}, {rounds}, run {run.run_id} of {when(run, 'created')[:16]}"
    return f"{words}; beside {others}" if others else words
