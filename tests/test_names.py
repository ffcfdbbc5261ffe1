"""One class, one name: nowhere in the package do two public classes share one."""

import ast
from collections import Counter
from pathlib import Path

from mutants import MUTANTS, edited

import cuboid


def test_class_names_are_unique() -> None:
    names: Counter[str] = Counter()
    for path in Path(cuboid.__file__).parent.rglob("*.py"):
        names.update(n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_mutants_each_edit_one_place() -> None:
    """Those of tests/mutants.py still fit the code; whether they are noticed is for `make test-all`."""
    for mutant in MUTANTS:
        with edited(mutant):
            pass
