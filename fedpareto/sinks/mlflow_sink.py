"""A tracking server of MLflow: a run with its metrics, its model, the model's card and the report.

A tag of the run says how many rounds count. A server writes a round's metrics before the tag, so a process that starts
again asks for each metric of the first rounds that do not count whether the server has it already.

Several processes may write one run. Each writes the same metrics, which the database of a server keeps once, and the
tag counts only rounds that are there.
"""

import logging
import os
import random
import re
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink, SinkError

_RUN, _ROUNDS, _STATE, _REASON = "fedpareto.run", "fedpareto.rounds", "fedpareto.state", "fedpareto.reason"  # tags
_STATUS = {"COMPLETED": "FINISHED", "FAILED": "FAILED", "STOPPED": "KILLED"}
_BATCH = 500  # metrics of a call, of at most 1000
_LONGEST_TAG = 5000
_APART, _LOOKS = 1.0, 10  # seconds at most between two looks for a run that others make, and the number of looks
_SECONDS = 60  # that a call may take; the sink is tried again by its caller, and not by MLflow


class MlflowSink(Sink):
    """Writes to the server whose URI is the address, into the experiment `fedpareto-TASK`.

    A password may stand in the URI, or in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token in
    MLFLOW_TRACKING_TOKEN, which MLflow reads.
    """

    packages = ("mlflow",)
    takes_files = True

    def __init__(self, address: str) -> None:
        if not re.match(r"[a-z0-9+-]+://.", address):
            raise SinkError("expected the URI of a server, such as mlflow:http://127.0.0.1:5000")
        self._address = address

    def open(self, run: FollowedRun) -> int:
        """Finds the run by its tag, or makes it. Raises SinkError: the tag of the rounds is no number."""
        library = _library()
        self._entities = library.entities
        self._client = library.client(tracking_uri=self._address)
        experiment = self._experiment(f"fedpareto-{run.task}")
        there = self._run(experiment, run)
        self._id, tags = there.info.run_id, there.data.tags
        self._ended = tags.get(_STATE, "")
        rounds = tags[_ROUNDS]
        if not rounds.isdecimal():
            raise SinkError(f"the tag {_ROUNDS} of the run {self._id} is {rounds!r}, and not a number")
        self._doubtful = True  # whether the server may have the next round
        if rounds == "0":
            facts = {"task": run.task, "algorithm": run.algorithm, "rounds": str(run.rounds), "run_id": run.run_id}
            params = [self._entities.Param(name, value) for name, value in facts.items()]
            self._client.log_batch(self._id, params=params, synchronous=True)
        return int(rounds)

    def write(self, numbers: RoundNumbers) -> None:
        """Logs the metrics of a round, and then how many rounds count."""
        time = int(numbers.ended * 1000)
        known = {_key(name): value for name, value in numbers.values.items()}
        if self._doubtful:
            whole = len(known)
            known = {name: value for name, value in known.items() if not self._has(name, numbers.round)}
            self._doubtful = len(known) < whole
        metrics = [self._entities.Metric(name, value, time, numbers.round) for name, value in known.items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + _BATCH], synchronous=True)
        self._client.set_tag(self._id, _ROUNDS, str(numbers.round + 1))

    def finish(self, end: RunEnd) -> None:
        """Logs the files, and ends the run there."""
        if self._ended == end.state:
            return
        for file in end.files:
            self._client.log_artifact(self._id, str(file))
        if end.reason:
            self._client.set_tag(self._id, _REASON, end.reason[:_LONGEST_TAG])
        if end.state in _STATUS:
            self._client.set_terminated(self._id, _STATUS[end.state])
        self._client.set_tag(self._id, _STATE, end.state)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                if (found := self._client.get_experiment_by_name(name)) is None:  # another process has made it
                    raise
        if found.lifecycle_stage != "active":
            raise SinkError(f"the experiment {name} was deleted at the server: restore it there")
        return str(found.experiment_id)

    def _run(self, experiment: str, run: FollowedRun) -> Any:
        """The run at the server, which has an id of its own. It has the tag of the rounds once it may be used.

        A process that was killed before may have left a run without this tag: after some looks it is used, too.
        """
        looks = 0
        while True:
            found = self._found(experiment, run)
            if usable := [there for there in found if _ROUNDS in there.data.tags]:
                return usable[0]
            if not found:
                self._make(experiment, run)
            elif looks == _LOOKS:
                self._client.set_tag(found[0].info.run_id, _ROUNDS, "0")
            else:
                looks += 1
                _pause()

    def _make(self, experiment: str, run: FollowedRun) -> None:
        """Makes the run. Of two processes that do so, at least the later one sees both, and deletes its own."""
        start = int(run.created.timestamp() * 1000)
        made = self._client.create_run(experiment, start_time=start, tags={_RUN: run.key}, run_name=run.name)
        if len(self._found(experiment, run)) == 1:
            self._client.set_tag(made.info.run_id, _ROUNDS, "0")
        else:
            self._client.delete_run(made.info.run_id)
            _pause()

    def _found(self, experiment: str, run: FollowedRun) -> list[Any]:
        """The runs with its tag, in the order of their ids."""
        found = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{run.key}'")
        return sorted(found, key=lambda there: str(there.info.run_id))

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self._id, name))


def _pause() -> None:
    """Waits for what another process does; at random, so that two do not do the same again and again."""
    time.sleep(random.uniform(0, _APART))  # noqa: S311 - MLflow tells no client what another one has done


def _key(name: str) -> str:
    """A name that MLflow takes: other letters are written as their number."""
    return re.sub(r"[^\w.\-: /]", lambda found: f"_{ord(found[0]):x}", name)


def _library() -> SimpleNamespace:
    """MLflow's client, which tells nobody about its use, prints nothing, and does not try again by itself."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it is read at the import
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_SECONDS))
    client: Any = import_module("mlflow.tracking.client").MlflowClient
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # its errors come as exceptions
    return SimpleNamespace(client=client, entities=import_module("mlflow.entities"))
