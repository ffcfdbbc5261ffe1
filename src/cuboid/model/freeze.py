"""Frozen parameters of a model, by a pattern of their names.

A frozen weight has no gradient; nothing is computed, sent or kept for one. Backward ends with the lowest stage that has
trained parameters; stages below it save nothing.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cached_property

from cuboid.model.config import ModelConfig


def matching(pattern: str, names: Sequence[str]) -> set[str]:
    """Returns the names in which a regular expression is found; an empty one is found in none. Raises ValueError if it,
    or one of the alternatives it lists ("embed|blocks.0"), is found in no name."""
    if not pattern:
        return set()
    try:
        found = {name for name in names if re.search(pattern, name)}
    except re.error as error:
        hint = "write such as 'embed|blocks.0'"
        raise ValueError(f"freeze={pattern!r} is not a regular expression: {error}; {hint}") from None
    plain = re.fullmatch(r"[\w.^$\\*+?|]*", pattern) is not None
    for part in pattern.split("|") if plain else [pattern]:
        if not part or not any(re.search(part, name) for name in names):
            near = get_close_matches(part, _prefixes(names), 3, 0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"they are such as {', '.join(names[:3])}"
            raise ValueError(f"freeze={pattern!r}: {part!r} is in no parameter's name; {hint}")
    return found


def _prefixes(names: Iterable[str]) -> list[str]:
    """The dotted names of all modules and parameters."""
    words = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(each[:n]) for each in words for n in range(1, len(each) + 1)))


def block_names(config: ModelConfig) -> list[str]:
    """The names of one block's parameters."""
    c, found = config, list[str]()
    for module, bias in (
        ("norm1", c.norm_bias),
        *((f"attention.{each}", c.qkv_biased) for each in "qkv"),
        *((f"attention.norm_{each}", False) for each in "qk" if c.qk_norm),
        ("attention.out", bool(c.bias)),
        ("norm2", c.norm_bias),
        *((f"mlp.{each}", bool(c.bias)) for each in (["gate"] if c.gated else []) + ["up", "down"]),
    ):
        found += [f"{module}.weight", *[f"{module}.bias"] * bias]
    return found


def parameter_names(config: ModelConfig) -> list[str]:
    """The names of all parameters of a Transformer."""
    c, block = config, block_names(config)
    found = ["embed.weight", *["positions.weight"] * (not c.rotary)]
    found += [f"blocks.{i}.{name}" for i in range(c.layers) for name in block]
    return [*found, "norm.weight", *["norm.bias"] * c.norm_bias, *["head.weight"] * (not c.tied)]


class Trained:
    """The parameters of a Transformer that a pattern, or a set of names, leaves trained. Stages are the embedding, the
    blocks, the last norm and the head."""

    def __init__(self, config: ModelConfig, freeze: str | Collection[str] = "") -> None:
        self.config, self.freeze = config, freeze
        self._frozen = set(freeze)
        if isinstance(freeze, str):
            self._frozen = matching(freeze, parameter_names(config)) if freeze else set()

    def __contains__(self, name: str) -> bool:
        return name not in self._frozen

    @property
    def embed(self) -> bool:
        return "embed.weight" in self

    @property
    def head(self) -> bool:
        """Whether the head's weight is trained: the embedding, if it is tied."""
        return self.embed if self.config.tied else "head.weight" in self

    def tables(self) -> list[bool]:
        """Whether the embedding is trained and, if positions are learned, whether they are."""
        return [self.embed] + ([] if self.config.rotary else ["positions.weight" in self])

    def norm(self) -> list[bool]:
        """Whether the last norm's weight and bias are trained."""
        return [f"norm.{each}" in self for each in ["weight", "bias"][: 1 + self.config.norm_bias]]

    def block(self, i: int) -> frozenset[str]:
        """The parameters of a block that are trained."""
        if not self._frozen:
            return self._whole
        return frozenset(name for name in self._whole if f"blocks.{i}.{name}" in self)

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(block_names(self.config))

    @cached_property
    def lowest(self) -> int:
        """The first stage with trained parameters, where backward ends; the number of stages if there is none."""
        layers = self.config.layers
        stages = [any(self.tables()), *(bool(self.block(i)) for i in range(layers)), any(self.norm()), self.head]
        return stages.index(True) if True in stages else len(stages)

    @property
    def nothing(self) -> bool:
        return self.lowest == self.config.layers + 3
