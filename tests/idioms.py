"""What PyTorch users do in a training loop, written as they write it: each is run on a plain `nn.Module` and on ours.

An idiom takes a `Case` and gives what is to be compared: tensors, sharded or not, numbers, names. The names of idioms
are the first column of the table in docs/training-loop.md.
"""

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cuboid.mesh.layout import whole_of
from cuboid.mesh.place import Place

BATCH, SEQ = 8, 5


@dataclass
class Case:
    """A model, its like with other values, and how one calls either on a batch."""

    model: nn.Module
    other: nn.Module
    call: Callable[[nn.Module, Tensor, Tensor], Tensor]  # the loss of tokens and targets [batch, seq]
    vocab: int
    folder: Path  # for files, empty
    place: Place | None = None  # of ours

    def loss(self, i: int = 0, model: Any = None) -> Tensor:
        """Of batch `i`."""
        text = torch.randint(self.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(i))
        return self.call(self.model if model is None else model, text[:, :-1], text[:, 1:])

    def batch(self) -> tuple[Tensor, Tensor]:
        """Of this rank."""
        assert self.place is not None
        part = self.place.take(torch.zeros(BATCH, SEQ, dtype=torch.long), 0)
        return part, part

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def named(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        return dict((model or self.model).named_parameters())

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in self.model.named_parameters()}

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 2, model: nn.Module | None = None) -> None:
        for i in range(steps):
            optimizer.zero_grad()
            self.loss(i, model).backward()
            optimizer.step()


@dataclass(frozen=True)
class Idiom:
    name: str
    do: Callable[[Case], Any]
    raises: str = ""  # on ours, this
    sharded: str = ""  # on ours, on several ranks

    def outcome(self) -> str:
        return "raises" if self.raises else "same on one device, raises on several" if self.sharded else "same"


@dataclass
class Idioms:
    all: list[Idiom] = field(default_factory=list)

    def __call__(self, name: str, raises: str = "", sharded: str = "") -> Callable[[Callable[[Case], Any]], Any]:
        def add(do: Callable[[Case], Any]) -> Callable[[Case], Any]:
            self.all.append(Idiom(name, do, raises, sharded))
            return do

        return add


idiom = Idioms()

# Gradients


@idiom("`loss.backward()`, then `p.grad`")
def backward(c: Case) -> Any:
    loss = c.loss()
    loss.backward()
    return loss.item(), c.gradients()


@idiom("`torch.autograd.grad(loss, list(model.parameters()))`")
def autograd_grad(c: Case) -> Any:
    return dict(zip(c.named(), torch.autograd.grad(c.loss(), c.parameters), strict=True))


@idiom("accumulation: `(loss / n).backward()` n times")
def accumulation(c: Case) -> Any:
    for i in range(2):
        (c.loss(i) / 2).backward()
    return c.gradients()


@idiom("`clip_grad_norm_(model.parameters(), 0.1).item()`")
def clip(c: Case) -> Any:
    c.loss().backward()
    return nn.utils.clip_grad_norm_(c.model.parameters(), 0.1).item(), c.gradients()


@idiom("`clip_grad_norm_` of some parameters, of other norms")
def clip_some(c: Case) -> Any:
    c.loss().backward()
    matrices = [p for p in c.parameters if p.dim() == 2]
    norms = [float(nn.utils.clip_grad_norm_(matrices, 0.1, norm_type=kind)) for kind in (1.0, torch.inf)]
    return norms, c.gradients()


@idiom("`clip_grad_value_`")
def clip_value(c: Case) -> Any:
    c.loss().backward()
    nn.utils.clip_grad_value_(c.parameters, 1e-3)
    return c.gradients()


