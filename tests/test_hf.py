"""Hugging Face folders: their model equals that of `transformers`, on any cuboid, and exports equal the original."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrained
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sharded import relative
from torch import Tensor

from cuboid import Cuboid, Mesh, from_pretrained, save_pretrained
from cuboid.mesh.cuboid import AXES
from cuboid.mesh.layout import shard_of
from cuboid.model.generate import Sampling, generate
from cuboid.model.hf import architecture
from cuboid.model.hf.folder import FILE, INDEX
from cuboid.model.hf.save import parts_of
from cuboid.model.module import declared
from cuboid.model.presets import PRESETS
from cuboid.run.launch import Pool, World

Pools = Callable[[int], Pool]
GRIDS = [Cuboid(1, 1, 1), Cuboid(2, 2, 2), Cuboid(1, 2, 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each kind of model, made once."""
    root = tmp_path_factory.mktemp("models")

    def of(name: str) -> Path:
        return root / name if (root / name).exists() else pretrained.make(name, root / name)

    return of


# The same model


def step(world: World, folder: Path, cuboid: Cuboid, tokens: Tensor) -> dict[str, float]:
    """The relative error of loss, logits and every gradient against those of `transformers`, on rank 0."""
    mesh = Mesh(cuboid, world.rank)
    model = from_pretrained(folder, mesh, torch.float64)
    place = model.parallel.place(*tokens.shape)
    targets = torch.cat((tokens[:, 1:], torch.full((len(tokens), 1), -100)), 1)
    loss = model(place.take(tokens, 0), place.take(targets, -100), place)
    loss.backward()
    with torch.no_grad():
        logits = model.logits(place.take(tokens, 0), place)
    mine = {name: shard_of(parameter.grad) for name, parameter, _ in declared(model)}
    mesh.close()
    ranks: list[Any] = [None] * world.size
    dist.gather_object((mine, logits, tuple(place.logits)), ranks if world.rank == 0 else None)
    if world.rank:
        return {}
    reference = pretrained.load(folder)
    with pretrained.wide():
        wanted = reference(input_ids=tokens, labels=tokens)
        wanted.loss.backward()
    whole = torch.full_like(wanted.logits, torch.nan)
    for _, part, (s, b, v) in ranks:
        inside = s < tokens.shape[1]
        whole[b[:, None], s[inside, None, None], v] = part[inside]
    errors = {"loss": abs(loss.item() / wanted.loss.item() - 1), "logits": relative(whole, wanted.logits)}
    gradients = dict(reference.named_parameters())
    least = 1e-3 * torch.cat([p.grad.flatten() for p in gradients.values()]).norm().item()
    ours = {id(parameter): name for name, parameter, _ in declared(model)}
    for name, parts in parts_of(model).items():
        pieces = [part.spec.join([rank[0][ours[id(part.parameter)]] for rank in ranks], cuboid) for part in parts]
        joined = torch.cat(pieces).T if parts[0].source.transposed else torch.cat(pieces)
        errors[name] = relative(joined, gradients.pop(name).grad, least)
    assert not gradients, "parameters that we do not have"
    return errors


#: Each model on one grid of several axes, in turn; in the slow tests on all.
EVERY = [
    pytest.param(name, grid, id=f"{name}-{grid}", marks=[pytest.mark.slow] * (grid is not GRIDS[1 + i % 2]))
    for i, name in enumerate(pretrained.CONFIGS)
    for grid in GRIDS
]


@pytest.mark.parametrize(("name", "cuboid"), EVERY)
def test_from_pretrained_step_matches_transformers(
    name: str, cuboid: Cuboid, folders: Callable[[str], Path], pool: Pools
) -> None:
    folder = folders(name)
    errors = pool(cuboid.ranks).run(step, folder, cuboid, pretrained.tokens_for(folder))[0]
    assert {key: error for key, error in errors.items() if not error <= 1e-9} == {}


