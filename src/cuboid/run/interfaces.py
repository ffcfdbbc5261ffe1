"""Network interfaces that the environment names and this host does not have: told before a backend fails over them."""

import os
import socket


def check_interfaces(backend: str) -> None:
    """gloo needs every interface of its list; NCCL one that begins as a name of its list, or after = is one of them."""
    name = f"{backend.upper()}_SOCKET_IFNAME"
    given = os.environ.get(name, "")
    wanted = [each.partition(":")[0] for each in given.removeprefix("=").split(",") if each]
    here = [interface for _, interface in socket.if_nameindex()]
    if backend == "gloo" or given.startswith("="):
        found = [each for each in wanted if each in here]
    else:
        found = [each for each in wanted if any(interface.startswith(each) for interface in here)]
    enough = len(found) == len(wanted) if backend == "gloo" else found or given.startswith("^")
    if wanted and not enough:
        raise ValueError(
            f"{name}={given} names an interface that {socket.gethostname()} does not have, which has "
            f"{', '.join(here)}; set it to one of these, or unset it"
        )
