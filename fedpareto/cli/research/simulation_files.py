"""The files of a simulation for targets that keep files: its model, the model's card, and the report."""

from collections.abc import Sequence
from pathlib import Path

from federation.digests import digest
from federation.v1.admin_pb2 import ExportRoundsResponse, Run
from federation.vectors import to_bytes
from fedpareto.cli.show.model_card import CardFacts, recorded_scores, write_card
from fedpareto.run_table import parts_of
from fedpareto.simulation.history import History
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun


def write_files(history: History, directory: Path) -> Sequence[Path]:
    """Writes them into a directory; those of a run that is paused are those up to now."""
    if history.layout is None:
        return []
    run = Run.FromString(history.message)
    rounds = [ExportRoundsResponse.FromString(item) for item in history.exported]
    model, card, report = (directory / name for name in ("model.safetensors", "card.md", "report.html"))
    content = to_bytes(history.layout, history.model)
    model.write_bytes(content)
    write_card(_facts(history, run, rounds, content), card, model, as_json=False)
    report.write_text(page(ShownRun.of(run, rounds)), encoding="utf-8")
    return [model, card, report]


def _facts(history: History, run: Run, rounds: Sequence[ExportRoundsResponse], content: bytes) -> CardFacts:
    last = next((item for item in reversed(rounds) if item.summary.result_model), None)
    metrics = {} if last is None else dict(last.summary.metrics)
    names = [] if last is None else [part.name for part in parts_of(last) if part.counts]
    return CardFacts(
        federation="simulation",
        run=run.run_id,
        name=run.name,
        state=history.state,
        round=None if last is None else last.summary.round,
        model=digest(content),
        size=len(content),
        step="",
        record="",
        spec=history.spec,
        spec_digest=digest(run.spec.encode()),
        members=len(names),
        names=names,
        scores=list(recorded_scores(metrics, history.spec, "" if last is None else last.summary.worst_client)),
        numbers=metrics,
        source="A simulation wrote this card from its record: its clients were simulated on one machine.",
    )
