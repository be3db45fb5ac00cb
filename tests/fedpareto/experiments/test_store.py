"""Results of experiments on disk: damaged ones, interrupted ones, and runs in processes of their own."""

import math
import multiprocessing
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from fedpareto.experiments import measures
from fedpareto.experiments.experiment_runner import Event, ExperimentRunner, RunnerSettings, other
from fedpareto.experiments.result_store import RUNS, DamagedError, Store, difference
from tests.fedpareto.experiments import scene as experiment_cases
from tests.fedpareto.experiments.scene import begun, events_of, history, made, tiny_job
from tests.harness import wait_for
from tests.process_state import is_running

one_thread, under_way = experiment_cases.one_thread, experiment_cases.under_way  # fixtures


def test_results_are_stored_whole_with_unknown_numbers_and_count_for_their_specification_only(tmp_path: Path) -> None:
    store, job = Store(tmp_path), tiny_job(7)
    assert store.find(job) is None
    store.keep(job, {"mean": 80.0, "std": math.nan}, [{"round": 1.0}])
    found = store.find(job)
    assert found is not None
    assert found.final["mean"] == 80.0
    assert math.isnan(found.final["std"])
    changed = tiny_job(7, "rounds = 3", "rounds = 4")
    assert (changed.name, store.find(changed)) == (job.name, None)
    store.forget([job])
    assert store.find(job) is None
    assert store.runs() == {}


def test_a_key_that_came_later_changes_nothing_of_results_unless_the_experiment_gives_it(tmp_path: Path) -> None:
    store, job = Store(tmp_path), tiny_job(7)
    store.keep(job, {"mean": 80.0}, [])
    stored = store.runs()[job.name]
    del stored.spec["train"]["measure"]
    (tmp_path / RUNS).write_bytes(stored.line())
    found = store.find(job)
    assert found is not None
    assert found.spec == job.document
    assert store.find(tiny_job(7, "rounds = 3", "rounds = 3, train.measure = true")) is None
    stored.spec["train"]["of another time"] = 1
    (tmp_path / RUNS).write_bytes(stored.line())
    assert store.find(job) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), ""),
        (("rounds = 3", "rounds = 4"), "rounds = 3, not 4"),
        (("train.steps = 2", "train.steps = 5"), "train.steps = 2, not 5"),
        (("rounds = 3", "rounds = 3, limits.skipped_rounds = 7"), "limits.skipped_rounds = 3, not 7"),
        (('name = "fedavg"', 'name = "fedmgda"'), 'algorithm.name = "fedavg", not "fedmgda"'),
    ],
)
def test_results_of_another_specification_say_in_what_they_differ(
    tmp_path: Path, changes: tuple[str, str], message: str
) -> None:
    store, job = Store(tmp_path), tiny_job(7)
    store.keep(job, {"mean": 80.0}, [])
    other = tiny_job(7, *changes)
    assert store.other(other) == message
    assert difference({"a": {"b": 1}, "gone": 1}, {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 2}}) == (
        "a.c = unset, not 2"
    )


def run_line(mean: str = "80", rounds: str = "{}", digest: bytes | None = None) -> str:
    """A line of a run whose specification is empty."""
    stated = "" if digest is None else f', "digest": "blake3:{blake3(digest).hexdigest()}"'
    heading = '"method": "a", "condition": "", "seed": 7, "spec": {}'
    return f'{{{heading}, "final": {{"mean": {mean}}}, "rounds": {rounds}{stated}}}'


LINES = {
    "[]": "(the document): Input should be an object",
    '"x"': "(the document): Input should be an object",
    "null": "(the document): Input should be an object",
    "\0": "(the document): Invalid JSON: expected value at line 1 column 1",
    '{"method": "a", "condition": "", "seed": 7, "spec": {}, "rounds": {}}': "final: missing",
    run_line('"80"'): "final.mean: Input should be a valid number",
    run_line(rounds='{"round": 1}'): "rounds: expected lists of the same length",
    run_line(rounds="[]"): "rounds: expected lists of the same length",
    run_line(rounds='{"mean": [80]}'): "rounds: no round",
    run_line(rounds='{"round": [1, null], "mean": [80, 81]}'): "rounds: no round",
    run_line(rounds='{"round": [1], "mean": [80, 81]}'): "rounds: expected lists of the same length",
    '{"method": "a", "condition": "", "seed": 7, "spec": {"x": NaN}, "final": {}, "rounds": {}}': (
        "spec: Out of range float values are not JSON compliant"
    ),
    run_line(): "digest: not that of the specification",
    run_line(digest=b"[]"): "digest: not that of the specification",
    run_line(digest=b"{}"): "",
}


