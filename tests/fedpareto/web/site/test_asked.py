"""What a run asks of a site, in words that promise no more than the worker compares."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from federation.spec.run_spec import with_models
from federation.work.site import SessionEntry
from fedpareto.web.serving.security import EntranceKeys
from fedpareto.web.site.asked import SiteFacts, asked_words, can_be_approved, changed_lines, changes, compared_words
from fedpareto.web.site.site_pages import SiteConsole
from tests.fedpareto.web.site.scene import answer_of, request, run_address
from worker.home import WorkerHome
from worker.ledgers.round_ledger import RoundLedger
from worker.site.policy_file import Policy
from worker.site.run_requests import RunsFile
from worker.status import OfferedTask, StatusFile, WorkerStatus

HEAD = 'name = "a"\ntask = "digits"\nrounds = 10\n'
PRIVATE = HEAD + '[privacy]\nsecure = "private"\ndisclose = ["loss"]\n'


@pytest.fixture
def home(tmp_path: Path) -> WorkerHome:
    return WorkerHome(tmp_path)


def words(home: WorkerHome, document: str) -> dict[str, str]:
    return dict(asked_words(request(1, document), SiteFacts.read(home)))


def test_the_bytes_are_known_while_a_worker_has_told_the_size_of_its_model(home: WorkerHome) -> None:
    assert "is known while a worker runs" in words(home, HEAD)["how much"]
    StatusFile(home.status).show(WorkerStatus(None, (), (OfferedTask("digits", 1_000, 2),)))
    told = words(home, HEAD)["how much"]
    assert "each update at most 8.0 kB (a model of 1,000 numbers and 2 objectives), 80.0 kB in 10 rounds" in told
    assert "limits.max_bytes is not set" in told
    home.policy.write_text("limits.max_bytes = 5000\n")
    assert "limits.max_bytes refuses work that moves more than 5.0 kB" in words(home, HEAD)["how much"]


@pytest.mark.parametrize(
    ("more", "key", "told"),
    [
        ("", "who sees it", "the update of every member"),
        ("", "would leave", "it reveals much of the data; after each evaluation losses and metrics on train"),
        ("", "who gets the model", "each member with an accepted reply"),
        ('results = "admins"\n', "who gets the model", "members that train or evaluate have it, too"),
        ('privacy.secure = "sum"\n', "who sees it", "no member's own"),
        ('privacy.secure = "sum"\n', "would leave", "only in the sum of all members, with noise"),
        (
            'privacy.secure = "sum"\nprivacy.disclose = ["loss"]\n',
            "would leave",
            "your own loss, which the coordinator can read",
        ),
        ("privacy.client_noise = 5.0\n", "would leave", "measures no model"),
        ("[", "specification", "this worker cannot read it"),
    ],
)
def test_the_words_say_what_leaves_who_sees_it_and_who_gets_the_model(
    home: WorkerHome, more: str, key: str, told: str
) -> None:
    assert told in words(home, HEAD + more)[key]


def test_an_owner_reads_which_models_a_run_measures_and_what_they_can_show(home: WorkerHome) -> None:
    named = [f"blake3:{number:064x}" for number in range(12)]
    for more, sees in (
        ("", "the values of every member"),
        ('privacy.secure = "sum"\n', "with noise, and no member's own"),
    ):
        head = f'name = "a"\ntask = "digits"\nkind = "evaluate"\n{more}'
        document = with_models(head.encode(), named).decode()
        told = words(home, document)
        assert told["rounds"] == "12, one for each model; nothing is trained"
        assert told["models"] == ", ".join(named[:10]) + ", and 2 more"
        assert sees in told["who sees it"]
        assert "algorithm" not in told
        assert ("private rounds" in told) == bool(more)
        compared = " ".join(compared_words(request(1, document), Policy()))
        assert "It trains nothing." in compared
        assert ("privately once, over all runs" in compared) == bool(more)
    assert told["private rounds"] == "at most the 1000 evaluations that are left of 1000; 12 are planned"


def test_the_most_that_each_budget_can_lose_is_what_is_left_of_it(home: WorkerHome) -> None:
    assert words(home, HEAD)["private rounds"] == "none: the rounds of this run are not private"
    assert words(home, HEAD)["privacy budget (epsilon)"].startswith("none: your policy.toml asks for no noise")
    home.policy.write_text(
        'secure.sessions = 20\nsecure.evaluations = 5\nsecure.data_sets.both = ["digits", "other"]\n'
        "[privacy.digits]\nnoise = 1.0\nepsilon = 4.0\n"
    )
    ledger = RoundLedger(home.rounds)
    for number, (task, work) in enumerate((("digits", "train"), ("other", "train"), ("digits", "evaluate"))):
        ledger.add(SessionEntry(str(number), "run", task, "m", work))
    ledger.close()
    told = words(home, PRIVATE)
    assert (
        "at most the 18 trainings that are left of 20, and the 4 evaluations that are left of 5"
        in told["private rounds"]
    )
    assert told["privacy budget (epsilon)"] == "at most the 4 that are left of 4 for the data set digits"


def test_the_page_promises_of_an_open_run_no_more_than_the_worker_compares() -> None:
    policy = Policy()
    opened, private = (" ".join(compared_words(request(1, document), policy)) for document in (HEAD, PRIVATE))
    assert "the worker does not compare an assignment of an open run with them" in opened
    assert "in the clear" not in opened
    assert "No update and no gradient leaves in the clear" in private
    assert all("The number of rounds is the coordinator's word" in text or text is opened for text in (opened, private))
    noisy = Policy.model_validate({"privacy": {"digits": {"noise": 1.0, "epsilon": 4.0}}})
    assert "the noise of policy.toml" in " ".join(compared_words(request(1), noisy))


def test_a_line_that_moves_into_another_section_is_a_difference() -> None:
    """The same lines in another order are another specification."""
    before = request(1, HEAD + "[evaluate]\ndeadline_seconds = 10.0\n[jacobian]\n")
    now = request(2, HEAD + "[evaluate]\n[jacobian]\ndeadline_seconds = 10.0\n")
    found = {change.key: (change.now, change.before) for change in changes(now, before)}
    assert found == {
        "evaluate.deadline_seconds": ("600.0", "10.0"),
        "jacobian.deadline_seconds": ("10.0", "600.0"),
    }
    assert changed_lines(now, before)


def test_a_default_that_is_written_out_is_none_and_another_submitter_or_model_is_one() -> None:
    before = request(1, HEAD)
    assert changes(request(2, HEAD + "seed = 0\n"), before) == []
    assert "+seed = 0" in changed_lines(request(2, HEAD + "seed = 0\n"), before)
    other = request(2, HEAD, submitted_by="mallory\x1b", initial_model="sha256:other")
    assert [(change.key, change.now) for change in changes(other, before)] == [
        ("submitted by", "mallory\\x1b"),
        ("initial model", "sha256:other"),
    ]


def test_a_run_can_be_approved_where_the_policy_allows_it() -> None:
    policy = Policy.model_validate({"approve": "each-run", "submitters": ["alice"]})
    assert can_be_approved(request(1), policy)
    assert not can_be_approved(request(1, submitted_by="bob"), policy)


def test_a_run_that_describes_data_shows_its_columns_and_on_request_the_numbers_that_would_leave(
    home: WorkerHome,
) -> None:
    text = 'name = "a"\ntask = "digits"\nkind = "statistics"\n[statistics]\nopen = true\ncolumns = ["x1", "y"]\n'
    run = request(1, text)
    told = words(home, text)
    assert told["columns"] == "x1, y"
    assert "histograms of at most 20 bins, of these columns on train, in the clear" in told["would leave"]
    assert "and declines all other work" in compared_words(run, Policy())[-1]
    assert not can_be_approved(run, Policy())
    with closing(RunsFile(home.runs)) as file:
        file.add(run)
    console = SiteConsole(home, EntranceKeys(lambda: 0.0), lambda run: [f"numbers of {run.name}"])
    for more, found in (("", "and show the numbers</a>"), ("&numbers=yes", "numbers of run-1")):
        status, page = asyncio.run(answer_of(console, f"{run_address(run)}{more}", "GET"))
        assert (status, found in page) == (200, True), page
