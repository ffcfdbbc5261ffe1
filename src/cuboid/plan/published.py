"""Others' measurements, predicted from the presets and nothing else: no figure here was fitted.

Megatron-LM's tensor parallelism is played on the same clock with the same prices as our own step, with its own
schedule: nothing hidden, attention in separate kernels that write the scores, fused elementwise kernels, gradients
all-reduced over data at the end in fp16.
"""

from dataclasses import dataclass

import numpy as np

from cuboid.config import ModelConfig
from cuboid.cost import Cost
from cuboid.cost.two_d import two_d_cost
from cuboid.mesh import Cuboid
from cuboid.parallel.cuboid import Policy
from cuboid.plan.hardware import PRESETS, Hardware
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.plan.sizes import groups
from cuboid.plan.tape import Tape
from cuboid.plan.time import Array, Prices
from cuboid.schedule import OFF


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
    sequence: bool = False  # parallel: norms and dropouts are cut, all-reduces are scatters and gathers
    seq: int = 2048
    vocab: int = 51200

    def seconds(self, hw: Hardware, precision: str = "fp16", itemsize: int = 2) -> float:
        """Of a step."""
        cuboid = Cuboid(1, self.tensor, 1, self.data)
        one = np.ones(1, dtype=np.int64)
        prices = Prices(hw, precision, itemsize, groups([cuboid], one, hw.node))
        tape = Tape(prices, overlap=False)
        play = _Megatron(self, tape, itemsize)
        count = self.batch // (self.data * self.micro_batch)
        play.ends()
        for _ in range(self.layers):
            play.layer()
        tape.now = tape.now * count
        parameters = (12 * self.layers * self.hidden**2 + self.vocab * self.hidden) // self.tensor
        tape.wait(tape.launch("data", "all_reduce", np.array([parameters])))
        tape.stream("optimizer", np.array([34.0 * parameters]))
        return float(tape.now[0])

    @property
    def flops(self) -> float:
        """Of a step with everything computed again, as SC21 counts them."""
        h, share = self.hidden, self.seq / (6 * self.hidden) + self.vocab / (16 * self.layers * self.hidden)
        return 96 * self.batch * self.seq * self.layers * h**2 * (1 + share)


class _Megatron:
    """One micro-batch of one rank."""

    def __init__(self, of: Megatron, tape: Tape, itemsize: int) -> None:
        self.of, self.tape, self.e = of, tape, itemsize
        self.m = np.array([of.micro_batch * of.seq])
        self.h, self.t = np.array([of.hidden]), of.tensor

    def product(self, n: Array, k: Array, times: int) -> None:
        """Forward `times` times; backward twice as much."""
        self.tape.compute("products", times * self.tape.prices.product(self.m, n, k))
        self.tape.compute("products", self.tape.prices.product(self.m, k, n))
        self.tape.compute("products", self.tape.prices.product(n, k, self.m))

    def stream(self, size: Array, forward: float, backward: float, times: int) -> None:
        """Of an operand read or written so often in forward and in backward."""
        self.tape.stream("elementwise", (times * forward + backward) * size * self.e)

    def exchange(self, times: int) -> None:
        """After an out-of product in forward, and of dX before an into product in backward."""
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
        self.product(3 * self.h // t, self.h, all_again)
        scores = self.m * of.seq * of.heads // t
        each = np.array([of.hidden // of.heads])
        for _ in range(2 * scores_again + 4):  # Q Kᵀ and P V; each has two transposes
            self.tape.compute("attention", self.tape.prices.product(self.m * of.heads // t, np.array([of.seq]), each))
        self.stream(scores, 2 + 2.5, 3 + 2.5, scores_again)  # softmax, dropout
        self.product(self.h, self.h // t, all_again)
        self.exchange(all_again)
        self.product(4 * self.h // t, self.h, all_again)
        self.stream(4 * self.m * self.h // t, 2, 3, all_again)
        self.product(self.h, 4 * self.h // t, all_again)
        self.exchange(all_again)

    def ends(self) -> None:
        vocab = np.array([self.of.vocab // self.t])
        self.product(vocab, self.h, 1)
        self.stream(self.m * vocab, 8, 4, 1)  # the loss, partly in fp32
        self.stream(self.m * self.h, 4, 4, 1)


def two_d_seconds(hw: Hardware, config: ModelConfig, side: int, batch: int, seq: int, precision: str) -> float:
    """SUMMA on side × side devices, nothing hidden: `side` rounds, each a product after a broadcast of both blocks."""
    cuboid = Cuboid(1, side, side)
    cost: Cost = two_d_cost(config, cuboid, cuboid.coordinates(0), batch, seq)
    found = groups([cuboid], np.ones(1, dtype=np.int64), hw.node)
    seconds = cost.flops / hw.rate[precision] * (1 + hw.depth / (config.hidden / side))
    for (axis, kind), (calls, sent) in cost.traffic.items():
        size, inside = (int(each[0]) for each in found[axis])
        near, far = hw.inside["all_gather"], hw.across["all_gather"]
        crosses = inside < size
        share = min(near.bandwidth, far.bandwidth * inside / hw.node) if crosses else near.bandwidth
        base, hop = (far.base, far.hop) if crosses else (near.base, near.hop)
        block = sent * size / (size - 1)  # the ledger counts the mean over the ranks
        times = 2 if kind == "all_reduce" else 1
        seconds += calls * (base + hop * np.log2(size)) * times + block / share
    return float(seconds)


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
    """Bian et al. 2021, the paper this project implements: 64 V100, strong scaling. Whether its code kept gathered
    operands is not known to us, so both are predicted."""
    hw, batch, seq = PRESETS["v100-edr"], 24, 512
    config = ModelConfig("gpt2", layers=24, hidden=3072, heads=64, vocab=64, context=seq, tied=True)
    one_d = Megatron(24, 3072, 64, 64, 1, batch, batch, recompute="none", seq=seq, vocab=64).seconds(hw, "fp32", 4)
    two_d = two_d_seconds(hw, config, 8, batch, seq, "fp32")
    where = "64 V100, 4 a node, EDR; fp32; 24 layers, batch 24 × 512 in every layout; head left out; nothing hidden"
    lines = []
    for way, policy in (("gathered again", Policy()), ("kept", Policy("retain", "retain"))):
        work, choice = Work(config, batch, seq, "fp32"), Choice(policy=policy, schedule=OFF)
        cube = predict(hw, work, Cuboid(4, 4, 4), choice, overlap=False).seconds
        assumed = f"{where}; z within nodes; operands {way} for backward"
        lines.append(Line(f"3-D against 1-D, operands {way}", "×", 2.32, one_d / cube, 0.20, assumed))
        lines.append(Line(f"3-D against 2-D, operands {way}", "×", 1.57, two_d / cube, 0.20, assumed))
    return lines


def published() -> list[Line]:
    return [*sc21(), *korthikanti(), *bian()]
