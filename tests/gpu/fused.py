"""The functions that are compiled on a GPU, and how many kernels each becomes at most."""

#: By name; "backward" of those that autograd differentiates.
KERNELS = {
    "statistics": 1,
    "merged_scaled": 1,
    "sums_alone": 3,
    "fused_gradient": 1,
    "rotate": 2,
    "rotate backward": 1,
    "swiglu": 1,
    "swiglu backward": 1,
    "dropout": 1,
    "parts": 2,
    "merge": 1,
    "gradient": 3,
    "add_up": 1,
    "scaled": 1,
}
