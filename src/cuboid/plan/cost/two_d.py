"""The cost of a step of 2-D or 2.5-D parallelism on a rank: the tables of summa.py and baselines/two_d.py, summed over
a model."""

from collections.abc import Mapping, Sequence

from cuboid.baselines.summa import blocks_of
from cuboid.baselines.two_d import check
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.cost import Cost, Counter


def two_d_cost(
    config: ModelConfig,
    cuboid: Cuboid,
    coordinates: Mapping[str, int],
    batch: int,
    seq: int,
    parameter_size: int = 4,
    compute_size: int = 4,
    recompute: str = "none",
) -> Cost:
    """One forward and backward of the rank at `coordinates`; sizes are bytes an element at rest and in products."""
    check(config, cuboid, batch, seq)
    step = _TwoDStep(config, cuboid, coordinates, batch, seq, parameter_size, compute_size)
    step.embedding()
    for _ in range(config.layers):
        step.block(recompute)
        step.bucket(parameter_size)
    step.norm()
    step.bucket(parameter_size)
    step.head()
    step.sums()
    return step.cost


class _TwoDStep(Counter):
    """The sizes on a rank, and a method per formula; each adds to `cost`."""

    def __init__(
        self,
        config: ModelConfig,
        cuboid: Cuboid,
        coordinates: Mapping[str, int],
        batch: int,
        seq: int,
        parameter_size: int,
        compute_size: int,
    ) -> None:
        super().__init__(cuboid, coordinates)
        self.c, self.q = config, cuboid.y
        self.stored, self.e, self.wide = parameter_size, compute_size, max(compute_size, 4)
        self.s, self.b = seq, batch // (cuboid.replicas * cuboid.x * cuboid.y)
        self.m = self.s * self.b
        self.d = config.hidden // self.q
        self.forwards, self.saving = 1, True  # how often forward runs, and whether it saves, where we are

    def visit(self, axis: str, block: int) -> None:
        """A broadcast."""
        self.send("broadcast", axis, block, self.e)

    def sum_to_one(self, axis: str, block: int, size: int = 0) -> None:
        """A reduce. Two ranks send what they have; more reduce in fp32 at least."""
        self.send("reduce", axis, block, size or (self.e if self.q == 2 else self.wide))

    def save(self, size: int) -> None:
        if self.saving:
            self.cost.saved += size

    # Layers

    def embedding(self) -> None:
        for rows in [self.c.vocab] + ([] if self.c.rotary else [self.c.context]):
            self.cost.matrices += self.part(rows, "y") * self.d * self.stored
            self.bucket(self.stored)
            for start, stop in blocks_of(rows, self.q):
                self.visit("y", (stop - start) * self.d)
                self.sum_to_one("y", (stop - start) * self.d, self.wide)  # rows are added up in fp32 already

    def norm(self) -> None:
        statistics = self.m * (1 + self.c.norm_bias)
        for _ in range(self.forwards):
            if self.c.norm_bias:
                self.send("all_gather", "z", statistics * self.q, self.wide)
            else:
                self.reduce("z", statistics, self.wide)
        self.reduce("z", statistics, self.wide)
        self.save(self.m * self.d * self.e + statistics * self.wide)
        self.cost.vectors += self.d * (1 + self.c.norm_bias) * self.stored

    def product(self, k: int, outs: Sequence[int]) -> None:
        """(1)–(3) of X [m, k] and all weights [n, k] for n in `outs`, sizes of a rank's blocks."""
        m, n = self.m, sum(outs)
        self.cost.matrices += n * k * self.stored
        self.cost.vectors += n * self.stored * bool(self.c.bias)
        for _ in range(self.q):
            for _ in range(self.forwards + 1):  # (1), then W for (2) and X for (3)
                self.visit("z", m * k)
                self.visit("y", n * k)
            self.sum_to_one("z", m * k)
            self.sum_to_one("y", n * k)
        self.cost.flops += (self.forwards + 2) * 2 * m * n * k * self.q
        self.save(m * k * self.e)

    def block(self, recompute: str) -> None:
        c, q = self.c, self.q
        if recompute == "full":
            self.save(self.m * self.d * self.e)  # the block's input
            self.forwards, self.saving = 2, False
        self.norm()
        self.product(self.d, [c.q_dim // q, c.kv_dim // q, c.kv_dim // q])
        self.attend(recompute)
        self.product(c.q_dim // q, [self.d])
        self.norm()
        ups = [c.ffn // q] * (2 if c.gated else 1)
        self.product(self.d, ups)
        self.save(self.m * sum(ups) * self.e)  # what the nonlinearity saw
        self.product(c.ffn // q, [self.d])
        self.forwards, self.saving = 1, True

    def attend(self, recompute: str) -> None:
        heads, forwards = self.c.heads // self.q, 1 if recompute == "none" else 2
        self.cost.flops += (4 * forwards + 10) * self.b * heads * self.s**2 * self.c.head_dim
        self.save(self.m * (self.c.q_dim + 2 * self.c.kv_dim) // self.q * self.e)
        if recompute == "none":
            self.save(self.m * heads * self.wide)  # the rows' log-sum-exps

    def head(self) -> None:
        c, m, d = self.c, self.m, self.d
        if not c.tied:
            self.cost.matrices += self.part(c.vocab, "y") * d * self.stored
            self.bucket(self.stored)
        for start, stop in blocks_of(c.vocab, self.q):
            rows = stop - start
            self.visit("y", rows * d)
            self.sum_to_one("z", m * rows)  # logits
            self.visit("z", m * rows)  # dlogits
            self.visit("y", rows * d)
            self.sum_to_one("y", rows * d)  # dT
        self.send("all_gather", "z", 4 * m * self.q, self.wide)  # four numbers per row for its loss
        for axis in ("replicas", "x", "y"):
            self.reduce(axis, 2, self.wide)  # loss and count
        self.cost.flops += 3 * 2 * m * d * c.vocab
        self.save(m * d * self.e + self.part(c.vocab, "y") * d * self.stored + self.wide)  # dX, dT and the count

    def sums(self) -> None:
        """Sums of gradients, over the axes on which each rank has seen its own tokens."""
        self.reduce("y", self.cost.vectors // self.stored, self.stored)
        self.reduce("x", self.cost.parameters // self.stored, self.stored)
