"""The cost of a step on a rank of `bench/native.py`: torch's FSDP × tensor parallelism, or its DDP."""

from collections.abc import Sequence

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import ceil_div, round_up, shard_range
from cuboid.model.config import ModelConfig
from cuboid.plan.cost import Cost, Counter


def native_cost(
    config: ModelConfig,
    fsdp: int,
    tp: int,
    batch: int,
    seq: int,
    rank: int = 0,
    ideal: bool = False,
    reshard: bool = True,
    sp: bool = True,
    ddp: bool = False,
    size: int = 4,
) -> Cost:
    """Calls and bytes over the axes "fsdp" and "tp", and the parameters at rest, of one forward and backward; `size` is
    bytes an element. FLOPs and saved activations are not predicted.

    An `ideal` reduce-scatter is an all-to-all, and counted as one.
    """
    check_model(config, tp)
    check_batch(config, fsdp, tp if sp else 1, batch, seq)
    return _NativeStep(config, fsdp, tp, batch, seq, rank, ideal, reshard, sp, ddp, size).cost


def check_model(config: ModelConfig, tp: int) -> None:
    """Raise ValueError if tensor parallelism over `tp` ranks cannot split this model."""
    config.check_plain("PyTorch's FSDP × TP")
    for name in ("heads", "kv_heads", "ffn"):
        n = getattr(config, name)
        if n % tp:
            divisors = [each for each in range(1, tp) if n % each == 0]
            raise ValueError(f"{name}={n} cannot be split into tp={tp}; use another {name}, or tp one of {divisors}")
    for name in ("vocab",) if config.rotary else ("vocab", "context"):
        n = getattr(config, name)
        if shard_range(n, tp, tp - 1) == (n, n):  # DTensor cannot look up rows in none
            raise ValueError(f"{name}={n} leaves the last of tp={tp} ranks no row; use {name} {round_up(n, tp)}")


def check_batch(config: ModelConfig, fsdp: int, tp: int, batch: int, seq: int) -> None:
    config.check(Cuboid(), batch, seq)
    for name, n, axis, parts in (("batch", batch, "fsdp", fsdp), ("seq", seq, "tp", tp)):
        if n % parts:
            near = " or ".join(str(each) for each in (n // parts * parts, (n // parts + 1) * parts) if each)
            raise ValueError(f"{name}={n} cannot be split into {axis}={parts}; use {name} {near}")


def ddp_buckets(elements: Sequence[int], size: int) -> list[int]:
    """The elements that DDP all-reduces together: parameters in order, until they reach 1 MiB, then 25 MiB."""
    found, held, limit = list[int](), 0, 1 << 20
    for each in elements:
        held += each
        if held * size >= limit:
            found, held, limit = [*found, held], 0, 25 << 20
    return found + [held] * bool(held)


#: A parameter [rows, columns] as tensor parallelism leaves it; vectors have one column.
_Parameter = tuple[int, int]


class _NativeStep(Counter):
    """The sizes on a rank, and a method per formula; each adds to `cost`."""

    def __init__(
        self,
        config: ModelConfig,
        fsdp: int,
        tp: int,
        batch: int,
        seq: int,
        rank: int,
        ideal: bool,
        reshard: bool,
        sp: bool,
        ddp: bool,
        size: int,
    ) -> None:
        cuboid = Cuboid(fsdp, tp)
        at = cuboid.coordinates(rank)
        super().__init__(cuboid, at)
        self.axes, self.at = {"fsdp": fsdp, "tp": tp}, {"fsdp": at["x"], "tp": at["y"]}
        self.c, self.e, self.sp, self.ddp = config, size, sp, ddp
        self.replicated: list[int] = []  # bytes of each parameter under DDP
        self.scattering = "all_to_all" if ideal else "reduce_scatter"
        self.tokens = batch // fsdp * seq
        self.embedding(seq)
        for layer in range(config.layers):
            self.block(gathers=2 if reshard and layer < config.layers - 1 else 1)
        self.head()
        for elements in ddp_buckets([each // size for each in self.replicated], size):
            self.reduce("fsdp", elements, size)

    def gather(self, axis: str, whole: int) -> None:
        self.send("all_gather", axis, whole, self.e)

    def scatter(self, axis: str, whole: int) -> None:
        self.send(self.scattering, axis, whole, self.e)

    def pair(self, whole: int) -> None:
        """A gather of activations over tp and the scatter of their gradient, or the reverse; without sequence
        parallelism one all-reduce, of the activations or of their gradient."""
        if not self.sp:
            self.reduce("tp", whole, self.e)
            return
        self.gather("tp", whole)
        self.scatter("tp", whole)

    def group(self, parameters: Sequence[_Parameter], gathers: int = 1) -> None:
        """Parameters that FSDP gathers together; each is split by rows, and padded."""
        moved, fsdp = 0, self.axes["fsdp"]
        for rows, columns in parameters:
            held = (rows if self.ddp else self.part(rows, "fsdp")) * columns * self.e
            if columns == 1:
                self.cost.vectors += held
            else:
                self.cost.matrices += held
            moved += ceil_div(rows, fsdp) * fsdp * columns
            self.replicated += [held] * self.ddp
        if self.ddp:
            return
        for _ in range(gathers):
            self.gather("fsdp", moved)
        self.scatter("fsdp", moved)

    def norm(self) -> list[_Parameter]:
        """A norm's gradients are partial sums over the tokens that tp splits."""
        vectors = 1 + self.c.norm_bias
        for _ in range(vectors if self.sp else 0):
            self.reduce("tp", self.c.hidden, self.e)
        return [(self.c.hidden, 1)] * vectors

    def embedding(self, seq: int) -> None:
        d, tables = self.c.hidden, [(self.part(self.c.vocab, "tp"), self.c.hidden)]
        self.pair(self.tokens * d)
        if not self.c.rotary:
            tables.append((self.part(self.c.context, "tp"), d))
            self.pair(seq * d)
        self.group(tables + self.norm() if self.c.tied else tables)

    def block(self, gathers: int) -> None:
        c, tp = self.c, self.axes["tp"]
        into = [n // tp for n in (c.q_dim + 2 * c.kv_dim, *[c.ffn] * (2 if c.gated else 1))]
        parameters = [(n, c.hidden) for n in into] + [(c.hidden, k // tp) for k in (c.q_dim, c.ffn)]
        if c.bias:
            parameters += [(n, 1) for n in (*into, c.hidden, c.hidden)]
        self.group(parameters + self.norm() + self.norm(), gathers)
        for _ in range(4):  # into and out of attention and the MLP
            self.pair(self.tokens * c.hidden)

    def head(self) -> None:
        if not self.c.tied:
            self.group([(self.part(self.c.vocab, "tp"), self.c.hidden), *self.norm()])
        self.pair(self.tokens * self.c.hidden)
        for size in (max(self.e, 4), max(self.e, 4), self.e):  # each row's largest logit, its sum of exps, its target's
            self.reduce("tp", self.tokens, size)
        self.reduce("fsdp", 1, self.e)  # the loss
