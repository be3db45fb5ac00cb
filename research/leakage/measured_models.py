"""What private runs that measure models show of one member: ten constant models, changed bits, records.

    python -m leakage.measured_models

It measures what docs/results/private-sums.md says. The members hold digits whose labels are dealt by Dirichlet(0.3).
The coordinator is malicious: it chooses the models, the runs and the members that it asks, and t members give it their
noise. Of a model that always predicts one class, a member's accuracy is the share of the class, and its loss 10 times
the share of the others. The coordinator knows how shares are spread over members, and reads its sums by the best linear
estimate.

The member's own rule, `check_sessions`, decides with a ledger which questions it answers. Vectors, noise and thresholds
are those of `federation.secure`; masks cancel exactly, and are left out.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from federation.digests import digest
from federation.secure.evaluation import deviation, noise
from federation.secure.thresholds import SMALLEST, Mode, Thresholds, assumed
from federation.spec.sharing import Unshared
from federation.vectors import update_layout
from federation.work.base import Memory, Origin, Shape, WorkError, WorkingClient
from federation.work.secure.limits import check_sessions
from federation.work.site import EVALUATE, MemoryLedger, SecurePolicy, Site
from leakage import labels
from leakage.evaluations import federation
from leakage.federation import CLASSES, AttackedFederation, Reals

SEEDS = (0, 1, 2)
VICTIMS = 4  # attacked members of each federation
SIGMAS = (0.1, 0.3)


@dataclass(frozen=True)
class AskedModel:
    """A model, with one bit changed in a copy, in a run, asked of some members."""

    label: int
    copy: int
    run: str
    asked: tuple[int, ...]

    @property
    def model(self) -> str:
        """The digest: a changed bit is another model."""
        return digest(f"always {self.label}, copy {self.copy}".encode())


Plan = Sequence[AskedModel]


class _Nothing(Memory):
    """The rule of a member reads its ledger alone."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps nothing."""


@dataclass
class Rules:
    """The rules of all members, of whom some collude and answer everything.

    Attributes:
        members: their number.
        approved: the digests of the models with which owners have approved each run.
        evaluations: the limit of every owner.
    """

    members: int
    approved: frozenset[str]
    evaluations: int = 1000
    _sites: list[Site] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = {"digits": SecurePolicy(evaluations=self.evaluations)}
        self._sites = [Site(policies=policy, ledger=MemoryLedger()) for _ in range(self.members)]

    def answers(self, number: int, question: AskedModel, honest: int) -> tuple[int, ...]:
        """The members whose vectors are in the sum; none where these are too few for their owners."""
        willing = tuple(i for i in question.asked if i >= honest or self._measures(self._sites[i], number, question))
        return willing if len(willing) >= max(SMALLEST, 3 * assumed(self.members) + 1) else ()

    def _measures(self, site: Site, number: int, question: AskedModel) -> bool:
        origin = Origin("f", question.run, "digits", digest(b"spec"), question.model, 0, Unshared())
        shape = Shape(update_layout([("w", 1)]), ("loss",), ("loss",))
        client = WorkingClient("member", 0, 0, shape, _Nothing(), origin, site, measures=self.approved)
        try:
            check_sessions(client, f"{number}", work=EVALUATE, count=True)
        except WorkError:
            return False
        return True


def read(shares: Reals, plan: Plan, rules: Rules, sigma: float, honest: int, random: np.random.Generator) -> Reals:
    """The coordinator's estimate of every honest member's histogram, (honest, CLASSES), from a plan."""
    mean, spread = shares.mean(0), shares.std(0)
    guess = np.tile(mean, (honest, 1))
    sums: dict[int, list[tuple[Reals, float, float]]] = {}
    for number, question in enumerate(plan):
        whole = rules.answers(number, question, honest)
        V = [i for i in whole if i < honest]
        if not V:
            continue
        s, label = deviation(sigma, Thresholds(len(whole), Mode.SUM)), question.label
        drawn = np.array([noise(random.bytes(32), bytes(32), 2) for _ in V])
        # The accuracy and the loss of a constant model are two readings of one share.
        reading = shares[V, label].sum() + s * (drawn[:, 0].sum() - drawn[:, 1].sum()) / 2
        row = np.zeros(honest)
        row[V] = 1
        sums.setdefault(label, []).append((row, float(reading), s * s * len(V) / 2))
    for label, found in sums.items():
        A, y, errors = (np.array(column) for column in zip(*found, strict=True))
        prior = spread[label] ** 2
        gain = prior * A.T @ np.linalg.inv(prior * A @ A.T + np.diag(errors + 1e-12))
        guess[:, label] += gain @ (y - A @ guess[:, label])
    return guess


def certainty(questions: Sequence[tuple[int, ...]], members: int, honest: int, sigma: float, spread: float) -> float:
    """The variance that the sums over these members leave of the first one's share."""
    A = np.array([[float(i in V) for i in range(honest)] for V in questions])
    errors = [deviation(sigma, Thresholds(len(V), Mode.SUM)) ** 2 * sum(i < honest for i in V) / 2 for V in questions]
    prior = spread**2
    kept = np.eye(honest) * prior - prior * A.T @ np.linalg.inv(prior * A @ A.T + np.diag(errors)) @ A * prior
    return float(kept[0, 0])


