"""Predictions of published measurements, from the presets only: no figure here was fitted.

Megatron-LM's tensor parallelism is simulated on the same clock with the same prices as our own step, with its own
schedule: no overlap, attention in separate kernels that write the scores, fused elementwise kernels, gradients
all-reduced over data at the end in fp16.
"""

from dataclasses import dataclass, replace

import numpy as np

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.plan.cost.two_d import two_d_cost
from cuboid.plan.hardware import PRESETS, Hardware
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.plan.sizes import Sizes, groups
from cuboid.plan.step import prices_of
from cuboid.plan.tape import Tape
from cuboid.plan.time import Array, Prices
from cuboid.step.schedule import OFF


@dataclass(frozen=True)
class Line:
    """A published figure and ours."""

    what: str
    unit: str
    published: float
    predicted: float
    allowed: float  # relative error
    assumptions: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def ok(self) -> bool:
        return abs(self.error) <= self.allowed


@dataclass(frozen=True)
class Megatron:
    """A GPT on `tensor` × `data` devices; `micro_batch` sequences at a time of the `batch` of a step."""

    layers: int
    hidden: int
    heads: int
    tensor: int
    data: int
    batch: int
    micro_batch: int
    recompute: str = "full"
    sequence: bool = False  # parallel: norms and dropouts are sharded, all-reduces are scatters and gathers
    seq: int = 2048
    vocab: int = 51200

    def seconds(self, hw: Hardware, precision: str = "fp16", itemsize: int = 2) -> float:
        """Seconds of a step."""
        cuboid = Cuboid(1, self.tensor, 1, self.data)
        one = np.ones(1, dtype=np.int64)
        prices = Prices(hw, precision, itemsize, groups([cuboid], one, hw.node))
        tape = Tape(prices, overlap=False)
        play = _MegatronPlay(self, tape, itemsize)
        count = self.batch // (self.data * self.micro_batch)
        play.ends()
        for _ in range(self.layers):
            play.layer()
        tape.now = tape.now * count
        parameters = (12 * self.layers * self.hidden**2 + self.vocab * self.hidden) // self.tensor
        tape.wait(tape.launch("replicas", "all_reduce", np.array([parameters])))
        tape.stream("optimizer", np.array([34.0 * parameters]))
        return float(tape.now[0])

    @property
    def flops(self) -> float:
        """FLOPs of a step with full recomputation, as SC21 counts them."""
        h, share = self.hidden, self.seq / (6 * self.hidden) + self.vocab / (16 * self.layers * self.hidden)
        return 96 * self.batch * self.seq * self.layers * h**2 * (1 + share)