def continued(world: World, folder: Path, cuboid: Cuboid, prompt: list[int], count: int) -> list[int]:
    mesh = Mesh(cuboid, world.rank)
    found = list(generate(from_pretrained(folder, mesh, torch.float64), prompt, count, Sampling(temperature=0)))
    mesh.close()
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mistral", "qwen2", "qwen3"])
def test_generate_greedy_matches_transformers(name: str, folders: Callable[[str], Path], pool: Pools) -> None:
    folder, prompt = folders(name), [3, 1, 4, 1, 5]
    with torch.no_grad(), pretrained.wide():
        wanted = pretrained.load(folder).generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert pool(4).run(continued, folder, Cuboid(1, 2, 2), prompt, 8)[0] == wanted[0, 5:].tolist()


def test_from_pretrained_rejects_seq_beyond_sliding_window(folders: Callable[[str], Path], pool: Pools) -> None:
    assert len(pool(1).run(continued, folders("mistral"), Cuboid(), [1, 2], 40)[0]) == 22  # 24 in all
    with pytest.raises(ValueError, match="seq=25 is longer than window=24"):
        pool(1).run(step, folders("mistral"), Cuboid(), pretrained.tokens_for(folders("mistral"), seq=25))


# There and back


def rewritten(world: World, folder: Path, cuboid: Cuboid, out: Path, dtype: torch.dtype | None, most: int) -> None:
    mesh = Mesh(cuboid, world.rank)
    save_pretrained(from_pretrained(folder, mesh, torch.float64), out, dtype, most)
    mesh.close()