@pytest.mark.parametrize(("line", "why"), LINES.items())
def test_a_line_is_a_run_or_refused_with_a_reason(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / RUNS).write_text(f"\n{line}\n")
    if not why:
        assert list(Store(tmp_path).runs()) == ["a-7"]
        return
    with pytest.raises(DamagedError) as refused:
        Store(tmp_path).runs()
    assert str(refused.value).startswith(f"{tmp_path / RUNS}, line 2 cannot be read ({why}")
    assert str(refused.value).endswith("): remove the line, and its run is made again")


def test_a_last_line_without_its_end_is_a_run_and_gets_its_end(tmp_path: Path) -> None:
    store, jobs = Store(tmp_path), [tiny_job(seed) for seed in (7, 8)]
    store.keep(jobs[0], {"mean": 80.0}, [{"round": 1.0}, {"round": 2.0, "mean": math.inf}])
    whole = (tmp_path / RUNS).read_bytes()
    (tmp_path / RUNS).write_bytes(whole.rstrip())
    assert store.find(jobs[0]) is not None
    store.keep(jobs[1], {"mean": 81.0}, [])
    assert (tmp_path / RUNS).read_bytes().startswith(whole)
    assert [run.rounds for run in store.runs().values()] == [[{"round": 1.0}, {"round": 2.0}], []]
    assert not store.mend()


