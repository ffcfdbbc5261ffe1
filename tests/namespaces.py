"""Whether network namespaces can be made here, asked of the tools rather than of the code under test."""

import shutil
import subprocess

import pytest


def possible() -> bool:
    if not all(shutil.which(tool) for tool in ("ip", "tc", "nsenter", "unshare")):
        return False
    tried = subprocess.run(["unshare", "--net", "ip", "link", "set", "dev", "lo", "up"], capture_output=True)
    return tried.returncode == 0


needed = pytest.mark.skipif(not possible(), reason="network namespaces need root, iproute2 and util-linux")
