"""What a run asks of a site, in words: for `worker runs RUN` and the member's console.

The words say what the run's specification asks for, and apart from that what the worker compares with it. They promise
no more than this.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import unified_diff
from typing import Any

from federation.spec.run_spec import RunSpec, SpecError
from federation.text import counted, escaped
from fedpareto.formatting import size
from fedpareto.web.site.budgets import SiteBudgets
from worker.home import WorkerHome
from worker.site.policy_file import Policy
from worker.site.run_requests import APPROVED, RunRequest
from worker.status import OfferedTask, read_status

_FLOAT_BYTES = 4
_NAMED = 10  # models
_SUM = "the coordinator sees one weighted sum of the updates of a round"
_SKETCHED = f"{_SUM}, and inner products of sketches of them; no member's own update"
_SEEN = {
    "off": "the coordinator's operator sees the update of every member, and a security officer can export it",
    "sum": f"{_SUM}, and no member's own",
    "private": _SKETCHED,
    "verified": f"{_SKETCHED}. It checks the length of each",
}


@dataclass(frozen=True)
class SiteFacts:
    """What a site has to compare a run with: the owner's rules, the budgets, and the tasks that its worker offers."""

    policy: Policy
    budgets: SiteBudgets
    offers: Mapping[str, OfferedTask]

    @classmethod
    def read(cls, home: WorkerHome) -> "SiteFacts":
        """Reads the facts of a home. A worker that runs has told the tasks that it offers.

        Raises:
            WorkerHomeError, PolicyError, OSError: a file is damaged, or cannot be read now.
        """
        policy, seen = Policy.load(home.policy), read_status(home.status)
        offers = () if seen is None else seen.status.offers
        return cls(policy, SiteBudgets.read(home, policy), {offer.task: offer for offer in offers})


def asked_words(run: RunRequest, facts: SiteFacts) -> Iterator[tuple[str, str]]:
    """Names and sentences about what the specification asks for, without control characters."""
    yield "asked by", escaped(run.submitted_by or "nobody whom the coordinator names")
    yield "task", escaped(run.task)
    try:
        spec = RunSpec.parse(run.document)
    except SpecError as error:
        yield "specification", escaped(f"this worker cannot read it: {error}")
        return
    if spec.describes:
        yield from _described(run, spec)
        return
    if not spec.trains:
        yield from _measures(run, spec, facts)
        return
    yield "rounds", f"{spec.rounds} at most"
    rule = ", ".join(f"{name} = {value}" for name, value in spec.algorithm.hyperparameters.items())
    yield "algorithm", escaped(spec.algorithm.name + (f" ({rule})" if rule else ""))
    yield "would leave", _leaves(spec)
    yield "how much", _bytes(run, spec, facts)
    yield "who sees it", f"{_SEEN[spec.privacy.secure]}. Administrators see the numbers and names"
    yield (
        "who gets the model",
        "administrators, and each member with an accepted reply"
        if spec.results == "members"
        else "administrators alone by a command; members that train or evaluate have it, too",
    )
    yield "privacy budget (epsilon)", _epsilon(run, spec, facts)
    yield "private rounds", _private_rounds(run, spec, facts)


def _described(run: RunRequest, spec: RunSpec) -> Iterator[tuple[str, str]]:
    """What a run that describes data asks for."""
    asked, private = spec.statistics, spec.privacy.secure != "off"
    yield "kind", "statistics: it describes your data, trains nothing, and takes no model"
    yield "columns", escaped(", ".join(asked.columns))
    yield (
        "would leave",
        f"counts, sums, and histograms of at most {asked.bins} bins, of these columns on {', '.join(asked.splits)}, "
        f"{'masked' if private else 'in the clear'}, by the rules of [statistics] in policy.toml. "
        f"`fedpareto worker runs {escaped(run.run)}` and the page of the run show the numbers",
    )
    if private:
        yield "who sees it", "the coordinator's operator sees the sums over all members, and no member's own numbers"
        yield (
            "afterwards",
            "your data join no private sum over other members, for another task, or of other columns, ranges, classes, "
            "bins or splits, and are not described in the open: two such sums would show those who are in one of them",
        )
        return
    yield "who sees it", "the coordinator's operator sees your numbers. Administrators see the totals of all members"


