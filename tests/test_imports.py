"""Imports go one way, and transports alone call collectives."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch.distributed as dist

import cuboid

#: The packages, lowest first: a module imports from its own package and from those above it in this list.
PACKAGES = (
    "lazy",
    "dtypes",
    "device",
    "fuse",
    "comm",
    "mesh",
    "run",
    "step",
    "layers",
    "data",
    "model",
    "baselines",
    "plan",
    "emulate",
    "verify",
    "train",
    "demo",
    "doctor",
    "bench",
    "cli",
)
MOVES = ("all_", "reduce", "broadcast", "scatter", "gather", "send", "recv", "isend", "irecv", "batch_isend")
COLLECTIVES = {name for name in dir(dist) if name.startswith(MOVES)}  # a barrier moves nothing


def sources() -> dict[str, ast.Module]:
    """Every module of the package by its name without the package's; the package's own is empty."""
    root = Path(cuboid.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


SOURCES = sources()


def imports(tree: ast.Module) -> set[str]:
    """The modules of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in within if name.removeprefix("cuboid.") in SOURCES}
            found |= modules if modules == within else modules | {node.module}
    ours = {name for name in found if name == "cuboid" or name.startswith("cuboid.")}
    return {name.removeprefix("cuboid").removeprefix(".") for name in ours}


def package(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_imports_only_lower_packages(name: str) -> None:
    mine = [tree for module, tree in SOURCES.items() if package(module) == name]
    used = {package(each) for tree in mine for each in imports(tree)} - {name, ""}
    assert used <= set(PACKAGES[: PACKAGES.index(name)])


def test_packages_are_all_listed() -> None:
    assert {package(module) for module in SOURCES} == {*PACKAGES, "", "__main__"}


def test_package_has_no_import_cycles() -> None:
    TopologicalSorter({name: imports(tree) for name, tree in SOURCES.items()}).prepare()


def test_cli_is_imported_only_by_main() -> None:
    users = {name for name, tree in SOURCES.items() if any(i.split(".")[0] == "cli" for i in imports(tree))}
    assert {name for name in users if name.split(".")[0] != "cli"} == {"__main__"}


def calls(tree: ast.Module) -> set[str]:
    """The collectives of torch.distributed, or of a transport's wire, that a module calls or imports."""
    found, names = set(), {"torch.distributed", "self.wire"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            found |= {alias.name for alias in node.names} & COLLECTIVES
        elif isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in names:
            found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            source = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found |= source & {"torch.distributed.nn", "torch.distributed._functional_collectives"}
    return found


def test_transports_alone_call_collectives() -> None:
    callers = {name for name, tree in SOURCES.items() if calls(tree)}
    assert callers == {f"comm.transport.{name}" for name in ("base", "gloo", "nccl")}


def asks(tree: ast.Module) -> bool:
    """Whether a module asks what kind of device there is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"):
            return True
        if isinstance(node, ast.Compare) and "'cuda'" in ast.unparse(node):
            return True
    return False


def test_package_only_device_asks_for_its_kind() -> None:
    assert {name for name, tree in SOURCES.items() if asks(tree)} == {"device"}
    for source in ("torch.cuda.synchronize()", "f() if x.is_cuda else g()", "x.device.type == 'cuda'"):
        assert asks(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as d\nd.all_reduce(x)", {"all_reduce"}),
        ("import torch\ntorch.distributed.send(x, 1)", {"send"}),
        ("from torch import distributed\nf(distributed.gather)", {"gather"}),
        ("from torch.distributed import broadcast as b", {"broadcast"}),
        ("self.wire.all_reduce(x)", {"all_reduce"}),
        ("import torch.distributed as d\nd.new_group()", set()),
    ],
)
def test_collective_scan_finds_calls_and_imports(source: str, found: set[str]) -> None:
    assert calls(ast.parse(source)) == found
