"""An encoder of your own on a cuboid: BERT-style, bidirectional attention, masked-language-model loss.

    python examples/encoder.py                      # eight ranks of this machine, cuboid (2,2,2)
    torchrun --nproc-per-node 8 examples/encoder.py # the ranks torchrun starts

The text is synthetic: each word is repeated eight times, so a masked word follows from its neighbours on either side.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cuboid import (
    MLP,
    Attention,
    CuboidParallel,
    Embedding,
    LayerModule,
    Mesh,
    Model,
    ModelConfig,
    Norm,
    Parallel,
    Stage,
    World,
    chain,
    launch,
    residual,
)

# Sizes, and what the layers do: gpt2 has LayerNorm, learned positions, GELU and biases.
CONFIG = ModelConfig("gpt2", layers=2, hidden=64, heads=8, vocab=62, context=32, ffn=128, init_std=0.05)
MASK = CONFIG.vocab - 1
BATCH, SEQ = 32, 24


class EncoderBlock(LayerModule):
    """norm(X + attention(X)), then norm(X + mlp(X)): post-norm, as in BERT."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        d = parallel.config.hidden
        self.attention, self.norm1 = Attention(parallel, causal=False), Norm(parallel, d, bias=True)
        self.mlp, self.norm2 = MLP(parallel), Norm(parallel, d, bias=True)
        self.layer = chain(residual(self.attention), self.norm1, residual(self.mlp), self.norm2)


class Encoder(Model):
    """The mean loss of the tokens whose target is not -100, over all ranks. The head is tied to the embedding."""

    def __init__(self, parallel: Parallel, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(parallel)
        c = parallel.config
        self.embed = Embedding(parallel, c.vocab, c.hidden, c.init_std)
        self.positions = Embedding(parallel, c.context, c.hidden, c.init_std)
        self.norm = Norm(parallel, c.hidden, bias=True)
        self.blocks = nn.ModuleList(EncoderBlock(parallel) for _ in range(c.layers))
        self.finish(seed, dtype)

    def stages(self) -> list[Stage]:
        return [
            Stage("embed", self.embed.lookup(self.positions), [self.embed, self.positions], in_backward=False),
            Stage("norm", self.norm),
            *(Stage(f"block {i}", block) for i, block in enumerate(self.blocks)),
            Stage("head", self.embed.head_loss(), [self.embed], in_backward=False),
        ]


def masked(step: int) -> tuple[Tensor, Tensor]:
    """The full batch [batch, seq]: tokens, a sixth of them masked, and as targets the masked ones."""
    dice = torch.Generator().manual_seed(step)
    text = torch.randint(MASK, (BATCH, SEQ // 8), generator=dice).repeat_interleave(8, 1)
    hidden = torch.rand(text.shape, generator=dice) < 1 / 6
    hidden[:, 0] = True  # at least one in every sample
    return text.where(~hidden, MASK), text.where(hidden, -100)


def train(world: World, sizes: tuple[int, int, int], steps: int) -> list[float]:
    """The loss at every step."""
    mesh = Mesh.over(init_device_mesh(world.device.type, sizes, mesh_dim_names=("x", "y", "z")))
    parallel = CuboidParallel(CONFIG, mesh)
    model, place = Encoder(parallel), parallel.place(BATCH, SEQ)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for step in range(steps):
        tokens, targets = (each.to(mesh.device) for each in masked(step))
        loss = model(place.take(tokens, 0), place.take(targets, -100), place)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = launch(train, 8, [(2, 2, 2), 60])[0]
    print(f"loss {found[0]:.3f} at first, {found[-1]:.3f} after {len(found)} steps")
