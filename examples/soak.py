"""Does a long run use more and more? Trains a tiny model with a checkpoint every 50 steps and samples every rank.

    python examples/soak.py                    10,000 steps on (1,2,2)
    python examples/soak.py --steps 1000

Exits with 1 if memory, files, threads, checkpoints or temporary files grow after the first fifth of the steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

CONFIG = """
[model]
layers = 1
hidden = 16
heads = 4

[cuboid]
x = 1
y = 2
z = 2

[data]
seq = 8
batch = 4
max_bytes = 100000

[schedule]
steps = {steps}
warmup = 0

[checkpoint]
every = 50
keep = 2

[logging]
folder = "{folder}/run"
eval_every = 0
every = 10
sample_tokens = 0
"""
MORE = 1.05  # memory may vary by this much: allocators keep pages


class Look(NamedTuple):
    """One sample: the largest values of any rank, and the number of files."""

    step: int
    kilobytes: int
    descriptors: int
    threads: int
    checkpoints: int  # files and folders
    temporary: int


def step_of(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def look(ranks: list[Path], run: Path, temporary: Path) -> Look:
    resident = [int((rank / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024 for rank in ranks]
    return Look(
        step_of(run),
        max(resident),
        max(len(list((rank / "fd").iterdir())) for rank in ranks),
        max(len(list((rank / "task").iterdir())) for rank in ranks),
        len(list((run / "checkpoints").glob("step-*"))),
        len(list(temporary.rglob("*"))),
    )


def soak(steps: int, folder: Path) -> list[Look]:
    """About ten samples."""
    file, run, temporary = folder / "soak.toml", folder / "run", folder / "tmp"
    temporary.mkdir()
    file.write_text(CONFIG.format(steps=steps, folder=folder))
    words = [sys.executable, "-m", "cuboid", "train", str(file)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    found: list[Look] = []
    while process.poll() is None:
        time.sleep(0.1)
        if not (run / "metrics.jsonl").is_file() or step_of(run) < (len(found) + 1) * steps // 10:
            continue
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        try:
            found.append(look([Path("/proc", pid) for pid in children], run, temporary))
        except FileNotFoundError:  # the run has just ended, or a checkpoint was renamed
            continue
        print("  ".join(f"{name} {value:>7}" for name, value in found[-1]._asdict().items()), flush=True)
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        found = soak(steps, Path(folder))
    settled = [each for each in found if each.step >= steps // 5]
    first, last = settled[:3], settled[-3:]  # a checkpoint may be incomplete in any one sample

    def grows(name: str) -> bool:
        allowed = MORE if name == "kilobytes" else 1.0
        return min(getattr(each, name) for each in last) > allowed * max(getattr(each, name) for each in first)

    grown = [name for name in Look._fields[1:] if grows(name)]
    print(f"{last[-1].step - first[0].step} steps: " + (f"more {', '.join(grown)}" if grown else "nothing grows"))
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
