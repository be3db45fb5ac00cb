"""Is a rule never dominated, and does no attack move it? The procedure, which is fixed before the last three tasks run.

For each rival and each task: the lower 97.5 % bound of the rule's score minus the rival's, paired by seed, is above
minus the margin in the mean or in the worst member. For each attack: the lower bound of attacked minus honest, of the
same members with the same seed, is above minus the margin in both. The claim holds if all of them do. A bound that is
not above says "not shown": it is no evidence of the opposite.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from comparison.catalogue import AFTER, ATTACKERS, ATTACKS, MEMBERS, TASKS
from comparison.scores import score
from fedpareto.experiments.result_store import RunResult

MARGIN = 2.0  # points, or percent of a loss
LEVEL = 0.975
HONEST, ATTACKED = 5, 3  # seeds at least: whoever looks earlier would find a bound that holds by chance
RULES = ("FedAvg", "q-FedAvg", "AFL", "FedFV", "FedMGDA+", "fedmgda+auto", "dual-cone", "Krum", "geometric median")
Scores = tuple[float, float]  # of the mean over members, and of the worst member


@dataclass(frozen=True)
class Bound:
    """One comparison: the rule on a task against a rival, or under an attack against itself.

    Attributes:
        against: the rival, or the attack.
        seeds: the number of pairs.
        mean, worst: lower bounds of the difference in the mean, and in the worst member.
        shown: whether the comparison says what is claimed.
    """

    task: str
    against: str
    seeds: int
    mean: float
    worst: float
    shown: bool


def lower_bound(differences: Sequence[float]) -> float:
    """The lower 97.5 % bound of the mean of normal numbers, by Student's t; minus infinity for fewer than two."""
    n = len(differences)
    if n < 2:
        return -math.inf
    from scipy.special import stdtrit  # noqa: PLC0415 - few commands need it

    mean = sum(differences) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in differences) / (n - 1))
    return mean - float(stdtrit(n - 1, LEVEL)) * deviation / math.sqrt(n)


def against_rivals(results: Iterable[RunResult], rule: str, task: str, after: int = AFTER[-1]) -> list[Bound]:
    """The rule beside each other rule on a task, honest."""
    honest: dict[str, dict[int, Scores]] = {}
    for run in results:
        if run.spec["task"] == task and run.spec["split"] == "test" and not run.spec["attack"]:
            honest.setdefault(run.method, {})[run.seed] = _all_members(run, after)
    bounds = []
    for rival in RULES:
        if rival != rule:
            mean, worst, pairs = _bounds(honest.get(rule, {}), honest.get(rival, {}))
            shown = pairs >= HONEST and max(mean, worst) > -MARGIN
            bounds.append(Bound(task, rival, pairs, mean, worst, shown))
    return bounds


def under_attacks(results: Sequence[RunResult], rule: str, task: str, after: int = AFTER[-1]) -> list[Bound]:
    """The rule under each attack minus the rule without, on the members that do not attack; all attacks, run or not."""
    own = [run for run in results if run.method == rule and run.spec["task"] == task and run.spec["split"] == "test"]
    honest = {run.seed: run for run in own if not run.spec["attack"]}
    attacks = [f"{attack}, {count}" for attack in ATTACKS for count in ATTACKERS]
    pairs: dict[str, tuple[dict[int, Scores], dict[int, Scores]]] = {attack: ({}, {}) for attack in attacks}
    for run in own:
        attack = run.condition.removeprefix(f"{task}, ")
        if attack in pairs and run.seed in honest:
            # Not those that the attacked run measured: one that diverged has none, and would then equal the honest one.
            members = [f"{after}/member/{number}" for number in range(MEMBERS - run.spec["attackers"])]
            attacked, alone = pairs[attack]
            attacked[run.seed] = _of(run, members)
            alone[run.seed] = _of(honest[run.seed], members)
    bounds = []
    for attack, (attacked, alone) in pairs.items():
        mean, worst, count = _bounds(attacked, alone)
        shown = count >= ATTACKED and min(mean, worst) > -MARGIN
        bounds.append(Bound(task, attack, count, mean, worst, shown))
    return bounds


def _bounds(ours: Mapping[int, Scores], theirs: Mapping[int, Scores]) -> tuple[float, float, int]:
    seeds = sorted(ours.keys() & theirs.keys())
    mean, worst = (lower_bound([ours[seed][place] - theirs[seed][place] for seed in seeds]) for place in (0, 1))
    return mean, worst, len(seeds)


def _all_members(run: RunResult, after: int) -> Scores:
    loss = TASKS[run.spec["task"]].loss
    return score(run.final.get(f"{after}/mean"), loss=loss), score(run.final.get(f"{after}/worst"), loss=loss)


def _of(run: RunResult, members: Sequence[str]) -> Scores:
    loss = TASKS[run.spec["task"]].loss
    values = [run.final.get(name, math.nan) for name in members]
    if not all(map(math.isfinite, values)):
        return score(None, loss=loss), score(None, loss=loss)
    return score(sum(values) / len(values), loss=loss), score(max(values) if loss else min(values), loss=loss)


def row(bound: Bound) -> str:
    """A row of the table of the procedure."""
    numbers = " | ".join("–" if math.isinf(value) else f"{value:+.1f}" for value in (bound.mean, bound.worst))
    return f"| {bound.task} | {bound.against} | {bound.seeds} | {numbers} | {'shown' if bound.shown else 'not shown'} |"
