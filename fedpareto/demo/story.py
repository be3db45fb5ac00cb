"""The story that the results tell: columns of accuracies, and the sentences that the terminal and the page show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from federation.text import counted
from fedpareto.demo.demo_results import DemoResult
from fedpareto.demo.hospitals import ATTACKER, EIGHT, TWO
from fedpareto.demo.outsider import Verification
from fedpareto.demo.private_act import PrivateResult
from fedpareto.formatting import percent
from fedpareto.series import mean

TITLES = {  # of the runs that are compared, by name
    "fedavg": "FedAvg",
    "fedmgda": "FedMGDA+",
    "fedavg-attacked": "FedAvg, attacked",
    "fedmgda-attacked": "FedMGDA+, attacked",
}
_CHANCE = 0.2  # of ten classes, with room for luck
_SAME = 0.05  # points, which are shown with one decimal


@dataclass(frozen=True)
class HospitalAccuracies:
    """The accuracies of the hospitals after a run, in [0, 1], by name."""

    title: str
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class Story:
    """The columns and sentences that are shown at the end."""

    columns: Sequence[HospitalAccuracies]
    sentences: Sequence[str]


def story(runs: Mapping[str, DemoResult], private: PrivateResult | None, verification: Verification | None) -> Story:
    """The story of the runs, by name, without the acts that were not played."""
    columns = [HospitalAccuracies(title, runs[name].accuracy) for name, title in TITLES.items() if name in runs]
    sentences = []
    if private is not None and not runs:
        sentences.append(of_private(private))
    if runs:
        sentences += [_average(runs["fedavg"]), _fair(runs["fedavg"], runs["fedmgda"])]
        sentences.append(_attack(runs["fedmgda"], runs["fedavg-attacked"], runs["fedmgda-attacked"]))
    if verification is not None:
        sentences.append(_verified(verification))
    return Story(columns, sentences)


def of_the_record(run: DemoResult) -> str:
    """The warnings of the record about a run; without any, what the cosines of both kinds of updates say."""
    if run.warnings:
        return "The record warns: " + " ".join(f"{warning}." for warning in run.warnings)
    eight, two = (mean(run.cosine[name] for name in names) for names in (EIGHT, TWO))
    return (
        f"The record shows why: the cosine between an update and the step is {eight:.2f} on average for the eight and "
        f"{two:.2f} for the two. At 1 a step goes where a hospital pulls, at 0 it gains the hospital nothing. The "
        "coordinator warns of members that work against the step (well below 0). The two do not: the average hardly "
        "serves them, and nothing warns of that."
    )


def _average(run: DemoResult) -> str:
    return (
        f"Averaging (FedAvg) gives the eight hospitals with the usual scanner {percent(run.eight)}, and leaves the two "
        f"with the other scanner at {percent(run.two)}."
    )


def _fair(average: DemoResult, run: DemoResult) -> str:
    paid = 100 * (average.eight - run.eight)
    cost = f"the eight pay {paid:.1f} points" if paid > 0 else "the eight pay nothing"
    gained = f"FedMGDA+ brings the two to {percent(run.two)} in as many rounds"
    return f"{gained}, and the eight to {percent(run.eight)}: {cost}."


def _attack(fair: DemoResult, average_attacked: DemoResult, fair_attacked: DemoResult) -> str:
    chance = ", which is chance" if average_attacked.mean <= _CHANCE else ""
    difference = 100 * (fair_attacked.mean - fair.mean)
    end = f"{abs(difference):.1f} points {'above' if difference > 0 else 'below'} its end"
    if abs(difference) < _SAME:
        end = "exactly where it ended"
    rounds = counted(average_attacked.rounds_done, "round")
    return (
        f"{ATTACKER} multiplied its update by 100 and added 1000 to its loss: in {rounds} FedAvg fell to "
        f"{percent(average_attacked.mean)} on average{chance}. FedMGDA+ ended at {percent(fair_attacked.mean)}, {end} "
        "without the attack."
    )


def of_private(run: PrivateResult) -> str:
    """Sentences about what the coordinator could learn of the hospitals, and about the cheaters that were named."""
    named = "".join(f" {name} entered a vector that was five times too long, and was named." for name in run.named)
    return (
        f"From the updates of an open round the coordinator could pick out the hospitals with the other scanner: "
        f"{run.open.right} of 2 are right. From the masked vectors of a private round {run.masked.right} are right, "
        f"and chance gives 0.4.{named}"
    )


def _verified(run: Verification) -> str:
    if not run.verified:
        return f"An outsider could not verify everything in {run.file}."
    where = f" ({run.wrong})" if run.wrong else ", but was not noticed: this is an error of fedpareto"
    rounds = counted(run.rounds, "round")
    return (
        f"An outsider verified every signature, weight and model of {rounds} of FedMGDA+ from one file. With one byte "
        f"changed the file was refused{where}."
    )
