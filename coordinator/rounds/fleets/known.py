"""The clients that a run may ask, by what their workers have told."""

from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.aggregation.phases import Selected
from federation.spec.computation import CANNOT, Ability
from federation.spec.run_spec import RunSpec
from storage import models
from storage.states import ClientState

# Built once, since it runs in each phase.
_OFFERS = select(
    models.Client.client_id,
    models.Client.tasks,
    models.Client.objectives,
    models.Client.tags,
    models.Client.run_kinds,
    models.Client.abilities,
).where(models.Client.state == ClientState.ACTIVE)


def known_clients(session: Session, spec: RunSpec, objectives: tuple[str, ...]) -> dict[str, Selected]:
    """Active clients that a run may ask, that offer its task and serve at least one of its objectives.

    Their workers know the kind of the run, and fixed tensors if it has them.
    """
    # The samples of an offer are an unsigned claim: bounded as those of a reply are. A task without samples is offered
    # for statistics alone.
    offering = {
        client_id: Selected(
            max(1, min(int(tasks[spec.task]), spec.limits.samples)), serves(client_id, declared, spec, objectives)
        )
        for client_id, tasks, declared, tags, kinds, abilities in session.connection().execute(_OFFERS)
        if tasks.get(spec.task, -1) >= (0 if spec.describes else 1)
        and spec.selection.admits(client_id, tags)
        and _knows(spec, kinds, abilities.get(spec.task, ()))
    }
    return {name: client for name, client in offering.items() if client.objectives}


def too_old(session: Session, spec: RunSpec) -> dict[str, str]:
    """The active clients that offer a run's task, and whose workers do not know runs like it, by name, with the reason.

    The reason says what the worker needs.
    """
    if spec.trains and not spec.parameters.fixed:
        return {}
    unknown = "with fixed tensors (parameters.fixed)" if spec.trains else f"of the kind {spec.kind!r}"
    old = f"its worker does not know runs {unknown}: it needs a newer release"
    unable = f"the trainer of its worker {CANNOT[Ability.FIXED]}"
    return {
        client_id: unable if kinds and (spec.trains or spec.kind in kinds) else old
        for client_id, tasks, _, tags, kinds, abilities in session.connection().execute(_OFFERS)
        if tasks.get(spec.task, 0) > 0
        and spec.selection.admits(client_id, tags)
        and not _knows(spec, kinds, abilities.get(spec.task, ()))
    }


def _knows(spec: RunSpec, kinds: Sequence[str], abilities: Sequence[str]) -> bool:
    """True if a worker that told these kinds of runs, and these abilities for the task, knows runs like this one.

    One of version 0.1.0 would train a model with fixed tensors as if they were not there: it is never asked.
    """
    return (spec.trains or spec.kind in kinds) and (not spec.parameters.fixed or Ability.FIXED in abilities)


def serves(
    client_id: str, declared: Mapping[str, Sequence[str]], spec: RunSpec, objectives: tuple[str, ...]
) -> tuple[str, ...]:
    """The run's objectives that a client serves: those that it declares, by task, and the specification allows it."""
    declared_here = declared.get(spec.task) or objectives
    allowed = spec.objectives.serve.get(client_id, objectives)
    return tuple(name for name in objectives if name in declared_here and name in allowed)
