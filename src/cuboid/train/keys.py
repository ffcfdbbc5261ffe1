"""Typed keys: a tree of frozen dataclasses, read from TOML and written back, each key with meaning and rule.

A key's name is dotted, as a person types it: `optimizer.lr`. The tree is known here only through its fields.
"""

import json
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

#: The largest integer that 64 bits hold.
LARGEST = 2**63 - 1


class RenamedKey(FutureWarning):
    """A key or a flag was given by its earlier name."""


@dataclass(frozen=True)
class Rule:
    """The meaning of a key, and which values of its type are valid."""

    help: str
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    path: bool = False  # names files: made absolute, so that a run resumes from any working directory
    also: tuple[str, ...] = ()  # its names in other projects
    was: str = ""  # its dotted name in earlier versions
    spellings: Mapping[str, str] = field(default_factory=dict)  # other spellings of values, or of items of a list
    between: str = ","  # separates items of a list typed without brackets: a regular expression


def key(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    path: bool = False,
    also: tuple[str, ...] = (),
    was: str = "",
    spellings: Mapping[str, str] | None = None,
    between: str = ",",
) -> Any:
    rule = Rule(help, at_least, above, below, at_most, path, also, was, spellings or {}, between)
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class Key:
    name: str
    kind: Any  # the annotation: int, float, str, a tuple of int or str, or bool and Literal, alone or joined by |
    default: Any
    rule: Rule

    @property
    def choices(self) -> tuple[Any, ...]:
        """All valid values, if the key has a list of them."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        found: list[Any] = []
        for kind in kinds:
            found += [True, False] if kind is bool else get_args(kind) if get_origin(kind) is Literal else []
        return tuple(found)

    @property
    def rule_text(self) -> str:
        if self.choices:
            return "one of " + ", ".join(toml(choice) for choice in self.choices)
        names = {int: "a whole number", float: "a finite number", str: "a text", tuple[int, ...]: "a list of numbers"}
        text = names.get(self.kind, "a list of texts")
        rule = self.rule
        limits = [
            ("at least", rule.at_least),
            ("above", rule.above),
            ("below", rule.below),
            ("at most", rule.at_most),
        ]
        given = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
        return ", ".join([text, " and ".join(given)]) if given else text

    def fit(self, value: Any) -> Any:
        """Returns `value` as the key's type; raises ValueError if it is not valid."""
        value = self._respelt(value)
        if self.choices:
            ok = any(type(value) is type(choice) and value == choice for choice in self.choices)
        elif self.kind in (int, float):
            ok = isinstance(value, self.kind | int) and not isinstance(value, bool) and self._within(value)
            value = self.kind(value) if ok else value
        elif self.kind is str:
            ok = isinstance(value, str)
            value = _absolute(value) if ok and self.rule.path else value
        else:
            ok = isinstance(value, list | tuple) and all(type(item) is get_args(self.kind)[0] for item in value)
            value = tuple(_absolute(item) if self.rule.path else item for item in value) if ok else value
        if not ok:
            raise ValueError(f"{self.name} = {toml(value)} must be {self.rule_text}; {self._remedy(value)}")
        return value

    def parse(self, text: str) -> Any:
        """Reads what was typed after `key=`: a TOML value, or bare text if the key takes text."""
        try:
            table = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            table = {}
        bare = len(table) != 1
        value = text if bare else table["value"]
        if self.kind is str and not isinstance(value, str):
            return text
        if get_origin(self.kind) is tuple and not isinstance(value, list):
            quoted = isinstance(value, str) and not bare
            parts = [value] if quoted else [part.strip() for part in re.split(self.rule.between, text) if part.strip()]
            numbers = get_args(self.kind)[0] is int and all(part.isdecimal() for part in parts)
            return [int(part) for part in parts] if numbers else parts
        return value

    def _respelt(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._respelt(item) for item in value)
        return self.rule.spellings.get(value, value) if isinstance(value, str) else value

    def _within(self, value: float) -> bool:
        rule = self.rule
        return (
            abs(value) <= LARGEST
            and (rule.at_least is None or value >= rule.at_least)
            and (rule.above is None or value > rule.above)
            and (rule.below is None or value < rule.below)
            and (rule.at_most is None or value <= rule.at_most)
        )

    def _remedy(self, value: Any) -> str:
        if isinstance(value, int) and abs(value) > LARGEST:
            return "use one that fits into 64 bits"
        texts = [choice for choice in self.choices if isinstance(choice, str)]
        near = get_close_matches(value, texts, 1) if isinstance(value, str) else []
        return f"did you mean {toml(near[0])}?" if near else f"the default is {toml(self.default)}"


def sections(tree: type, at: str = "") -> Iterator[tuple[str, type]]:
    """Every section of the tree with its dotted name; the root's is empty."""
    yield at, tree
    hints = get_type_hints(tree)
    for each in fields(tree):
        if is_dataclass(hints[each.name]):
            yield from sections(hints[each.name], f"{at}.{each.name}".strip("."))


def keys(tree: type) -> dict[str, Key]:
    """Every key of the tree by its dotted name."""
    found = {}
    for at, section in sections(tree):
        hints = get_type_hints(section)
        for each in fields(section):
            if not is_dataclass(hints[each.name]):
                name = f"{at}.{each.name}".strip(".")
                found[name] = Key(name, hints[each.name], each.default, each.metadata["rule"])
    return found