def compared_words(run: RunRequest, policy: Policy) -> list[str]:
    """What the worker compares of the work for a run, as sentences; it compares no more than this."""
    if run.evaluates:
        once = [] if run.discloses is None else ["It measures each model privately once, over all runs."]
        return [
            "The worker works for this run only under the specification with this digest, and for this task.",
            "It measures the models that the specification names, each in its round, and no others. It trains nothing.",
            *once,
            "Each assignment is within the limits of policy.toml.",
        ]
    shown = [
        "The worker works for this run only with this specification, which its digest names, and for this task.",
        "In round 0 it starts from the initial model with this digest. It cannot tell where later models come from.",
        "Each assignment is within the limits of policy.toml.",
    ]
    if any(run.task in (rule.tasks or (name,)) for name, rule in policy.privacy.items()):
        shown.append("Each training has at least the noise of policy.toml, and stays within its epsilon.")
    if run.describes is not None:
        return [
            *shown[:1],
            "It describes the columns that the specification names, on its splits, and declines all other work.",
        ]
    if run.discloses is None:
        shown.append(
            "Rounds, algorithm and the rest of the specification are the coordinator's word: the worker does not "
            "compare an assignment of an open run with them."
        )
    else:
        shown.append(
            "No update and no gradient leaves in the clear, and no evaluation that the specification or policy.toml "
            "does not disclose. Each private round is within the limits of policy.toml."
        )
        shown.append("The number of rounds is the coordinator's word.")
    return shown


def can_be_approved(run: RunRequest, policy: Policy) -> bool:
    """True if the policy allows the owner to approve the run."""
    return replace(run, owner=APPROVED).verdict(policy).answer == "accepted"


@dataclass(frozen=True)
class Change:
    """A key of the specification with two values, as JSON; empty where there is none."""

    key: str
    now: str
    before: str


def changes(run: RunRequest, before: RunRequest) -> list[Change]:
    """The keys of a run's specification whose values differ from those of another run, with defaults filled in.

    Who submitted the run, and the initial model, are keys, too. The lines that differ are one key if a specification
    cannot be read.
    """
    new, old = _values(run), _values(before)
    names = [*new, *(name for name in old if name not in new)]
    found = [Change(name, new.get(name, ""), old.get(name, "")) for name in names if new.get(name) != old.get(name)]
    return [Change(*(escaped(text) for text in (change.key, change.now, change.before))) for change in found]


def changed_lines(run: RunRequest, before: RunRequest) -> list[str]:
    """The lines of the specification that differ from another one, as of `diff -u`, without control characters."""
    old, new = (each.document.decode(errors="replace").splitlines() for each in (before, run))
    return [escaped(line) for line in unified_diff(old, new, "before", "now", n=0, lineterm="")]


def _values(run: RunRequest) -> dict[str, str]:
    """The values of a specification as JSON, by their keys; one that cannot be read has none."""
    found = {"submitted by": run.submitted_by, "initial model": run.initial_model}
    try:
        document = RunSpec.parse(run.document).model_dump(mode="json")
    except SpecError:
        return found
    return found | dict(flat_values(document))


