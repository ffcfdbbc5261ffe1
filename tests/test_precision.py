"""Gradients of bf16 and fp16: no worse for being added up over sub-batches, and finite where their sums are large."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from sharded import move_parameters, relative
from torch import Tensor
from torch.nn import Parameter

from cuboid.baselines.serial import Serial
from cuboid.comm.axis import Axis
from cuboid.comm.collectives import reduce_scatter
from cuboid.comm.flight import landed
from cuboid.layers.product import Affine, Product, weight_gradient
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.module import declared
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.schedule import Schedule
from cuboid.step.weights import Bucket, Gathered

Pools = Callable[[int], Pool]
MODEL = ModelConfig("llama", layers=2, hidden=32, heads=4, kv_heads=2, vocab=40, context=1024, ffn=48)


def backward(parallel: Parallel, batch: tuple[Tensor, Tensor], dtype: torch.dtype, scale: float = 1.0) -> Transformer:
    """The gradient of `scale` times the loss, divided by `scale`."""
    model, place = Transformer(parallel, 1, dtype), parallel.place(*batch[0].shape)
    move_parameters(model, 2)
    with torch.no_grad():
        model.norm.weight.mul_(20)  # features as large as those of a trained model's outliers
    tokens, targets = batch
    (scale * model(place.take(tokens, 0), place.take(targets, -100), place)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= scale
    return model


def random_batch(samples: int, seq: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(MODEL.vocab, (samples, seq + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def matrix_errors(world: World, shape: Cuboid, dtype: torch.dtype) -> list[float]:
    """Of the gradients of all linears of blocks, for one, two and four sub-batches."""
    mesh, batch, found = Mesh(shape, world.rank), random_batch(8 * shape.x, 32), []
    wanted = backward(Serial(MODEL), batch, torch.float64)
    for count in (1, 2, 4):
        parallel = CuboidParallel(MODEL, mesh, dtype=dtype, schedule=Schedule(sub_batches=count))
        model, pairs = backward(parallel, batch, torch.float32, scale=256.0), list[tuple[Tensor, Tensor]]()
        for name, parameter, d in declared(model):
            reference = wanted.get_parameter(name).grad
            assert parameter.grad is not None
            assert reference is not None
            if name.startswith("blocks.") and parameter.dim() == 2:
                pairs.append((shard_of(parameter.grad), d.spec.take(reference, shape, mesh.coordinates)))
        ours, theirs = (torch.cat([each.double().reshape(-1) for each in some]) for some in zip(*pairs, strict=True))
        found.append(relative(ours, theirs))
    mesh.close()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [Cuboid(), Cuboid(2, 2, 1)], ids=str)
def test_gradient_error_of_low_precision_does_not_grow_with_sub_batches(
    shape: Cuboid, dtype: torch.dtype, pool: Pools
) -> None:
    for one, two, four in pool(shape.ranks).run(matrix_errors, shape, dtype):
        assert 0 < one < 0.1
        assert max(two, four) <= 1.1 * one


def of_sub_batches(w: Gathered, weight: Parameter, dYs: list[Tensor], Xs: list[Tensor]) -> None:
    for dY, X in zip(dYs, Xs, strict=True):
        weight_gradient(dY[None], X[None], *w.gradient([weight]))


def of_local_sub_batches(w: Gathered, weight: Parameter, dYs: list[Tensor], Xs: list[Tensor]) -> None:
    for dY, X in zip(dYs, Xs, strict=True):
        w.add(weight, dY.T @ X)


def of_chunks(w: Gathered, weight: Parameter, dYs: list[Tensor], Xs: list[Tensor]) -> None:
    alone, (n, k) = Axis("", 1, 0), weight.shape
    product = Product([Affine(weight, None, (n, k), "into")], alone, alone)
    product.weight_gradients([landed(X[:, None]) for X in Xs], [[dY[None]] for dY in dYs], w)


Adding = Callable[[Gathered, Parameter, list[Tensor], list[Tensor]], None]


def accumulated_errors(world: World, add: Adding) -> list[float]:
    """Of a weight whose gradient is made by two matmuls and by 64, in bf16."""
    dice, found = torch.Generator().manual_seed(0), []
    dY, X = (torch.randn(4096, n, generator=dice) + 0.5 for n in (8, 16))
    for count in (2, 64):
        found.append(accumulated_error(dY.bfloat16(), X.bfloat16(), count, add))
    return found


def accumulated_error(dY: Tensor, X: Tensor, count: int, add: Adding) -> float:
    weight = Parameter(torch.zeros(dY.shape[1], X.shape[1]))
    bucket = Bucket({weight: Spec(tuple(weight.shape), ((), ()))}, Mesh(Cuboid(), alone=True), torch.bfloat16)
    w = Gathered([bucket], bucket.gather()(), 1 if add is of_chunks else count)
    add(w, weight, list(dY.chunk(count)), list(X.chunk(count)))
    ((_, land),) = w.reduce()
    (found,) = land().values()
    return relative(found.double(), dY.double().T @ X.double())


@pytest.mark.parametrize("add", [of_sub_batches, of_local_sub_batches, of_chunks])
def test_gathered_adds_up_bf16_gradients_of_many(add: Adding, pool: Pools) -> None:
    few, many = pool(1).run(accumulated_errors, add)[0]
    assert many <= few


def sum_error(world: World) -> float:
    """Of a reduce-scatter of bf16 into fp32, over two ranks and over four."""
    errors = []
    for shape in (Cuboid(2, 2, 1), Cuboid(4, 1, 1)):
        mesh = Mesh(shape, world.rank)
        tensors = [torch.randn(8, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
        line = [rank for rank in range(4) if rank % (4 // shape.x) == world.rank % (4 // shape.x)]
        part = 8 // shape.x
        wanted = sum(tensors[rank].double() for rank in line)[mesh.x.index * part : (mesh.x.index + 1) * part]
        found = reduce_scatter(tensors[world.rank], mesh.x, torch.float32).wait()
        errors.append(relative(found.double(), wanted))
        mesh.close()
    return max(errors)


def test_reduce_scatter_of_bf16_sums_in_fp32(pool: Pools) -> None:
    assert max(pool(4).run(sum_error)) < 1e-6


# fp16, and a word that most tokens are


class Head(NamedTuple):
    finite: bool
    error: float  # of its gradient, against fp32's


def heads_of_frequent_word(world: World, shape: Cuboid | None, tied: bool) -> list[Head]:
    """On a cuboid or on one device, by loss scale."""
    config = MODEL.replace(layers=1, tied=tied)
    mesh = None if shape is None else Mesh(shape, world.rank)
    tokens, targets = random_batch(8, 1024)
    batch = tokens, torch.where(targets < 36, 7, targets)  # of 8192 targets nine tenths
    wanted = backward(Serial(config), batch, torch.float32)
    found = []
    for scale in (1.0, 65536.0):
        half = torch.float16
        parallel = Serial(config, half) if mesh is None else CuboidParallel(config, mesh, dtype=half)
        model = backward(parallel, batch, torch.float32, scale)
        name = "embed.weight" if tied else "head.weight"
        gradient, reference = model.get_parameter(name).grad, wanted.get_parameter(name).grad
        assert gradient is not None
        assert reference is not None
        if mesh is not None:
            spec = {each: d.spec for each, _, d in declared(model)}[name]
            reference = spec.take(reference, mesh.cuboid, mesh.coordinates)
        gradient = shard_of(gradient)
        found.append(Head(bool(gradient.isfinite().all()), relative(gradient, reference)))
    if mesh is not None:
        mesh.close()
    return found


@pytest.mark.parametrize(
    ("shape", "tied"),
    [(None, False), (Cuboid(), False), (Cuboid(2, 1, 1), False), (Cuboid(1, 2, 1), True), (Cuboid(1, 1, 2), False)],
    ids=str,
)
def test_head_gradient_of_fp16_is_finite_and_close_for_frequent_word(
    shape: Cuboid | None, tied: bool, pool: Pools
) -> None:
    for found in pool(1 if shape is None else shape.ranks).run(heads_of_frequent_word, shape, tied):
        for finite, error in found:
            assert finite
            assert error <= 0.01
