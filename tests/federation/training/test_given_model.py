"""Initial models in files as people have them: which tensors a run takes, in which order, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import nn

from federation.spec.run_sections import ParametersSpec
from federation.tasks import Task, initial_model
from federation.training.given_model import given_model, model_in_order
from federation.training.model_file import GivenModelError
from federation.vectors import write_vectors

AVERAGED, LOCAL = ParametersSpec(buffers="averaged"), ParametersSpec(buffers="local")
ORDER = ["body.weight", "body.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
State = dict[str, torch.Tensor]


class Net(Task):
    """A layer, a normalisation, a classifier."""

    name = "net"
    norm: type[nn.Module] = nn.BatchNorm1d

    def model(self, width: int = 8) -> nn.Module:
        made = nn.Sequential()
        made.add_module("body", nn.Linear(6, width))
        made.add_module("norm", self.norm(width))
        made.add_module("out", nn.Linear(width, 2))
        return made


class Plain(Net):
    """Without buffers."""

    norm = nn.LayerNorm


class Tied(Task):
    """An output that is the embedding, and a layer that is not trained."""

    name = "tied"

    def model(self) -> nn.Module:
        made = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "base": nn.Linear(3, 3).requires_grad_(False)})
        made["z_head"] = nn.Linear(3, 4, bias=False)
        made["z_head"].weight = made["embed"].weight
        return made


@pytest.fixture
def state() -> State:
    """Of a trained model, whose steps were counted."""
    torch.manual_seed(1)
    trained = Net().model()
    trained(torch.randn(32, 6))
    return dict(trained.state_dict())


def values(state: Mapping[str, Any], *names: str) -> list[float]:
    return [float(value) for name in names for value in np.asarray(state[name]).reshape(-1)]


def given(path: Path, task: Task, parameters: ParametersSpec = ParametersSpec()) -> tuple[list[str], list[float], str]:  # noqa: B008
    """The names and values of the run's model, and the remarks."""
    model = given_model(path, task, 3, parameters)
    return list(model.layout.shapes), model.vector.tolist(), "; ".join(model.remarks)


def test_tensors_are_taken_by_name_in_the_order_of_the_model(tmp_path: Path, state: State) -> None:
    path = tmp_path / "state.safetensors"
    save_file(state, path)  # which sorts them
    assert given(path, Net(), AVERAGED) == ([*ORDER, *BUFFERS], values(state, *ORDER, *BUFFERS), "")
    plain = {name: state[name] for name in ORDER}
    save_file(plain, path)
    assert given(path, Plain()) == (ORDER, values(state, *ORDER), "")


def test_what_a_run_does_not_share_is_left_out_and_named(tmp_path: Path, state: State) -> None:
    path = tmp_path / "state.safetensors"
    save_file(state, path)
    names, taken, said = given(path, Net(), LOCAL)
    assert (names, taken) == (ORDER, values(state, *ORDER))
    assert f"{path}: 3 buffers left out" in said
    assert "which differ from the file's" in said
    chosen = ParametersSpec(buffers="averaged", personal=("out.*",), frozen=("body.bias",))
    state["out.weight"] = torch.ones(9, 9)  # of another number of classes
    save_file(state, path)
    names, taken, said = given(path, Net(), chosen)
    assert names == ["body.weight", "norm.weight", "norm.bias", *BUFFERS]
    assert taken == values(state, *names)
    assert "2 personal parameters left out, as the run does not share them: out.bias, out.weight" in said
    assert "1 frozen parameter left out" in said