@idiom("`get_total_norm`, then `clip_grads_with_norm_`")
def total_norm(c: Case) -> Any:
    c.loss().backward()
    norm = nn.utils.get_total_norm([p.grad for p in c.parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(c.parameters, 0.1, norm)
    return norm.item(), c.gradients()


@idiom("`p.grad.norm().item()` for each parameter")
def norms(c: Case) -> Any:
    c.loss().backward()
    return {name: p.grad.norm().item() for name, p in c.model.named_parameters() if p.grad is not None}


@idiom("`p.grad.mul_(0.5)`, `p.grad /= 2`")
def scaled(c: Case) -> Any:
    c.loss().backward()
    for p in c.parameters:
        assert p.grad is not None
        p.grad.mul_(0.5)
        p.grad /= 2
    return c.gradients()


@idiom("`zero_grad(set_to_none=False)`")
def zeroed(c: Case) -> Any:
    c.loss().backward()
    c.model.zero_grad(set_to_none=False)
    before = [float(p.grad.abs().sum()) for p in c.parameters if p.grad is not None]
    c.loss(1).backward()
    return before, c.gradients()


@idiom("`p.register_hook`")
def hooked(c: Case) -> Any:
    for p in c.parameters:
        p.register_hook(lambda gradient: 2 * gradient)
    c.loss().backward()
    return c.gradients()


@idiom("`p.register_post_accumulate_grad_hook`: the step within backward")
def step_within_backward(c: Case) -> Any:
    rules = {p: torch.optim.SGD([p], lr=0.1) for p in c.parameters}

    def update(p: Tensor) -> None:
        rules[p].step()  # type: ignore[index]
        rules[p].zero_grad()  # type: ignore[index]

    for p in c.parameters:
        p.register_post_accumulate_grad_hook(update)
    for i in range(2):
        c.loss(i).backward()
    return c.named()


# Optimizers


def trained(c: Case, make: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> Any:
    c.train(make(c.model.parameters()))
    return c.named()


@idiom("`torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)`")
def sgd(c: Case) -> Any:
    return trained(c, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))


@idiom("`torch.optim.AdamW(model.parameters(), foreach=True)`")
def adamw_foreach(c: Case) -> Any:
    return trained(c, lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, foreach=True))


@idiom("`torch.optim.AdamW(model.parameters(), fused=True)`")
def adamw_fused(c: Case) -> Any:
    return trained(c, lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, fused=True))


@idiom("`torch.optim.Adam(…, amsgrad=True)`, RMSprop, Adagrad")
def others(c: Case) -> Any:
    trained(c, lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-6, amsgrad=True))
    trained(c, lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-6))
    return trained(c, lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-6))


@idiom("`torch.optim.LBFGS`, which flattens all parameters", sharded="flatten")
def lbfgs(c: Case) -> Any:
    rule = torch.optim.LBFGS(c.parameters, max_iter=2)

    def closure() -> Tensor:
        rule.zero_grad()
        loss = c.loss()
        loss.backward()
        return loss

    rule.step(closure)  # type: ignore[arg-type]
    return c.named()


@idiom("parameter groups by name")
def groups(c: Case) -> Any:
    decayed = [p for name, p in c.model.named_parameters() if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in c.model.named_parameters() if not name.endswith("weight") or "norm" in name]
    rule = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others}], lr=0.01, eps=1e-6)
    c.train(rule)
    return [len(decayed), len(others)], c.named()


@idiom("`optimizer.add_param_group`")
def added(c: Case) -> Any:
    first, *rest = c.parameters
    rule = torch.optim.SGD([first], lr=0.1)
    rule.add_param_group({"params": rest, "lr": 0.01})
    c.train(rule)
    return c.named()


@idiom("`lr_scheduler.SequentialLR`: a warm-up, then a cosine")
def scheduled(c: Case) -> Any:
    rule = torch.optim.SGD(c.parameters, lr=0.1)
    parts = [lr_scheduler.LinearLR(rule, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(rule, 4)]
    schedule, rates = lr_scheduler.SequentialLR(rule, parts, [2]), []
    for _ in range(4):
        c.train(rule, 1)
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates, c.named()


@idiom("a step by hand: `with torch.no_grad(): p.add_(p.grad, alpha=-lr)`")
def by_hand(c: Case) -> Any:
    for i in range(2):
        c.loss(i).backward()
        with torch.no_grad():
            for p in c.parameters:
                p.add_(p.grad, alpha=-0.1)
                p.grad = None
    return c.named()


@idiom("`torch.amp.GradScaler`")
def scaler(c: Case) -> Any:
    scale, rule = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(c.parameters, lr=0.1)
    scale.scale(c.loss()).backward()
    scale.unscale_(rule)
    norm = nn.utils.clip_grad_norm_(c.parameters, 0.1).item()
    scale.step(rule)
    scale.update()
    return norm, scale.get_scale(), c.named()


# Freezing, modes


@idiom("`p.requires_grad_(False)` by name")
def frozen(c: Case) -> Any:
    for name, p in c.model.named_parameters():
        p.requires_grad_("blocks.0" not in name)
    c.train(torch.optim.SGD([p for p in c.parameters if p.requires_grad], lr=0.1))
    return c.gradients(), c.named()


@idiom("`model.blocks[0].requires_grad_` toggled between steps")
def toggled(c: Case) -> Any:
    rule = torch.optim.SGD(c.parameters, lr=0.1)
    for i, trains in enumerate((True, False, True)):
        c.model.get_submodule("blocks.0").requires_grad_(trains)
        rule.zero_grad()
        c.loss(i).backward()
        rule.step()
    return c.gradients(), c.named()


@idiom("`with torch.no_grad()`: an evaluation")
def evaluated(c: Case) -> Any:
    c.model.eval()
    with torch.no_grad():
        loss = c.loss()
    c.model.train()
    return loss.requires_grad, loss.item(), c.model.training


@idiom("`with torch.inference_mode()`")
def inferred(c: Case) -> Any:
    with torch.inference_mode():
        return c.loss().item()


# Copies and averages


@idiom("`copy.deepcopy(model)`")
def copied(c: Case) -> Any:
    twin = copy.deepcopy(c.model)
    c.train(torch.optim.SGD(c.parameters, lr=0.1), 1)
    c.train(torch.optim.SGD(twin.parameters(), lr=0.2), 1, twin)
    return c.named(), c.named(twin), c.loss(1, twin).item()


@idiom("`AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))`")
def averaged(c: Case) -> Any:
    ema, rule = AveragedModel(c.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), torch.optim.SGD(c.parameters, lr=0.1)
    for i in range(3):
        rule.zero_grad()
        c.loss(i).backward()
        rule.step()
        ema.update_parameters(c.model)
    return c.loss(0, ema).item(), c.named(ema.module)


@idiom("EMA by hand: `shadow[name].lerp_(p, 0.1)`, evaluated by `p.data.copy_(shadow[name])`")
def ema_by_hand(c: Case) -> Any:
    shadow = {name: p.detach().clone() for name, p in c.model.named_parameters()}
    rule = torch.optim.SGD(c.parameters, lr=0.1)
    for i in range(2):
        c.train(rule, i + 1)
        for name, p in c.model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)
    kept = {name: p.detach().clone() for name, p in c.model.named_parameters()}
    for name, p in c.model.named_parameters():
        p.data.copy_(shadow[name])
    with torch.no_grad():
        averaged = c.loss().item()
    for name, p in c.model.named_parameters():
        p.data.copy_(kept[name])
    return averaged, c.loss().item(), shadow


