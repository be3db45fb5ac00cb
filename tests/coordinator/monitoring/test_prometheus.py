"""The alert rules and the dashboard of deploy/monitoring, as Prometheus itself reads them."""

import json
import math
import re
import resource
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from federation.v1.common_pb2 import ReplyManifest
from federation.v1.federation_pb2 import SubmitRequest
from tests.harness import Federation, Member, Process, federation, wait_for
from tests.paths import ROOT
from tests.project.scene import ended

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

FILES = ROOT / "deploy/monitoring"
RULES = [rule for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((FILES / "dashboard.json").read_text())["panels"]
LISTENS = 'listen = "127.0.0.1:0"'


def installed(name: str) -> str:
    """A program of Prometheus; the test is skipped where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH: Debian's package prometheus has it")
    return found


def test_each_rule_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = yaml.safe_load((FILES / "alerts_test.yml").read_text())["tests"]
    checks = [(check["alertname"], bool(check["exp_alerts"])) for case in cases for check in case["alert_rule_test"]]
    assert set(checks) == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}


def test_promtool_takes_the_rules_which_fire_as_their_cases_say() -> None:
    ended(installed("promtool"), "check", "rules", FILES / "alerts.yml", code=0)
    ended(installed("promtool"), "test", "rules", FILES / "alerts_test.yml", code=0)


class Prometheus:
    """A server of Prometheus, with the rules of deploy/monitoring, whose minutes are seconds here."""

    def __init__(self, directory: Path, jobs: Mapping[str, Sequence[int]]) -> None:
        directory.mkdir()
        rules = (FILES / "alerts.yml").read_text()
        (directory / "alerts.yml").write_text(re.sub(r"for: (\d+)m", r"for: \1s", rules))
        scrapes = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in jobs.items()
        ]
        often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings = {"global": often, "rule_files": ["alerts.yml"], "scrape_configs": scrapes}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [
                    installed("prometheus"),
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: "Server is ready" in self.log.read_text(), "Prometheus to start")
        self.port = found(r'"Listening on" address=127.0.0.1:(\d+)', self.log)

    def get(self, path: str, **query: object) -> Any:
        """The data of an answer of its API."""
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {query}: {error.read().decode()}") from None

    def values(self, expression: str) -> list[float]:
        """The numbers that a panel draws of the last two minutes."""
        now = time.time()
        found = self.get("query_range", query=expression, start=now - 120, end=now, step=1)["result"]
        numbers = [float(number) for series in found for _, number in series["values"]]
        return [number for number in numbers if not math.isnan(number)]  # a quantile of nothing is NaN

    def firing(self) -> dict[str, list[Any]]:
        """The labels of the alerts that fire, by rule."""
        rules = [rule for group in self.get("rules", type="alert")["groups"] for rule in group["rules"]]
        assert [(rule["health"], rule.get("lastError", "")) for rule in rules] == [("ok", "")] * len(RULES)
        fired = {rule["name"]: [a["labels"] for a in rule["alerts"] if a["state"] == "firing"] for rule in rules}
        return {name: alerts for name, alerts in fired.items() if alerts}


def found(pattern: str, log: Path) -> int:
    """The number that a log has after these words; 0 if it has none yet."""
    match = re.search(pattern, log.read_text())
    return int(match[1]) if match else 0


def port_of(process: Process) -> int:
    return wait_for(lambda: found(r"metrics at http://127.0.0.1:(\d+)/metrics", process.log), "a server of metrics")


def working(fed: Federation, name: str, policy: str = "") -> Process:
    """A member that has joined and attends, and serves its numbers."""
    home = fed.join(name)
    (home / "worker.toml").write_text(f"format = 1\n[metrics]\n{LISTENS}\n")
    (home / "policy.toml").write_text(policy)
    return fed.work(name)


@contextmanager
def watched(fed: Federation, *workers: Process) -> Iterator[Prometheus]:
    """A server that scrapes a coordinator and workers."""
    jobs = {"fedpareto": [port_of(fed.serving)], "fedpareto-worker": [port_of(worker) for worker in workers]}
    prometheus = Prometheus(fed.directory / "prometheus", jobs)
    try:
        yield prometheus
    finally:
        prometheus.popen.kill()
        prometheus.popen.wait()


def hand_in_unknown(member: Member, times: int) -> None:
    """Hands in replies to assignments that there are not."""
    for number in range(times):
        reply = ReplyManifest(federation_id=member.files.federation_id, client_id=member.files.client_id)
        reply.assignment_id = f"{number:032x}"
        with pytest.raises(grpc.RpcError, match="there is no assignment"):
            list(member.stub.Submit(iter([SubmitRequest(reply=member.sign(reply))])))


SPEC = """\
task = "digits"
rounds = 100000
algorithm.name = "fedavg"
selection = { minimum = 2, quorum = 0.5 }
train = { steps = 2 }
"""


@pytest.mark.full
def test_a_server_of_prometheus_draws_every_panel_and_its_rules_fire_when_something_is_wrong(tmp_path: Path) -> None:
    installed("prometheus")
    with federation(tmp_path) as fed:
        settings = fed.home / "coordinator.toml"
        settings.write_text(settings.read_text().replace('\nlisten = ""', f"\n{LISTENS}"))
        fed.serve()
        ann, ben = working(fed, "ann"), working(fed, "ben", "[limits]\nmax_steps = 1\n")
        fed.attending("ann", "ben")
        with watched(fed, ann, ben) as prometheus:
            wait_for(lambda: prometheus.values("fedpareto_gives_federation") and prometheus.values("up"), "scrapes")
            assert prometheus.firing() == {}
            hand_in_unknown(fed.enroll("zoe"), 11)
            run = fed.submit("long", SPEC)
            for title, expression in [(panel["title"], each["expr"]) for panel in PANELS for each in panel["targets"]]:
                wait_for(partial(prometheus.values, expression), f"{title}: {expression}")
            wait_for(lambda: "FedparetoWarning" in prometheus.firing(), "the alert about a member that fails")
            fired = prometheus.firing()
            assert {name: [labels.get("reason") or labels.get("kind") for labels in fired[name]] for name in fired} == {
                "FedparetoRepliesRefused": ["assignment-unknown"],
                "FedparetoWarning": ["MEMBER_FAILS"],
            }
            fed.admin("stop", run, "--yes")
            ben.kill()
            down = wait_for(lambda: prometheus.firing().get("FedparetoDown"), "a worker that was killed")
            assert [labels["job"] for labels in down] == ["fedpareto-worker"]
            resource.prlimit(fed.serving.popen.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            fault = wait_for(lambda: prometheus.firing().get("FedparetoFault"), "a disk that takes no more")
            assert [labels["fault"] for labels in fault] == ["disk"]
            fed.serving.kill()
            wait_for(lambda: len(prometheus.firing().get("FedparetoDown", [])) == 2, "a coordinator that was killed")
            wait_for(lambda: prometheus.firing().get("FedparetoWorkerAway"), "a worker without a coordinator")
