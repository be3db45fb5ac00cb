"""QM9: the reader of its files, and a network for molecules against its definition, atom by atom."""

from pathlib import Path

import numpy as np
import pytest
import torch

from federation.tasks import DataError, DataSource, Part, task
from federation.tasks.molecules import EdgeConvolution, MessagePassing, Set2Set, bond, gru, lstm
from federation.tasks.qm9 import FOLDER, OBJECTIVES
from tests.federation.tasks.scene import descended, packed_or_not, published, refused, write
from tests.paths import PUBLIC_DATA

# Elements, positions in ångström, and bonds (from 1; single 1, double 2, triple 3).
METHANE = (
    "CHHHH",
    [
        (-0.0127, 1.0858, 0.008),
        (0.0022, -0.006, 0.002),
        (1.0117, 1.4638, 0.0003),
        (-0.5408, 1.4475, -0.8766),
        (-0.5238, 1.4379, 0.9064),
    ],
    [(1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1)],
)
WATER = ("OHH", [(-0.0344, 0.9775, 0.0076), (0.0648, 0.0206, 0.0015), (0.8718, 1.3008, 0.0007)], [(1, 2, 1), (1, 3, 1)])
CYANIDE = (
    "CNH",
    [(-0.0133, 1.1325, 0.0083), (0.0023, -0.0192, 0.0019), (-0.0278, 2.1990, 0.0141)],
    [(1, 2, 3), (1, 3, 1)],
)
FORMALDEHYDE = (
    "CONH",
    [(0.0, 0.0, 0.0), (1.2, 0.0, 0.0), (-0.7, 1.1, 0.0), (-0.6, -0.9, 0.1)],
    [(1, 2, 2), (1, 3, 1), (1, 4, 1)],
)
Molecule = tuple[str, list[tuple[float, float, float]], list[tuple[int, int, int]]]
MADE: list[Molecule] = [METHANE, WATER, CYANIDE, FORMALDEHYDE]


def block(name: str, molecule: Molecule) -> str:
    """A molecule as gdb9.sdf has it."""
    symbols, positions, bonds = molecule
    lines = [name, " -OEChem-03231823253D", "", f"{len(symbols):3}{len(bonds):3}  0     0  0  0  0  0  0999 V2000"]
    for symbol, (x, y, z) in zip(symbols, positions, strict=True):
        lines.append(f"{x:10.4f}{y:10.4f}{z:10.4f} {symbol:3} 0  0  0  0  0  0  0  0  0  0  0  0")
    lines += [f"{one:3}{other:3}{kind:3}  0  0  0  0" for one, other, kind in bonds]
    return "\n".join([*lines, "M  END", "$$$$", ""])


