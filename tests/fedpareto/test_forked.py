"""Processes that are forks of a server with the imports done."""

from fedpareto.processes.forked import completed


def test_a_fork_collects_garbage_but_not_what_its_server_has_imported() -> None:
    code = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    assert completed(["-c", code]).stdout.split() == ["True", "True"]
