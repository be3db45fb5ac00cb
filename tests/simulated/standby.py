"""A model of two workers of one member whose ledgers are in a database of the site: docs/reference/standby.md.

It has no part of the product. Each schedule draws what happens next: questions of a coordinator that lies, steps of the
workers, lost lines, leases that run out, and restores of the database. What left the site is then compared with the
ledger.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

BUDGET = 4
QUESTIONS = 6
STEPS = 120


@dataclass(frozen=True)
class Rules:
    """What the workers and the site do; each rule that is left out is a weaker design."""

    lease_in_transaction: bool = True  # otherwise the lease is compared when the work begins
    journal: bool = True  # the answer is in the database; otherwise on the machine that made it
    spends_before: bool = True  # the transaction is over before anything leaves
    unknown_is_not_done: bool = True  # a commit without an answer is looked up; otherwise it is taken for done
    identity: bool = True  # a database with another identity is not used until the owner has raised what was spent
    restores: str = "named"  # "named": a restore gives the database another identity; "silent": an image is put back


@dataclass(frozen=True)
class Database:
    """What the site's database keeps."""

    identity: int = 0
    lease: int = 0  # its number
    spent: tuple[str, ...] = ()  # one entry for each question that was answered
    answers: tuple[tuple[str, int], ...] = ()  # the journal: of each question, the answer


@dataclass
class Work:
    """A question under way: the answer is computed, then spent, then sent."""

    question: str
    answer: int
    lease: int
    spent: bool = False


@dataclass
class Worker:
    """One of the two machines; what is under way is lost when its process dies."""

    identity: int = 0
    lease: int = -1
    connected: bool = True
    works: list[Work] = field(default_factory=list)
    own: dict[str, int] = field(default_factory=dict)  # its answers, where the database has no journal


class Model:
    """One schedule.

    Attributes:
        left: each question with the answers that have left the site.
    """

    def __init__(self, seed: int, rules: Rules) -> None:
        self._random, self._rules = Random(seed), rules
        self._database, self._backup = Database(), Database()
        self._workers = Worker(), Worker()
        self._answers = 0
        self.raised = 0  # what the owner has added to the spent, after restores that it knows of
        self.left: dict[str, set[int]] = {}

    def play(self) -> list[str]:
        """Plays, and returns what is wrong."""
        for _ in range(STEPS):
            worker = self._random.choice(self._workers)
            self._random.choices(
                (self._ask, self._step, self._take_lease, self._line, self._die, self._back_up, self._restore),
                (6, 12, 2, 2, 1, 1, 0.3),
            )[0](worker)
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        spent = set(self._database.spent)
        for question, answers in sorted(self.left.items()):
            if len(answers) > 1:
                yield f"{len(answers)} different answers to {question} have left"
            if question not in spent and not self.raised:
                yield f"the answer to {question} has left, and no entry says so"
        if len(self.left) > BUDGET:
            yield f"{len(self.left)} answers have left, with a budget of {BUDGET}"

    def _ask(self, worker: Worker) -> None:
        """The coordinator asks anybody anything, also what was answered, and what it asks of the other one."""
        question = f"question {self._random.randrange(QUESTIONS)}"
        held = self._database.lease if self._rules.lease_in_transaction else worker.lease
        if worker.lease >= 0 and len(worker.works) < 3 and held >= worker.lease:
            self._answers += 1
            worker.works.append(Work(question, self._answers, worker.lease))

    def _step(self, worker: Worker) -> None:
        """One piece of work goes on: any, since its threads run as they like, and pause as long as they like."""
        if not worker.works:
            return
        work = self._random.choice(worker.works)
        if work.spent:
            worker.works.remove(work)
            self._send(work)
        else:
            self._spend(worker, work)

    def _spend(self, worker: Worker, work: Work) -> None:
        """One transaction: it compares, and writes entry and answer; its commit may be unknown."""
        rules, database = self._rules, self._database
        if not worker.connected:
            return  # it waits
        if rules.identity and database.identity != worker.identity:
            worker.works.remove(work)
            return
        if not rules.spends_before and self._random.random() < 0.5:
            self._send(work)
        given = dict(database.answers) if rules.journal else worker.own
        if work.question in given:
            work.answer, work.spent = given[work.question], True
            return
        stale = rules.lease_in_transaction and database.lease != work.lease
        if stale or len({*database.spent}) + self.raised >= BUDGET:
            worker.works.remove(work)
            return
        after = replace(
            database,
            spent=(*database.spent, work.question),
            answers=(*database.answers, (work.question, work.answer)),
        )
        lost = self._random.random() < 0.2  # the line, before or after the commit
        if not lost or self._random.random() < 0.5:
            self._database = after
            worker.own[work.question] = work.answer
        if lost:
            worker.connected = False
        work.spent = not lost or not rules.unknown_is_not_done

    def _send(self, work: Work) -> None:
        """The answer leaves; whether it arrives is the coordinator's word, and nothing depends on it."""
        self.left.setdefault(work.question, set()).add(work.answer)

    def _take_lease(self, worker: Worker) -> None:
        """The lease of the other one has run out, by the database's clock."""
        if worker.connected and (not self._rules.identity or worker.identity == self._database.identity):
            self._database = replace(self._database, lease=self._database.lease + 1)
            worker.lease = self._database.lease

    def _line(self, worker: Worker) -> None:
        worker.connected = not worker.connected

    def _die(self, worker: Worker) -> None:
        worker.works.clear()
        worker.lease = -1

    def _back_up(self, _: Worker) -> None:
        self._backup = self._database

    def _restore(self, _: Worker) -> None:
        """The database's disk is lost, and a backup is put back, while the workers go on.

        The owner, who is asked by workers that find another identity, adds the whole budget to what was spent: nobody
        knows what the backup lacks.
        """
        named = self._rules.restores == "named"
        self._database = replace(self._backup, identity=self._database.identity + named)
        if named and self._rules.identity:
            self.raised = BUDGET
            for worker in self._workers:
                worker.identity = self._database.identity if self._random.random() < 0.5 else worker.identity


def problems(seeds: range, rules: Rules) -> dict[int, list[str]]:
    """What is wrong, by seed."""
    return {seed: found for seed in seeds if (found := Model(seed, rules).play())}