def test_missing_buffers_are_those_of_a_new_model(tmp_path: Path, state: State) -> None:
    path = tmp_path / "parameters.safetensors"
    save_file({name: state[name] for name in ORDER}, path)
    names, taken, said = given(path, Net(), AVERAGED)
    assert (names, taken) == ([*ORDER, *BUFFERS], [*values(state, *ORDER), *[0.0] * 8, *[1.0] * 8, 0.0])
    assert "3 buffers not in the file are those of a new model of the task" in said
    assert given(path, Net(), LOCAL) == (ORDER, values(state, *ORDER), "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_numbers_become_float32(tmp_path: Path, state: State, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    other = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    if dtype is torch.float64:
        other["body.bias"] += 1e-12
    save_file(other, path)
    expected = values({name: value.to(torch.float32) for name, value in other.items()}, *ORDER, *BUFFERS)
    _, taken, said = given(path, Net(), AVERAGED)
    assert taken == expected
    word = "1 tensor rounded to float32: body.bias" if dtype is torch.float64 else "became float32, which has the same"
    assert word in said


def test_tied_parameters_may_have_either_name_and_a_base_that_is_not_trained_may_be_there(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", Tied().model()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    weight = values(whole, "embed.weight")
    for names in (["embed.weight"], ["z_head.weight"], ["embed.weight", "z_head.weight"]):
        save_file({name: whole[name] for name in names}, path)
        assert given(path, Tied()) == (["embed.weight"], weight, "")
    save_file(whole, path)
    names, taken, said = given(path, Tied())
    assert (names, taken) == (["embed.weight"], weight)
    assert "2 untrained tensors left out" in said
    whole["z_head.weight"] = whole["z_head.weight"] + 1
    save_file(whole, path)
    with pytest.raises(GivenModelError, match=r"'embed.weight' and 'z_head.weight' are one tensor of the task's model"):
        given(path, Tied())


def changed(state: State, **changes: torch.Tensor | None) -> State:
    """A copy with other tensors, whose names have two underscores in place of a dot; None removes one."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in {**state, **named}.items() if value is not None}


REFUSED: dict[str, tuple[Any, str]] = {
    "another architecture": (
        lambda s: dict(Net().model(12).state_dict()),
        r"'body.weight' is \[8, 6\] in the task's model, and \[12, 6\] in the file. The task is net$",
    ),
    "a parameter is missing": (
        lambda s: changed(s, norm__bias=None),
        r"'norm.bias' is \[8\] in the task's model, and missing in the file. The task is net$",
    ),
    "another name": (
        lambda s: changed(s, out__bias=None, head__bias=s["out.bias"]),
        r"'out.bias' .* missing in the file; it has 'head.bias', \[2\], and the task's model has not",
    ),
    "one too many": (lambda s: changed(s, extra=torch.ones(3)), r"it has 'extra', \[3\], and the task's model has not"),
    "a parallel model": (
        lambda s: {f"module.{name}": value for name, value in s.items()},
        r"all of its names begin with 'module.': save the tensors under their names without it",
    ),
    "integers for a parameter": (
        lambda s: changed(s, out__bias=torch.ones(2, dtype=torch.int64)),
        r"'out.bias' is I64; a parameter is F32, F16, BF16, F64",
    ),
    "not finite": (lambda s: changed(s, out__bias=torch.tensor([1, torch.nan])), "'out.bias' has values that are not"),
    "too large": (
        lambda s: changed(s, out__bias=torch.tensor([1, 1e300], dtype=torch.float64)),
        "'out.bias' has values that are not finite in float32",
    ),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_another_model_is_refused_with_its_first_difference(
    tmp_path: Path, state: State, make: Any, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make(state), path)
    with pytest.raises(GivenModelError, match=rf"^{path} cannot be the initial model: .*{words}"):
        given(path, Net(), AVERAGED)


def converted(message: str) -> None:
    """Runs the lines of a message, which are indented."""
    exec("\n".join(line.strip() for line in message.splitlines() if line.startswith("    ")), {})


@pytest.mark.parametrize("name", ["state.pt", "old.pt", "state.npz"])
def test_a_file_of_another_library_is_not_read_and_the_lines_that_convert_it_work(
    tmp_path: Path, state: State, name: str
) -> None:
    path = tmp_path / name
    if name == "state.npz":
        np.savez(path, allow_pickle=True, **{name: value.numpy() for name, value in state.items()})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name == "state.pt")
    with pytest.raises(GivenModelError) as caught:
        given(path, Net(), AVERAGED)
    said = str(caught.value)
    assert f"{path} cannot be the initial model: it is a" in said
    assert "fedpareto does not read them" in said
    converted(said)
    assert given(path.with_suffix(".safetensors"), Net(), AVERAGED)[1] == values(state, *ORDER, *BUFFERS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"loss,accuracy\n0.5,0.8\n", "it is a text"),
        (b"PK\x03\x04" + bytes(30), "it is a zip archive that is damaged or incomplete"),
        (b"\x89HDF\r\n\x1a\n" + bytes(30), "it is an HDF5 file"),
        (b"\xff" * 30, r"at most 10004096 are accepted \[limit:header\]"),
    ],
    ids=["empty", "text", "archive", "HDF5", "unknown"],
)
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(GivenModelError, match=words):
        given(path, Net(), AVERAGED)
    with pytest.raises(GivenModelError, match=r"cannot read .*: No such file"):
        given(tmp_path / "absent", Net(), AVERAGED)


def test_without_its_task_a_file_is_sent_in_the_order_of_the_model_and_no_other_one(
    tmp_path: Path, state: State
) -> None:
    path = tmp_path / "model.safetensors"

    def refused(parameters: ParametersSpec = ParametersSpec()) -> str:  # noqa: B008
        with pytest.raises(GivenModelError) as caught:
            model_in_order(path, "there is no task 'net'", parameters)
        return str(caught.value)

    write_vectors(path, *initial_model(Plain(), 0))
    assert model_in_order(path, "", ParametersSpec())[1].tolist() == initial_model(Plain(), 0)[1].tolist()
    assert "holds 'out.weight', which the run does not share" in refused(ParametersSpec(personal=("out.*",)))
    assert "buffers is needed" in refused(AVERAGED)
    write_vectors(path, *initial_model(Net(), 0))
    model_in_order(path, "", AVERAGED)
    assert "holds 'norm.running_mean', which the run does not share" in refused(LOCAL)
    save_file({name: state[name] for name in ORDER}, path)
    assert "sorted by name, as libraries write them" in refused()
    assert "it is not here: there is no task 'net'" in refused()
    save_arrays({f"layers.{number}.w": np.ones(1, np.float32) for number in range(11)}, path)
    assert "sorted by name" in refused()
    save_arrays({"coef": np.ones((2, 3), np.float32), "intercept": np.ones(2, np.float32)}, path)
    model_in_order(path, "", ParametersSpec())
    save_file({name: value.half() for name, value in state.items()}, path)
    assert "is F16, not F32" in refused()
