"""What a site tells of its data: statistics of an approved run, by its owner's rules, and nothing else of this run.

The worker is real, over TLS; the coordinator signs what it likes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation.findings import CheckOutcome
from federation.spec.run_spec import RunSpec, with_columns
from federation.statistics.sums import decoded
from federation.tasks import Dataset, DataSource, LossError, Splits, task
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, Row, TrainWork
from federation.vectors import payload_rows
from federation.work.base import payload_layout
from federation.work.statistics.wire import to_proto
from federation.work.statistics.work import ROW, Statistics
from tests.harness import federation, wait_for
from tests.worker.scene import Running, Scene, command
from tests.worker.site.scene import Hospital
from worker.doctor import check_tasks
from worker.ledgers.left_reading import read_left
from worker.service import prepare_offers
from worker.site.policy_file import Policy, StatisticsPolicy
from worker.site.run_requests import RunRequest

OPEN = Policy(approve="each-run", statistics=StatisticsPolicy(open=True))
HEAD = b'name = "run"\ntask = "digits"\nkind = "statistics"\n[statistics]\nopen = true\nbins = 5\n'
DOCUMENT = with_columns(HEAD, task("digits").columns())
WORK = Statistics.of(RunSpec.parse(DOCUMENT))


def asked(site: Hospital, work: Statistics = WORK, document: bytes = DOCUMENT, **changes: Any) -> AssignmentManifest:
    """To describe data in the run."""
    order = site.work(document, to_proto(work), **changes)
    del order.rows[:]
    order.rows.extend(Row(name=row.name, dtype=row.dtype, length=row.length) for row in work.payload)
    order.max_payload_bytes = payload_layout(work.payload).file_bytes
    return order


@pytest.fixture
def site(scene: Scene) -> Hospital:
    return Hospital(scene)


def request(document: bytes) -> RunRequest:
    fields: dict[str, Any] = dict.fromkeys(
        ("run", "spec", "initial_model", "submitted_by", "asked", "owner", "words", "decided"), ""
    )
    return RunRequest(**fields, name="run", task="digits", document=document)


def test_an_approved_run_gets_the_statistics_that_it_names_and_nothing_else(site: Hospital) -> None:
    running: Running = site.approved(DOCUMENT, OPEN)
    assert site.told(asked(site)) == ""
    payload = site.coordinator.submissions[-1].payload
    told = np.frombuffer(payload_rows(payload, payload_layout(WORK.payload))[ROW].tobytes(), "<f8")
    samples, found = decoded(told, WORK.columns, WORK.bins)
    train = site.offers["digits"].data.train
    assert samples == len(train)
    means = [float(one.first / one.count) for one in found[:-1]]
    assert means == pytest.approx(np.asarray(train.x, np.float64).mean(axis=0).tolist(), rel=1e-9)
    classes = np.bincount(train.y)
    assert list(found[-1].cells) == [count if count >= 5 else 0 for count in classes]
    assert site.models() == [], "no model was fetched"
    [row] = read_left(site.home.left).rows
    assert (row.first.kind, row.first.payload_bytes) == ("statistics", len(payload))
    assert row.first.numbers.keys() <= {"samples", "seconds"}, "the ledger of what left has none of the statistics"
    written = site.home.left.read_bytes()
    assert not any(number.tobytes() in written for number in told if number > 1000)
    fewer = Statistics(columns=WORK.columns[:3], bins=5, splits=("train",))
    tested = Statistics(columns=WORK.columns, bins=5, splits=("test",))
    for order in (
        asked(site, fewer),
        asked(site, tested),
        site.work(DOCUMENT, TrainWork(learning_rate=0.1, batch_size=8, steps=1)),
        site.work(DOCUMENT, EvaluateWork(splits=["test"])),
    ):
        assert site.told(order) == "statistics-only"
    assert running.events("training") == []


def test_a_run_that_trains_gets_no_statistics_and_an_owner_has_to_allow_them(site: Hospital) -> None:
    trains = b'name = "run"\ntask = "digits"\nrounds = 1\n'
    site.approved(trains, OPEN)
    assert site.told(asked(site, document=trains)) == "statistics-only"
    assert request(DOCUMENT).verdict(Policy()).reason == "policy:statistics"
    assert request(DOCUMENT).verdict(OPEN).answer == "waiting"
    named = Policy(algorithms=("fedavg",), statistics=StatisticsPolicy(open=True))
    assert request(DOCUMENT).verdict(named).reason == "policy:algorithm"
    assert Policy(statistics=StatisticsPolicy(open=True)).decides, "its runs ask, so that their specifications are kept"


def test_data_with_an_owners_noise_and_a_site_that_tells_none_have_no_open_statistics(site: Hospital) -> None:
    noisy = Policy.model_validate(
        {"statistics": {"open": True}, "privacy": {"scans": {"tasks": ["digits"], "noise": 1.0, "epsilon": 3.0}}}
    )
    assert [*noisy.statistics_of(["digits", "other"])] == ["other"]
    assert not Policy().statistics_of(["digits"])
    site.attending(policy=Policy())
    assert site.told(asked(site)) == "policy:statistics"


def test_data_on_which_the_model_has_no_finite_loss_are_offered_for_statistics_alone(
    scene: Scene, offers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Splits = offers["digits"].data
    x = data.train.x.clone()
    x[7] = torch.nan
    gaps = Splits(Dataset(x, data.train.y), data.validation, data.test)
    monkeypatch.setattr(type(offers["digits"].task), "load", lambda self, source: gaps)
    made: dict[str, Any] = {"device": "cpu", "threads": 1}
    with pytest.raises(LossError):
        prepare_offers(["digits"], DataSource(), **made)
    found, _ = prepare_offers(["digits"], DataSource(), describes=["digits"], **made)
    assert "not finite" in found["digits"].unfit
    (_, (finding, _)) = check_tasks(["digits"], DataSource(), "cpu", {}, ["digits"])
    assert (finding.outcome, "for statistics alone" in finding.message) == (CheckOutcome.WARNING, True)
    site = Hospital(Scene(scene.coordinator, scene.home.directory, found, scene.model))
    site.started = scene.started
    running = site.approved(DOCUMENT, OPEN)
    assert site.coordinator.hellos[-1].tasks[0].samples == 0
    assert "offered for statistics alone" in str(running.events("policy"))
    assert site.told(site.work(DOCUMENT)) == "statistics:alone"
    assert site.told(asked(site)) == ""


def test_an_owner_sees_the_numbers_that_would_leave_before_the_decision(site: Hospital) -> None:
    site.attending(policy=OPEN)
    site.coordinator.ask(DOCUMENT, "run")
    wait_for(lambda: site.coordinator.consents, "an answer")
    site.home.policy.write_text('approve = "each-run"\nstatistics.open = true\n')
    place = ("--home", site.joined())
    shown = command("runs", "run", *place)
    assert "kind: statistics" in shown
    assert "would leave: these numbers of 1437 samples, in the clear" in shown
    (document,) = json.loads(command("runs", "run", *place, "--json"))
    own = document["statistics"]
    assert (own["samples"], own["problem"], len(own["columns"])) == (1437, "", 65)
    assert sum(own["columns"][-1]["counts"]) == 1437
    site.home.policy.write_text('approve = "each-run"\n')
    assert "no statistics would leave: policy.toml allows none" in command("runs", "run", *place)


@pytest.mark.full
def test_real_members_describe_their_data_once_their_owners_have_allowed_it(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        made.serve()
        for place, client in enumerate(("open", "asks", "silent")):
            rules = {"open": "statistics.open = true\n", "asks": 'approve = "each-run"\nstatistics.open = true\n'}
            (made.join(client) / "policy.toml").write_text(rules.get(client, 'submitters = ["admin"]\n'))
            made.work(client, "--set", f"part={place + 1}/3")
        made.attending("open", "asks", "silent")
        run = made.submit(
            "held",
            HEAD.decode().partition("\n")[2] + "splits = ['train', 'test']\n[selection]\nminimum = 2\n",
            "--paused",
        )
        made.admin("resume", run)
        home = ("--home", str(tmp_path / "asks"))
        wait_for(lambda: made.query("select 1 from consents where client_id = 'asks'"), "the run to ask")
        assert "would leave: these numbers of" in made.fedpareto("worker", "runs", run, *home)
        made.fedpareto("worker", "approve", run, *home)
        made.wait_completed(run)
        answers = {one["client_id"]: (one["answer"], one["reason"]) for one in made.run_state(run)["consents"]}
        assert answers["silent"] == ("refused", "policy:statistics")
        found = made.admin("statistics", run)
        assert (found["members"], len(found["columns"])) == (["asks", "open"], 65)
        assert made.admin("audit", "verify")["problems"] == []
        bundle = str(tmp_path / "run.fedpareto")
        made.admin("bundle", run, "--out", bundle, "--payloads", "--yes")
        assert json.loads(made.fedpareto("verify", bundle, "--json"))["verified"] is True
        assert json.loads(made.fedpareto("worker", "verify", bundle, *home, "--json"))["problems"] == []
        made.admin("bundle", run, "--out", str(tmp_path / "small.fedpareto"), "--yes")
        (without,) = json.loads(made.fedpareto("verify", str(tmp_path / "small.fedpareto"), "--json", code=3))["rounds"]
        assert "the result" in str(without["missing"])
