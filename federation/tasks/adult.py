"""`adult`: who earns more than 50,000 dollars a year. Two owners: those with a doctorate and everybody else.

Source: B. Becker and R. Kohavi, Adult, UCI Machine Learning Repository, 1996; two clients and 99 binary features as in
agnostic federated learning (Mohri et al. 2019) and FedMGDA+ section 6.4.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Published
from federation.tasks.published_files import lines

OWNERS = ("non-phd", "phd")
_INCOMES = ("<=50K", ">50K")
_FIELDS = 15
_EDUCATION = 3

# The categorical fields by their column, each with its values in the order of adult.names. The continuous fields are
# left out, and an unknown value ("?") is none of these: all zeros.
_CATEGORIES = {
    1: "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked",
    3: "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
    "1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    5: "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse",
    6: "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
    "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, "
    "Armed-Forces",
    7: "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    8: "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    9: "Female, Male",
    13: "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, "
    "Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, "
    "Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
    "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
}
_FEATURES = tuple((field, value) for field, values in _CATEGORIES.items() for value in values.split(", "))
_COLUMNS = {feature: column for column, feature in enumerate(_FEATURES)}


class Adult(Published):
    """Classify a person by eight fields. `--data DIR` reads DIR/adult/adult.data and adult.test, which may be .gz."""

    network = "adult_logistic"
    files = "adult/adult.data and adult/adult.test"

    def pool(self, source: DataSource) -> Pool:
        """Binary features, uint8 (n, 99), and whether the income is above 50,000, (n,); all rows, unknowns included.

        The official test part is dealt by the same owners.
        """
        folder = self.directory(source) / "adult"
        return _read(folder / "adult.data", _read(folder / "adult.test"))


def _read(path: Path, test: Pool | None = None) -> Pool:
    wanted = "expected UCI's Adult, a person on a line, as `39, State-gov, ..., <=50K`"
    rows, labels, owner = [], [], []
    for number, line in lines(path, wanted):
        # adult.test begins with a line of its own, and its lines end with a full stop.
        text = line.strip().rstrip(".")
        if not text or text.startswith("|"):
            continue
        person = [field.strip() for field in text.split(",")]
        if len(person) != _FIELDS or person[-1] not in _INCOMES:
            raise DataError(f"{path}, line {number}: not {_FIELDS} fields with an income at the end; {wanted}")
        row = bytearray(len(_COLUMNS))
        for field in _CATEGORIES:
            column = _COLUMNS.get((field, person[field]))
            if column is not None:
                row[column] = 1
            elif person[field] != "?":
                raise DataError(f"{path}, line {number}: field {field + 1} cannot be {person[field]!r}; {wanted}")
        rows.append(row)
        labels.append(_INCOMES.index(person[-1]))
        owner.append(OWNERS.index("phd" if person[_EDUCATION] == "Doctorate" else "non-phd"))
    if not rows:
        raise DataError(f"{path} holds nobody; {wanted}")
    import torch  # noqa: PLC0415

    x = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), len(_COLUMNS))
    return Pool(
        torch.from_numpy(x), torch.from_numpy(_integers(labels)), owners=OWNERS, owner=_integers(owner), test=test
    )


def _integers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