def test_a_full_disk_loses_no_run_that_was_written_and_leaves_no_half_line(tmp_path: Path) -> None:
    store, jobs = Store(tmp_path), [tiny_job(seed) for seed in (7, 8)]
    store.keep(jobs[0], {"mean": 80.0}, [])
    whole = (tmp_path / RUNS).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (len(whole), len(whole) + 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                store.keep(jobs[1], {"mean": 81.0}, [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / RUNS).read_bytes() == whole
    store.keep(jobs[1], {"mean": 81.0}, [])
    both = (tmp_path / RUNS).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.forget(jobs[:1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / RUNS).read_bytes() == both
    store.forget(jobs[:1])
    assert [run.seed for run in store.runs().values()] == [8]
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]


def test_a_run_whose_result_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    store, job = Store(tmp_path), tiny_job()
    (tmp_path / RUNS).mkdir()
    event = made(store, job)
    assert event.kind == "failed"
    assert event.reason == f"IsADirectoryError: [Errno 21] Is a directory: '{tmp_path / RUNS}'"
    (tmp_path / RUNS).rmdir()
    assert [(item.kind, item.done) for item in events_of(store, job)] == [("finished", 3)]  # no round is made again
    assert store.find(job) is not None


def adds_and_removes(directory: Path, first: int) -> None:
    """Adds runs to a table, and removes every second one."""
    store = Store(directory)
    for seed in range(first, first + 10):
        job = tiny_job(seed)
        store.keep(job, {"mean": float(seed)}, [{"round": float(t)} for t in range(1000)])
        if seed % 2:
            store.forget([job])


def test_several_processes_write_one_table(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # importing PyTorch takes seconds
    writers = [context.Process(target=adds_and_removes, args=(tmp_path, first)) for first in (0, 100, 200)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    runs = Store(tmp_path).runs().values()
    assert {run.seed for run in runs} == {first + k for first in (0, 100, 200) for k in range(0, 10, 2)}
    assert all(run.final == {"mean": run.seed} for run in runs)


def test_what_is_measured_is_in_percent_and_can_leave_attackers_out() -> None:
    everybody = measures.final(history())
    assert (everybody["mean"], everybody["pooled"], everybody["client/client-002"]) == (50.0, 35.0, 0.0)
    honest = measures.final(history(), exclude=("client-002",))
    assert (honest["mean"], honest["std"], honest["variance"]) == (75.0, 25.0, 625.0)
    assert (honest["pooled"], honest["loss/train"], honest["worst"]) == (87.5, 1.5, 50.0)
    assert (honest["improved"], honest["skipped"], honest["refusals"], honest["seconds"]) == (75.0, 1.0, 1.0, 3.0)
    assert "client/client-002" not in honest
    assert [item["round"] for item in measures.rounds(history())] == [2.0]
    assert "rises" not in honest, "only one round was evaluated"


@pytest.mark.parametrize(("losses", "share"), [([1.0, 2.0], 100.0), ([3.0, 2.0, 2.0, 2.5], 100 / 3)])
def test_the_share_of_rounds_in_which_the_loss_rises_is_that_of_evaluated_rounds(
    losses: list[float], share: float
) -> None:
    whole = history()
    (record, *_) = (record for record in whole.client_records if record["split"] == "train")
    rounds = [{**whole.round_records[1], "round": number} for number in range(len(losses))]
    records = [{**record, "round": number, "loss": loss} for number, loss in enumerate(losses)]
    tested = [{**records[number], "split": "test"} for number in range(len(losses))]
    clients = sorted([*records, *tested], key=lambda one: one["round"])
    changed = replace(whole, round_records=tuple(rounds), client_records=tuple(clients))
    assert measures.final(changed)["rises"] == pytest.approx(share)


@pytest.mark.full
def test_a_run_that_is_stopped_goes_on_where_it_was_and_comes_to_the_same(tmp_path: Path) -> None:
    job = tiny_job()
    stopped, straight = Store(tmp_path / "stopped"), Store(tmp_path / "straight")
    assert begun(stopped, job, job) == ["round", "stopped"]
    assert stopped.workspace(job).is_dir()
    for store in (stopped, straight):
        ended = made(store, job)
        assert (ended.kind, ended.done) == ("finished", 3)
        assert not store.workspace(job).exists()
    ours, theirs = stopped.find(job), straight.find(job)
    assert ours is not None
    assert theirs is not None
    assert {**ours.final, "seconds": 0} == {**theirs.final, "seconds": 0}
    assert [item["round"] for item in ours.rounds] == [2.0, 3.0]


def test_a_run_under_way_of_another_specification_is_left_alone(tmp_path: Path, under_way: Path) -> None:
    store = Store(shutil.copytree(under_way, tmp_path / "out"))
    job = tiny_job(1, "rounds = 3", "rounds = 4")
    assert other(store, job) == "rounds = 3, not 4"
    event = made(store, job)
    why = f"the interrupted run in {store.workspace(job)} cannot be used (it is of another specification: rounds = 3, "
    assert event.reason == why + "not 4): --anew makes it again"
    same = tiny_job()
    assert other(store, same) == ""
    assert made(store, same).kind == "finished"


def test_a_run_under_way_goes_on_with_what_was_written_when_it_began(tmp_path: Path, under_way: Path) -> None:
    store = Store(shutil.copytree(under_way, tmp_path / "out"))
    # The same to a reader, in another order.
    again = tiny_job(1, "rounds = 3, simulation.clients = 4", "simulation.clients = 4, rounds = 3")
    assert made(store, again).kind == "finished"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("coordinator.db", b"x" * 4096, "(sqlite3.DatabaseError) file is not a database"),
        ("coordinator.toml", b"x", "coordinator.toml is not TOML: "),
        ("signing.key", b"x", "signing.key is damaged: it does not hold a private key"),
        ("blobs", b"x", "the bytes of blob "),
        ("blobs", None, "there is no blob blake3:"),
    ],
)
def test_a_run_under_way_that_is_damaged_says_what_to_do(
    tmp_path: Path, under_way: Path, file: str, content: bytes | None, why: str
) -> None:
    store, job = Store(shutil.copytree(under_way, tmp_path / "out")), tiny_job()
    place = store.workspace(job) / file
    for path in [path for path in place.rglob("*/*/*") if path.is_file()] if place.is_dir() else [place]:
        path.unlink() if content is None else path.write_bytes(content)
    reason = made(store, job).reason
    assert reason.startswith(f"the interrupted run in {store.workspace(job)} cannot be used (")
    assert reason.endswith("): --anew makes it again")
    assert why in reason
    assert "\n" not in reason
    assert "Background on this error" not in reason
    assert store.workspace(job).is_dir()


def test_a_run_that_another_process_is_making_says_so(tmp_path: Path, under_way: Path) -> None:
    from storage.database import Database

    store, job = Store(shutil.copytree(under_way, tmp_path / "out")), tiny_job()
    database = Database.open(f"sqlite:///{store.workspace(job)}/coordinator.db")
    database.lock_exclusive()
    assert made(store, job).reason == f"another process is making this run, in {store.workspace(job)}"
    database.close()
    assert made(store, job).kind == "finished"


def test_a_run_that_fails_says_why_its_updates_were_not_accepted_and_keeps_its_record(tmp_path: Path) -> None:
    diverging = "rounds = 3, limits.skipped_rounds = 2, train.learning_rate = 1e30"
    store, job = Store(tmp_path), tiny_job(1, "rounds = 3", diverging)
    for _ in range(2):  # neither is it made again by itself
        event = made(store, job)
        assert (event.kind, event.done) == ("failed", 2)
        assert "the run ended FAILED: 2 rounds in a row were skipped" in event.reason
        assert "; 8 of 8 replies not accepted: training-diverged; " in event.reason
        assert f"its record is in {store.workspace(job)}, --anew makes it again" in event.reason
        assert (store.workspace(job) / "coordinator.db").exists()


def test_a_run_that_is_paused_by_the_coordinator_fails_with_the_reason_and_is_not_one_that_was_stopped(
    tmp_path: Path,
) -> None:
    store, job = Store(tmp_path), tiny_job()
    runner = ExperimentRunner(store, RunnerSettings())
    paused = replace(history(), state="PAUSED", reason="a check fails")
    event = runner._ended(job, store.workspace(job), paused)
    assert event.kind == "failed"
    assert event.reason.startswith("the run ended PAUSED: a check fails; 1 of 1 replies not accepted: not-finite; ")
    runner.stop()
    assert runner._ended(job, store.workspace(job), paused).kind == "stopped"


def of_a_parent_that_is_killed(directory: Path, pids: "multiprocessing.Queue[int]") -> None:
    """Makes two runs beside each other, one of them without an end, and tells the ids of its children."""
    jobs = [tiny_job(0, "rounds = 3", "rounds = 1"), tiny_job(1, "rounds = 3", "rounds = 1000000")]
    seen: set[tuple[int, str]] = set()

    def tell(event: Event) -> None:
        seen.add((event.job.seed, event.kind))
        if {(0, "finished"), (1, "round")} <= seen:
            for child in multiprocessing.active_children():
                pids.put(child.pid or 0)
            pids.put(0)
            seen.clear()

    ExperimentRunner(Store(directory), RunnerSettings(parallel=2)).run(jobs, tell)


@pytest.mark.parametrize("ended", ["its parent", pytest.param("each child", marks=pytest.mark.full)])
def test_children_whose_parent_is_killed_end_and_so_do_those_that_are_told_to(tmp_path: Path, ended: str) -> None:
    context = multiprocessing.get_context("forkserver")
    pids: multiprocessing.Queue[int] = context.Queue()
    parent = context.Process(target=of_a_parent_that_is_killed, args=(tmp_path, pids))
    parent.start()
    children = list(iter(lambda: pids.get(timeout=60), 0))
    assert len(children) == 2
    if ended == "its parent":
        parent.kill()
    else:
        for child in children:
            os.kill(child, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, children)), "the end of the children", 30)
    parent.join()
    endless = tiny_job(1, "rounds = 3", "rounds = 1000000")
    assert begun(Store(tmp_path), endless) == ["round", "stopped"]