class _MegatronPlay:
    """One micro-batch of one rank."""

    def __init__(self, of: Megatron, tape: Tape, itemsize: int) -> None:
        self.of, self.tape, self.e = of, tape, itemsize
        self.m = np.array([of.micro_batch * of.seq])
        self.h, self.t = np.array([of.hidden]), of.tensor

    def product(self, n: Array, k: Array, times: int) -> Array:
        """Seconds: forward `times` times; backward twice as much."""
        price = self.tape.prices.product
        return times * price(self.m, n, k) + price(self.m, k, n) + price(n, k, self.m)

    def into(self, n: Array, times: int) -> None:
        self.tape.compute("matmuls", self.product(n // self.t, self.h, times))

    def out_of(self, k: Array, times: int) -> None:
        self.tape.compute("matmuls", self.product(self.h, k // self.t, times))

    def stream(self, size: Array, forward: float, backward: float, times: int) -> None:
        """Memory traffic of an operand, by the number of reads and writes in forward and in backward."""
        self.tape.stream("elementwise", (times * forward + backward) * size * self.e)

    def exchange(self, times: int) -> None:
        """The communication after an out-of product in forward, and before an into product in backward."""
        whole = self.m * self.h
        for _ in range(times + 1):
            if self.of.sequence:  # a reduce-scatter and a gather; NCCL's are rings, one as long as the other
                for _ in range(2):
                    self.tape.wait(self.tape.launch("y", "all_gather", whole))
            else:
                self.tape.wait(self.tape.launch("y", "all_reduce", whole))

    def layer(self) -> None:
        of, t = self.of, self.t
        all_again, scores_again = (2 if of.recompute == "full" else 1), (1 if of.recompute == "none" else 2)
        rows = self.m * self.h // (t if of.sequence else 1)  # of norms, dropouts and the residual stream
        self.stream(rows, 2 * 2 + 2 * 3.5, 2 * 5 + 2 * 2.5 + 2 * 3, all_again)
        self.into(3 * self.h, all_again)
        scores = self.m * of.seq * of.heads // t
        each = np.array([of.hidden // of.heads])
        for _ in range(2 * scores_again + 4):  # Q Kᵀ and P V; each has two transposes
            self.tape.compute("attention", self.tape.prices.product(self.m * of.heads // t, np.array([of.seq]), each))
        self.stream(scores, 2 + 2.5, 3 + 2.5, scores_again)  # softmax, dropout
        self.out_of(self.h, all_again)
        self.exchange(all_again)
        self.into(4 * self.h, all_again)
        self.stream(4 * self.m * self.h // t, 2, 3, all_again)
        self.out_of(4 * self.h, all_again)
        self.exchange(all_again)

    def ends(self) -> None:
        vocab = np.array([self.of.vocab // self.t])
        self.into(np.array([self.of.vocab]), 1)
        self.stream(self.m * vocab, 8, 4, 1)  # the loss, partly in fp32
        self.stream(self.m * self.h, 4, 4, 1)


class _SummaPlay(_MegatronPlay):
    """Optimus: tokens, features and weights split by side × side. A product takes `side` rounds, each after a broadcast
    of both blocks; `Megatron.tensor` is the side. Collectives are added from the ledger's formulas."""

    def __init__(self, of: Megatron, tape: Tape, itemsize: int) -> None:
        super().__init__(of, tape, itemsize)
        self.m = self.m // of.tensor

    def into(self, n: Array, times: int) -> None:
        self.tape.compute("matmuls", self.t * self.product(n // self.t, self.h // self.t, times))

    def out_of(self, k: Array, times: int) -> None:
        self.tape.compute("matmuls", self.t * self.product(self.h // self.t, k // self.t, times))

    def exchange(self, times: int) -> None:
        pass


def summa_seconds(hw: Hardware, of: Megatron, precision: str = "fp32", itemsize: int = 4) -> float:
    """Seconds of a forward and backward without overlap. A node holds a square of the mesh, as in Optimus."""
    side, square = of.tensor, max(1, round(hw.node**0.5))
    config = ModelConfig("gpt2", of.layers, of.hidden, of.heads, of.vocab, of.seq, tied=True)
    cuboid = Cuboid(1, side, side)
    tape = Tape(Prices(hw, precision, itemsize, groups([cuboid], np.ones(1, dtype=np.int64), hw.node)), overlap=False)
    play = _SummaPlay(of, tape, itemsize)
    for _ in range(of.layers):
        play.layer()
    cost = two_d_cost(config, cuboid, cuboid.coordinates(0), of.batch, of.seq, recompute=of.recompute)
    link, share = hw.across["all_gather"], hw.across["all_gather"].bandwidth * square / hw.node
    seconds = float(tape.now[0])
    for (_, kind), (calls, sent) in cost.traffic.items():
        block = sent * side / (side - 1)  # the ledger counts the mean over the ranks
        times = 2 if kind == "all_reduce" else 1
        seconds += calls * times * (link.base + link.hop * np.log2(side)) + block / share
    return seconds


def sc21() -> list[Line]:
    """Narayanan et al. 2021, the rows without a pipeline."""
    hw, lines = PRESETS["a100-hdr"], []
    rows = (
        ("1.7B", Megatron(24, 2304, 24, 1, 32, 512, 16), 137),
        ("3.6B", Megatron(30, 3072, 32, 2, 32, 512, 16), 138),
        ("7.5B", Megatron(36, 4096, 32, 4, 32, 512, 16), 142),
        ("18B", Megatron(40, 6144, 48, 8, 32, 1024, 8), 135),
    )
    for name, run, published in rows:
        reached = run.flops / run.seconds(hw) / (run.tensor * run.data) / 1e12
        where = f"{run.tensor * run.data} A100, fp16, full recompute, micro-batch {run.micro_batch}"
        lines.append(Line(f"SC21 {name}", "TFLOP/s", published, reached, 0.15, where))
    return lines


def korthikanti() -> list[Line]:
    """Korthikanti et al. 2022: 22B on eight A100, batch 4."""
    hw = PRESETS["a100-hdr"]
    full = Megatron(48, 6144, 64, 8, 1, 4, 4)
    selective = Megatron(48, 6144, 64, 8, 1, 4, 4, recompute="selective", sequence=True)
    where = "8 A100, fp16, one micro-batch of 4"
    return [
        Line("22B, full recompute", "s", 1.42, full.seconds(hw), 0.15, where),
        Line("22B, sequence parallel, selective", "s", 1.10, selective.seconds(hw), 0.15, where),
    ]


def bian() -> list[Line]:
    """Bian et al. 2021, the paper this project implements: 64 V100, strong scaling.

    What its tables leave open is taken from code its authors published: Optimus' benchmark (xuqifan897/Optimus,
    bcmk_ParallelTransformer and summa/arguments.py) has fp32, 24 layers of 512 tokens, blocks alone, each computed
    again in backward, a 2 × 2 square of the mesh on a node; Colossal-AI's first release gathers both operands of
    every product, dY for each of its two. Which axis lies within nodes is not known: the fastest, or as in that release
    the one that weights are gathered over.
    """
    hw, batch, seq = PRESETS["v100-edr"], 24, 512
    one_d = Megatron(24, 3072, 64, 64, 1, batch, batch, seq=seq, vocab=64)
    two_d = replace(one_d, tensor=8, sequence=True)  # nothing is held twice
    rivals = {"1-D": (2.32, one_d.seconds(hw, "fp32", 4)), "2-D": (1.57, summa_seconds(hw, two_d))}
    where = "64 V100, 4 per node, EDR; fp32; 24 blocks, batch 24 × 512 in every layout, full recompute; no overlap"
    lines = []
    for axis in ("z", "x"):
        cube = cube_seconds(hw, one_d, axis)
        for other, (published, seconds) in rivals.items():
            what = f"3-D against {other}, {axis} within nodes"
            lines.append(Line(what, "×", published, seconds / cube, 0.20, where))
    return lines


def cube_seconds(hw: Hardware, of: Megatron, fastest: str) -> float:
    """The paper's cube, without overlap, dY gathered for each product of backward; `fastest` runs within nodes."""
    config = ModelConfig("gpt2", of.layers, of.hidden, of.heads, of.vocab, of.seq, tied=True)
    order = (*(axis for axis in AXES if axis != fastest), fastest)
    cuboid = Cuboid(4, 4, 4, order=order)
    work, choice = Work(config, of.batch, of.seq, "fp32"), Choice("full", Policy(), OFF)
    seconds = predict(hw, work, cuboid, choice, overlap=False).seconds
    sizes = Sizes(config, [cuboid], hw.node, of.batch, of.seq)
    dYs = [("z", sizes.q + 2 * sizes.kv), ("z", sizes.f), ("y", sizes.d), ("y", sizes.d)]
    prices = prices_of(hw, work, sizes)
    again = sum(prices.collective(axis, "all_gather", sizes.m * n, 4).seconds[0] for axis, n in dYs)
    return seconds + of.layers * float(again)


def published() -> list[Line]:
    return [*sc21(), *korthikanti(), *bian()]
