"""Runs scripts of this folder, each in a fork of this process, which has imported torch and the package: that takes
longer than most of them. It reads a line of JSON for each, `[script, words, stdout, stderr]`, and prints its exit code.
"""

import emulated  # noqa: F401, I001  before torch

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch._subclasses.fake_tensor
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.utils.flop_counter  # noqa: F401

import cuboid.cli
import cuboid.doctor
import cuboid.train.loop
import cuboid.train.writer
import cuboid.verify  # noqa: F401


def run(script: str, words: list[str], stdout: str, stderr: str) -> int:
    for path, stream in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    gc.freeze()  # a fork does not copy what no collection touches
    here = str(Path(__file__).parent)
    for line in sys.stdin:
        script, *rest = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(run(os.path.join(here, script), *rest))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
