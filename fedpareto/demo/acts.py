"""The runs of the demo, as their specifications are written."""

from dataclasses import dataclass

ATTACK = "scale=100,bias=1000"
CHEAT = "scale=5"  # in private rounds: a vector five times as long as allowed
ATTACKED_AVERAGE_ROUNDS = 5  # FedAvg has fallen to chance by then
PRIVATE_ROUNDS = 2
LARGEST = 10_000  # rounds

_SPEC = """\
name = "{name}"
task = "{run.task}"
rounds = {rounds}
seed = {seed}

[algorithm]
{run.algorithm}

[server]
learning_rate = {run.rate}

[train]
{run.train}

[selection]
minimum = 10  # a round waits until all hospitals attend
"""
_PRIVACY = """
[privacy]
secure = "verified"
"""


@dataclass(frozen=True)
class Play:
    """A run of the demo.

    Attributes:
        name: of the run.
        title: of its algorithm.
        algorithm: the section of its specification.
        rate: of the server.
        most: rounds, if it has fewer than the demo's number.
        private: whether its rounds are private.
        task: the name of the task.
        train: the section of its specification.
    """

    name: str
    title: str
    algorithm: str
    rate: float = 1.5
    most: int = LARGEST
    private: bool = False
    task: str = "scanners"
    train: str = "epochs = 1\nbatch_size = 10\nlearning_rate = 0.1"

    def specification(self, rounds: int, seed: int) -> str:
        """Its TOML document, for at most this number of rounds."""
        text = _SPEC.format(name=self.name, run=self, rounds=min(rounds, self.most), seed=seed)
        return text + _PRIVACY if self.private else text


AVERAGE = Play("fedavg", "FedAvg", 'name = "fedavg"')
FAIR = Play("fedmgda", "FedMGDA+", 'name = "fedmgda+"')
AVERAGE_ATTACKED = Play("fedavg-attacked", "FedAvg", 'name = "fedavg"', most=ATTACKED_AVERAGE_ROUNDS)
FAIR_ATTACKED = Play("fedmgda-attacked", "FedMGDA+", 'name = "fedmgda+"')
OPEN = Play("open", "FedMGDA+", 'name = "fedmgda+"', most=PRIVATE_ROUNDS)
PRIVATE = Play("private", "FedMGDA+", 'name = "fedmgda+"', most=PRIVATE_ROUNDS, private=True)

_TWO_DIGITS = "steps = 15\nbatch_size = 20\nlearning_rate = 0.4"
# Each has the better of the server's rates 1 and 2 (docs/results/scaled-digits).
OBJECTIVES = (
    Play("scalarised", "scalarised", 'name = "scalarised"', 2.0, task="two-digits-scaled", train=_TWO_DIGITS),
    Play("fsmgda", "FSMGDA", 'name = "fsmgda"\nnormalize = true', 1.0, task="two-digits-scaled", train=_TWO_DIGITS),
    Play(
        "fedcmoo",
        "FedCMOO",
        'name = "fedcmoo"\nweights = "exact"\nnormalize = true',
        1.0,
        task="two-digits-scaled",
        train=_TWO_DIGITS,
    ),
)
