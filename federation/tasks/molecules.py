"""A network for molecules: messages between all pairs of atoms, by their bond and distance."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ATOMS = 29  # room in a molecule, which QM9's largest take
SLOTS = 4  # bonds of an atom
BONDS = 4  # kinds: single, double, triple, aromatic
COLUMNS = 4 + SLOTS  # atomic number, position, bonds
_ELEMENTS = (1, 6, 7, 8, 9)
_FEATURES = 11
_HYDROGEN = 1


class MessagePassing(nn.Module):
    """A molecule's graph to a vector: molecules (n, 29, 8) -> (n, 64); 616,960 parameters.

    Gilmer et al., Neural Message Passing for Quantum Chemistry, 2017, as LibMTL and FedCMOO have it: atoms exchange
    messages three times (NNConv, then a GRU), and Set2Set reads them in three steps. Every pair of atoms is joined by
    an edge with the kind of its bond, if any, and its distance.

    An atom is a row: its atomic number, its position in ångström, and for each of its bonds `bond(kind, other)`, in any
    order; zeros are no bond, and a row of zeros is no atom.
    """

    def __init__(self, width: int = 64, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.atom = nn.Linear(_FEATURES, width)
        self.message = EdgeConvolution(width, BONDS + 1, hidden=128)
        self.update = nn.GRUCell(width, width)
        self.read = Set2Set(width, steps)
        self.out = nn.Linear(2 * width, width)
        # Constants, not state.
        self.register_buffer("elements", torch.tensor(_ELEMENTS, dtype=torch.float32), persistent=False)
        codes = torch.tensor([[bond(kind, other) for kind in range(BONDS)] for other in range(ATOMS)])
        self.register_buffer("codes", codes.float(), persistent=False)
        self.elements: Tensor
        self.codes: Tensor

    def forward(self, molecules: Tensor) -> Tensor:
        """The vector of each molecule."""
        atoms, edges, present = self.graph(molecules)
        joined = present[:, :, None] * present[:, None, :] * (1 - torch.eye(ATOMS, device=present.device))
        state = self.atom(atoms).relu()
        for _ in range(self.steps):
            message = self.message(state, edges, joined).relu()
            state = gru(self.update, message, state)
        vector: Tensor = self.out(self.read(state, present)).relu()
        return vector

    def graph(self, molecules: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The features of atoms (n, 29, 11) and of pairs of them (n, 29, 29, 5), and the mask of present atoms (n, 29).

        Of an atom: which element it is of five, its atomic number, four zeros and the number of its hydrogens. The
        zeros stand for aromatic, sp, sp2 and sp3: in PyTorch Geometric's QM9, which the published code reads, they are
        never set, since its molecules are not sanitised. Of a pair: which bond of four, and the distance.
        """
        number, position, own = molecules[..., 0], molecules[..., 1:4], molecules[..., 4:]
        bonds = (own[:, :, :, None, None] == self.codes).any(dim=2).float()
        distance = (position[:, :, None] - position[:, None]).square().sum(dim=-1).sqrt()
        hydrogens = (bonds.sum(dim=-1) * (number == _HYDROGEN)[:, None]).sum(dim=-1)
        unset = torch.zeros_like(molecules[..., :4])
        kind = (number[..., None] == self.elements).float()
        atoms = torch.cat([kind, number[..., None], unset, hydrogens[..., None]], dim=-1)
        return atoms, torch.cat([bonds, distance[..., None]], dim=-1), (number > 0).float()


class EdgeConvolution(nn.Module):
    """NNConv with the mean over neighbours: an edge's features decide how its atoms' states become messages.

    With e(i, j) the features of an edge: m(i) = W s(i) + b + mean over j of s(j) N(e(i, j)), where the network N makes
    a matrix (width, width) of an edge.
    """

    def __init__(self, width: int, features: int, hidden: int) -> None:
        super().__init__()
        self.edge = nn.Linear(features, hidden)
        self.matrix = nn.Linear(hidden, width * width)
        self.root = nn.Linear(width, width)

    def forward(self, state: Tensor, edges: Tensor, joined: Tensor) -> Tensor:
        """Messages to all atoms, (n, atoms, width), of states (n, atoms, width) and edges (n, atoms, atoms, features).

        `joined` (n, atoms, atoms) is 1 where two atoms are neighbours. N is linear in its last layer: N(e) is the sum
        of matrices, one for each of its hidden units and one for the bias. Each atom's state is multiplied by these
        first, and edges only weigh the results. So no edge takes a matrix of its own, and there are many more edges
        than atoms.
        """
        width = state.shape[-1]
        ones = torch.ones_like(joined)[..., None]
        weights = torch.cat([self.edge(edges).relu(), ones], dim=-1) * joined[..., None]
        matrices = torch.cat([self.matrix.weight, self.matrix.bias[:, None]], dim=1).view(width, width, -1)
        met = state @ matrices.transpose(1, 2).flatten(1)
        total = weights.flatten(2) @ met.view(len(state), -1, width)
        message: Tensor = self.root(state) + total / joined.sum(dim=-1, keepdim=True).clamp(min=1)
        return message


class Set2Set(nn.Module):
    """Reads a set in some steps of attention: (n, atoms, width) -> (n, 2 width) (Vinyals et al. 2016)."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.cell = nn.LSTMCell(2 * width, width)

    def forward(self, state: Tensor, present: Tensor) -> Tensor:
        """The readout of states (n, atoms, width); `present` (n, atoms) is 1 for an atom and 0 for a gap."""
        query = memory = torch.zeros_like(state[:, 0])
        read = torch.cat([query, query], dim=-1)
        for _ in range(self.steps):
            query, memory = lstm(self.cell, read, query, memory)
            score = (state * query[:, None]).sum(dim=-1).masked_fill(present == 0, -torch.inf)
            seen = (score.softmax(dim=-1)[..., None] * state).sum(dim=1)
            read = torch.cat([query, seen], dim=-1)
        return read


def gru(cell: nn.GRUCell, x: Tensor, state: Tensor) -> Tensor:
    """The cell's new states for inputs and states, (..., width). Torch's own kernel cannot be stacked by `vmap`."""
    new = linear(x, cell.weight_ih, cell.bias_ih).chunk(3, dim=-1)
    old = linear(state, cell.weight_hh, cell.bias_hh).chunk(3, dim=-1)
    reset, keep = (new[0] + old[0]).sigmoid(), (new[1] + old[1]).sigmoid()
    candidate = (new[2] + reset * old[2]).tanh()
    return candidate + keep * (state - candidate)


def lstm(cell: nn.LSTMCell, x: Tensor, state: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The cell's next state and memory, (..., width), as `gru`."""
    gates = linear(x, cell.weight_ih, cell.bias_ih) + linear(state, cell.weight_hh, cell.bias_hh)
    take, keep, candidate, show = gates.chunk(4, dim=-1)
    memory = keep.sigmoid() * memory + take.sigmoid() * candidate.tanh()
    return show.sigmoid() * memory.tanh(), memory


def bond(kind: int, other: int) -> int:
    """A bond of an atom as one number: its kind from 0, and the row of the other atom."""
    return 1 + kind * ATOMS + other
