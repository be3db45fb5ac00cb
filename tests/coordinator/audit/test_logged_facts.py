import tracemalloc

from coordinator.services.checks.logged_facts import LoggedFacts
from federation.record.log_entries import ACCEPTED, ISSUED, Fact

ONE, OTHER = Fact(ISSUED, "a-1", "blake3:1"), Fact(ACCEPTED, "a-1", "blake3:1")


def test_every_part_of_a_fact_counts() -> None:
    facts = LoggedFacts([ONE])
    assert ONE in facts
    for different in (OTHER, Fact(ISSUED, "a-2", "blake3:1"), Fact(ISSUED, "a-1", "blake3:2"), Fact(ISSUED, "a-", "1")):
        assert different not in facts
        assert not facts.see(different)


def test_texts_are_not_joined_to_those_beside_them() -> None:
    facts = LoggedFacts([Fact("ab", "c", "d")])
    assert Fact("a", "bc", "d") not in facts
    assert Fact("ab", "cd", "") not in facts


def test_a_set_knows_which_facts_were_seen() -> None:
    facts = LoggedFacts([ONE, OTHER, ONE])
    assert facts.see(ONE)
    assert (facts.has_seen(ONE), facts.has_seen(OTHER), facts.all_seen) == (True, False, False)
    assert facts.see(OTHER)
    assert facts.all_seen


def test_a_set_without_facts_has_seen_all() -> None:
    facts = LoggedFacts([])
    assert facts.all_seen
    assert ONE not in facts


def test_a_fact_takes_32_bytes_and_its_mark() -> None:
    count = 20_000
    tracemalloc.start()
    try:
        facts = LoggedFacts(Fact(ISSUED, f"assignment-{number}", f"blake3:{number:064x}") for number in range(count))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert Fact(ISSUED, "assignment-7", f"blake3:{7:064x}") in facts
    assert taken < 40 * count
