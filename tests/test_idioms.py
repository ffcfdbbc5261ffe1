"""Ours is a good citizen of PyTorch: every idiom gives what it gives for a plain `nn.Module`, or raises a sentence."""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from idioms import BATCH, SEQ, Case, Idiom, idiom
from numpy import array, ndarray
from numpy.linalg import norm
from sharded import EXACT, move_parameters
from steps import GPT2
from torch import Tensor, nn

from cuboid.baselines.serial import Serial
from cuboid.bench.native_model import NativeTransformer
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import whole_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World

Found = dict[str, Any]
TABLE = Path(__file__).parents[1] / "docs" / "training-loop.md"


def model_on(parallel: Parallel, seed: int) -> Transformer:
    model = Transformer(parallel, seed, torch.float64)
    move_parameters(model, seed)
    return model


def plain_case(folder: Path) -> Case:
    """`torch.nn`, on one device."""

    def call(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    models = [NativeTransformer(GPT2, fused=False).double() for _ in range(2)]
    for seed, model in enumerate(models):
        model.load_state_dict(model_on(Serial(GPT2), seed).state_dict())
    return Case(*models, call, GPT2.vocab, folder)


def our_case(mesh: Mesh, folder: Path) -> Case:
    parallel = CuboidParallel(GPT2, mesh)
    place = parallel.place(BATCH, SEQ)

    def call(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(place.take(tokens, 0), place.take(targets, -100), place)
        return loss

    return Case(model_on(parallel, 0), model_on(parallel, 1), call, GPT2.vocab, folder, place)


def flat(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and texts with where they were, in a form that travels between processes."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(found, list | tuple):
        for i, value in enumerate(found):
            yield from flat(value, f"{path}.{i}")
    elif isinstance(found, Tensor):
        yield path, whole_of(found).numpy()
    else:
        yield path, array(found) if isinstance(found, float) else found


def done(each: Idiom, case: Case) -> Found | str:
    """What it gives, or says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return dict(flat(each.do(case)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plain(world: World) -> dict[str, Found | str]:
    with tempfile.TemporaryDirectory() as folder:
        return {each.name: done(each, plain_case(Path(folder))) for each in idiom.all if not each.raises}


def ours(world: World, shape: Cuboid, folder: Path) -> dict[str, Found | str]:
    mesh = Mesh(shape, world.rank)
    found = {each.name: done(each, our_case(mesh, folder)) for each in idiom.all}
    mesh.close()
    return found


def differences(found: Found, wanted: Found) -> list[str]:
    if found.keys() != wanted.keys():
        return [f"{sorted(found.keys() ^ wanted.keys())} on one side alone"]
    # some gradients are zero in exact arithmetic, such as that of a key's bias: what is left is rounding
    least = 1e-3 * max((norm(value) for value in wanted.values() if isinstance(value, ndarray)), default=0)
    said = []
    for path, value in wanted.items():
        if not isinstance(value, ndarray):
            if found[path] != value:
                said.append(f"{path}: {found[path]!r}, not {value!r}")
        elif found[path].shape != value.shape or not norm(found[path] - value) <= EXACT * max(norm(value), least):
            said.append(f"{path}: {found[path]}, not {value}")
    return said


def wrong(each: Idiom, found: Found | str, wanted: Found | str, sharded: bool) -> list[str]:
    expected = each.raises or (each.sharded if sharded else "")
    if expected:
        return [] if isinstance(found, str) and re.search(expected, found, re.S) else [f"does not raise: {found}"]
    return [found] if isinstance(found, str) else [wanted] if isinstance(wanted, str) else differences(found, wanted)


@pytest.mark.parametrize("shape", [Cuboid(1, 1, 1), Cuboid(2, 2, 1)], ids=str)
def test_idioms_give_what_a_plain_module_gives_or_raise(
    shape: Cuboid, pool: Callable[[int], Pool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (wanted,) = pool(1).run(plain)
    for found in pool(shape.ranks).run(ours, shape, tmp_path):
        told = {i.name: wrong(i, found[i.name], wanted.get(i.name, ""), shape.ranks > 1) for i in idiom.all}
        assert {name: said for name, said in told.items() if said} == {}
    assert capfd.readouterr().err == ""  # torch has no advice, on any rank


def test_idioms_are_the_table_of_the_docs() -> None:
    rows = re.findall(r"^\| (.+?) \| (same|raises|same on one device, raises on several) \|$", TABLE.read_text(), re.M)
    assert rows == [(each.name, each.outcome()) for each in idiom.all]
    assert len(rows) >= 40