@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_save_pretrained_writes_same_as_transformers(
    name: str, folders: Callable[[str], Path], tmp_path: Path, pool: Pools
) -> None:
    """Weights byte by byte; config.json by the model that it makes."""
    folder, out = folders(name), tmp_path / "out"
    pool(4).run(rewritten, folder, Cuboid(2, 1, 2), out, None, 1 << 30)
    assert (out / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert architecture.model_config(out).replace(window=0) == architecture.model_config(folder).replace(window=0)
    tokens = pretrained.tokens_for(folder)
    with torch.no_grad(), pretrained.wide():
        found, wanted = (pretrained.load(each)(tokens).logits for each in (out, folder))
    assert torch.equal(found, wanted)


def test_save_pretrained_splits_into_shards(folders: Callable[[str], Path], tmp_path: Path, pool: Pools) -> None:
    folder, out = folders("qwen3"), tmp_path / "out"
    pool(4).run(rewritten, folder, Cuboid(1, 2, 2), out, torch.bfloat16, 20_000)
    index = json.loads((out / INDEX).read_text())
    parts = sorted(set(index["weight_map"].values()))
    assert len(parts) > 2
    assert parts == sorted(path.name for path in out.glob("*.safetensors"))
    found = {name: tensor for part in parts for name, tensor in load_file(out / part).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    wanted = load_file(folder / FILE)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert pretrained.load(out).config.vocab_size == 61


@pytest.mark.parametrize("name", PRESETS)
def test_architecture_config_json_round_trips_presets(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(architecture.config_json(PRESETS[name], "bfloat16")))
    assert architecture.model_config(tmp_path) == PRESETS[name]


def test_architecture_config_json_rejects_unsupported_model(tmp_path: Path) -> None:
    odd = PRESETS["qwen3-0.6b"].replace(qkv_bias=True)
    with pytest.raises(ValueError, match=r"no Hugging Face architecture has .* qkv_bias=True, qk_norm=True"):
        architecture.config_json(odd, "float32")


# What cannot be read

CONFIG = "config.json"


def changed(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def resaved(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def in_shards(folder: Path, **where: str) -> None:
    names = dict.fromkeys(load_file(folder / FILE), "a.safetensors")
    (folder / FILE).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names | where}))


def pickled(folder: Path) -> None:
    (folder / FILE).unlink()
    torch.save({"anything": Boom()}, folder / "pytorch_model.bin")


class Boom:
    """Fails the test if it is ever unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("the pickle was opened",)


Q = "model.layers.1.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda f: resaved(f, lambda t: t.pop(Q)), ["lacks tensor", Q, "[48, 48]"]),
    "extra": (lambda f: resaved(f, lambda t: t.update({"model.odd": t[Q][:2].clone()})), [FILE, "model.odd"]),
    "shape": (lambda f: resaved(f, lambda t: t.update({Q: t[Q][:3].clone()})), [FILE, Q, "[3, 48]", "[48, 48]"]),
    "integers": (lambda f: resaved(f, lambda t: t.update({Q: t[Q].int()})), [FILE, Q, "I32"]),
    "truncated": (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-1]), [FILE, "not a complete safetensors"]),
    "empty": (lambda f: (f / FILE).write_bytes(b""), [FILE, "not a complete safetensors"]),
    "pickle": (pickled, ["pytorch_model.bin", "never"]),
    "no weights": (lambda f: (f / FILE).unlink(), ["no model.safetensors"]),
    "no such shard": (lambda f: in_shards(f, **{Q: "b.safetensors"}), ["b.safetensors", "cannot be read"]),
    "wrong index": (lambda f: in_shards(f, **{"model.odd": "a.safetensors"}), ["a.safetensors", "model.odd", INDEX]),
    "index leads elsewhere": (lambda f: in_shards(f, **{Q: "../a.safetensors"}), [Q, "../a.safetensors"]),
    "pickle in the index": (lambda f: in_shards(f, **{Q: "a.bin"}), [Q, "a.bin", "only safetensors"]),
    "index not JSON": (lambda f: (in_shards(f), (f / INDEX).write_text("[")), [INDEX, "not an index"]),
    "architecture": (
        lambda f: changed(f, model_type="mamba", architectures=["MambaForCausalLM"]),
        [CONFIG, "'mamba'", "MambaForCausalLM", "gpt2, llama"],
    ),
    "rope": (
        lambda f: changed(f, rope_parameters={"rope_type": "yarn", "factor": 2.0}),
        [CONFIG, "'yarn'", "default, linear and llama3"],
    ),
    "partly rotary": (lambda f: changed(f, partial_rotary_factor=0.5), [CONFIG, "partial_rotary_factor"]),
    "activation": (lambda f: changed(f, hidden_act="gelu"), [CONFIG, "hidden_act = 'gelu'", "'silu'"]),
    "biases": (lambda f: changed(f, attention_bias=True), [CONFIG, "attention_bias", "mlp_bias"]),
    "quantised": (lambda f: changed(f, quantization_config={"bits": 4}), [CONFIG, "quantised"]),
    "sizes": (lambda f: changed(f, num_attention_heads=7, head_dim=None), [CONFIG, "heads=7"]),
    "key": (lambda f: (f / CONFIG).write_text('{"model_type": "llama"}'), [CONFIG, "num_hidden_layers"]),
    "not JSON": (lambda f: (f / CONFIG).write_text("{"), [CONFIG, "not JSON"]),
    "no config": (lambda f: (f / CONFIG).unlink(), [CONFIG, "cannot be read"]),
}


@pytest.mark.parametrize("case", BAD)
def test_from_pretrained_rejects_bad_folders(case: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    spoil, said = BAD[case]
    spoil(folder)
    with pytest.raises(ValueError) as refusal:
        from_pretrained(folder, Cuboid())
    for words in said:
        assert words in str(refusal.value)


def test_from_pretrained_rejects_on_every_rank(folders: Callable[[str], Path], tmp_path: Path, pool: Pools) -> None:
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    resaved(folder, lambda tensors: tensors.pop(Q))
    with pytest.raises(ValueError, match="lacks tensor"):
        pool(2).run(continued, folder, Cuboid(1, 2, 1), [1], 1)


def test_from_pretrained_reads_older_file_formats(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """GPT-2's first file has no prefix, and masks among the weights; older configurations say RoPE otherwise."""
    folder = shutil.copytree(folders("gpt2"), tmp_path / "gpt2")
    wanted = from_pretrained(folder, Cuboid(), torch.float64)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / FILE).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / FILE)
    found = from_pretrained(folder, Cuboid(), torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))
    folder = shutil.copytree(folders("llama-tied"), tmp_path / "llama")
    config = json.loads((folder / CONFIG).read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    new = architecture.model_config(folder)
    (folder / CONFIG).write_text(json.dumps(config))
    assert architecture.model_config(folder) == new
    assert new.rope_scaling is not None


def test_from_pretrained_is_independent_of_axis_order(folders: Callable[[str], Path], pool: Pools) -> None:
    folder, cuboid = folders("qwen2"), Cuboid(2, 2, 1, order=tuple(reversed(AXES)))
    errors = pool(4).run(step, folder, cuboid, pretrained.tokens_for(folder))[0]
    assert max(errors.values()) <= 1e-9