@pytest.mark.full
def test_runs_beside_each_other_are_processes_that_fail_finish_and_stop_by_themselves(tmp_path: Path) -> None:
    endless = tiny_job(2, "rounds = 3", "rounds = 1000000")
    jobs = [tiny_job(0, "clients = 4", "clients = 5000"), tiny_job(1), endless]
    store = Store(tmp_path)
    runner = ExperimentRunner(store, RunnerSettings(parallel=2))
    last: dict[int, Event] = {}

    def stop_when_the_endless_one_is_all_that_is_left(event: Event) -> None:
        last[event.job.seed] = event
        if {seed: item.kind for seed, item in last.items()} == {0: "failed", 1: "finished", 2: "round"}:
            runner.stop()

    runner.run(jobs, stop_when_the_endless_one_is_all_that_is_left)
    assert {seed: event.kind for seed, event in last.items()} == {0: "failed", 1: "finished", 2: "stopped"}
    assert "5000" in last[0].reason
    assert [store.find(job) is not None for job in jobs] == [False, True, False]
    assert store.workspace(jobs[2]).is_dir()


@pytest.mark.full
def test_a_run_whose_process_is_killed_fails_alone(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    jobs = [tiny_job(0, "rounds = 3", "rounds = 1"), tiny_job(1, "rounds = 3", "rounds = 1000000")]
    ends: dict[int, Event] = {}

    def kill_what_is_left(event: Event) -> None:
        if event.kind != "round":
            ends[event.job.seed] = event
        if event.job.seed == 1 and 0 in ends:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()

    ExperimentRunner(Store(tmp_path), RunnerSettings(parallel=2)).run(jobs, kill_what_is_left)
    assert {seed: (event.kind, event.reason) for seed, event in ends.items()} == {
        0: ("finished", ""),
        1: ("failed", "its process ended with -9"),
    }
