"""Functions that torch.compile fuses, with a compiler that leaves each graph as it is and counts its runs."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuboid import fuse
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.plan.measure import Memory, count_flops
from cuboid.step.schedule import Schedule
from cuboid.verify import Case, measure


def twice(x: Tensor) -> Tensor:
    return x + x


def thrice(x: Tensor) -> Tensor:
    return x + x + x


def both_ways(*inputs: Tensor) -> None:
    """Compares two functions, compiled and as written."""
    for function in (twice, thrice):
        fast = fuse.compiled(function)
        for x in inputs:
            assert torch.equal(fast(x), function(x))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Neither a function compiled nor a warning given before."""
    for cached in (fuse.compiled, fuse._warn):
        cached.cache_clear()
    yield
    for cached in (fuse.compiled, fuse._warn):
        cached.cache_clear()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """By the name of its function, how often a compiled graph has run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo

    compile_, found = torch.compile, Counter[str]()

    def compile_counted(function: Callable[..., Any], **options: Any) -> Any:
        def backend(graph: Any, _: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                found[function.__name__] += 1
                return graph.forward(*args)

            return run

        return compile_(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_counted)
    yield found
    torch._dynamo.reset()


def test_compiled_runs_as_written_under_a_mode_and_compiled_again_after_it(ran: Counter[str]) -> None:
    fast, x = fuse.compiled(twice), torch.ones(3)
    for mode in (Memory(nn.Linear(1, 1)), nullcontext(), count_flops(), nullcontext()):
        with mode:
            assert torch.equal(fast(x), twice(x))
    assert ran["twice"] == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads of each tensor
def test_verify_takes_its_values_from_the_compiled_step(ran: Counter[str]) -> None:
    """Of its three steps, one counts memory and one FLOPs."""
    case = Case(ModelConfig("llama", 1, 8, 2, vocab=5, context=4), Cuboid(), 1, 4, schedule=Schedule(compile=True))
    measured = measure(case, CuboidParallel(case.config, Mesh(Cuboid(), alone=True), schedule=case.schedule))
    assert measured.loss.isfinite()
    assert measured.flops > 0
    for name in ("parts", "merge", "gradient", "sums_alone", "fused_gradient"):
        assert ran[name] == (3 if "_" in name else 1), name  # three norms


def test_compiled_for_more_kinds_of_arguments_than_pytorch_allows_stays_compiled(ran: Counter[str]) -> None:
    fast, kinds = fuse.compiled(twice), [(n, dtype) for n in range(1, 7) for dtype in (torch.float32, torch.float64)]
    for n, dtype in kinds:
        fast(torch.ones([2] * n, dtype=dtype))
    assert ran["twice"] == len(kinds) == 12


def test_compiled_too_often_says_so_once(ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "GRAPHS", 2)
    inputs = [torch.ones([2] * n) for n in range(1, 5)]
    with pytest.warns(UserWarning, match="compiled 2 times.*fewer models") as said:
        both_ways(*inputs)
    assert len(said) == 1
    assert ran == {"twice": 2, "thrice": 2}


def test_compiled_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(function: Any, **_: Any) -> Any:
        def fail(*args: Any) -> Any:
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.warns(UserWarning, match=r"torch.compile failed \(RuntimeError\).* a C compiler") as said:
        both_ways(torch.tensor(3), torch.tensor(4))
    assert len(said) == 1


def test_compiled_is_as_written_where_pytorch_is_told_not_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert fuse.compiled(twice) is twice
    assert fuse.compile_fault(torch.device("cpu")) == "TORCH_COMPILE_DISABLE=1 is set"


@pytest.mark.slow
@pytest.mark.skipif(which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compile_fault_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        assert fuse.compile_fault(torch.device("cpu")) == ""
        torch._dynamo.reset()
        monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no compiler"))
        assert "C++ compiler" in fuse.compile_fault(torch.device("cpu"))


def test_fuse_is_for_gpus() -> None:
    assert fuse.fuse_on(torch.device("cpu")) is fuse.plain
    assert fuse.fuse_on(torch.device("cuda", 0)) is fuse.compiled
