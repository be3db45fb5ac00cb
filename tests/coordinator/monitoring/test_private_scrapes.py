"""What scrapes of a coordinator and of its workers show of a private round: nothing but what is on record."""

import re
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from storage.states import AlertKind, AlertSeverity, ClientState, RunState
from tests.coordinator.monitoring.scene import Labels, samples, scraped, value
from tests.harness import Process, federation, wait_for
from tests.paths import OWNERS_CODE
from tests.trained import train
from tests.worker.work.scene import POLICY, STAGES, TASK, Members, specification

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

MEMBERS = 5
TOKEN = "0123456789abcdef"
SEED = 7
TIMES = re.compile(
    r"_(sum|bucket|seconds|days|bytes)$|^process_|^fedpareto_(database_|blob_|log_|looked_|member_attending)"
)
"""Times, the numbers of machines, and what depends on when the coordinator has last looked."""
STATES = [*RunState, *ClientState, *AlertKind, *AlertSeverity]
WORDS = re.compile("|".join([r"[a-z -]*|m\d|[0-9a-f]{12}", r"\d+\.\d+|\+Inf", *STATES]))
"""The values that labels may have: kinds, reasons, members and runs; bounds of seconds; states."""


def port_of(process: Process) -> int:
    """Where a process serves its numbers."""
    served = re.compile(r"metrics at http://127.0.0.1:(\d+)/metrics")
    return int(wait_for(lambda: served.search(process.text), "a server of metrics")[1])


class Watched:
    """Five members and their coordinator, all of whom serve their numbers; the coordinator's name members."""

    def __init__(self, made: Members) -> None:
        self.fed = made.fed
        code = ("--code", str(OWNERS_CODE))
        self.workers = {
            name: port_of(made.work(name, *(("--set", "trainer=ending:Ending") if name == "m0" else ()), *code))
            for name in made.clients
        }
        made.fed.attending(*made.clients)
        self.coordinator = port_of(made.fed.serving)

    def replies(self) -> int:
        """The replies on record that were accepted."""
        return int(self.fed.query("select count(*) from replies where accepted")[0][0])

    def after(self, rounds: int) -> dict[str, Mapping[tuple[str, Labels], float]]:
        """The numbers of each process once all see that so many private rounds are over."""
        replies = self.replies() / MEMBERS

        def of_worker(port: int) -> str:
            page = scraped(port)
            return page if value(page, "fedpareto_worker_receipts_total", outcome="accepted") == replies else ""

        def of_coordinator() -> str:
            page = scraped(self.coordinator, TOKEN)
            seen = value(page, "fedpareto_runs", state="COMPLETED"), value(page, "fedpareto_members_attending")
            return page if seen == (rounds, MEMBERS) else ""

        pages = {name: wait_for(partial(of_worker, port), f"receipts of {name}") for name, port in self.workers.items()}
        pages["coordinator"] = wait_for(of_coordinator, "the end of the run")
        return {name: samples(page) for name, page in pages.items()}


def changed(
    before: Mapping[tuple[str, Labels], float], after: Mapping[tuple[str, Labels], float]
) -> dict[tuple[str, Labels], float]:
    """What has changed, without times."""
    return {
        key: number - before.get(key, 0)
        for key, number in after.items()
        if number != before.get(key, 0) and not TIMES.search(key[0])
    }


def hidden() -> list[float]:
    """What a private round hides of each member: the length of its update, its largest numbers, losses, accuracies."""
    subject = task(TASK)
    _, base = initial_model(subject, SEED)
    found: list[float] = []
    for place in range(MEMBERS):
        trainer = TorchTrainer(subject, subject.load(DataSource(None, Part(place, MEMBERS))), threads=1)
        result = train(trainer, base, LocalSgd(steps=1, batch_size=0, learning_rate=0.1), measure=True)
        (row,) = result.rows.values()
        found += [float(np.linalg.norm(row)), *map(float, np.sort(np.abs(row))[-20:])]
        found += [*result.losses.values(), *result.metrics.values()]
    return [number for number in found if number not in (0.0, 1.0)]


SECURE = {"secure": "sum", "disclose": []}
SGD = {"steps": 1, "batch_size": 0, "learning_rate": 0.1, "deadline_seconds": 120.0}


@pytest.mark.full
def test_scrapes_show_of_a_private_round_what_is_on_record_and_not_whose_computation_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, token = tmp_path / "ending", tmp_path / "token"
    monkeypatch.setenv("ENDING", str(word))
    word.write_text("")
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    with federation(tmp_path) as fed:
        settings = fed.home / "coordinator.toml"
        text = settings.read_text().replace('token_file = ""', f'token_file = "{token}"')
        settings.write_text(text.replace('\nlisten = ""', '\nlisten = "127.0.0.1:0"'))
        fed.serve()
        made = Members(fed, [f"m{number}" for number in range(MEMBERS)])
        made.enrol(POLICY)
        for name in made.clients:
            (fed.directory / name / "worker.toml").write_text('format = 1\n[metrics]\nlisten = "127.0.0.1:0"\n')
        watched = Watched(made)
        scrapes = [watched.after(0)]
        for number, fault in enumerate(("", "exit")):
            word.write_text(fault)
            spec = specification(MEMBERS, {"name": "fedavg-n"}, SECURE, seed=SEED + number, train=SGD)
            fed.completed(f"run-{number}", spec)
            scrapes.append(watched.after(number + 1))
        first, second = ({name: changed(a[name], b[name]) for name in a} for a, b in pairwise(scrapes))
        for name in first:
            assert first[name].items() ^ second[name].items() == set(), f"{name}: a failed computation shows"
        assert all(first.values())
        failures = fed.fedpareto("worker", "failures", "--home", str(fed.directory / "m0"))
        assert f"{TASK}: 1 computation of private rounds failed in a row" in failures

        received = fed.query("select sum(payload_bytes) from replies")[0][0]
        phases = dict(map(tuple, fed.query("select kind, count(*) from phases group by kind")))
        last = [sample for page in scrapes[-1].values() for sample in page.items()]
        of_coordinator = scrapes[-1]["coordinator"]
        assert of_coordinator["fedpareto_replies_total", (("outcome", "accepted"), ("reason", ""))] == watched.replies()
        assert of_coordinator["fedpareto_payload_bytes_total", (("direction", "received"),)] == received
        assert set(phases) == set(STAGES)
        for stage, count in phases.items():
            assert of_coordinator["fedpareto_phase_seconds_count", (("kind", stage),)] == count
        numbers = np.array([number for _, number in last])
        for value_of_member in hidden():
            assert not np.isclose(numbers, value_of_member, rtol=1e-6, atol=0).any(), value_of_member
        labels = {text for (_, pairs), _ in last for _, text in pairs}
        assert [text for text in labels if not WORDS.fullmatch(text)] == []
