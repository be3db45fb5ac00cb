"""Run specifications and tasks as a notebook gives them."""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpareto
from federation.tasks.digits import Digits
from fedpareto.face.given_spec import document, task_name

VALUES: dict[str, Any] = {
    "name": "first",
    "task": "digits",
    "rounds": 3,
    "algorithm": {"name": "fedmgda+", "epsilon": 0.5, "pre": ["clip"]},
    "simulation": {"clients": 3, "partition": "dirichlet:0.5"},
    "train": {"steps": 2, "optimizer": {"learning_rate": 0.1}},
}


def test_a_dict_and_a_specification_that_is_read_are_the_same_run_as_their_toml() -> None:
    values = {key: value for key, value in VALUES.items() if key != "train"}
    text = document(values)
    assert tomllib.loads(text.decode()) == values
    spec = fedpareto.RunSpec.parse(text)
    assert fedpareto.RunSpec.parse(document(spec)) == spec
    assert document(text) == document(text.decode()) == text


def test_a_task_replaces_that_of_the_specification_and_a_document_without_one_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "first" # with a comment\ntask = "digits"\nrounds = 3\nalgorithm.name = "fedavg"\n')
    assert document(path) == document(str(path)) == path.read_bytes()
    for given in (path, fedpareto.RunSpec.parse(path.read_bytes())):
        replaced = fedpareto.RunSpec.parse(document(given, "mine:Mine"))
        assert replaced == fedpareto.RunSpec.parse(path.read_bytes()).model_copy(update={"task": "mine:Mine"})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({**VALUES, "train": {"steps": np.int64(2)}}, r"train\.steps is .*2.*, of the type int64"),
        ({**VALUES, "server": None}, "server is None, of the type NoneType.* Leave a key out for its default"),
        ({7: 1}, "the key 7 is no text"),
        (["name"], "a TOML text or the path of one is needed, or a dict or RunSpec, not list"),
    ],
)
def test_what_no_specification_can_hold_is_refused_with_its_place(spec: Any, says: str) -> None:
    with pytest.raises(fedpareto.Error, match=says) as caught:
        fedpareto.simulate(spec)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("spec", [{**VALUES, "rounds": math.inf}, {**VALUES, "round": 3}, 'name = "first'])
def test_a_wrong_value_or_key_is_refused_as_in_a_file(spec: Any) -> None:
    with pytest.raises(fedpareto.Error) as caught:
        fedpareto.simulate(spec, task=Digits)
    assert isinstance(caught.value, ValueError)


def test_a_task_is_named_by_its_module_and_class_and_anything_else_is_refused() -> None:
    assert task_name(Digits) == "federation.tasks.digits:Digits"

    class Inside(Digits):
        """A class that no module has."""

    for wrong, says in (
        (Digits(), "a class that inherits from fedpareto.Task is needed, not <"),
        (int, "a class that inherits from fedpareto.Task is needed, not int"),
        (Inside, "define it at the top of a cell or module, not in a function"),
    ):
        with pytest.raises(fedpareto.Error, match=says):
            task_name(wrong)
