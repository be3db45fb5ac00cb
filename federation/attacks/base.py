"""What every attack is: a few numbers, and what it does to a client's data, losses and update."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

if TYPE_CHECKING:
    from federation.objectives import Targets
    from federation.tasks import Dataset, Splits, Task

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


class AttackError(ValueError):
    """A description of an attack that says nothing, or an attack that does not fit the task or the client."""


def option(default: Any, words: str, *, least: float = -math.inf, most: float = math.inf) -> Any:
    """A number that an attack takes: its default, what it does, and the range that is allowed."""
    return dataclasses.field(default=default, metadata={"help": words, "least": least, "most": most})


@dataclasses.dataclass(frozen=True)
class Attack:
    """A dishonest client. Each method says what it does in place of the honest thing; here, the honest thing itself.

    Attributes:
        name: what specifications and the command line call it.
        trains: whether it needs its own honest update; where it does not, the client need not train.
        needs_peers: whether it is made from honest updates of others.
        alone: what becomes of an attack that needs peers where the only honest update it knows is its own.

    Raises:
        AttackError: a number out of its range.
    """

    name: ClassVar[str] = ""
    trains: ClassVar[bool] = True
    needs_peers: ClassVar[bool] = False
    alone: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least, most = field.metadata.get("least", -math.inf), field.metadata.get("most", math.inf)
            if isinstance(value, str):
                continue
            if not (math.isfinite(value) and least <= value <= most):
                span = f"from {least:g} to {most:g}" if math.isfinite(most) else f"at least {least:g}"
                wanted = f"{'finite and ' if most == math.inf else ''}{span}" if least > -math.inf else "finite"
                raise AttackError(f"{field.name} = {value:g}: the {field.name} of an attack is {wanted}")

    def __str__(self) -> str:
        """What `parse_attack` reads."""
        fields = dataclasses.fields(self)
        given = {
            field.name: getattr(self, field.name) for field in fields if getattr(self, field.name) != field.default
        }
        numbers = ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in given.items())
        return ":".join(part for part in (self.name, numbers) if part)

    @property
    def derived(self) -> str:
        """Which number follows from how many take part, since it is not given; empty where none does.

        A real worker does not know how many take part.
        """
        return ""

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return (type(self).__doc__ or "").partition("\n")[0]

    def poison(self, splits: "Splits", task: "Task", *, seed: int) -> "Splits":
        """The data that the client trains on in place of its own; what it is evaluated on stays as it is.

        Args:
            splits: its own.
            task: what is learned.
            seed: any integer; the same gives the same.

        Raises:
            AttackError: the data is not of the kind that the attack is about.
        """
        return splits

    def triggered(self, data: "Dataset") -> "Dataset | None":
        """Samples on which a model that was attacked with success answers with their y; None: there is no trigger.

        Args:
            data: clean samples of a test split.
        """
        return None

    def on_targets(self, targets: "Targets") -> "Targets":
        """The losses that the client trains on in place of `targets`, as weights of the objectives."""
        return targets

    def on_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """The losses of the base model that are reported in place of `losses`, by objective."""
        return dict(losses)

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        """The update that is sent.

        Args:
            own: u, the client's honest update w_t - w_i, (d,). For an attack that does not train the last change
                w_{t-1} - w_t of the global model, zeros where there is none.
            peers: the honest updates that the attacker knows, (h, d), in the order of the clients' names: in a
                simulation those of all the honest clients of the round, in a real worker its accomplices' and its own.
            m: how many clients take part, attackers included; read only where a number is `derived`.
            seed: of whatever is drawn; see `attack_seed`.

        Returns:
            float32 (d,).
        """
        return own

    def on_gradient(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        """The gradient of an objective that is sent, for rules that ask for gradients; as `on_update` by default."""
        return self.on_update(own, peers=peers, m=m, seed=seed)


def attack_seed(seed: int, round: int, client_id: str) -> int:  # noqa: A002 - the field's own word, as everywhere
    """The seed of one client's attack in one round, 0 to 2^63 - 1.

    A real worker poisons its data before it knows of a run: with seed 0 and round 0.
    """
    text = f"fedpareto/attack\0{seed}\0{round}\0{client_id}"
    return int.from_bytes(blake3(text.encode()).digest(8), "little") >> 1
