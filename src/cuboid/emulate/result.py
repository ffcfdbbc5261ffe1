"""Results of operations without computing them: tensors of the right shapes, with undefined values."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cuboid.plan.measure import tensors

aten = torch.ops.aten

#: Operations that touch no memory, with new results.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
#: Operations that touch no memory, although their schemas do not say that they are views.
VIEWS = {aten.detach.default, aten._unsafe_view.default, aten.lift_fresh.default, aten.is_same_size.default}


def signature(value: Any) -> Hashable:
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return tuple([signature(each) for each in value])
    if kind is dict:
        return tuple([(name, signature(each)) for name, each in value.items()])
    return kind, value if isinstance(value, Hashable) else repr(value)


def has_floats(values: Any) -> bool:
    return any(each.is_floating_point() for each in tensors(values))


def maker(func: Any, args: Any, kwargs: Any) -> tuple[Callable[[Any, Any], Any] | None, Any]:
    """Returns a function that makes an operation's result without computing it, and an example of new results."""
    if func._schema.is_mutable:
        return _written(func._schema), None

    def on_meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        template = func(*_mapped(on_meta, args), **_mapped(on_meta, kwargs))
    except RuntimeError:  # NotImplementedError among them: shapes alone do not tell
        return None, None

    def fresh(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x

    if isinstance(template, Tensor):
        shape, stride, dtype = template.shape, template.stride(), template.dtype
        return lambda args, kwargs: torch.empty_strided(shape, stride, dtype=dtype), template
    return lambda args, kwargs: _mapped(fresh, template), template


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to every leaf."""
    if type(value) in (list, tuple):
        return type(value)([_mapped(change, each) for each in value])
    if type(value) is dict:
        return {name: _mapped(change, each) for name, each in value.items()}
    return change(value)


def _written(schema: Any) -> Callable[[Any, Any], Any]:
    """The arguments that an in-place operation returns."""
    names = [argument.name for argument in schema.arguments]
    aliases = {frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info is not None}
    wanted = [aliases[frozenset(r.alias_info.before_set)] for r in schema.returns if r.alias_info is not None]

    def take(args: Any, kwargs: Any) -> Any:
        found = [kwargs[name] if name in kwargs else args[names.index(name)] for name in wanted]
        return None if not found else found[0] if len(found) == 1 else tuple(found)

    return take
