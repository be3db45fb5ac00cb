"""The report: the sections of a run's page in one HTML file, which needs no server, no script and no other file."""

from collections.abc import Sequence
from dataclasses import replace

from federation.text import counted
from fedpareto.admin_messages import name_of
from fedpareto.formatting import when
from fedpareto.run_names import RunNames
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.rendering import rendered
from fedpareto.web.pages.skeleton import Link, WebPage, in_one_file
from fedpareto.web.sections import run_words
from fedpareto.web.sections.page_sections import SECTIONS
from fedpareto.web.sections.shown_run import ShownRun


def page(data: ShownRun, beside: Sequence[ShownRun] = ()) -> Html:
    """A run as one HTML document that needs nothing else; other runs of its task are drawn beside it."""
    names = RunNames([data.run, *(other.run for other in beside)])
    data, *beside = (replace(one, origin=names.origin(one.run.run_id, one.run.name)) for one in (data, *beside))
    made = {section.anchor: section.html(data, beside) for section in SECTIONS}
    shown = {anchor: html for anchor, html in made.items() if html}
    run = data.run
    body = rendered(
        "report.html",
        data=data,
        run=run,
        state=name_of(run, "state").lower(),
        look=run_words.state_look(run),
        words=_words(data, beside),
        cards=run_words.cards(data),
        sections=shown,
    )
    links = [Link(anchor.capitalize(), f"#{anchor}") for anchor in shown]
    return in_one_file(WebPage(title=f"{run.name}: federated run", body=[body], nav=links))


def _words(data: ShownRun, beside: Sequence[ShownRun]) -> str:
    run = data.run
    others = ", ".join(f"{other.label} ({other.run.algorithm})" for other in beside)
    rounds = f"{run.rounds_done} of {counted(run.rounds_total, 'round')}"
    words = f"{run.algorithm} on {run.task}, {rounds}, run {run.run_id} of {when(run, 'created')[:16]}"
    return f"{words}; beside {others}" if others else words