def flat_values(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The values of a document as JSON, by their dotted keys."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from flat_values(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value, ensure_ascii=False)


def _leaves(spec: RunSpec) -> str:
    private = spec.privacy.secure != "off"
    update = (
        "an update (how the model changed on your data), masked so that it can be read only in the sum of all members"
        if private
        else "an update (how the model changed on your data), readable by the coordinator; it reveals much of the data"
    )
    also = "" if private else ". Some algorithms also ask for sketches of gradients, which it can read, too"
    own = [name for name in spec.privacy.disclose if name != "evaluation"]
    shown = f"; and your own {', '.join(own)}, which the coordinator can read" if own else ""
    return f"after each training {update}{shown}; after each evaluation {_measured(spec)}{also}"


def _measures(run: RunRequest, spec: RunSpec, facts: SiteFacts) -> Iterator[tuple[str, str]]:
    """The same about a run that only measures models."""
    private, left = spec.evaluates_privately, facts.budgets.rounds(run.task).evaluations
    yield "rounds", f"{len(spec.models)}, one for each model; nothing is trained"
    more = f", and {len(spec.models) - _NAMED} more" if len(spec.models) > _NAMED else ""
    yield "models", ", ".join(spec.models[:_NAMED]) + more
    yield "would leave", f"in each round {_measured(spec)}"
    sees = (
        "the coordinator sees the mean of each value over all members, with noise, and no member's own"
        if private
        else "the coordinator's operator sees the values of every member"
    )
    yield "who sees it", f"{sees}. Administrators see the numbers and names"
    yield (
        "what it can show",
        "a model that always names one class asks for the share of this class in your data, and a model made for it "
        "asks whether you have a certain record: approve only models whose origin you know",
    )
    if private:
        planned = counted(len(spec.models), "is", "are")
        yield "private rounds", f"at most the {left.left} evaluations that are left of {left.most}; {planned} planned"


def _measured(spec: RunSpec) -> str:
    splits = ", ".join(spec.evaluated) or "no split"
    if spec.privacy.client_noise:
        return "nothing: this run measures no model"
    if spec.privacy.secure == "off" or "evaluation" in spec.privacy.disclose:
        return f"losses and metrics on {splits}, which the coordinator can read"
    return f"losses and metrics on {splits}, which it can read only in the sum of all members, with noise"


def _bytes(run: RunRequest, spec: RunSpec, facts: SiteFacts) -> str:
    most = facts.policy.limits.max_bytes
    bound = (
        f"your rule limits.max_bytes refuses work that moves more than {size(most)}"
        if most
        else "your rule limits.max_bytes is not set"
    )
    offer = facts.offers.get(run.task)
    if offer is None:
        return (
            f"{_FLOAT_BYTES} for each parameter and each objective, in each training; how many these are is known "
            f"while a worker runs that offers the task; {bound}"
        )
    update = _FLOAT_BYTES * offer.parameters * max(1, offer.objectives)
    of = f"{offer.parameters:,} numbers"
    several = f" and {offer.objectives} objectives" if offer.objectives > 1 else ""
    planned = f"{size(update * spec.rounds)} in {counted(spec.rounds, 'round')}"
    private = spec.privacy.secure != "off"
    besides = (
        "keys, sketches and messages of each session"
        if private
        else "messages, and sketches where the algorithm has any,"
    )
    return (
        f"each update at most {size(update)} (a model of {of}{several}), {planned} if no round is tried again; "
        f"{besides} come on top; {bound}"
    )


def _epsilon(run: RunRequest, spec: RunSpec, facts: SiteFacts) -> str:
    budgets = facts.budgets
    if budgets.problem:
        return escaped(f"not known: {budgets.problem}")
    noise = budgets.noise_of(run.task)
    if noise is None:
        asked = ""
        if spec.privacy.sample_noise:
            asked = f"; the run asks for noise of {spec.privacy.sample_noise:g} on samples, which the ledger counts"
        return f"none: your policy.toml asks for no noise on the data of this task{asked}"
    return f"at most the {noise.left:.4g} that are left of {noise.budget:g} for the data set {escaped(noise.data_set)}"


def _private_rounds(run: RunRequest, spec: RunSpec, facts: SiteFacts) -> str:
    rounds = facts.budgets.rounds(run.task)
    evaluations = f"{rounds.evaluations.left} evaluations that are left of {rounds.evaluations.most}"
    if spec.privacy.secure == "off":
        if facts.policy.secure.of(run.task).required:
            return f"none; of evaluations in the clear, at most the {evaluations}"
        return "none: the rounds of this run are not private"
    return (
        f"at most the {rounds.training.left} trainings that are left of {rounds.training.most}, and the {evaluations}; "
        f"{counted(spec.rounds, 'round')} are planned, and an attempt that fails counts, too"
    )
