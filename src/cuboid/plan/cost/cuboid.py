"""The cost of a step on a rank of a cuboid: ARCHITECTURE.md's table, summed over a model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import gcd, lcm
from typing import Any, NamedTuple

from cuboid.layers.head import chunk_rows
from cuboid.layers.product import chunk_count
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import ceil_div, round_up
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.model.freeze import Trained
from cuboid.plan.cost import Cost, Counter
from cuboid.step.pipeline import Split
from cuboid.step.schedule import PREFETCH, Schedule


def step_cost(
    config: ModelConfig,
    cuboid: Cuboid,
    coordinates: Mapping[str, int],
    batch: int,
    seq: int,
    policy: Policy = Policy(),
    recompute: str = "none",
    parameter_size: int = 4,
    compute_size: int = 4,
    schedule: Schedule = PREFETCH,
    last: bool = True,
    micro_batches: int = 1,
    freeze: str = "",
) -> Cost:
    """One forward and backward of the rank at `coordinates`; sizes are bytes an element at rest and in products. A
    schedule of sub-batches or chunks sends the same bytes in more calls. Of several micro-batches only the `last` sums
    gradients over replicas and, on a pipe, between the two ends, and tells all of the losses of all `micro_batches`.
    `freeze` is a pattern of the parameters that are not trained."""
    config.check(cuboid, batch, seq)
    sizes, trained = (parameter_size, compute_size), Trained(config, freeze)
    step = _CuboidStep(config, cuboid, coordinates, batch, seq, policy, recompute, *sizes, schedule, last, trained)
    if last and cuboid.pipe > 1:
        step.send("broadcast", "pipe", micro_batches, step.wide)
    return step.cost


def cost_of_all(micro_batches: int, *of: Any, **options: Any) -> Cost:
    """`step_cost` of all micro-batches of a step. `saved` is of one."""
    cost: Callable[..., Cost] = step_cost
    found = cost(*of, micro_batches=micro_batches, **options)
    for _ in range(micro_batches - 1):
        found.add(cost(*of, last=False, **options))
    return found


class _Weight(NamedTuple):
    """A parameter [n, k] with the axes that split n (before x) and k; None: not split."""

    n: int
    k: int
    n_axis: str
    k_axis: str | None
    trained: bool


class _CuboidStep(Counter):
    """The sizes on a rank, and a method per formula; each adds to `cost`."""

    def __init__(
        self,
        config: ModelConfig,
        cuboid: Cuboid,
        coordinates: Mapping[str, int],
        batch: int,
        seq: int,
        policy: Policy,
        recompute: str,
        parameter_size: int,
        compute_size: int,
        schedule: Schedule,
        last: bool,
        trained: Trained,
    ) -> None:
        super().__init__(cuboid, coordinates)
        self.trained = trained
        self.c, self.policy, self.recompute, self.last = config, policy, recompute, last
        self.stored, self.e, self.wide = parameter_size, compute_size, max(compute_size, 4)
        self.x, self.y, self.z = cuboid.x, cuboid.y, cuboid.z
        along_batch = gcd(batch // cuboid.replicas, cuboid.x)
        self.context = cuboid.x // along_batch
        self.b = batch // cuboid.replicas // along_batch
        unit = lcm(self.y, self.z, 2 if self.context > 1 else 1) * self.context
        self.s = round_up(seq, unit) // self.context
        self.m = self.s * self.b  # tokens of the x-slice
        self.sub_batches = schedule.sub_batches if self.b % schedule.sub_batches == 0 else 1
        self.chunks = chunk_count(self.s, self.y, self.z, schedule.chunks)
        self.d = config.hidden // self.z
        self.summed_over_y = 0  # elements of norm gradients
        self.summed_over_all = 0  # of those of heads' norms
        self.in_bucket = 0  # elements of a bucket's gradients
        self.forwards, self.saving = 1, True  # the number of forwards of the current part, and whether it saves
        self.backward = True  # whether backward comes here
        self.of_block = trained.block(0)  # trained parameters of the current block

        split = Split.of(config.layers, cuboid.pipe, schedule)
        lowest = split.stage_of(trained.lowest)  # stage that is trained
        self.whole = cuboid.pipe == 1  # no pipeline: a tied embedding is held once
        for stage in split.stages(coordinates["pipe"]):
            if stage == 0:
                self.embedding()
            else:
                self.in_sub_batches(partial(self.message, back=lowest < stage, onward=False))
            for i in split.layers(stage):
                self.of_block = trained.block(i)
                self.backward = self.saving = trained.lowest <= 1 + i
                self.block(kept=self.whole and schedule.prefetch and i == config.layers - 1)
            if stage < split.last:
                self.in_sub_batches(partial(self.message, back=lowest <= stage, onward=True))
                continue
            self.backward = self.saving = trained.lowest <= 1 + config.layers
            self.weights(self.norm_weights(trained.norm()), regathered=True)
            self.sum_replicas()
            self.head()
        if last:
            if config.tied and trained.embed and not self.whole and coordinates["pipe"] in (0, cuboid.pipe - 1):
                table = self.part(self.part(config.vocab, "y"), "x") * self.d
                if table:
                    self.count("send", table * self.stored)
                    self.count("receive", 0)
            for axis, summed in (("x", 0), ("y", self.summed_over_y), ("z", 0)):
                self.reduce(axis, summed + self.summed_over_all, self.stored)

    def gather(self, axis: str, whole: int, size: int = 0, p: int = 0) -> None:
        self.send("all_gather", axis, whole, size or self.e, p=p)

    def scatter(self, axis: str, whole: int, size: int = 0, p: int = 0) -> None:
        self.send("reduce_scatter", axis, whole, size or self.e, p=p)

    def pair(self, axis: str, whole: int, p: int = 0) -> None:
        """An all-gather of activations, and the reduce-scatter of their gradient."""
        for _ in range(self.forwards):
            self.gather(axis, whole, p=p)
        if self.backward:
            self.scatter(axis, whole, p=p)

    def message(self, back: bool, onward: bool) -> None:
        """The residual stream from the stage before or `onward` to the next and, if there is something to train below,
        its gradient the other way."""
        size = self.m // self.y * self.d * self.e
        if onward or back:
            self.count("send", size)
        if back or not onward:
            self.count("receive", 0)

    def count(self, kind: str, size: int) -> None:
        entry = self.cost.traffic["pipe", kind]
        entry[0] += 1
        entry[1] += size

    def in_sub_batches(self, formula: Callable[[], None]) -> None:
        """Adds what each sub-batch costs."""
        whole = self.b, self.m
        self.b, self.m = self.b // self.sub_batches, self.m // self.sub_batches
        for _ in range(self.sub_batches):
            formula()
        self.b, self.m = whole

    def save(self, size: int) -> None:
        if self.saving:
            self.cost.saved += size

    # Weights: AG_m in forward and in backward, RS_m of the gradient

    def weights(self, weights: Sequence[_Weight], regathered: bool, gathers: int = 1) -> None:
        """The collectives of one bucket."""
        in_flight = reduced = 0
        for n, k, n_axis, k_axis, trained in weights:
            rows, columns = self.part(n, n_axis), self.part(k, k_axis)
            held = self.part(rows, "x") * columns
            if k_axis is None:
                self.cost.vectors += held * self.stored
            else:
                self.cost.matrices += held * self.stored
            in_flight += ceil_div(rows, self.x) * columns
            reduced += trained * ceil_div(rows, self.x) * columns
            self.in_bucket += trained * held
        retained = self.policy.weights == "retain"
        for _ in range(1 if retained else gathers + (regathered and self.backward)):
            self.gather("x", in_flight * self.x)
        self.scatter("x", reduced * self.x)

    def sum_replicas(self) -> None:
        """The sum of a bucket's gradients over replicas."""
        if self.last:
            self.reduce("replicas", self.in_bucket, self.stored)
        self.in_bucket = 0

    def norm_weights(self, trained: Sequence[bool]) -> list[_Weight]:
        """Weights and biases of norms. Their gradients are summed over y at the end."""
        self.summed_over_y += sum(trained) * self.part(self.d, "x")
        return [_Weight(self.c.hidden, 1, "z", None, each) for each in trained]

    def head_norms(self) -> None:
        """Weights of QK-norm: unsharded on every rank; their gradients are summed over all axes."""
        if self.c.qk_norm:
            trained = sum(f"attention.norm_{each}.weight" in self.of_block for each in "qk")
            self.cost.vectors += 2 * self.c.head_dim * self.stored
            self.summed_over_all += trained * self.c.head_dim
            self.in_bucket += trained * self.c.head_dim

    # Layers

    def embedding(self) -> None:
        tied, tables = bool(self.c.tied), [self.c.vocab] + ([] if self.c.rotary else [self.c.context])
        for i, (rows, trained) in enumerate(zip(tables, self.trained.tables(), strict=True)):
            twice = tied and i == 0 and self.whole  # a tied embedding is gathered for the head too
            self.weights([_Weight(rows, self.c.hidden, "y", "z", trained)], regathered=False, gathers=1 + twice)
            self.sum_replicas()
        self.in_sub_batches(self.lookup)

    def lookup(self) -> None:
        self.scatter("y", self.m * self.d)
        if self.trained.lowest == 0:
            self.gather("y", self.m * self.d)

    def norm(self) -> None:
        rows = self.m // self.y
        for _ in range(self.forwards):
            if self.c.norm_bias:
                self.gather("z", 2 * rows * self.z, self.wide)
            else:
                self.reduce("z", rows, self.wide)
        statistics = rows * (1 + self.c.norm_bias)
        if self.backward:
            self.reduce("z", statistics, self.wide)
        self.save(rows * self.d * self.e + statistics * self.wide)

    def product(self, k: int, outs: Sequence[Mapping[str, int]], k_axis: str, n_axis: str, whole: bool = False) -> None:
        """(1)–(3) of X [m, k] and outputs [m, n], in gathered sizes. Each of `outs` is one reduce-scatter, with n by
        the name of each linear. Computed in chunks unless `whole`."""
        retain, chunks = self.policy.activations == "retain", 1 if whole else self.chunks
        m, trained = self.m // chunks, sum(n for out in outs for name, n in out.items() if self.trains(name))
        for _ in range(chunks):
            for _ in range(self.forwards + (trained > 0 and not retain)):
                self.gather(n_axis, m * k)  # X, once more for wgrad
            for out in outs:
                for _ in range(self.forwards):
                    self.scatter(k_axis, m * sum(out.values()))  # Y
                if self.backward:
                    self.gather(k_axis, m * sum(out.values()))  # dY
            if self.backward:
                self.scatter(n_axis, m * k)  # dX
        every = sum(n for out in outs for n in out.values())
        self.cost.flops += 2 * self.m * k * ((self.forwards + self.backward) * every + trained)
        if trained:
            self.save(self.m * k * self.e // (1 if retain else self.axes[n_axis]))

    def trains(self, linear: str) -> bool:
        """Whether the weight of a linear of the current block has a gradient."""
        return f"{linear}.weight" in self.of_block

    def block(self, kept: bool) -> None:
        """`kept`: its weights stay from forward to backward."""
        c, trained = self.c, self.of_block
        into = {"attention.q": c.q_dim, "attention.k": c.kv_dim, "attention.v": c.kv_dim, **self.ups(c.ffn)}
        linears = {name: (n, c.hidden, "y", "z") for name, n in into.items()}
        linears |= {"attention.out": (c.hidden, c.q_dim, "z", "y"), "mlp.down": (c.hidden, c.ffn, "z", "y")}
        weights = [_Weight(*sizes, self.trains(name)) for name, sizes in linears.items()]
        for name, (n, _, n_axis, _) in linears.items():
            if c.qkv_biased if name in ("attention.q", "attention.k", "attention.v") else c.bias:
                weights.append(_Weight(n, 1, n_axis, None, f"{name}.bias" in trained))
        kinds = ["weight", "bias"][: 1 + c.norm_bias]
        norms = [f"{norm}.{kind}" in trained for norm in ("norm1", "norm2") for kind in kinds]
        self.weights(weights + self.norm_weights(norms), regathered=not kept)
        self.head_norms()
        self.sum_replicas()
        self.in_sub_batches(self.layer)

    def ups(self, n: int) -> dict[str, int]:
        """The MLP's linears into its inner features."""
        return dict.fromkeys(("mlp.gate", "mlp.up") if self.c.gated else ("mlp.up",), n)

    def layer(self) -> None:
        if self.recompute == "full" and self.backward:
            self.save(self.m // self.y * self.d * self.e)  # the block's input
            self.forwards, self.saving = 2, False
        self.norm()
        self.attention()
        self.norm()
        f = self.part(self.c.ffn, "y")
        ups = self.ups(f)
        self.product(self.d, [ups], k_axis="z", n_axis="y")
        self.save(self.m // self.z * sum(ups.values()) * self.e)  # what the nonlinearity saw
        self.product(f, [{"mlp.down": self.d}], k_axis="y", n_axis="z")
        self.forwards, self.saving = 1, self.backward

    def attention(self) -> None:
        c, y, z, m = self.c, self.y, self.z, self.m
        q, kv = c.q_dim // y, self.part(c.kv_dim, "y")
        few = c.kv_heads % (y * z) != 0  # keys and values are then split by tokens
        queries, keys = {"attention.q": q}, {"attention.k": kv, "attention.v": kv}
        self.product(self.d, [queries, keys] if few else [queries | keys], "z", "y", whole=few)
        recomputed = self.recompute == "selective" and self.backward
        if recomputed:
            self.save((m * q + 2 * m * kv) // z * self.e)
            self.forwards, self.saving = 2, False
        self.attend(few, kv)
        if recomputed:
            self.forwards, self.saving = 1, True
        self.product(q, [{"attention.out": self.d}], k_axis="y", n_axis="z")

    def attend(self, few: bool, kv: int) -> None:
        c, y, z, m = self.c, self.y, self.z, self.m
        heads, kv_heads = c.heads // (y * z), c.kv_heads // (y * z)
        if few:  # gather them, and pick
            if c.kv_heads % y:
                self.pair("y", m // z * 2 * ceil_div(c.kv_dim, y) * y)
                kv = c.kv_dim
            self.pair("z", m * 2 * kv)
            kv_heads = self.picked(heads)
        keys = m * 2 * kv_heads * c.head_dim
        if c.qk_norm:
            self.save_unnormed(few, keys // 2)
        seen = [(self.s, self.s)]  # queries, keys they look at
        if self.context > 1:
            keys *= self.context
            self.pair("x", keys, p=self.context)
            piece, index = self.s // 2, self.at["x"] % self.context
            seen = [(piece, (index + 1) * piece), (piece, (2 * self.context - index) * piece)]
        scores = sum(s * t for s, t in seen)
        self.cost.flops += (4 * self.forwards + 10 * self.backward) * self.b * heads * scores * c.head_dim
        outputs = m * heads * c.head_dim
        saved = outputs + keys  # queries, keys and values
        if self.context > 1:
            masks = sum(s * t for s, t in seen if s != t)
            saved += outputs + masks  # the pieces' outputs before they are joined
        elif (self.policy.activations == "retain" and z > 1) or not self.trains("attention.out"):
            saved += outputs  # else the very tensor that the next product saves
        self.save(saved * self.e + m * heads * self.wide)  # and the rows' log-sum-exps

    def save_unnormed(self, few: bool, keys: int) -> None:
        """Inputs of QK-norm. The values share the keys' buffer if they are as large; if x splits the sequence, nothing
        else saves them."""
        c = self.c
        self.save((self.m * c.q_dim // (self.y * self.z) + keys * (1 + (self.context > 1 and not few))) * self.e)

    def picked(self, heads: int) -> int:
        """The number of key heads that `heads` queries need; one each if the need is uneven."""
        first = (self.at["y"] * self.z + self.at["z"]) * heads
        need = [h * self.c.kv_heads // self.c.heads for h in range(first, first + heads)]
        each = sorted(set(need))
        even = [head for head in each for _ in range(heads // len(each))] == need
        return len(each) if even else heads

    def head(self) -> None:
        vocab = self.part(self.c.vocab, "y")
        if not (self.c.tied and self.whole):
            self.cost.matrices += self.part(vocab, "x") * self.d * self.stored
            self.in_bucket += self.trained.head * self.part(vocab, "x") * self.d
            self.sum_replicas()
            self.gather("x", ceil_div(vocab, self.x) * self.x * self.d)
        self.in_sub_batches(self.end)
        if self.trained.head:
            self.scatter("x", ceil_div(vocab, self.x) * self.x * self.d)  # dW
            self.cost.saved += ceil_div(vocab, self.x) * self.d * self.stored
        for axis in ("x", "z", "replicas"):
            self.reduce(axis, 2, self.wide)  # loss and count
        self.cost.saved += self.wide  # the count

    def end(self) -> None:
        """The last norm and the head."""
        self.norm()
        vocab = self.part(self.c.vocab, "y")
        row = self.b * ceil_div(self.c.vocab, self.y)
        chunk = chunk_rows(self.s, self.z, row, self.policy.head_elements)
        self.gather("y", self.m * self.d)  # X
        for _ in range(self.s // chunk):
            rows = chunk * self.b
            self.scatter("z", rows * vocab)  # logits
            self.gather("y", 4 * rows // self.z * self.y, self.wide)  # four numbers per row for its loss
            if self.backward or self.trained.head:
                self.gather("z", rows * vocab)  # dlogits
        if self.backward:
            self.scatter("y", self.m * self.d)  # dX
        self.cost.flops += (1 + self.backward + self.trained.head) * 2 * self.m * self.d * vocab
        self.save(self.m // self.y * self.d * self.e)  # dX
