"""The base of all attacks: options, and changes to a client's data, losses and update."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.arrays import numbers
from federation.digests import derived_seed
from federation.errors import Error
from federation.plugins import PluginError, plugin_code
from federation.spec.options import Options

if TYPE_CHECKING:
    from federation.spec.objective_names import Targets
    from federation.tasks import Dataset, Splits, Task

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


class AttackError(Error, ValueError):
    """The description names no attack, or the attack does not fit the task or the client."""


@dataclasses.dataclass(frozen=True)
class Attack(Options):
    """A dishonest client. Each method changes one thing that an honest client does; here, nothing is changed.

    Attributes:
        name: its name in specifications and on the command line.
        trains: True if it needs its own honest update; otherwise the client need not train.
        needs_peers: True if it is computed from honest updates of others.
        alone: the effect of an attack that needs peers if the only honest update that it knows is its own.
        from_participants: an option that follows from the number of participants if it is 0; or empty.

    Raises:
        AttackError: a number outside its interval.
    """

    refusal = AttackError
    name: ClassVar[str] = ""
    trains: ClassVar[bool] = True
    needs_peers: ClassVar[bool] = False
    alone: ClassVar[str] = ""
    from_participants: ClassVar[str] = ""

    def __str__(self) -> str:
        """The text from which `parse_attack` makes it."""
        return self.spelling(every=False)

    def spelling(self, *, every: bool = True) -> str:
        """Its name and its options; with `every` those with their default, too."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {field.name: value for field, value in values.items() if every or value != field.default}
        numbers = ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in given.items())
        return ":".join(part for part in (self.name, numbers) if part)

    @property
    def derived(self) -> str:
        """The option that follows from the number of participants, which a real worker does not know; or empty."""
        key = self.from_participants
        return key if key and not getattr(self, key) else ""

    @property
    def summary(self) -> str:
        """Its first line of documentation."""
        return (type(self).__doc__ or "").partition("\n")[0]

    @property
    def stretch(self) -> float:
        """The length of its vector in a private round, as a multiple of the allowed length; 1 for an honest member."""
        return 1.0

    def poison(self, splits: "Splits", task: "Task", *, seed: int) -> "Splits":
        """The client's data with another training split; it is evaluated on its own data. The same seed gives the same.

        Raises:
            AttackError: the attack does not suit data of this kind.
        """
        return splits

    def triggered(self, data: "Dataset") -> "Dataset | None":
        """Clean test samples with a trigger, and the labels y that a successful attack gets; None without a trigger."""
        return None

    def on_targets(self, targets: "Targets") -> "Targets":
        """The weights of the objectives in the losses that the client trains on."""
        return targets

    def on_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """The losses of the base model that are reported, by objective."""
        return dict(losses)

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        """The update that is sent.

        Args:
            own: u, the client's honest update w_t - w_i, (d,). For an attack that does not train the last change
                w_{t-1} - w_t of the global model, zeros without one.
            peers: the honest updates that the attacker knows, (h, d), in the order of the clients' names: in a
                simulation those of all the honest clients of the round, in a real worker its accomplices' and its own.
            m: the number of participants, attackers included; read only where an option is `derived`.
            seed: for random numbers; see `attack_seed`.

        Returns:
            float32 (d,).
        """
        return own

    def on_gradient(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        """The gradient of an objective that is sent to algorithms that ask for gradients; as `on_update` here."""
        return self.on_update(own, peers=peers, m=m, seed=seed)


def distorted(attack: Attack, own: Vector, *, of_update: bool, peers: Matrix, m: int, seed: int) -> Vector:
    """The update, or the gradient, that an attack sends in place of `own`, checked and converted: float32 (d,).

    The other arguments are those of `Attack.on_update`. The attack may write into `own`, and not into `peers`.

    Raises:
        AttackError: the code of an attack raised an exception, or its answer is no vector of d numbers.
    """
    method, seen = ("on_update" if of_update else "on_gradient"), peers.view()
    seen.flags.writeable = False
    with _own_code(attack, method):
        answer = getattr(attack, method)(own.copy(), peers=seen, m=m, seed=seed)
        sent = np.ascontiguousarray(numbers(answer), dtype=np.float32)
    if sent.shape != own.shape:
        raise AttackError(f"attack {attack}: the answer of {method} has shape {sent.shape}; {own.shape} is needed")
    return sent


def claimed(attack: Attack, losses: Mapping[str, float]) -> dict[str, float]:
    """The losses that an attack reports, by objective.

    Raises:
        AttackError: the code of an attack raised an exception, or they are not numbers by these names.
    """
    with _own_code(attack, "on_losses"):
        answer = {name: float(numbers(value).reshape(())) for name, value in dict(attack.on_losses(losses)).items()}
    if answer.keys() - losses.keys():
        raise AttackError(f"attack {attack}: on_losses gives {list(answer)}; the losses are {list(losses)}")
    return answer


def poisoned(attack: Attack, splits: "Splits", task: "Task", *, seed: int) -> "Splits":
    """The data of a client that attacks; see `Attack.poison`.

    Raises:
        AttackError: the attack does not suit the data, or its code raised an exception or gives something else.
    """
    with _own_code(attack, "poison"):
        answer: Any = attack.poison(splits, task, seed=seed)
    if not isinstance(answer, type(splits)):
        raise AttackError(f"attack {attack}: poison gives {type(answer).__name__}; {type(splits).__name__} is needed")
    return answer


@contextmanager
def _own_code(attack: Attack, method: str) -> Iterator[None]:
    """Turns an exception in the code of an attack into an AttackError that says where it was."""
    try:
        with plugin_code(f"attack {attack}", method, AttackError):
            yield
    except PluginError as error:
        raise AttackError(str(error)) from error


def attack_seed(seed: int, round: int, client_id: str) -> int:  # noqa: A002 - the field's own word, as everywhere
    """The seed of one client's attack in one round, 0 to 2^63 - 1.

    A real worker poisons its data before it knows of a run: with seed 0 and round 0.
    """
    return derived_seed(f"fedpareto/attack\0{seed}\0{round}\0{client_id}")
