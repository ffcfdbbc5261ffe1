"""Sampling: the same tokens on every cuboid, with a cache as without, drawn as asked."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from cuboid.baselines.serial import Serial
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.generate import Sampling, generate
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World

Pools = Callable[[int], Pool]
GPT2 = ModelConfig("gpt2", layers=2, hidden=16, heads=4, vocab=37, context=20, init_std=0.3)
LLAMA = ModelConfig("llama", layers=2, hidden=16, heads=4, kv_heads=2, vocab=37, context=20, init_std=0.3)
PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0)


def serial(config: ModelConfig) -> Transformer:
    return Transformer(Serial(config), dtype=torch.float64)


def tokens_of(
    world: World, config: ModelConfig, cuboid: Cuboid, prompt: list[int], count: int, sampling: Sampling
) -> list[int]:
    mesh = Mesh(cuboid, world.rank)
    try:
        model = Transformer(CuboidParallel(config, mesh), dtype=torch.float64)
        return list(generate(model, prompt, count, sampling))
    finally:
        mesh.close()


@torch.no_grad()
def without_cache(config: ModelConfig, count: int) -> list[int]:
    """The likeliest token each time, everything computed anew for it."""
    model, tokens = serial(config), list(PROMPT)
    for _ in range(count):
        place = model.parallel.place(1, len(tokens))
        tokens.append(int(model.logits(torch.tensor([tokens]).T, place)[-1, 0].argmax()))
    return tokens[len(PROMPT) :]


CUBOIDS = [Cuboid(1, 2, 2), Cuboid(1, 2, 1, replicas=2)]
CUBOIDS += [pytest.param(each, marks=pytest.mark.slow) for each in (Cuboid(), Cuboid(2, 2, 2))]


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("cuboid", CUBOIDS, ids=str)
def test_generate_greedy_matches_uncached_on_every_cuboid(config: ModelConfig, cuboid: Cuboid, pool: Pools) -> None:
    wanted = without_cache(config, 8)
    assert len(set(wanted)) > 3  # not one token over and over
    for found in pool(cuboid.ranks).run(tokens_of, config, cuboid, PROMPT, 8, GREEDY):
        assert found == wanted


def test_generate_samples_alike_on_every_cuboid(pool: Pools) -> None:
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=3)
    wanted = list(generate(serial(LLAMA), PROMPT, 10, sampling))
    for found in pool(4).run(tokens_of, LLAMA, Cuboid(2, 1, 2), PROMPT, 10, sampling):
        assert found == wanted
    assert wanted != list(generate(serial(LLAMA), PROMPT, 10, Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=4)))


LOGITS = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()


def shares(sampling: Sampling) -> dict[int, float]:
    """How often each token is drawn."""
    draws = Counter(sampling.draw(LOGITS, position) for position in range(2000))
    return {token: draws[token] / 2000 for token in sorted(draws)}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampling(1.0, seed=1 << 70), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampling(0.5), {0: 1 / 30, 1: 16 / 30, 2: 9 / 30, 3: 4 / 30}),
        (Sampling(1.0, top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (Sampling(1.0, top_p=0.75), {1: 4 / 9, 2: 3 / 9, 3: 2 / 9}),
        (Sampling(1.0, top_k=2, top_p=0.9), {1: 4 / 7, 2: 3 / 7}),
        (Sampling(1.0, top_k=1), {1: 1.0}),
        (Sampling(1.0, top_p=1e-6), {1: 1.0}),
        (Sampling(1e-320), {1: 1.0}),
        (GREEDY, {1: 1.0}),
    ],
    ids=str,
)
def test_sampling_draws_expected_frequencies(sampling: Sampling, expected: dict[int, float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=0.04)


def test_generate_continues_own_output_given_as_prompt() -> None:
    whole = list(generate(serial(LLAMA), [3], 12, GREEDY))
    assert list(generate(serial(LLAMA), [3, *whole[:7]], 5, GREEDY)) == whole[7:]


def test_generate_draws_only_tokenizer_vocab() -> None:
    assert max(generate(serial(LLAMA), PROMPT, 30, Sampling(5.0))) > 9
    assert max(generate(serial(LLAMA), PROMPT, 30, Sampling(5.0), vocab=9)) < 9


def test_generate_stops_at_context() -> None:
    for config in (GPT2, LLAMA):
        assert len(list(generate(serial(config), PROMPT, 100, GREEDY))) == config.context - len(PROMPT)
    assert not list(generate(serial(LLAMA), PROMPT, 0, GREEDY))


@pytest.mark.parametrize(
    ("config", "prompt", "said"),
    [
        (GPT2, [], "no tokens"),
        (GPT2, [1] * 20, "20 tokens and the model's positions end at 20; shorten it"),
        (LLAMA, [1, 37, 2], "token 37 but the model knows 37"),
        (LLAMA, [1, -1, 2], "token -1 but the model knows 37"),
    ],
)
def test_generate_rejects_bad_prompts(config: ModelConfig, prompt: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        next(generate(serial(config), prompt, 1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "said"),
    [
        (-0.1, 0, 1.0, "temperature=-0.1"),
        (float("nan"), 0, 1.0, "temperature=nan"),
        (1.0, -1, 1.0, "top_k=-1"),
        (1.0, 0, 0.0, "top_p=0.0"),
        (1.0, 0, 1.1, "top_p=1.1"),
    ],
)
def test_sampling_rejects_bad_parameters(temperature: float, top_k: int, top_p: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(temperature, top_k, top_p)
