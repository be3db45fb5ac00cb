"""The results of simulated attackers: unlike real ones, they know the honest updates of the round."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from coordinator.rounds.fleets.base import Question
from federation.attacks import Attack, attack_seed, claimed, distorted
from federation.spec.sharing import BUFFERS
from federation.vectors import Vector
from federation.work.base import Result
from fedpareto.simulation.local import Outcome, naming


def attacked(
    outcomes: Mapping[str, Outcome],
    attackers: Mapping[str, Attack],
    question: Question,
    seed: int,
    change: Callable[[Question], Vector],
) -> dict[str, Outcome]:
    """Replaces the outcomes of attackers in the outcomes of clients, by name.

    `change` gives the last change of the model, w_{t-1} - w_t, which attackers that do not train send; `seed` is the
    run's.

    Raises:
        AttackError: an attack's code raised an exception, or its answer cannot be used.
    """
    results = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Result)}
    attacks = {name: attack for name, attack in attackers.items() if name in results}
    if not attacks:
        return dict(outcomes)
    changed = change(question)
    honest = [result for name, result in sorted(results.items()) if name not in attacks]
    for objective in dict.fromkeys(row for result in results.values() for row in result.rows if row != BUFFERS):
        rows = [result.rows[objective] for result in honest if objective in result.rows]
        m = sum(objective in result.rows for result in results.values())
        peers = np.stack(rows) if rows else np.empty((0, len(changed)), dtype=np.float32)
        for name, attack in attacks.items():
            result = results[name]
            if objective in result.rows:
                own = result.rows[objective] if attack.trains else changed
                with naming([name], question.current.number):
                    sent = distorted(
                        attack,
                        own,
                        of_update=question.phase.kind.sends_update,
                        peers=peers,
                        m=m,
                        seed=attack_seed(seed, question.current.number, name),
                    )
                results[name] = replace(result, rows={**result.rows, objective: sent})
    for name, attack in attacks.items():
        with naming([name], question.current.number):
            results[name] = replace(results[name], losses=claimed(attack, results[name].losses))
    return {**outcomes, **results}
