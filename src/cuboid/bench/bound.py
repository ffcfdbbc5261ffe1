"""The least that any algorithm can send for a matrix product on P processors.

Al Daas, Ballard, Grigori, Kumar and Rouse, "Tight Memory-Independent Parallel Matrix Multiplication Communication
Lower Bounds" (SPAA 2022). For sizes m ≥ n ≥ k, each matrix held once and evenly to begin with, a processor receives at
least

    D − (mn + mk + nk)/P  words,   D = (mn + mk)/P + nk             P ≤ m/n          one dimension split
                                       2 √(m n k²/P) + mn/P         P ≤ mn/k²        two
                                       3 (mnk/P)^⅔                  beyond           three

A step has three such products for each linear layer: forward, and the gradients of its two operands. Each is bounded by
itself: a step that keeps a gathered operand for the next product, or gathers one for several, can send less.
"""

from math import sqrt

from cuboid.bench.problem import Problem


def product_words(sizes: tuple[int, int, int], ranks: int) -> float:
    """The bound for one product.

    >>> product_words((8, 8, 8), 1)
    0.0
    >>> round(product_words((4096, 4096, 4096), 64))  # a cube of 4 × 4 × 4 gathers 3/4 of three blocks of 1024²
    2359296
    """
    m, n, k = sorted(sizes, reverse=True)
    if ranks <= m / n:
        least = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        least = 2 * sqrt(m * n / ranks) * k + m * n / ranks
    else:
        least = 3 * (m * n * k / ranks) ** (2 / 3)
    return least - (m * n + m * k + n * k) / ranks


def regime(sizes: tuple[int, int, int], ranks: int) -> int:
    """The number of dimensions that the best algorithm splits."""
    m, n, k = sorted(sizes, reverse=True)
    return 1 if ranks <= m / n else 2 if ranks <= m * n / k**2 else 3


def step_bytes(problem: Problem, ranks: int, size: int = 4) -> float:
    """The bound for all products of a training step, attention aside."""
    c, tokens = problem.config, problem.tokens
    into = [c.q_dim, c.kv_dim, c.kv_dim, *[c.ffn] * (2 if c.gated else 1)]
    shapes = [(c.hidden, n) for n in into] + [(c.q_dim, c.hidden), (c.ffn, c.hidden)]
    layer = sum(product_words((tokens, k, n), ranks) for k, n in shapes)
    head = product_words((tokens, c.hidden, c.vocab), ranks)
    return 3 * size * (c.layers * layer + head)