def searched(members: int, honest: int, sigma: float, spread: float, sums: int) -> list[tuple[int, ...]]:
    """The members of a number of sums that show most of the first one, as hill climbing finds them."""
    random, least = np.random.default_rng([members, sums]), max(SMALLEST, 3 * assumed(members) + 1)
    everybody = tuple(range(members))
    best = [everybody if k % 2 else everybody[1:] for k in range(sums)]
    left = certainty(best, members, honest, sigma, spread)
    for _ in range(2000):
        other, place = list(best), int(random.integers(sums))
        flipped = set(other[place]) ^ set(random.choice(members, 1 + int(random.integers(3)), replace=False).tolist())
        if len(flipped) < least:
            continue
        other[place] = tuple(sorted(flipped))
        found = certainty(other, members, honest, sigma, spread)
        if found < left:
            best, left = other, found
    return best


def plans(members: int, sets: Sequence[tuple[int, ...]], victim: int) -> Iterator[tuple[str, Plan]]:
    """The attacks on one member, by name; `sets` are the members of sums that show most of the first member."""
    everybody = tuple(range(members))
    without = tuple(i for i in everybody if i != victim)

    def pairs(copies: int) -> Plan:
        both = itertools.product(range(CLASSES), range(copies))
        return [
            q for c, k in both for q in (AskedModel(c, 2 * k, "a", everybody), AskedModel(c, 2 * k + 1, "a", without))
        ]

    def swapped(V: tuple[int, ...]) -> tuple[int, ...]:
        places = {0: victim, victim: 0}
        return tuple(sorted(places.get(i, i) for i in V))

    once = [AskedModel(c, 0, "a", everybody) for c in range(CLASSES)]
    again = [AskedModel(c, 0, "copy", without) for c in reversed(range(CLASSES))]
    yield "nothing is seen", []
    yield "ten constant models, all members", once
    yield "the same, then a copy of the run under another name, in another order, without the member", [*once, *again]
    yield "each model, and with one bit changed without the member: 20 evaluations", pairs(1)
    yield "the same where the owner allows ten evaluations, by all runs together", pairs(1)
    yield "five such pairs for each model: 100 evaluations", pairs(5)
    chosen = [AskedModel(c, k, "a", V) for c in range(CLASSES) for k, V in enumerate(map(swapped, sets))]
    yield "as many, the members of each sum found by a search", chosen
    yield "25 pairs for each model: 500 evaluations", pairs(25)


def measured(made: AttackedFederation, sigma: float) -> dict[str, Reals]:
    """By attack, the total-variation distance of the guessed histogram, and how often the top label is right (%)."""
    shares, members = made.members.histograms, made.specification.members
    honest, spread = made.targets, float(made.members.histograms.std(0).mean())
    random = np.random.default_rng([made.specification.seed, members, int(100 * sigma)])
    found: dict[str, list[tuple[float, float]]] = {}
    sets = searched(members, honest, sigma, spread, 10)
    for victim in range(VICTIMS):
        for name, plan in plans(members, sets, victim):
            limit = 10 if "ten evaluations" in name else 1000
            rules = Rules(members, frozenset(question.model for question in plan), limit)
            guess = labels.on_simplex(read(shares, plan, rules, sigma, honest, random)[victim : victim + 1])
            scores = labels.scores(guess, shares[victim : victim + 1])
            found.setdefault(name, []).append((scores["labels/distance"], scores["labels/top"]))
    return {name: np.mean(values, 0) for name, values in found.items()}


def told(members: int, sigma: float, *, pair: bool, trials: int = 20_000) -> float:
    """How often a sum, or a pair of sums, tells whether a record is there: a huge loss counts as the largest one."""
    whole, less = Thresholds(members, Mode.SUM), Thresholds(members - 1, Mode.SUM)
    honest, random = members - whole.t, np.random.default_rng([members, int(100 * sigma), pair])
    variance = deviation(sigma, whole) ** 2 * honest
    if pair:
        variance += deviation(sigma, less) ** 2 * (honest - 1)
    present = random.integers(0, 2, trials)
    seen = present + random.normal(0, np.sqrt(variance), trials) > 0.5
    return float((seen == present).mean())


def main() -> None:
    """Prints the tables."""
    for sigma in SIGMAS:
        found = [[measured(federation(members, seed), sigma) for seed in SEEDS] for members in (10, 20)]
        names, columns = list(found[0][0]), [np.mean([[*one.values()] for one in of_all], 0) for of_all in found]
        _write(f"Noise {sigma:g}", "10 members: distance", "top label, %", "20 members: distance", "top label, %")
        _write(*["---"] * 5)
        for place, name in enumerate(names):
            _write(
                name, *(text for column in columns for text in (f"{column[place][0]:.2f}", f"{column[place][1]:.0f}"))
            )
    _write("Noise", "Members", "one sum", "a pair", "eight bits of a sample, a model each")
    _write(*["---"] * 5)
    for sigma, members in itertools.product(SIGMAS, (6, 10, 20)):
        one, pair = told(members, sigma, pair=False), told(members, sigma, pair=True)
        _write(f"{sigma:g}", members, f"{one:.3f}", f"{pair:.3f}", f"{one**8:.3f}")


def _write(*cells: object) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
