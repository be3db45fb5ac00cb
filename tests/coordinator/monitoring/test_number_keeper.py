"""What a coordinator shows at /metrics, to whom, and what it does not show."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from operator import eq, gt, lt

import pytest
import yaml

from coordinator.monitoring import number_keeper
from coordinator.monitoring.number_keeper import NumberKeeper
from federation.monitoring import scrape_server
from federation.monitoring.metrics_page import page
from federation.monitoring.tally import MonitoredKind
from storage.database import Database
from storage.faults import StorageFault
from tests.coordinator.monitoring.scene import Labels, samples, scraped, value
from tests.paths import ROOT
from tests.project.scene import tool
from tests.running import wait_for
from tests.stage import Stage, stage, vector
from worker import event_counts
from worker.event_counts import EventCounts

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

TOKEN = "0123456789abcdef"
OF_MEMBERS = {
    "fedpareto_member_alerts",
    "fedpareto_member_attending",
    "fedpareto_member_certificate_days",
    "fedpareto_member_replies_total",
    "fedpareto_member_seen_timestamp_seconds",
}


@pytest.fixture(scope="module")
def served_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A coordinator that serves /metrics, and looks often."""
    directory = tmp_path_factory.mktemp("watched")
    (directory / "token").touch(mode=0o600)
    (directory / "token").write_text(TOKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_keeper, "LOOK_SECONDS", 0.3)
        patch.setattr(number_keeper, "MEMBERS_SECONDS", 0.0)
        patch.setattr(scrape_server, "PAGE_SECONDS", 0.0)
        metrics = {"listen": "127.0.0.1:0", "token_file": str(directory / "token")}
        with stage(directory / "home", f"sqlite:///{directory / 'test.db'}", metrics=metrics) as made:
            yield made


@pytest.fixture
def watched(served_stage: Stage) -> Iterator[Stage]:
    yield served_stage
    served_stage.clear()


def shown(made: Stage) -> str:
    """The page after a look that begins now."""
    port, now = made.served.coordinator.metrics_port, made.clock().timestamp()
    assert port is not None

    def looked() -> str:
        page = scraped(port, TOKEN)
        at = re.search(r"^fedpareto_looked_timestamp_seconds (\S+)", page, re.MULTILINE)
        return page if at is not None and float(at[1]) >= now else ""

    return wait_for(looked, "a look", seconds=20)


def test_a_scrape_shows_runs_members_replies_and_the_state_of_the_record(watched: Stage) -> None:
    run, (ann, ben) = watched.begin("ann", "ben", more="selection.minimum = 1\nselection.quorum = 0.5")
    ben.decline(ben.order(), "no-data")
    wait_for(lambda: watched.outcomes(run).get("ben", ("", ""))[0] == "DECLINED", "the decline", seconds=20)
    page = shown(watched)
    assert value(page, "fedpareto_replies_total", outcome="missing", reason="absent") == 0, "it counts from 0"
    assert value(page, "fedpareto_open_assignments") == 1
    assert value(page, "fedpareto_runs", state="RUNNING") == 1
    assert value(page, "fedpareto_run_round", run=run) == 0
    assert value(page, "fedpareto_replies_total", outcome="declined", reason="no-data") == 1
    assert value(page, "fedpareto_members", state="ACTIVE") == 3
    assert value(page, "fedpareto_members_attending") == value(page, "fedpareto_streams") == 2
    assert value(page, "fedpareto_member_attending", member="ann") == 1
    assert 0 < (value(page, "fedpareto_members_certificate_days") or 0) < 400
    assert 0 < (value(page, "fedpareto_log_signed_entries") or 0) <= (value(page, "fedpareto_log_entries") or 0)
    assert (value(page, "fedpareto_disk_free_bytes", directory="blobs") or 0) > 0
    assert value(page, "fedpareto_faults", fault="disk") == 0
    watched.complete(run, ann, ben)
    page = wait_for(
        lambda: text if value(text := shown(watched), "fedpareto_runs", state="COMPLETED") else "", "a look"
    )
    accepted = value(page, "fedpareto_replies_total", outcome="accepted", reason="")
    assert (accepted, value(page, "fedpareto_member_replies_total", member="ann", outcome="accepted")) == (3, 2)
    assert value(page, "fedpareto_phase_seconds_count", kind="train") == 1
    assert (value(page, "fedpareto_payload_bytes_total", direction="received") or 0) > 0
    assert value(page, "fedpareto_blob_seconds_count", kind="store") == 1
    assert value(page, "fedpareto_uploads", state="under way") == 0
    assert (value(page, "fedpareto_database_seconds_count", kind="write") or 0) > 0
    assert value(page, "fedpareto_run_round", run=run) is None


def test_a_refused_reply_counts_by_its_reason(watched: Stage) -> None:
    _, (player,) = watched.begin("ann", more="selection.minimum = 1")
    player.submit_zeros(player.order())
    assert value(shown(watched), "fedpareto_replies_total", outcome="refused", reason="zero") == 1


NOISE = "privacy.client_noise = 1.0\nselection.pool = 'enrolled'"


@pytest.mark.parametrize("privacy", ["", pytest.param(NOISE, marks=pytest.mark.full)])
def test_numbers_do_not_depend_on_what_members_reply(watched: Stage, privacy: str) -> None:
    """So nothing of a reply's content leaves: no loss, sample count, norm or weight, of whatever run."""
    pages = []
    for size, scale in ((10, 1.0), (7919, 33.0)):
        more = f"selection.minimum = 2\ntrain.steps = 1\n{privacy}"
        run, players = watched.begin("ann", "ben", samples=[size, 2 * size], more=more)
        orders = [player.order() for player in players]
        before = shown(watched)
        for player, order in zip(players, orders, strict=True):
            player.losses["left"] = scale / 7
            player.reply(order, scale * vector(player.name, order))
        watched.complete(run, *players)
        pages.append(counted(before, shown(watched)))
    assert pages[0] == pages[1]
    assert len(pages[0]) > 10


