"""Models that members have measured privately, which they do once: the numbers that are on record stand."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.record.metric_definitions import Basis, basis
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from storage.models import Round, Run
from storage.states import RoundState

MODEL_EVALUATED = "model-evaluated"
_NUMBERS = 6  # that are named


def private_numbers(session: Session, task: str, model: str, but: str = "") -> str:
    """Says where members have measured a model privately, and with which result; empty if they have not.

    Args:
        session: of the database.
        task: whose members are asked.
        model: its digest.
        but: the id of a run that does not count.
    """
    query = select(Run.name, Run.spec, Round.number, Round.metrics).join(Run, Round.run_id == Run.run_id)
    query = query.where(Round.deployed_model == model, Round.state == RoundState.COMPLETED, Run.run_id != but)
    for name, document, number, metrics in session.execute(query.order_by(Round.ended)):
        spec = RunSpec.parse(document)
        if spec.task == task and spec.evaluates_privately and "evaluated" in metrics:
            return f"members have measured it in round {number} of the run {name}; its numbers stand: {_told(metrics)}"
    return ""


def check_unmeasured(session: Session, spec: RunSpec) -> None:
    """Raises if a private run would measure a model that members have measured privately before.

    Raises:
        Refusal: `model-evaluated`, with the numbers on record.
    """
    for model in spec.models if spec.evaluates_privately else ():
        if known := private_numbers(session, spec.task, model):
            raise Refusal(MODEL_EVALUATED, f"the model {model}: {known}. Leave it out")


def _told(metrics: Mapping[str, float]) -> str:
    found = [f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if basis(name) is Basis.MODEL]
    return ", ".join(found[:_NUMBERS])