@idiom("`p.data = shadow[name]`", sharded="which a DTensor ignores; copy values into it")
def data_set(c: Case) -> Any:
    for p in c.parameters:
        p.data = 0.5 * p.data
    return c.loss().item()


# State dicts


@idiom("`model.load_state_dict(other.state_dict())`")
def loaded(c: Case) -> Any:
    said = c.model.load_state_dict(c.other.state_dict())
    return str(said), sorted(c.model.state_dict()), c.loss().item(), c.named()


@idiom("`model.load_state_dict` of unsharded tensors")
def loaded_whole(c: Case) -> Any:
    c.model.load_state_dict({name: 0.5 * whole_of(p) for name, p in c.other.state_dict().items()})
    return c.loss().item(), c.named()


@idiom("`load_state_dict(…, strict=False)`: missing and unexpected keys")
def not_strict(c: Case) -> Any:
    state = {name: p for name, p in c.other.state_dict().items() if name.startswith("blocks.0")}
    missing, unexpected = c.model.load_state_dict(state | {"else": torch.ones(1)}, strict=False)
    return sorted(missing), unexpected, c.named()


@idiom("`load_state_dict` of other shapes or names raises")
def strict(c: Case) -> Any:
    said = []
    state = c.other.state_dict()
    for wrong in ({"norm.weight": torch.ones(3)}, {"else": torch.ones(1)}):
        try:
            c.model.load_state_dict({**state, **wrong})
        except RuntimeError as error:
            said.append(str(error).split("\n", 1)[1])
    return said


@idiom("`load_state_dict(…, assign=True)`")
def assigned(c: Case) -> Any:
    rule = torch.optim.SGD(c.parameters, lr=0.1)
    c.model.load_state_dict(c.other.state_dict(), assign=True)
    rule.param_groups[0]["params"] = c.parameters  # which a plain module has replaced
    c.train(rule, 1)
    return c.named()


@idiom("`optimizer.state_dict()`, `optimizer.load_state_dict`")
def optimizer_state(c: Case) -> Any:
    first = torch.optim.AdamW(c.parameters, lr=0.01, eps=1e-6)
    c.train(first)
    second = torch.optim.AdamW(c.parameters, lr=0.5, eps=1e-6)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    c.train(second)
    return second.param_groups[0]["lr"], c.named()


@idiom("`get_state_dict`, `set_state_dict` of model and optimizer")
def get_and_set(c: Case) -> Any:
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-6) for m in (c.model, c.other))
    c.train(first)
    model, optimizer = get_state_dict(c.model, first)
    set_state_dict(c.other, second, model_state_dict=model, optim_state_dict=optimizer)
    c.train(second, 1, c.other)
    return sorted(model), c.named(c.other)