def counted(before: str, after: str) -> dict[tuple[str, Labels], float]:
    """What a page has more than one before: without times, the numbers of this machine, and alerts, which come late."""
    left_out = ("process_", "fedpareto_disk", "fedpareto_log", "fedpareto_database", "fedpareto_alerts")
    earlier = samples(before)
    return {
        key: number - earlier.get(key, 0)
        for key, number in samples(after).items()
        if not key[0].startswith(left_out) and not re.search(r"_(sum|seconds|bucket|days)$", key[0])
    }


def test_without_a_token_no_number_names_a_member(watched: Stage) -> None:
    record, presence = watched.served.coordinator.record, watched.parts.presence
    pages = []
    for names_members in (False, True):
        keeper = NumberKeeper(record, presence, names_members=names_members)
        keeper.look(gives=True)
        pages.append(page(keeper.readings()).decode())
    assert {name for name, _ in samples(pages[1]) if name.startswith("fedpareto_member_")} == OF_MEMBERS
    assert "member=" not in pages[0]
    assert "ann" not in pages[0]


def test_a_scrape_reads_memory_only_and_old_numbers_of_the_federation_are_not_shown(watched: Stage) -> None:
    now = [0.0]
    with closing(Database.open(watched.served.home.database_url)) as database:
        record = replace(watched.served.coordinator.record, database=database)
        keeper = NumberKeeper(record, watched.parts.presence, names_members=True, monotonic=lambda: now[0])
        keeper.look(gives=True)
        first, second = page(keeper.readings()).decode(), page(keeper.readings()).decode()
    read = "fedpareto_database_seconds_count"
    assert value(first, read, kind="read") == value(second, read, kind="read") == 1
    assert value(second, "fedpareto_members", state="ACTIVE") is not None
    now[0] = number_keeper.OLD_SECONDS
    late = page(keeper.readings()).decode()
    assert value(late, "fedpareto_gives_federation") == 0
    assert not {"fedpareto_members", "fedpareto_member_attending"} & {name for name, _ in samples(late)}
    assert value(late, "fedpareto_faults", fault="database") == 0


# --- what deploy/monitoring/ has

FILES = ROOT / "deploy/monitoring"
RULES = [rule for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
SIMPLE = re.compile(r'(time\(\) - )?(fedpareto_\w+)(?:\{(\w+)="(\w+)"\})? (==|<|>) ([\d* ]+)')


def fires(expression: str, page: str, now: float) -> bool:
    """Whether a rule that compares one metric with a number fires on a page."""
    found = SIMPLE.fullmatch(expression)
    assert found is not None, expression
    age, name, label, wanted, operator, limit = found.groups()
    threshold = math.prod(map(float, limit.split("*")))
    compared = {"==": eq, "<": lt, ">": gt}[operator]
    of_metric = [
        number
        for (metric, labels), number in samples(page).items()
        if metric == name and (label is None or (label, wanted) in labels)
    ]
    return any(compared(now - number if age else number, threshold) for number in of_metric)


def firing(made: Stage, worker: EventCounts) -> set[str]:
    """The rules that fire now, of those that compare one metric with a number."""
    both, now = shown(made) + page(worker.tally.readings()).decode(), made.clock().timestamp()
    return {rule["alert"] for rule in RULES if SIMPLE.fullmatch(rule["expr"]) and fires(rule["expr"], both, now)}


def test_alert_rules_are_quiet_on_the_scrape_of_a_healthy_federation_and_fire_when_it_is_not(watched: Stage) -> None:
    worker = EventCounts()
    worker.hear("attending", {})
    about_earlier_tests = {"FedparetoCritical", "FedparetoWarning"}
    assert firing(watched, worker) <= about_earlier_tests
    worker.hear("disconnected", {"reason": "database"})
    worker.hear("certificate-ends", {})
    faults = watched.served.coordinator.record.faults
    faults.begin(StorageFault.CLOCK, "a test says so")
    with watched.clock.moved(timedelta(days=8)):
        fired = firing(watched, worker)
    faults.over(StorageFault.CLOCK)
    assert fired - about_earlier_tests == {
        *("FedparetoBackupOld", "FedparetoFault", "FedparetoWorkerAway", "FedparetoWorkerCertificateEnds"),
    }


def test_rules_and_dashboard_ask_for_metrics_and_labels_that_exist() -> None:
    known = {number.name: number for number in tool("tables").monitored(*tool("tables").OF_COORDINATOR, event_counts)}
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    asked = [rule["expr"] for rule in RULES] + [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) > 25
    for expression in asked:
        for name, selected in re.findall(r"(fedpareto_\w+)(?:\{(.*?)\})?", expression):
            number = known[re.sub(r"_(total|bucket)$", "", name)]
            kind = {"_total": MonitoredKind.COUNTER, "_bucket": MonitoredKind.DURATION}
            assert number.kind is kind.get(name.removeprefix(number.name), MonitoredKind.GAUGE), expression
            assert set(re.findall(r"(\w+)!?=", selected)) <= {*number.labels}, expression
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", " ".join(asked)))))
    assert grouped <= {"le", *(label for number in known.values() for label in number.labels)}
