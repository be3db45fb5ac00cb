"""Whether a sum tells that one member has a certain sample: two worlds, and the best reader of the numbers.

In each trial there are two worlds that differ in one sample of the attacked member. The coordinator chooses range,
bins and kind of the column, and which number it reads, so that it tells the worlds apart on half of the trials. `told`
is how often it is right on the other half, 0.5 for a guess. The numbers are those of the members' own code.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from federation.statistics.data_columns import Column
from federation.statistics.rules import MemberRules
from federation.statistics.words import PLACES
from federation.work.statistics.work import Statistics
from statistics_search.room import MemberTable, Room, SumQuestion
from statistics_search.specification import StatisticsSearchSpecification

Numbers = NDArray[np.float64]
_OUTLIER, _VALUE, _SIZE = 5000.0, 71.0, 150
_CODES, _MOST = (-999.0, 99999.0), 20  # each of 5 to 20 samples of every member, in attacks on coded values


def told(specification: StatisticsSearchSpecification) -> dict[str, float]:
    """The measures of an attack.

    Returns:
        `told`: how often the best reader is right about the attacked member's sample; `questions`: how many forms of
        the question it chose from.
    """
    rng = np.random.default_rng([specification.seed, specification.members])
    trials = [_pair(specification, rng) for _ in range(specification.trials)]
    half, best, right = len(trials) // 2, 0.0, 0.5
    asked = _questions(specification)
    for columns, bins in asked:
        read = [[_read(specification, world, columns, bins) for world in pair] for pair in trials]
        if any(one is None for pair in read for one in pair):
            continue
        seen = np.array(read, dtype=np.float64)  # trials, worlds, readings
        for at in range(seen.shape[2]):
            level, sign, score = _threshold(seen[:half, :, at])
            if score > best:
                best, right = score, _score(seen[half:, :, at], level, sign)
    _check_session(specification, trials[0][0], *asked[0])
    return {"told": right, "questions": float(len(asked))}


def _pair(
    specification: StatisticsSearchSpecification, rng: np.random.Generator
) -> tuple[list[Numbers], list[Numbers]]:
    """The column of each member, without the sample and with it, in place of another one."""
    kind, m = specification.attack, specification.members
    if kind in ("class", "flag"):
        rate = 0.0 if specification.knows == "others" else 0.02
        without = [(rng.random(_SIZE) < (rate if at else 0.0)).astype(float) for at in range(m)]
        sample = 1.0
    else:
        without = [np.clip(rng.normal(55, 12, _SIZE).round(), 18, 95) for _ in range(m)]
        if kind in ("coded", "coded-inside"):
            for values in without:
                for number, code in enumerate(_CODES):
                    values[number * _MOST :][: int(rng.integers(5, _MOST + 1))] = code
        sample = {"digits": 55.37, "missing": np.nan, "value": _VALUE}.get(kind, _OUTLIER)
    with_ = [values.copy() for values in without]
    first = _MOST * len(_CODES) if kind in ("coded", "coded-inside") else 0
    with_[0][int(rng.integers(first, _SIZE))] = sample
    if kind == "again":  # a new sample, of which the coordinator asks what it is
        before = without[0][:-1]
        low, high = (np.append(before, value) for value in (40.0, 70.0))
        return [before, low, *without[1:]], [before, high, *without[1:]]
    return without, with_


def _questions(specification: StatisticsSearchSpecification) -> list[tuple[tuple[Column, ...], int]]:
    """The columns and bins that the coordinator tries."""
    name, kind = "v", specification.attack
    if kind == "class":
        return [((Column(name=name, classes=2),), 2), ((Column(name=name, classes=3),), 2)]
    if kind == "flag":
        ranges = [(0.0, 1.0), (-1.0, 1.0), (0.0, 2.0), (0.5, 1.5), (-1e6, 1.0)]
    elif kind == "threshold":  # most or all other values are outside
        ranges = [(100.0, 6000.0), (4999.0, 5001.0), (54.0, 6000.0), (50.0, 5000.5), (45.0, 5000.5), (55.5, 5001.0)]
    elif kind == "edges":
        ranges = [(0.0, 4999.5), (0.0, 5000.0), (0.0, 5000.5), (5000.0 - 2.0**20, 5000.5), (18.0, 5000.0 + 2.0**-10)]
    elif kind == "coded":
        ranges = [
            (0.0, 1e4),
            (0.0, 6000.0),
            (0.0, 99998.0),
            (-1000.0, 6000.0),
            (-998.0, 5000.5),
            (-1e6, 1e4),
            (0.0, 100.0),
        ]
    elif kind == "coded-inside":
        ranges = [(0.0, 1e5), (-998.0, 1e5), (-1000.0, 1e5), (-1e6, 1e6), (-1e9, 1e9)]
    elif kind == "outlier":
        ranges = [(0.0, 100.0), (0.0, 1e4), (0.0, 1e6), (-1e6, 1e6), (-1e9, 1e4), (54.0, 1e4)]
    else:
        ranges = [(0.0, 100.0), (0.0, 128.0), (50.0, 80.0), (55.0, 56.0), (70.5, 71.5), (0.0, 1e6)]
    return [((Column(name=name, low=low, high=high),), bins) for low, high in ranges for bins in (2, 5, 15)]


def _read(
    specification: StatisticsSearchSpecification, world: Sequence[Numbers], columns: tuple[Column, ...], bins: int
) -> list[float] | None:
    """All that the coordinator reads of the sum; None if a member declines."""
    work, rules = (
        Statistics(columns=columns, bins=bins, splits=("train",)),
        MemberRules(smallest=specification.smallest),
    )
    told = []
    members = world[:2] if specification.attack == "again" else world[: _honest(specification)]
    for values in members:
        table = MemberTable(values[:, None], np.zeros((len(values), 0)), columns)
        samples, sums = work.moved(table, rules)
        if rules.problem(samples, bins) is not None:
            return None
        told.append(work.in_words(samples, sums))
    if specification.attack == "again":
        return _readings(told[1] - told[0], columns[0])
    first = told[0] if specification.knows == "others" else np.sum(told, axis=0)
    return _readings(first, columns[0])


def _honest(specification: StatisticsSearchSpecification) -> int:
    """The members of a sum whose numbers the coordinator does not know."""
    m = specification.members
    return 1 if specification.knows == "others" else (2 * m) // 3 + 1 - (m - 1) // 3


def _readings(words: NDArray[np.int64], column: Column) -> list[float]:
    """The words, what is missing in the counts, and what of the sums is no multiple of the others' digits."""
    found = [float(word) for word in words]
    samples, values, _, _, missing, outside = (int(word) for word in words[:6])
    cells = words[6:] if column.classes else words[8:]
    found += [float(values - missing - outside - int(cells.sum())), float(samples - values)]
    if column.low is not None and column.high is not None:
        low, high = Fraction(column.low), Fraction(column.high)
        count, middle, half = values - missing, (low + high) / 2, (high - low) / 2
        total = count * middle + half * Fraction(int(words[6]), 1 << PLACES)
        squares = half**2 * Fraction(int(words[7]), 1 << PLACES) + 2 * middle * total - count * middle**2
        found += [float(abs(number - round(number))) for number in (total, squares)]
        found += [float(total), float(squares)]
    return found


