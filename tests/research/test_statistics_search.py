"""Private statistics against a malicious coordinator of real members: sets of members, questions, samples, lies."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from statistics_search.room import SHAPE, TASK, KeptValues, Room, SumQuestion
from statistics_search.samples import told
from statistics_search.sets import COLUMNS, people, reached
from statistics_search.specification import Attack, StatisticsSearchSpecification

from federation.secure.thresholds import Mode, Thresholds, assumed, smallest_cohort
from federation.statistics.rules import MemberRules
from federation.work.base import Result, Work, WorkError, WorkingClient
from federation.work.secure.masking import Confirm, Mask
from federation.work.secure.ready import Ready
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import terms_bytes
from federation.work.site import DescribedEntry
from federation.work.statistics.work import Statistics
from tests.few import few

ASKED = SumQuestion(COLUMNS, 4)
NAMES = tuple(f"m{at:02}" for at in range(7))


def room(members: int = 7, seed: int = 0) -> Room:
    return Room(people(members, seed), assumed=assumed(members))


def reasons(made: Room) -> set[str]:
    return set(made.declined.values())


def lies(made: Room, stage: SessionStage, **changed: Any) -> None:
    made.change = lambda at, name, work: replace(work, **changed) if at == stage else work


def spec(**changed: Any) -> StatisticsSearchSpecification:
    return StatisticsSearchSpecification(**{"name": "x", "seed": 0, **changed})


@pytest.mark.full
def test_one_sum_has_the_exact_totals_and_a_second_one_needs_the_same_members_and_question() -> None:
    made = room()
    answer = made.ask(ASKED)
    assert answer is not None
    counts = [np.bincount(table.y.astype(int), minlength=2) for table in made.tables.values()]
    assert (answer[1].words.view(np.int64)[-2:] == np.sum(counts, axis=0)).all()
    assert answer[1].record.coefficients == (1,) * 7
    other = replace(COLUMNS[0], high=90.0)
    for asked, reason in (
        (ASKED, "statistics:run"),
        (replace(ASKED, run="b", bins=5), "statistics:question"),
        (replace(ASKED, run="b", columns=COLUMNS[:1]), "statistics:question"),
        (replace(ASKED, run="b", columns=(other, COLUMNS[1])), "statistics:question"),
        (replace(ASKED, run="b", columns=(COLUMNS[1], COLUMNS[0])), "statistics:question"),
        (replace(ASKED, run="b", invited=NAMES[:6]), "statistics:members"),
        (replace(ASKED, run="b", approved=False), "statistics:approval"),
    ):
        assert made.ask(asked) is None
        assert reasons(made) == {reason}
    made.ask(replace(ASKED, run="c", lost=NAMES[:1]))
    assert reasons(made) == {"statistics:members"}, "V has confirmed another V"
    assert made.ask(replace(ASKED, run="d")) is not None, "another run, with its approval, over the same members"


@pytest.mark.full
def test_who_was_masked_for_a_sum_that_was_lost_joins_no_sum_of_others() -> None:
    made = room()
    assert made.ask(replace(ASKED, lost=NAMES[:3])) is None, "too few vectors arrived"
    assert made.ask(replace(ASKED, run="b", invited=NAMES[:6])) is None
    assert reasons(made) == {"statistics:members"}
    assert made.ask(replace(ASKED, run="c")) is not None


def test_tables_of_another_data_set_are_free_and_tasks_of_one_data_set_are_not() -> None:
    made = room()
    assert made.ask(ASKED) is not None
    site = made.sites[NAMES[0]]
    entry = site.ledger.described([TASK])[0]
    for name, shared in (("beside", True), ("apart", False)):
        sets = {TASK: frozenset({TASK, name}), name: frozenset({TASK, name})} if shared else {}
        ledger = replace(site, data_sets=sets).ledger
        found = ledger.described(replace(site, data_sets=sets).tasks_beside(name))
        assert found == ([entry] if shared else [])


def test_a_data_set_that_was_told_in_the_open_enters_no_sum_and_the_other_way_round() -> None:
    made = room()
    work = Statistics(columns=COLUMNS, bins=4, splits=("train",))

    def open_client(name: str) -> WorkingClient:
        site = replace(made.sites[name], statistics=MappingProxyType({TASK: MemberRules()}))
        origin = made.origin("open", COLUMNS, 4)
        return WorkingClient(name, 0, 0, SHAPE, KeptValues(), origin, site, data=made.tables[name])

    work.answer(open_client(NAMES[0]), Result({}, {}, {}, 100))
    made.ask(ASKED)
    assert made.declined == {("secure-ready", NAMES[0]): "statistics:told"}
    with pytest.raises(WorkError) as error:
        work.answer(open_client(NAMES[1]), Result({}, {}, {}, 100))
    assert error.value.reason == "statistics:summed"


def test_a_member_with_too_few_samples_or_data_under_noise_or_another_column_declines() -> None:
    made = room()
    made.sites[NAMES[0]] = replace(made.sites[NAMES[0]], summed=MappingProxyType({}))
    few = made.tables[NAMES[1]]
    few.x, few.y = few.x[:49], few.y[:49]
    made.tables[NAMES[2]]._columns = (replace(COLUMNS[0], name="weight"), COLUMNS[1])
    made.ask(ASKED)
    ready = {name: why for (stage, name), why in made.declined.items() if stage == SessionStage.READY}
    assert ready == {
        NAMES[0]: "policy:statistics", NAMES[1]: "statistics:samples", NAMES[2]: "statistics:column"
    }  # fmt: skip


@pytest.mark.full
def test_terms_and_lists_that_a_coordinator_changes_are_declined() -> None:
    made = room()
    lies(made, SessionStage.MASK, coefficients=(1,) * 6 + (2,))
    assert made.ask(ASKED) is None
    assert reasons(made) == {"coefficients"}
    lies(made, SessionStage.MASK, coefficients=(2**32 // 7,) * 7)
    assert made.ask(replace(ASKED, run="b")) is None
    assert reasons(made) == {"coefficients"}
    lies(made, SessionStage.MASK, length=3)
    assert made.ask(replace(ASKED, run="c")) is None
    assert reasons(made) == {"terms"}

    def other_work(stage: str, name: str, work: Work) -> Work:
        if not isinstance(work, Ready) or not isinstance(work.inner, Statistics):
            return work
        agreed = replace(work.agreed, work=replace(work.inner, bins=3))
        return replace(work, agreed=agreed, terms_bytes=terms_bytes(agreed))

    made.change = other_work
    assert made.ask(replace(ASKED, run="d")) is None
    assert reasons(made) == {"terms"}
    assert not made.sums
    assert all(not site.ledger.described([TASK]) for site in made.sites.values()), "nobody has masked"


@pytest.mark.full
def test_members_that_are_told_different_lists_open_one_sum_at_most() -> None:
    made = room()

    def split(stage: str, name: str, work: Work) -> Work:
        if stage == SessionStage.CONFIRM and isinstance(work, Confirm) and name in NAMES[3:]:
            return replace(work, members=work.members[1:], masked=work.masked[1:])
        return work

    made.change = split
    assert made.ask(ASKED) is None
    confirmed = [site.ledger.described([TASK])[0].confirmed for site in made.sites.values()]
    assert set(confirmed) == {NAMES, NAMES[1:]}
    made.change = None
    for run, lost in (("b", ()), ("c", NAMES[:1]), ("d", NAMES[1:2])):
        assert made.ask(replace(ASKED, run=run, lost=lost)) is None, "neither list has enough members left"


def test_a_member_that_dies_between_its_ledger_and_its_reply_answers_the_same_session_again() -> None:
    made, name = room(), NAMES[0]
    entry: list[DescribedEntry] = []
    ledger, do = made.sites[name].ledger, made._do

    def dies_once(who: str, work: Work, *args: Any) -> Result:
        result = do(who, work, *args)
        if who == name and isinstance(work, Mask | Confirm):  # the reply is lost, and the question comes again
            entry.extend(ledger.described([TASK]))
            again = do(who, work, *args)
            assert again.statement == result.statement
            assert all((again.rows[row] == result.rows[row]).all() for row in result.rows)
        return result

    made._do = dies_once  # type: ignore[method-assign, assignment]
    assert made.ask(ASKED) is not None
    assert [one.confirmed for one in entry] == [(), NAMES]
    assert len(ledger.described([TASK])) == 1


@few("class", "flag")
@pytest.mark.parametrize(
    "attack", ["class", "flag", "outlier", "coded", "coded-inside", "threshold", "edges", "missing"]
)
def test_the_rule_of_small_counts_hides_a_sample_that_no_other_is_like(attack: Attack) -> None:
    assert 0.2 <= told(spec(attack=attack, trials=16))["told"] <= 0.8
    assert told(spec(attack=attack, trials=16, smallest=1))["told"] == 1.0, "without the rule it shows"


@pytest.mark.full
@pytest.mark.parametrize("attack", ["digits", "again"])
def test_digits_that_no_other_sample_has_and_new_samples_of_a_second_sum_show(attack: Attack) -> None:
    assert told(spec(attack=attack, trials=16))["told"] == 1.0, "a limit that the documents name"


@pytest.mark.full
def test_a_search_over_what_a_coordinator_may_ask_finds_no_overlapping_sums() -> None:
    found = reached(spec(members=6, trials=20))
    assert found["overlaps"] == 0.0
    assert found["questions"] <= 1.0


@pytest.mark.full
@pytest.mark.parametrize("members", [5, 7])
def test_no_longer_search_finds_overlapping_sums_or_few_members(members: int) -> None:
    found = reached(spec(members=members, trials=150))
    least = Thresholds(smallest_cohort(Mode.SUM, assumed(members)), Mode.SUM).n_min
    assert found["sums"] > 5.0
    assert (found["overlaps"], found["questions"]) == (0.0, 1.0)
    assert found["fewest"] >= least - assumed(members)
