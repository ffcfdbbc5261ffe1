"""Number formats by name: ours, and those of other projects."""

from collections.abc import Iterable

#: Formats of matmuls and activations; those that `cuboid verify` compares in; those that weights are exported in.
COMPUTED = ("fp32", "bf16", "fp16")
VERIFIED = ("fp64", "fp32", "bf16")
EXPORTED = ("fp64", "fp32", "bf16", "fp16")
#: Other spellings of a format's name.
SPELLINGS = {
    "float64": "fp64",
    "double": "fp64",
    "f64": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
}


def known(name: str, choices: Iterable[str]) -> str:
    """Our name of a format. Raises ValueError if it is none of `choices`."""
    choices, found = list(choices), SPELLINGS.get(name.lower().removeprefix("torch."), name.lower())
    if found not in choices:
        raise ValueError(f"--dtype {name} is not one of {', '.join(choices)}")
    return found