def _threshold(seen: Numbers) -> tuple[float, float, float]:
    """The level and the direction that tell worlds apart best, (trials, 2), and how often they are right."""
    levels = np.unique(seen)
    middles = (levels[1:] + levels[:-1]) / 2 if len(levels) > 1 else levels
    if len(middles) > 64:
        middles = np.quantile(middles, np.linspace(0, 1, 64))
    return max(
        ((float(level), sign, _score(seen, level, sign)) for level in middles for sign in (1.0, -1.0)),
        key=lambda found: found[2],
    )


def _score(seen: Numbers, level: float, sign: float) -> float:
    right = [(sign * (seen[:, 0] - level) < 0).mean(), (sign * (seen[:, 1] - level) > 0).mean()]
    return float(np.mean(right))


def _check_session(
    specification: StatisticsSearchSpecification, world: Sequence[Numbers], columns: tuple[Column, ...], bins: int
) -> None:
    """Checks that a whole session of real members sums what `_read` has added up."""
    rules = MemberRules(smallest=specification.smallest)
    work = Statistics(columns=columns, bins=bins, splits=("train",))
    tables = {
        f"m{at:02}": MemberTable(values[:, None], np.zeros((len(values), 0)), columns)
        for at, values in enumerate(world)
    }
    room = Room(tables, rules=rules)
    answer = room.ask(SumQuestion(columns, bins))
    told = [work.in_words(*work.moved(table, rules)) for table in tables.values()]
    if answer is None or not (answer[1].words.view(np.int64) == np.sum(told, axis=0)).all():
        raise AssertionError(f"a session does not give the sum of the words: {room.declined}")