def properties(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(5, 3, (count, 20))


HEADER = "mol_id,A,B,C,mu,alpha,homo,lumo,gap,r2,zpve,u0,u298,h298,g298,cv,u0_atom,u298_atom,h298_atom,g298_atom"
CHOSEN = [4, 5, 6, 7, 9, 10, 16, 17, 18, 19, 15]  # mu alpha homo lumo r2 zpve, four of atomisation, cv: LibMTL's order


def written(root: Path, molecules: list[Molecule], left_out: str = "", *, packed: bool = False) -> DataSource:
    """The three files as they are published."""
    names = [f"gdb_{number}" for number in range(1, len(molecules) + 1)]
    rows = [",".join([name, *map(str, row[1:])]) for name, row in zip(names, properties(len(names)), strict=True)]
    contents = {
        "gdb9.sdf": "".join(map(block, names, molecules)),
        "gdb9.sdf.csv": "\n".join([HEADER, *rows, ""]),
        "uncharacterized.txt": f"Molecules that failed\n\nIndex SMILES\n{left_out}\n",
    }
    for name, content in contents.items():
        write(root / FOLDER / name, content, packed=packed)
    return DataSource(root)


@packed_or_not
def test_geometries_and_properties_are_read_without_those_left_out(tmp_path: Path, packed: bool) -> None:
    source = written(tmp_path, [METHANE, WATER, CYANIDE, FORMALDEHYDE], "   2  O  O", packed=packed)
    pool = task("qm9").pool(source)
    assert pool.x.shape == (3, 29, 8)
    assert (pool.x.dtype, pool.y.dtype) == (torch.float32, torch.float32)
    values = properties(4)[[0, 2, 3]][:, CHOSEN]
    wanted = (values - values.mean(axis=0)) / values.std(axis=0)
    np.testing.assert_allclose(pool.y.numpy(), wanted, atol=1e-5)
    cyanide = pool.x[1]
    assert cyanide[:3, 0].tolist() == [6, 7, 1]
    np.testing.assert_allclose(cyanide[:3, 1:4].numpy(), CYANIDE[1], atol=1e-6)
    assert cyanide[:3, 4:].tolist() == [[bond(2, 1), bond(0, 2), 0, 0], [bond(2, 0), 0, 0, 0], [bond(0, 0), 0, 0, 0]]
    assert not cyanide[3:].any()


def test_the_features_are_those_of_the_published_code(tmp_path: Path) -> None:
    atoms, edges, present = MessagePassing().graph(task("qm9").pool(written(tmp_path, [METHANE, CYANIDE])).x)
    # H, C, N, O, F; atomic number; aromatic, sp, sp2, sp3, never set; hydrogens.
    assert atoms[0, :2].tolist() == [[0, 1, 0, 0, 0, 6, 0, 0, 0, 0, 4], [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert atoms[1, :2].tolist() == [[0, 1, 0, 0, 0, 6, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 7, 0, 0, 0, 0, 0]]
    assert present.sum(dim=1).tolist() == [5, 3]
    assert edges[1, 0, 1, :4].tolist() == edges[1, 1, 0, :4].tolist() == [0, 0, 1, 0]
    assert edges[1, 1, 2, :4].tolist() == [0, 0, 0, 0]
    apart = np.linalg.norm(np.diff(CYANIDE[1][1:], axis=0))
    assert edges[1, 1, 2, 4].item() == pytest.approx(apart, rel=1e-5)


def test_an_edge_convolution_is_a_matrix_for_each_edge() -> None:
    torch.manual_seed(0)
    layer = EdgeConvolution(width=4, features=5, hidden=6)
    state, edges = torch.randn(1, 3, 4), torch.rand(1, 3, 3, 5)
    joined = torch.tensor([[[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]])
    found = layer(state, edges, joined)[0]
    for atom, neighbours in enumerate([[1, 2], [0], []]):
        message = layer.root(state[0, atom])
        for other in neighbours:
            matrix = layer.matrix(layer.edge(edges[0, atom, other]).relu()).view(4, 4)
            message = message + state[0, other] @ matrix / len(neighbours)
        torch.testing.assert_close(found[atom], message)


def test_set2set_attends_to_the_atoms_that_are_there() -> None:
    torch.manual_seed(0)
    layer = Set2Set(width=4, steps=3)
    state = torch.randn(2, 5, 4)
    present = torch.tensor([[1.0, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = layer(state, present)
    for row, count in enumerate((3, 1)):
        atoms = state[row, :count]
        query = memory = torch.zeros(1, 4)
        read = torch.zeros(1, 8)
        for _ in range(3):
            query, memory = layer.cell(read, (query, memory))
            read = torch.cat([query, (atoms @ query[0]).softmax(dim=0) @ atoms[None]], dim=1)
        torch.testing.assert_close(found[row], read[0])


def test_the_cells_are_torchs_and_can_be_stacked() -> None:
    torch.manual_seed(0)
    x, state, memory = torch.randn(3, 6), torch.randn(3, 4), torch.randn(3, 4)
    update, read = torch.nn.GRUCell(6, 4), torch.nn.LSTMCell(6, 4)
    torch.testing.assert_close(gru(update, x, state), update(x, state))
    torch.testing.assert_close(lstm(read, x, state, memory), read(x, (state, memory)))
    model = MessagePassing(width=8)
    parameters = {name: torch.stack([value, value]) for name, value in model.named_parameters()}
    molecules = torch.zeros(2, 1, 29, 8)
    molecules[:, 0, 0, 0] = torch.tensor([6.0, 7.0])
    both = torch.func.vmap(lambda own, x: torch.func.functional_call(model, own, (x,)))(parameters, molecules)
    torch.testing.assert_close(both[:, 0], model(molecules[:, 0]))


def test_neither_the_order_of_atoms_nor_the_place_in_space_matters(tmp_path: Path) -> None:
    symbols, positions, bonds = FORMALDEHYDE
    order = [2, 0, 3, 1]
    turned = [(y + 1, z - 2, x + 3) for x, y, z in positions]
    again: Molecule = (
        "".join(symbols[atom] for atom in order),
        [turned[atom] for atom in order],
        [(order.index(one - 1) + 1, order.index(other - 1) + 1, kind) for one, other, kind in reversed(bonds)],
    )
    pool = task("qm9").pool(written(tmp_path, [FORMALDEHYDE, again, WATER]))
    torch.manual_seed(0)
    first, second, other = MessagePassing()(pool.x)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.full
def test_eleven_properties_are_learned(tmp_path: Path) -> None:
    qm9 = task("qm9")
    data = qm9.load(written(tmp_path, MADE * 3)).train
    torch.manual_seed(0)
    model = qm9.model()
    descent = torch.optim.Adam(model.parameters(), lr=0.003)
    assert tuple(qm9.losses(model(data.x), data.y)) == OBJECTIVES
    means = descended(qm9, model, [data] * 6, descent)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    assert means[-1] < means[0]
    assert qm9.correct(model(data.x), data.y) is None


def test_molecules_have_no_classes_to_deal_by(tmp_path: Path) -> None:
    source = written(tmp_path, MADE * 5)
    assert len(task("qm9").load(DataSource(tmp_path, Part(0, 2))).train) == 8
    with pytest.raises(DataError, match="no classes to deal by; use iid"):
        task("qm9").load(DataSource(source.directory, Part(0, 2, "dirichlet:0.3")))


def test_a_table_of_smiles_is_not_enough(tmp_path: Path) -> None:
    for name in ("gdb9.sdf", "gdb9.sdf.csv", "uncharacterized.txt"):
        written(tmp_path, MADE)
        (tmp_path / FOLDER / name).unlink()
        said = refused("qm9", tmp_path, "distances between atoms, which a table of SMILES does not have")
        assert str(tmp_path / FOLDER / name) in said
    with pytest.raises(DataError, match="--data DIR"):
        task("qm9").pool(DataSource())


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("gdb9.sdf", "gdb_2\n", "gdb_3\n", "molecule 2 is 'gdb_3'"),
        ("gdb9.sdf", "  5  4  0", "  0  0  0", "0 atoms"),
        ("gdb9.sdf", "  5  4  0", " 30  4  0", "30 atoms"),
        ("gdb9.sdf", " C   0", " Si  0", "KeyError 'Si'"),
        ("gdb9.sdf", "   -0.0127", "       one", "molecule 1"),
        ("gdb9.sdf", "   -0.0127", "       nan", "not finite"),
        ("gdb9.sdf", "  1  5  1", "  1  6  1", "no bond"),
        ("gdb9.sdf", "  1  5  1", "  1  1  1", "no bond"),
        ("gdb9.sdf", "  1  5  1", "  1  5  5", "no bond"),
        ("gdb9.sdf", "  5  4  0", "  5  5  0", "molecule 1"),
        ("gdb9.sdf", block("gdb_4", FORMALDEHYDE), "", "after 3 of 4"),
        ("gdb9.sdf", block("gdb_4", FORMALDEHYDE), block("gdb_4", FORMALDEHYDE)[:-6], "molecule 4"),
        ("gdb9.sdf", block("gdb_4", FORMALDEHYDE), block("gdb_4", FORMALDEHYDE) + "gdb_5\n", "molecule 5 is 'gdb_5'"),
        ("gdb9.sdf.csv", HEADER, HEADER.replace("homo", "HOMO"), "line 1"),
        ("gdb9.sdf.csv", "gdb_3,", "gdb_3,1,", "line 4"),
        ("gdb9.sdf.csv", "gdb_3,", "gdb_3\ngdb_3,", "line 4"),
        ("gdb9.sdf.csv", f"{properties(4)[0, 4]}", "inf", "not finite"),
        ("uncharacterized.txt", "Index SMILES", "1 C\n2 O\n3 N\n4 C", "no molecule that is not left out"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str, old: str, new: str, says: str) -> None:
    written(tmp_path, MADE)
    path = tmp_path / FOLDER / name
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    assert str(path.parent) in refused("qm9", tmp_path, says)


def test_an_atom_of_five_bonds_is_refused(tmp_path: Path) -> None:
    crowded: Molecule = ("CHHHHH", [*METHANE[1], (2.0, 2.0, 2.0)], [*METHANE[2], (1, 6, 1)])
    with pytest.raises(DataError, match="molecule 1"):
        task("qm9").pool(written(tmp_path, [crowded]))


def test_the_published_subset_without_geometries_is_refused() -> None:
    published("qm9_subset")
    with pytest.raises(DataError, match="a table of SMILES does not have"):
        task("qm9").pool(DataSource(PUBLIC_DATA))
