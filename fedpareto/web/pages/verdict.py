"""The verdict on a run in a sentence: who gained, and who is left behind."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedpareto.formatting import natural, number
from fedpareto.series import mean
from fedpareto.turnout import Turnout, enumerated

Measure = Literal["accuracy", "loss"] | str
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NEAR = 0.02  # of the range of the values: nobody is left behind


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Each member's value at its first and at its last evaluation, by name.

    Attributes:
        measure: "accuracy", which is a share; "loss"; or the name of a metric of the task.
        first: after the first evaluated round.
        last: after the last one.
        higher: True if higher values are better.
        rounds: evaluated so far; with one, nobody can have gained.
    """

    measure: Measure
    first: Mapping[str, float]
    last: Mapping[str, float]
    higher: bool
    rounds: int

    @property
    def worst_first(self) -> list[str]:
        """The members with a last value, the worst off first; equals by their names."""
        known = [name for name, value in self.last.items() if math.isfinite(value)]
        return sorted(known, key=lambda name: (self.last[name] if self.higher else -self.last[name], natural(name)))

    @property
    def mean(self) -> float:
        """The mean of the last values."""
        return mean(self.last.values())

    @property
    def compared(self) -> list[str]:
        """The members with both values."""
        both = (name for name in self.last if math.isfinite(self.last[name] - self.first.get(name, math.nan)))
        return sorted(both, key=natural)

    @property
    def lost(self) -> list[str]:
        """The members that are worse off than at first, by name."""
        sign = 1 if self.higher else -1
        return [name for name in self.compared if sign * (self.last[name] - self.first[name]) < 0]

    @property
    def behind(self) -> bool:
        """True if the worst off is clearly further from the mean than members are on average."""
        worst = self.worst_first[:1]
        if len(self.last) < 2 or not worst:
            return False
        scale = 1.0 if self.measure == "accuracy" else abs(self.mean) or 1.0
        return abs(self.last[worst[0]] - self.mean) > _NEAR * scale

    def distance(self, name: str) -> str:
        """How far a member is from the mean, in words: "21 points below the mean"."""
        difference = self.last[name] - self.mean
        side = "below" if difference < 0 else "above"
        if self.measure == "accuracy":
            points = abs(100 * difference)
            written = f"{points:.0f}" if points >= 1 else f"{points:.1f}"
            return f"{written} {'point' if written == '1' else 'points'} {side} the mean"
        return f"{number(abs(difference))} {side} the mean"

    def value(self, name: str) -> str:
        """The last value of a member, as text."""
        return f"{100 * self.last[name]:.0f} %" if self.measure == "accuracy" else number(self.last[name])


def verdict(
    standing: Standing | None, *, over: bool, accuracy: float = math.nan, turnout: Turnout | None = None
) -> str:
    """The sentence about a run, without its full stop; a standing of None is of a run without single members' results.

    "All ten members gained; hospital-9 is 21 points below the mean", or while it runs "hospital-9 is at 61 %, 26 points
    below the mean". Members that take no part come first: "hospital-3 never took part: it declined in 40 of 40 rounds;
    all nine others gained".

    Args:
        standing: the members' results.
        over: True if the run has ended.
        accuracy: the mean, if only that is known.
        turnout: who took part; None if everybody did.
    """
    turnout = turnout or Turnout()
    told = [turnout.sentence(over=over), _results(standing, over=over, accuracy=accuracy, turnout=turnout)]
    sentence = "; ".join(filter(None, told))
    names = {*turnout.names, *(standing.last if standing else ())}
    return sentence if sentence.partition(" ")[0] in names else sentence[:1].upper() + sentence[1:]


def _results(standing: Standing | None, *, over: bool, accuracy: float, turnout: Turnout) -> str:
    """How the members fare, as a part of a sentence."""
    if standing is None or not standing.worst_first:
        if math.isfinite(accuracy):
            return f"the mean accuracy is {100 * accuracy:.0f} %; the members' own results are not disclosed"
        return "no member's result is known" + ("" if over else " yet")
    worst, members = standing.worst_first[0], len(standing.worst_first)
    if over:
        told = _gained(standing, turnout)
        return told + (f"; {worst} is {standing.distance(worst)}" if standing.behind else _even(standing))
    if standing.behind:
        at = "is at" if standing.measure == "accuracy" else f"has a {standing.measure} of"
        return f"{worst} {at} {standing.value(worst)}, {standing.distance(worst)}"
    if members == 1:
        return f"{worst} has the {standing.measure} {standing.value(worst)}"
    return f"{counted_members(members)} are close to each other; the mean {standing.measure} is {_mean(standing)}"


def _mean(standing: Standing) -> str:
    return f"{100 * standing.mean:.0f} %" if standing.measure == "accuracy" else number(standing.mean)


def counted_members(count: int, noun: str = "member") -> str:
    """A number of members in words: "ten members", "13 members"."""
    return f"{_word(count)} {noun}{'' if count == 1 else 's'}"


def _word(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)


def _gained(standing: Standing, turnout: Turnout) -> str:
    """How many gained and lost, of the members with a result; the others that took part are named."""
    members, lost = len(standing.compared), standing.lost
    if standing.rounds < 2 or not members:
        return f"{counted_members(len(standing.worst_first))} evaluated the model"
    unknown = sorted(turnout.present - standing.last.keys(), key=natural)
    others = bool(turnout.absent) and not {*turnout.absent} & standing.last.keys()
    noun = "other" if others else "member"
    everybody = f"all {counted_members(members, noun)}" if members > 1 else standing.compared[0]
    if unknown:
        everybody = f"{_word(members)} of {counted_members(members + len(unknown), noun)}"
    if not lost:
        told = f"{everybody} gained"
    elif len(lost) == members:
        told = f"{everybody} lost"
    else:
        named = enumerated(lost) if len(lost) <= 2 else counted_members(len(lost))
        of_all = counted_members(members + len(unknown), noun)
        told = f"{_word(members - len(lost))} of {of_all} gained, {named} lost"
    if unknown:
        named = enumerated(unknown) if len(unknown) <= 2 else counted_members(len(unknown))
        told += f", {named} {'has' if len(unknown) == 1 else 'have'} no result"
    return told


def _even(standing: Standing) -> str:
    return ", and nobody is far from the mean" if len(standing.worst_first) > 1 else ""