@idiom("`get_model_state_dict(…, full_state_dict=True)`, `set_model_state_dict`")
def full_state(c: Case) -> Any:
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(c.other, options=options)
    set_model_state_dict(c.model, dict(whole), options=options)  # torch shards what is in the dict it is given
    return {name: type(p).__name__ for name, p in whole.items()}, whole, c.loss().item()


@idiom("`dcp.save`, `dcp.load` of model and optimizer")
def saved(c: Case) -> Any:
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-6) for m in (c.model, c.other))
    c.train(first)
    model, optimizer = get_state_dict(c.model, first)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=c.folder)
    model, optimizer = get_state_dict(c.other, second)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=c.folder)
    set_state_dict(c.other, second, model_state_dict=model, optim_state_dict=optimizer)
    c.train(second, 1, c.other)
    return c.named(c.other)


@idiom("`torch.save(model.state_dict(), file)`, `torch.load`", sharded="would write the shard of one rank alone")
def torch_save(c: Case) -> Any:
    file = io.BytesIO()
    torch.save({"model": c.other.state_dict()}, file)
    file.seek(0)
    c.model.load_state_dict(torch.load(file)["model"])
    return c.loss().item()


# The module itself


@idiom("names, shapes and `sum(p.numel() for p in model.parameters())`")
def sizes(c: Case) -> Any:
    shapes = {name: list(p.shape) for name, p in c.model.named_parameters()}
    return shapes, sum(p.numel() for p in c.parameters)


@idiom("`p.mean().item()`, `p.std().item()`, `p.abs().max().item()`")
def statistics(c: Case) -> Any:
    return {name: [p.mean().item(), p.std().item(), p.abs().max().item()] for name, p in c.named().items()}


@idiom("`model.apply(fn)` with `nn.init.ones_` and `nn.init.constant_`")
def initialised(c: Case) -> Any:
    def fill(module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            nn.init.ones_(p) if name == "weight" and p.dim() == 1 else nn.init.constant_(p, 0.1)

    c.model.apply(fill)
    return c.loss().item(), c.named()


@idiom("`model.float()`, `model.double()`, `model.to(dtype)`")
def converted(c: Case) -> Any:
    c.model.to(torch.float32)
    found = [str(p.dtype) for p in c.parameters]
    c.model.double()
    c.train(torch.optim.SGD(c.parameters, lr=0.1))
    return found, c.named()


@idiom("`model.to(device)`, the device it is on")
def moved(c: Case) -> Any:
    c.model.to("cpu")
    return c.loss().item()


@idiom("`torch.compile(model)`")
def compiled(c: Case) -> Any:
    model = torch.compile(c.model, backend="eager")
    c.train(torch.optim.SGD(c.parameters, lr=0.1), 2, model)  # type: ignore[arg-type]
    return c.named()


@idiom("`model.register_forward_hook`, `register_forward_pre_hook`")
def model_hooks(c: Case) -> Any:
    seen: list[Any] = []
    c.model.register_forward_pre_hook(lambda *_: seen.append("before"))
    c.model.register_forward_hook(lambda *_: seen.append("after"))
    c.loss().backward()
    return seen


@idiom("`model.blocks[0].register_forward_hook`", raises="a hook on Block, a module inside a model")
def part_hooks(c: Case) -> Any:
    c.model.get_submodule("blocks.0").register_forward_hook(lambda *_: None)


@idiom("`torch.autocast`", raises=r"torch.autocast does not reach .* dtype=torch.bfloat16")
def autocast(c: Case) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        c.loss()


@idiom("`torch.func.functional_call`", raises="was replaced, as functional_call")
def functional(c: Case) -> Any:
    named = {name: 0 * p.detach() for name, p in c.model.named_parameters()}
    torch.func.functional_call(c.model, named, (*c.batch(), c.place))


@idiom("`model.norm.weight = nn.Parameter(…)`, weight tying", raises="norm.weight was replaced")
def replaced(c: Case) -> Any:
    norm = c.model.get_submodule("norm")
    norm.weight = nn.Parameter(0 * norm.weight.detach())  # type: ignore[operator]
    c.loss()


@idiom("`nn.utils.parametrizations.weight_norm`", raises="up.weight was replaced")
def parametrized(c: Case) -> Any:
    nn.utils.parametrizations.weight_norm(c.model.get_submodule("blocks.0.mlp.up"))
    c.loss()


@idiom("`model(tokens, None, place)`", raises=r"call model.logits\(tokens, place\)")
def no_targets(c: Case) -> Any:
    c.model(c.batch()[0], None, c.place)


@idiom(
    "a full batch, without `place.take`", raises=r"inputs have shape \[8, 5\], but this rank's slice.* is \[\d, \d\]"
)
def not_taken(c: Case) -> Any:
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    c.model(tokens, tokens, c.place)
