"""How much memory a rank needs to load a model of 1 GB on eight ranks (Linux).

    python examples/load_memory.py

Makes a temporary folder of 1.07 GB and loads it on cuboid (2,2,2). Prints for each rank the size of its shards, the
largest slice of one tensor, and the rise of its resident memory at its peak.
"""

import tempfile
from pathlib import Path

import torch

from cuboid import Cuboid, Mesh, ModelConfig, Serial, Transformer, World, from_pretrained, launch, save_pretrained

MODEL = ModelConfig("llama", layers=2, hidden=2048, heads=16, vocab=40000, ffn=5632, context=2048)
SMALL = ModelConfig("llama", layers=1, hidden=64, heads=4, vocab=40)
CUBE = Cuboid(2, 2, 2)


def make(world: World, config: ModelConfig, folder: Path) -> None:
    model = Transformer(Serial(config), seed=None)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    save_pretrained(model, folder)


def status(field: str) -> int:
    """Bytes in a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def load(world: World, small: Path, folder: Path) -> tuple[int, int, int]:
    mesh = Mesh(CUBE, world.rank)
    from_pretrained(small, mesh)  # modules that are imported at first use do not count
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    model = from_pretrained(folder, mesh)
    rise = status("VmHWM") - before
    sizes = [parameter.to_local().nbytes for parameter in model.parameters()]
    return sum(sizes), max(sizes), rise


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        small, big = Path(folder) / "small", Path(folder) / "big"
        launch(make, 1, [SMALL, small])
        launch(make, 1, [MODEL, big])
        print(f"{sum(file.stat().st_size for file in big.iterdir()) / 1e6:,.0f} MB in {big.name}/")
        for rank, found in enumerate(launch(load, CUBE.ranks, [small, big])):
            shards, largest, rise = (size / 1e6 for size in found)
            print(f"rank {rank}: shards {shards:.1f} MB, largest slice {largest:.1f} MB, memory rose {rise:.1f} MB")
