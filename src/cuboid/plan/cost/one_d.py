"""The cost of a step of 1-D parallelism on a rank: the tables of baselines/one_d.py, summed over a model."""

from collections.abc import Mapping

from cuboid.baselines.one_d import HEAD_ELEMENTS, check
from cuboid.layers.head import chunk_rows
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import ceil_div, round_up
from cuboid.model.config import ModelConfig
from cuboid.plan.cost import Cost, Counter


def one_d_cost(
    config: ModelConfig,
    cuboid: Cuboid,
    coordinates: Mapping[str, int],
    batch: int,
    seq: int,
    sequence: bool = False,
    parameter_size: int = 4,
    compute_size: int = 4,
    recompute: str = "none",
    head_elements: int = HEAD_ELEMENTS,
) -> Cost:
    """One forward and backward of the rank at `coordinates`; sizes are bytes an element at rest and in products. What
    is saved for backward has no formula here."""
    check(config, cuboid, batch, seq)
    step = _OneDStep(config, cuboid, coordinates, batch, seq, sequence, parameter_size, compute_size)
    step.embedding()
    for _ in range(config.layers):
        step.block(recompute)
        step.bucket(parameter_size)
    step.norm()
    step.bucket(parameter_size)
    step.head(head_elements)
    step.sums()
    return step.cost


class _OneDStep(Counter):
    """The sizes on a rank, and a method per formula; each adds to `cost`."""

    def __init__(
        self,
        config: ModelConfig,
        cuboid: Cuboid,
        coordinates: Mapping[str, int],
        batch: int,
        seq: int,
        sequence: bool,
        parameter_size: int,
        compute_size: int,
    ) -> None:
        super().__init__(cuboid, coordinates)
        self.c, self.y, self.sequence = config, cuboid.y, sequence
        self.stored, self.e, self.wide = parameter_size, compute_size, max(compute_size, 4)
        self.b = batch // cuboid.replicas
        self.s = round_up(seq, cuboid.y if sequence else 1)
        self.m = self.s * self.b
        self.replicated = 0  # elements of norms and out_of biases

    # Activations, [m, d] unsharded

    def before_into(self, forwards: int = 1) -> None:
        whole = self.m * self.c.hidden
        if self.sequence:
            for _ in range(forwards):
                self.send("all_gather", "y", whole, self.e)
            self.send("reduce_scatter", "y", whole, self.e)
        else:
            self.reduce("y", whole, self.e)  # dX

    def after_out_of(self, forwards: int = 1) -> None:
        whole = self.m * self.c.hidden
        for _ in range(forwards):
            if self.sequence:
                self.send("reduce_scatter", "y", whole, self.e)
            else:
                self.reduce("y", whole, self.e)
        if self.sequence:
            self.send("all_gather", "y", whole, self.e)

    # Layers

    def matrix(self, rows: int, columns: int) -> None:
        self.cost.matrices += rows * columns * self.stored

    def vector(self, n: int, replicated: bool) -> None:
        self.cost.vectors += n * self.stored
        self.replicated += n * replicated

    def embedding(self) -> None:
        for rows in [self.c.vocab] + ([] if self.c.rotary else [self.c.context]):
            self.matrix(self.part(rows, "y"), self.c.hidden)
            self.bucket(self.stored)
        self.after_out_of()

    def norm(self) -> None:
        self.vector(self.c.hidden * (1 + self.c.norm_bias), replicated=True)

    def block(self, recompute: str) -> None:
        c, y, forwards = self.c, self.y, 2 if recompute == "full" else 1
        qkv, inner = (c.q_dim + 2 * c.kv_dim) // y, c.ffn // y
        scores = self.b * c.heads // y * self.s * self.s
        attention = 2 if recompute == "selective" else forwards  # how often its forward runs
        self.cost.flops += (4 * attention + 10) * scores * c.head_dim
        for n, k in ((qkv, c.q_dim // y), (inner * (2 if c.gated else 1), inner)):  # into and out of each half
            self.norm()
            self.before_into(forwards)
            self.after_out_of(forwards)
            self.matrix(n + k, c.hidden)
            self.cost.flops += (forwards + 2) * 2 * self.m * c.hidden * (n + k)
            if c.bias:
                self.vector(n, replicated=False)
                self.vector(c.hidden, replicated=True)

    def head(self, head_elements: int) -> None:
        vocab, d = self.part(self.c.vocab, "y"), self.c.hidden
        if not self.c.tied:
            self.matrix(vocab, d)
            self.bucket(self.stored)
        self.before_into()
        chunk = chunk_rows(self.s, 1, self.b * ceil_div(self.c.vocab, self.y), head_elements)
        for _ in range(self.s // chunk):
            self.send("all_gather", "y", 4 * chunk * self.b * self.y, self.wide)  # four numbers per row for its loss
        self.reduce("replicas", 2, self.wide)  # loss and count
        self.cost.flops += 3 * 2 * self.m * d * vocab

    def sums(self) -> None:
        """Sums of gradients, at the end of the step."""
        if self.sequence:
            self.reduce("y", self.replicated, self.stored)
