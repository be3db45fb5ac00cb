"""What simulated attackers hand in: unlike real ones, they know the honest updates of the round."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from coordinator.rounds.fleets.base import Question
from federation.attacks import Attack, attack_seed
from federation.spec.sharing import BUFFERS
from federation.vectors import Vector
from federation.work.base import Result
from simulation.local import Outcome


def attacked(
    outcomes: Mapping[str, Outcome],
    attackers: Mapping[str, Attack],
    question: Question,
    seed: int,
    change: Callable[[Question], Vector],
) -> dict[str, Outcome]:
    """The outcomes of clients by name, those of attackers replaced.

    `change` gives the last change of the model, w_{t-1} - w_t, which attackers send that do not train; `seed` is that
    of the run.
    """
    results = {name: one for name, one in outcomes.items() if isinstance(one, Result)}
    attacks = {name: one for name, one in attackers.items() if name in results}
    if not attacks:
        return dict(outcomes)
    changed = change(question)
    honest = [one for name, one in sorted(results.items()) if name not in attacks]
    for objective in dict.fromkeys(row for one in results.values() for row in one.rows if row != BUFFERS):
        rows = [one.rows[objective] for one in honest if objective in one.rows]
        m = sum(objective in one.rows for one in results.values())
        peers = np.stack(rows) if rows else np.empty((0, len(changed)), dtype=np.float32)
        for name, attack in attacks.items():
            result = results[name]
            if objective in result.rows:
                own = result.rows[objective] if attack.trains else changed
                distort = attack.on_update if question.phase.kind.sends_update else attack.on_gradient
                made = distort(own, peers=peers, m=m, seed=attack_seed(seed, question.current.number, name))
                sent = np.ascontiguousarray(made, dtype=np.float32)
                results[name] = replace(result, rows={**result.rows, objective: sent})
    for name, attack in attacks.items():
        results[name] = replace(results[name], losses=attack.on_losses(results[name].losses))
    return {**outcomes, **results}
