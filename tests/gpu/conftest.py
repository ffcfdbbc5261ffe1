"""Emulated GPUs: a script of this folder in a process apart from the tests', which loads shim.cpp before torch."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from shutil import which
from tempfile import NamedTemporaryFile
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


class Shared:
    """The process of shared.py."""

    def __init__(self, shim: Path) -> None:
        # one thread: ranks share the cores
        environment = os.environ | {"CUBOID_SHIM": str(shim), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "shared.py")], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def run(self, script: str, *words: str) -> Any:
        """What the script prints last, read as JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with NamedTemporaryFile("r") as out, NamedTemporaryFile("r") as errors:
            print(json.dumps([script, words, out.name, errors.name]), file=self._process.stdin, flush=True)
            code, said = self._process.stdout.readline().strip(), out.read()
            assert code == "0", f"{script} {' '.join(words)}: {code}\n{said[-3000:]}{errors.read()[-6000:]}"
        return json.loads(said.splitlines()[-1])

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Iterator[Shared]:
    if which("g++") is None:
        pytest.skip("no g++: the devices on which the GPU's paths are rehearsed must be compiled")
    assert pytestconfig.cache is not None
    found = Shared(compiled_shim(pytestconfig.cache.mkdir("gpu")))
    yield found
    found.close()


@pytest.fixture
def emulate(shared: Shared) -> Callable[..., Any]:
    """emulate(script, *words): what the script prints last, read as JSON."""
    return shared.run
