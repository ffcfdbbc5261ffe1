"""Which cases a script runs."""

from collections.abc import Iterable, Sequence


def chosen(words: Sequence[str], cases: Iterable[str]) -> Sequence[str]:
    """The names on the command line or, after `but`, all others.

    >>> chosen(["a"], "abc"), chosen(["but", "a"], "abc")
    (['a'], ['b', 'c'])
    """
    return [name for name in cases if name not in words] if words[0] == "but" else words
