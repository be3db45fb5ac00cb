"""What a task computes unless it says otherwise: the cross-entropy of logits with classes, and the right samples."""

from typing import TYPE_CHECKING, Any

from federation.tasks.errors import TaskError
from federation.value_words import in_words

if TYPE_CHECKING:
    from torch import Tensor

_IGNORED = -100  # the label that torch's cross-entropy leaves out


def cross_entropy(name: str, output: Any, y: "Tensor") -> "Tensor":
    """The mean cross-entropy of logits (n, C, ...) with classes (n, ...), or with probabilities (n, C, ...).

    Raises:
        TaskError: the output or the labels have another form; `name` is that of the task.
    """
    from torch.nn import functional  # noqa: PLC0415

    _check_logits(name, "losses()", output)
    if y.is_floating_point() and y.shape == output.shape:
        return functional.cross_entropy(output, y)
    _check_classes(name, "losses()", output, y)
    return functional.cross_entropy(output, y.long())


def right_samples(name: str, output: Any, y: "Tensor") -> "Tensor":
    """Marks the samples whose greatest logit is that of their class, (n,) of bool.

    A sample may have several labels (n, ...), such as a class for each pixel. Then its value is the share of its labels
    that are right; labels that do not count are left out. Errors are those of `cross_entropy`.
    """
    _check_logits(name, "correct()", output)
    _check_classes(name, "correct()", output, y)
    y = y.long()
    right: Tensor = output.argmax(dim=1) == y
    if right.ndim == 1:
        return right
    counted = (y != _IGNORED).flatten(1).sum(dim=1)
    return right.flatten(1).sum(dim=1) / counted.clamp(min=1)


def check_labels(name: str, output: Any, y: "Tensor") -> None:
    """Checks that the logits have a place for each class. Errors are those of `cross_entropy`."""
    _check_logits(name, "losses()", output)
    if y.is_floating_point() or not y.numel():
        return  # `cross_entropy` says what is wrong with them
    classes, labels = output.shape[1], y.long()
    known = (labels >= 0) & (labels < classes) | (labels == _IGNORED)
    if not known.all():
        wrong = labels[~known]
        least, most = labels[labels != _IGNORED].aminmax()
        shifted = f"y {'-' if least > 0 else '+'} {abs(least)} numbers them from 0"
        more = f"give the model more outputs, or labels that do not count the number {_IGNORED}"
        raise TaskError(
            f"task {name!r}: the label {wrong[0]} is none of the classes 0 to {classes - 1} of the model, whose output "
            f"is {in_words(output)}; the labels are {least} to {most}: {shifted if most - least < classes else more}"
        )


def _check_logits(name: str, method: str, output: Any) -> None:
    from torch import Tensor  # noqa: PLC0415

    if isinstance(output, Tensor) and output.ndim > 1:
        return
    holder = "logits" in output if isinstance(output, dict) else hasattr(output, "logits")
    remedy = "return its logits in the model's forward()" if holder else "return them in the model's forward()"
    raise TaskError(
        f"task {name!r}: the default {method} needs logits, a tensor (n, C); the model's output is {in_words(output)}: "
        f"{remedy}, or write {method}"
    )


def _check_classes(name: str, method: str, output: "Tensor", y: "Tensor") -> None:
    shape = output.shape[:1] + output.shape[2:]
    if y.shape == shape and not (y.is_floating_point() or y.is_complex()):
        return
    if y.shape == shape:
        remedy = "y.long() makes whole numbers of them"
    elif y.shape == output.shape:
        remedy = "of one-hot labels y.argmax(1) gives the classes"
    elif y.shape == (*shape[:1], 1, *shape[1:]):
        remedy = "y.squeeze(1) has one dimension less"
    else:
        remedy = "give one class for each sample"
    raise TaskError(
        f"task {name!r}: the default {method} needs labels that are classes, {tuple(shape)} whole numbers from 0 to "
        f"{output.shape[1] - 1}; y is {in_words(y)}, and the model's output {in_words(output)}: {remedy}, or write "
        "losses() and correct()"
    )
