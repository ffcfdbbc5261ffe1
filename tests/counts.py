"""How often tests repeat what is drawn at random: a few times, or with CUBOID_LARGE=1 as docs/reliability.md says."""

import os

LARGE = bool(os.environ.get("CUBOID_LARGE"))
#: What is repeated: by default, and in large counts.
COUNTS = {
    "fuzzed inputs of each kind": (40, 4000),
    "corrupted checkpoints": (60, 1000),
    "steps with late ranks": (6, 1000),
    "kills of a run": (3, 50),
    "steps of a soaked run": (500, 10_000),
    "random cuboids and models": (10, 500),
    "random launch orders": (20, 3000),
}


def count(what: str) -> int:
    return COUNTS[what][LARGE]


def summary(markers: str) -> str:
    """What a run with this `-m` has covered."""
    known = {"": "all tests, slow ones included", "not slow": "fast tests alone; make test-all runs the slow ones too"}
    which = known.get(markers, f"tests marked {markers}")
    times = ", ".join(f"{count(what):,} {what}" for what in COUNTS)
    return f"{which}\n{times}" + ("" if LARGE else "; more with CUBOID_LARGE=1")
