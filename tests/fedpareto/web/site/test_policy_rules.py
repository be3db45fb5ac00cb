"""The rules of policy.toml on the member's console: each is explained, and known by the reasons that it gives."""

from typing import Any

import pytest

from fedpareto.cli.reasons.known_reasons import meanings
from fedpareto.web.site.policy_rules import BY_REASON, refused_runs, refused_work, rules
from tests.fedpareto.web.site.scene import HOSTILE, request
from worker.ledgers.left_reading import CountedDeclines
from worker.site.policy_file import Policy

# They set what the site shows, asks for or takes, and decline nothing by themselves.
DECLINE_NOTHING = {
    "restore",
    "statistics.smallest",
    "downloads_from",
    "error_texts",
    "secure.data_sets",
    "privacy.tasks",
    "privacy.evaluate",
}


def policy(**values: Any) -> Policy:
    return Policy.model_validate(values)


def test_each_rule_is_known_by_the_reasons_that_it_gives_or_declines_nothing() -> None:
    shown = rules(policy(privacy={"digits": {"noise": 1.0, "epsilon": 3.0}}))
    keys = {rule.key.replace("privacy.digits.", "privacy.") for rule in shown} - {"secure.tasks"}
    by_reason = {key for keys in BY_REASON.values() for key in keys}
    assert (by_reason - keys, keys - by_reason) == (set(), DECLINE_NOTHING)
    assert [reason for reason in BY_REASON if not any(row.said_by for row in meanings(reason))] == []


def test_a_rule_says_its_value_and_its_meaning_in_words_and_whether_the_owner_has_set_it() -> None:
    by_key = {rule.key: rule for rule in rules(policy(limits={"max_bytes": 5_000_000}, secure={"tasks": {"a": {}}}))}
    rule = by_key["limits.max_bytes"]
    assert (rule.value, rule.is_set) == ("5,000,000", True)
    assert rule.means.startswith("The most bytes that one assignment may move: ")
    assert rule.means.endswith(" 0 is any number.")
    assert (by_key["tasks"].value, by_key["secure.assumed"].value) == ("none named", "not set")
    assert [rule.key for rule in by_key.values() if not rule.means or set("`[]") & set(rule.means)] == []
    assert not [key for key in by_key if key.startswith("secure.tasks.")], "an exception that sets no key"


@pytest.mark.parametrize("by_rules", [True, False])
def test_a_decline_is_listed_by_its_rules_or_by_its_reason(*, by_rules: bool) -> None:
    time = "2026-05-04T12:00:00+00:00"
    declines = [
        CountedDeclines(reason, 2, time, time, "run-1", "a", HOSTILE) for reason in ("limit:steps", "training-failed")
    ]
    [row] = refused_work(declines, by_rules=by_rules)
    by = "limits.steps, limits.max_steps" if by_rules else "training-failed"
    assert (row.by, row.count, row.example) == (by, "2 assignments", HOSTILE)


def test_runs_that_are_refused_are_counted_by_rule_or_by_the_reason() -> None:
    runs = [*(request(number) for number in range(3)), request(4, "no TOML")]
    for rules_, by, count in ((True, "submitters", 3), (False, "spec", 1)):
        [row] = refused_runs(runs, policy(submitters=["bob"]), by_rules=rules_)
        assert (row.by, row.count) == (by, f"{count} of the 4 runs that asked last")
    assert refused_runs(runs, policy(), by_rules=True) == []
