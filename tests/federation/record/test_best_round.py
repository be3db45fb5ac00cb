"""The best round that is found while the rounds are read is that of the whole list."""

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from federation.record.best_round import BestSoFar
from federation.spec.task_metrics import best_round_of

SOME = (0.1, 0.2, 0.3, math.nan)  # few values, so that many are equal


def best_of_all(rounds: Sequence[Mapping[str, float]]) -> int | None:
    """The same, of the whole list at once."""

    def recorded(name: str) -> dict[int, float]:
        found = {number: metrics.get(name, math.nan) for number, metrics in enumerate(rounds)}
        return {number: value for number, value in found.items() if math.isfinite(value)}

    if stops := recorded("stop/best"):
        best = stops[max(stops)]
        equals = {number: value for number, value in recorded("stop/value").items() if value == best}
        return best_round_of(equals, recorded("loss/validation"), higher=True)[0] if equals else None
    if accuracies := recorded("accuracy/mean"):
        losses = next(filter(None, (recorded(f"loss/{split}") for split in ("test", "validation", "train"))), {})
        return best_round_of(accuracies, losses, higher=True)[0]
    losses = recorded("loss/test")
    return best_round_of(losses, losses, higher=False)[0] if losses else None


@pytest.mark.parametrize("higher", [True, False, None], ids=["higher is better", "lower is better", "no metric stops"])
def test_the_best_round_so_far_is_that_of_all_rounds_so_far(higher: bool | None) -> None:
    draw = random.Random(0)
    for _ in range(200):
        names = draw.sample(["accuracy/mean", "loss/test", "loss/validation", "loss/train"], draw.randrange(5))
        best, rounds, values = BestSoFar(), list[dict[str, float]](), list[float]()
        for number in range(8):
            metrics = {name: draw.choice(SOME) for name in names if draw.random() < 0.8}
            value = draw.choice(SOME)
            if higher is not None and math.isfinite(value):
                values.append(value)
                metrics |= {"stop/value": value, "stop/best": (max if higher else min)(values)}
            rounds.append(metrics)
            best.add(number, metrics, lambda: "validation")
            assert best.number == best_of_all(rounds), rounds
