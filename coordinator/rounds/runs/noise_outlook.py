"""What a run with noise for samples would spend, and where the budgets of members would end it, at its submission.

The budgets are those that members told when they attended last. It is advice: the ledger of each worker decides.
"""

from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.known import known_clients
from coordinator.rounds.runs.submission import Submission
from federation.aggregation.rules.fsmgda import FSMGDA
from federation.spec.accounting import DELTA, AccountingError, Mechanism, NoiseBudget, check_there, epsilon
from federation.spec.computation import PrivateSgd
from federation.text import counted
from storage.models import Client

MOST_BUDGETS = 10  # that are computed: each takes up to a second


def noise_outlook(submission: Submission, session: Session) -> Iterator[str]:
    """Lines for the operator; none for a run without noise for samples, to members without budgets."""
    spec = submission.spec
    known = known_clients(session, spec, submission.objectives)
    rows = session.scalars(select(Client).where(Client.client_id.in_(known)).order_by(Client.client_id)).all()
    budgets = {
        row.client_id: NoiseBudget.decode(row.noise_budgets[spec.task])
        for row in rows
        if spec.task in row.noise_budgets
    }
    trainings = {}
    for name, member in known.items():
        noise = max(spec.privacy.sample_noise, budgets[name].noise if name in budgets else 0.0)
        if noise and member.samples:
            targets = len(member.objectives) if isinstance(submission.rule, FSMGDA) else 1
            private = PrivateSgd(noise=noise, clip=spec.privacy.sample_clip)
            trainings[name] = private.mechanism(spec.train, member.samples, targets)
    if not trainings:
        return
    try:
        check_there()
        yield from _spends(submission, {name: known[name].samples for name in trainings}, trainings)
        yield from _ends(submission, budgets, trainings)
    except AccountingError as error:
        yield f"what this run spends of the members' privacy is not computed here: {error}"


def _spends(submission: Submission, samples: dict[str, int], trainings: dict[str, Mechanism]) -> Iterator[str]:
    """A line with the epsilon of the whole run at the member with the fewest samples."""
    smallest = min(trainings, key=lambda name: (samples[name], name))
    each, rounds = trainings[smallest], submission.spec.rounds
    spent = epsilon([Mechanism(each.noise, each.rate, each.steps * rounds)], DELTA)
    yield (
        f"the whole run spends epsilon = {spent.value:.3g} (delta = {DELTA:g}) of the samples of {smallest}, which has "
        f"the fewest ({samples[smallest]}), with noise {each.noise:g} in {counted(rounds, 'round')}"
    )


def _ends(submission: Submission, budgets: dict[str, NoiseBudget], trainings: dict[str, Mechanism]) -> Iterator[str]:
    """A line for each member whose budget ends before the run."""
    rounds = submission.spec.rounds
    concerned = {name: budget for name, budget in budgets.items() if name in trainings}
    affordable: dict[tuple[NoiseBudget, Mechanism], int] = {}
    for name, budget in concerned.items():
        key = budget, trainings[name]
        if key not in affordable:
            if len(affordable) == MOST_BUDGETS:
                yield f"{MOST_BUDGETS} budgets were looked at; other members may have spent theirs before the run ends"
                return
            affordable[key] = budget.affords(trainings[name], rounds)
        if affordable[key] < rounds:
            spent = epsilon(budget.spent, budget.delta).value
            yield (
                f"the budget of {name} (epsilon = {budget.epsilon:g}, of which {spent:.3g} is spent) lasts for "
                f"{affordable[key]} of {counted(rounds, 'round')}; then it declines [dp-budget]"
            )