def flatten(tree: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a TOML table as dotted keys with checked values. Warns once of all keys given by earlier names."""
    renamed: dict[str, str] = {}
    found = _flatten(tree, table, "", renamed)
    if renamed:
        _warn_of(renamed)
    return found


def _flatten(tree: type, table: Mapping[str, Any], at: str, renamed: dict[str, str]) -> dict[str, Any]:
    known, tables, now = keys(tree), dict(sections(tree)), earlier_names(tree)
    found: dict[str, Any] = {}
    for word, value in table.items():
        written = f"{at}.{word}".strip(".")
        name = now.get(written, written)
        if name in found:
            raise ValueError(f"{name} is given twice, once by its earlier name; remove one of them")
        if name != written:
            renamed[written] = name
        if name in known:
            found[name] = known[name].fit(value)
        elif name not in tables:
            raise unknown(tree, name, value)
        elif isinstance(value, Mapping):
            found |= _flatten(tree, value, name, renamed)
        else:
            raise ValueError(_is_section(tree, name, toml(value)))
    return found


def assignment(tree: type, text: str) -> tuple[str, Any]:
    """Reads `key=value` as typed on the command line."""
    typed_name, equals, typed = (part.strip() for part in text.partition("="))
    name = earlier_names(tree).get(typed_name, typed_name)
    if name != typed_name:
        _warn_of({typed_name: name})
    known = keys(tree)
    if not equals:
        raise ValueError(f"--set {text} has no value; write key=value, such as --set {next(iter(known))}=1")
    if name in dict(sections(tree)):
        raise ValueError(_is_section(tree, name, typed))
    if name not in known:
        raise unknown(tree, name, typed)
    return name, known[name].fit(known[name].parse(typed))


def earlier_names(tree: type) -> dict[str, str]:
    """The current names of keys, by their earlier names."""
    return {each.rule.was: name for name, each in keys(tree).items() if each.rule.was}


def _warn_of(renamed: Mapping[str, str]) -> None:
    pairs = ", ".join(f"{was} is now called {now}" for was, now in renamed.items())
    warnings.warn(f"{pairs}; earlier names are still read", RenamedKey, stacklevel=3)


def build(tree: type, values: Mapping[str, Any], at: str = "") -> Any:
    """Builds the tree from dotted keys; keys that `values` lacks have their defaults."""
    hints, arguments = get_type_hints(tree), {}
    for each in fields(tree):
        name = f"{at}.{each.name}".strip(".")
        if is_dataclass(kind := hints[each.name]):
            assert isinstance(kind, type)
            arguments[each.name] = build(kind, values, name)
        elif name in values:
            arguments[each.name] = values[name]
    return tree(**arguments)


def value_of(tree: object, name: str) -> Any:
    for word in name.split("."):
        tree = getattr(tree, word)
    return tree


def write(tree: object) -> str:
    """The tree as TOML that reads back as the same tree, each key with its meaning as a comment."""
    known, blocks = keys(type(tree)), []
    for at, section in sections(type(tree)):
        own = [k for name, k in known.items() if name.rpartition(".")[0] == at]
        lines = [f"{k.name.rpartition('.')[2]} = {toml(value_of(tree, k.name))}" for k in own]
        width = min(max(map(len, lines)), 40)
        head = [f"[{at}]  # {(section.__doc__ or '').splitlines()[0]}"] if at else []
        blocks.append(
            "\n".join(head + [f"{line:<{width}}  # {meaning(k)}" for line, k in zip(lines, own, strict=True)])
        )
    return "\n\n".join(blocks) + "\n"


def meaning(k: Key) -> str:
    """The help of a key, with its valid values if it has a list of them."""
    texts = [choice for choice in k.choices if isinstance(choice, str)]
    return k.rule.help + (f" ({', '.join(toml(choice) for choice in k.choices)})" if texts else "")


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no raw DEL
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    return repr(value)


def unknown(tree: type, name: str, value: Any) -> ValueError:
    """The error for an unknown key, with the most similar known one."""
    word = name.rpartition(".")[2]
    names = [*keys(tree), *(at for at, _ in sections(tree) if at)]
    words = {each.rpartition(".")[2]: each for each in reversed(names)}
    near = [each for each, known in keys(tree).items() if word in known.rule.also]
    near = near or [each for each in names if each.rpartition(".")[2] == word] or get_close_matches(name, names, 1, 0.7)
    near = near or [words[each] for each in get_close_matches(word, list(words), 1)]
    hint = f"did you mean {' or '.join(near)}?" if near else "no key is similar"
    what = "section" if isinstance(value, Mapping) else "key"
    arrived = name if what == "section" else f"{name} = {value if isinstance(value, str) else toml(value)}"
    return ValueError(f"{arrived}: there is no such {what}; {hint} (cuboid config --show lists all)")


def _is_section(tree: type, name: str, value: str) -> str:
    inside = [each for each in keys(tree) if each.startswith(f"{name}.")]
    return f"{name} = {value}: {name} is a section and takes no value; set its keys, such as {inside[0]}"


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().absolute()) if text else text
