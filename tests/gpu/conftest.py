"""Emulated GPUs: a script of this folder in a separate process, which loads shim.cpp before torch."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def compiled_shim(folder: Path) -> Path:
    """Once for each of its versions and torch's."""
    source, torch_at = HERE / "shim.cpp", Path(torch.__file__).parent
    library = folder / f"{blake2b(source.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it takes seconds: one worker for all
        if library.exists():
            return library
        made = folder / "unfinished.so"
        options = ["-shared", "-fPIC", "-std=c++20", f"-I{torch_at}/include", f"-L{torch_at}/lib"]
        linked = [f"-Wl,-rpath,{torch_at}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", *options, str(source), "-o", str(made), *linked], check=True)
        made.replace(library)
    return library


@pytest.fixture
def emulate(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """emulate(script, *words): what the script prints last, read as JSON."""
    if which("g++") is None:
        pytest.skip("no g++: the devices on which the GPU's paths are rehearsed must be compiled")
    assert pytestconfig.cache is not None
    shim = compiled_shim(pytestconfig.cache.mkdir("gpu"))

    def run(script: str, *words: str) -> Any:
        # one thread: ranks share the cores
        environment = os.environ | {"CUBOID_SHIM": str(shim), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / script), *words]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, f"{script} {' '.join(words)}\n{found.stdout[-3000:]}{found.stderr[-6000:]}"
        return json.loads(found.stdout.splitlines()[-1])

    return run
