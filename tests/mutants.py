"""Breakages of the core, each an edit of one function: what others shipped, and what a change could slip in."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from textwrap import dedent
from typing import Any, NamedTuple

OP, RUNNER, WEIGHTS, SCHEDULE = (f"cuboid.step.{name}" for name in ("op", "runner", "weights", "schedule"))
PLAY, POST = "cuboid.step.play", "cuboid.step.post"
PRODUCT, EMBEDDING, HEAD, LOSS, NORM, ATTEND, ATTENTION = (
    f"cuboid.layers.{name}" for name in ("product", "embedding", "head", "loss", "norm", "attend", "attention")
)
CUBOID, BASE, GLOO = "cuboid.model.cuboid", "cuboid.comm.transport.base", "cuboid.comm.transport.gloo"


class Mutant(NamedTuple):
    what: str
    module: str
    function: str
    old: str
    new: str


def function_of(mutant: Mutant) -> Any:
    found: Any = import_module(mutant.module)
    for name in mutant.function.split("."):
        found = inspect.getattr_static(found, name)
    return inspect.unwrap(getattr(found, "__func__", found))


@contextmanager
def edited(mutant: Mutant) -> Iterator[None]:
    """The function with one piece of its text replaced, for all who hold it. Ranks forked inside have it too."""
    function = function_of(mutant)
    source = dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.function} has {mutant.old!r} {source.count(mutant.old)} times"
    found: dict[str, Any] = {}
    exec(source.replace(mutant.old, mutant.new), vars(import_module(mutant.module)), found)
    (made,) = found.values()
    before, function.__code__ = function.__code__, inspect.unwrap(getattr(made, "__func__", made)).__code__
    try:
        yield
    finally:
        function.__code__ = before


#: Noticed by values, launches, memory or messages, whichever comes first.
MUTANTS = [
    # the product
    Mutant("dX of one linear replaces the others'", PRODUCT, "Product.run", "add=i > 0", "add=False"),
    Mutant("a bias of another block", PRODUCT, "Out.bias", "[self._block]", "[0]"),
    Mutant(
        "X regathered from the wrong shard",
        PRODUCT,
        "Product.__call__",
        "partial(self.X.gather, X_s, chunks)",
        "partial(self.X.gather, X_s.flip(1), chunks)",
    ),
    Mutant("blocks of heads out of order", PRODUCT, "tiles", "Ys[j], Xs[i], tile", "Ys[j], Xs[-1 - i], tile"),
    Mutant(
        "the gradient of one sub-batch or chunk alone",
        PRODUCT,
        "Product.weight_gradients",
        "*w.gradient(weights, wide)",
        "w.gradient(weights, wide)[0], False",
    ),
    Mutant(
        "chunks joined one behind another",
        PRODUCT,
        "join_chunks",
        "torch.cat([chunk.unflatten(0, (shards, -1)) for chunk in chunks], 1).flatten(0, 1)",
        "torch.cat(list(chunks))",
    ),
    Mutant("chunks added up in bf16", PRODUCT, "Product.weight_gradients", "len(dYs) > 1", "False"),
    Mutant("a bias's gradient of the last sub-batch", PRODUCT, "add_up", "db += dY", "db[:] = dY"),
    Mutant("X not gathered early", PRODUCT, "Product.run", "aside = before()", "aside = 0.0"),
    Mutant("X never regathered", PRODUCT, "Product.run", ", saved.launch())", ")"),
    Mutant(
        "chunks of dY out of order",
        PRODUCT,
        "Product.run",
        "saved.flights, dY_mn, w",
        "saved.flights, dY_mn[::-1], w",
    ),
    Mutant("frozen linears take others' columns", PRODUCT, "Out.trained", "zip(group, self", "zip(group[::-1], self"),
    Mutant("retained X regathered", PRODUCT, "Product.__call__", "trained and not self.retain", "trained"),
    Mutant("chunks that do not divide", PRODUCT, "chunk_count", "lcm(y, z)", "max(y, z)"),
    # weights
    Mutant(
        "a short shard padded in front",
        WEIGHTS,
        "Bucket._by_rank",
        "torch.cat((gradient, gradient.new_zeros(missing, *slot.padded[1:])))",
        "torch.cat((gradient.new_zeros(missing, *slot.padded[1:]), gradient))",
    ),
    Mutant("rows off by one", WEIGHTS, "Bucket.gather", "slot.padded))", "slot.padded).roll(1, 0))"),
    Mutant(
        "stale weights",
        WEIGHTS,
        "Bucket.gather",
        "self._packed().to(self.dtype)",
        "self.__dict__.setdefault('old', self._packed().to(self.dtype).clone())",
    ),
    Mutant("gradients of a second use dropped", WEIGHTS, "Sums.put", "before.add_(gradient)", "before"),
    Mutant("a small gradient doubled", WEIGHTS, "Gathered.add", "before + gradient", "before + 2 * gradient"),
    Mutant(
        "the sum over replicas forgotten for one micro-batch",
        WEIGHTS,
        "Sums._sum_replicas",
        "self._pending_uses[bucket] == 0",
        "self._pending_uses[bucket] <= 1",
    ),
    Mutant("replicas not summed", WEIGHTS, "Sums._sum_replicas", "bucket.mesh.replicas", "bucket.mesh.x"),
    Mutant("no sum over y", WEIGHTS, "Sums.finish", "(mesh.x, mesh.y, mesh.z)", "(mesh.x, mesh.z)"),
    Mutant("sub-batches added up in bf16", WEIGHTS, "Gathered.gradient", "wide or self._uses > 1", "wide"),
    Mutant(
        "a weight kept by what autograd saves",
        WEIGHTS,
        "Gathered.lasting",
        "self[parameter].clone()",
        "self[parameter]",
    ),
    Mutant("all gradients in flight at a time", WEIGHTS, "Sums.add", "> MOST_IN_FLIGHT", "> 1000"),
    Mutant(
        "messages packed in another order",
        WEIGHTS,
        "Bucket.gather",
        "by_weight(each.view(x.size, -1), elements)",
        "by_weight(each.view(x.size, -1), elements)[::-1]",
    ),
    Mutant("deferred gradients made early", WEIGHTS, "Gathered.make", 'if self.wgrads == "now":', "if True:"),
    # the runner
    Mutant(
        "targets of another sub-batch",
        RUNNER,
        "At.split",
        "self.targets.chunk(len(places), 1)",
        "self.targets.chunk(len(places), 1)[::-1]",
    ),
    Mutant(
        "a weight released early", RUNNER, "_StageWeights.release", "if self._pending[i]:", "if self._pending[i] > 1:"
    ),
    Mutant(
        "weights never released",
        RUNNER,
        "_StageWeights.release",
        "gathered = self._held.pop(i)",
        "gathered = self._held[i]",
    ),
    Mutant(
        "the kept weights of another stage",
        RUNNER,
        "Runner._through",
        "{p: gathered[p] for p in bucket.parameters}",
        "{p: gathered[p].roll(1, 0) for p in bucket.parameters}",
    ),
    Mutant(
        "the loss not summed over replicas", RUNNER, "Runner.forward", "in self.sums_over", "in self.sums_over[:-1]"
    ),
    Mutant("gradients shrunk and not restored", RUNNER, "Runner.backward", "scale / shrunk", "scale"),
    Mutant("dX of sub-batches out of order", RUNNER, "_Step.backward", "torch.cat(dXs, 1)", "torch.cat(dXs[::-1], 1)"),
    Mutant(
        "the stage after the next prefetched",
        RUNNER,
        "_StageWeights.acquire",
        "self._launch(i + self.direction)",
        "self._launch(i + 2 * self.direction)",
    ),
    Mutant("no prefetch", RUNNER, "_StageWeights.acquire", "self.prefetch and len", "False and len"),
    Mutant("losses summed, not averaged", PLAY, "Player.play", "scale / len(batches)", "scale"),
    Mutant(
        "weight gradients never made",
        PLAY,
        "Player.play",
        "settle(pending.pop((i, stage)), sums, clock)",
        "pending.pop((i, stage))",
    ),
    Mutant("one micro-batch counted", PLAY, "Player.play", "len(batches) * uses", "uses"),
    Mutant("shared gradients not summed", POST, "exchange", "return x + theirs if first else theirs + x", "return x"),
    Mutant("another sub-batch received", PLAY, "Player._forward", "else post.take(move)", "else post.take(move)[::-1]"),
    Mutant(
        "early gradients used twice",
        RUNNER,
        "Runner.backward",
        "    passed.early.clear()\n",
        "    sums.put(passed.early[0][0]()) if passed.early else None\n",
    ),
    Mutant("double backward runs", RUNNER, "_Step.backward", "ctx.passed, None", "ctx.passed, ctx.passed"),
    # operations
    Mutant("a sign of the residual", OP, "Residual.__call__", ") + dY", ") - dY"),
    Mutant("one branch's gradient alone", OP, "Fork.__call__", "else total + dX", "else total"),
    Mutant(
        "recomputed without dropout", OP, "Recomputed._run", "w, at))", "w, type(at)(at.place, at.targets, at.loss)))"
    ),
    Mutant(
        "keys for values",
        OP,
        "OnItems.__call__",
        "(*left, *Y, *right)",
        "(*left, *Y[::-1], *right)",
    ),
    Mutant("turns by a rank's own sizes", OP, "_collective", "tokens * width * X.element_size()", "X.nbytes"),
    # embedding, head, loss, norm
    Mutant(
        "a norm's frozen parameters trained",
        NORM,
        "Normalise._add",
        "[p for p in self._parameters if p.requires_grad]",
        "self._parameters",
    ),
    Mutant("the first row taken for another's", EMBEDDING, "_own", "local >= 0", "local > 0"),
    Mutant("an embedding's gradient not zeroed first", EMBEDDING, "_add_rows", "if not add:", "if False:"),
    Mutant("targets of another z", HEAD, "HeadLoss._rows", "[mesh.z.index]", "[0]"),
    Mutant("the head's gradient begun anew", HEAD, "HeadLoss.__call__", "dW if found else dW.zero_()", "dW.zero_()"),
    Mutant(
        "classes off by one",
        HEAD,
        "HeadLoss._rows",
        "shard_range(self.vocab, mesh.y.size, mesh.y.index)",
        "(self.vocab // mesh.y.size * mesh.y.index, 0)",
    ),
    Mutant("fp16 sums that overflow", HEAD, "shrinkage", "if dtype == torch.float16 else 1.0", "if False else 1.0"),
    Mutant("parts of a row not on one scale", LOSS, "Loss.merge", "(exps * (tops - top).exp())", "exps"),
    Mutant("moments merged with a wrong weight", NORM, "merge", "* (n // len(shards))", "* n"),
    Mutant("a sign of the norm", NORM, "gradient", "value=-1", "value=1"),
    Mutant(
        "a norm's sums of one shard taken for all",
        NORM,
        "Normalise.__call__",
        "all_reduce(sums, self.z)",
        "all_reduce(sums * self.z.size, self.z)",
    ),
    # attention
    Mutant(
        "key heads of another rank",
        ATTEND,
        "Attend._pick",
        "(y.index * z.size + z.index) * mine",
        "(y.index + z.index * y.size) * mine",
    ),
    Mutant(
        "a mask of another key", ATTEND, "Attend._pieces", "(context.index + 1) * piece", "(context.index + 2) * piece"
    ),
    Mutant("pieces of a sequence out of order", ATTEND, "in_order", "*pieces[::-2]", "*pieces[1::2]"),
    Mutant("padding attended to", ATTENTION, "attend_both_ways", "k[:tokens], v[:tokens]", "k, v"),
    # where tensors lie
    Mutant(
        "rotated by local positions",
        CUBOID,
        "CuboidParallel.place",
        "rotation(self.config, positions)",
        "rotation(self.config, positions - positions[0])",
    ),
    Mutant(
        "sequences dealt from one end",
        CUBOID,
        "dealt",
        "pieces[index], pieces[-1 - index]",
        "pieces[2 * index], pieces[2 * index + 1]",
    ),
    Mutant(
        "the way out of attention plays y for z",
        CUBOID,
        "CuboidParallel.out_of",
        "Product([linear], y, z",
        "Product([linear], *((z, y) if heads else (y, z))",
    ),
    # turns
    Mutant("a forward taken for the whole step", SCHEDULE, "Clock._pace", "1.5 *", "1.0 *"),
    Mutant("the pace of what was sent last", SCHEDULE, "Clock.launch", "sent if self.forward else 0.0", "sent"),
    Mutant("a clock that runs back", SCHEDULE, "Clock.advance", "max(moment, self.now)", "moment"),
    Mutant("messages all at once", SCHEDULE, "Clock.launch", "return self._launched", "return self._landed + sent"),
    Mutant("no waits for what was launched before", SCHEDULE, "interleave", "pause.message or clock", "clock"),
    Mutant("sub-batches run away from each other", SCHEDULE, "interleave", "last[at[0]] + MOST_AHEAD", "1000"),
    # messages
    Mutant("another's part of a sum for one's own", BASE, "Transport._exchange", "(first, row)", "(second, row)"),
    Mutant("sums of low precision", BASE, "Transport.reduce_scatter", "torch.float32", "torch.bfloat16"),
]
