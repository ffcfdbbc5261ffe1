"""Checks of the facts of all ranks. Nothing is tried here, so tests can make up the facts."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cuboid.comm.journal import listed
from cuboid.doctor.facts import Facts
from cuboid.doctor.finding import Finding, Status
from cuboid.mesh.cuboid import AXES, Cuboid, orders
from cuboid.train.preflight import CLEARLY, Need
from cuboid.train.progress import quantity

TIGHT = 0.9  # share of free memory above which there is a warning
AHEAD = 1.5  # how many times less another order must send between hosts to be suggested


def versions(facts: Sequence[Facts]) -> Finding:
    said, apart = list[str](), dict[str, dict[str, list[int]]]()
    for name in {name: None for each in facts for name in each.software}:
        by_version = defaultdict[str, list[int]](list)
        for each in facts:
            by_version[each.software.get(name, "none")].append(each.rank)
        if len(by_version) > 1:
            apart[name] = dict(by_version)
        else:
            said.append(f"{name} {next(iter(by_version))}")
    everywhere = f"{', '.join(said)} on {'all ' * (len(facts) > 1)}{_count(len(facts), 'rank')}"
    if not apart:
        return Finding("versions", "ok", everywhere, figures=facts[0].software)
    odd = "; ".join(
        f"{name} " + ", ".join(f"{version} on {listed(ranks)}" for version, ranks in found.items())
        for name, found in apart.items()
    )
    serious = bool(apart.keys() & {"cuboid", "torch", "NCCL"})
    return Finding(
        "versions", "error" if serious else "warning", f"ranks differ: {odd}", "install the same versions everywhere"
    )


def devices(facts: Sequence[Facts], precision: str) -> Finding:
    """Checks that ranks have one GPU each, of one kind, or enough cores."""
    by_kind, by_host = Counter(each.device for each in facts), hosts_of(facts)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in by_kind.items())
    if any(each.gpu for each in facts):
        idle = {host: each[0].gpus - len(each) for host, each in by_host.items() if each[0].gpus > len(each)}
        if len(by_kind) > 1:
            remedy = "all wait for the slowest; use GPUs of one kind"
            return Finding("devices", "warning", f"{kinds}: GPUs of different kinds", remedy)
        if idle:
            unused = ", ".join(f"{count} of {host}" for host, count in idle.items())
            remedy = "start more ranks to use them: a larger --cuboid, or --nproc-per-node"
            return Finding("devices", "ok", f"{kinds}; GPUs without a rank: {unused}", remedy)
        if precision == "fp32":
            remedy = "bf16, or fp16 on GPUs before Ampere, is several times as fast: --set precision.dtype=bf16"
            return Finding("devices", "warning", f"{kinds}, matmuls in fp32", remedy)
        return Finding("devices", "ok", f"{kinds}, one for each rank")
    present = {host: each[0].gpus for host, each in by_host.items() if each[0].driver or each[0].gpus}
    if present:
        if not all(present.values()):
            remedy = "install a build of PyTorch for CUDA: this one sees no GPU"
            return Finding("devices", "warning", f"{kinds}, but there are GPUs on {', '.join(present)}", remedy)
        short = [f"{len(each)} ranks and {each[0].gpus} GPUs on {host}" for host, each in by_host.items()]
        remedy = "start no more ranks on a host than it has GPUs: if one gets none, all compute on CPUs"
        return Finding("devices", "warning", f"{kinds}, with {', '.join(short)}", remedy)
    crowded = [f"{len(each)} ranks on {each[0].cores} cores of {host}" for host, each in by_host.items()]
    crowded = [text for text, each in zip(crowded, by_host.values(), strict=True) if len(each) > each[0].cores]
    if crowded:
        remedy = "fine for trying things out; to train, start no more ranks than cores"
        return Finding("devices", "warning", f"no GPU, and {'; '.join(crowded)}", remedy)
    return Finding("devices", "ok", f"{kinds}; no GPU")


def topology(facts: Sequence[Facts], cuboid: Cuboid, sent: Mapping[str, int]) -> Finding:
    """Which ranks share a host, and which axes leave it. `sent` are the bytes of each axis in a step."""
    by_host = hosts_of(facts)
    ranks = {host: [each.rank for each in those] for host, those in by_host.items()}
    where = "; ".join(f"{host}: {_span(those)}" for host, those in ranks.items())
    leaving = crossing(cuboid, [each.host for each in facts])
    inside = [axis for axis in AXES if cuboid.sizes[axis] > 1 and axis not in leaving]
    figures = {"hosts": ranks, "inside": inside, "across": leaving, "bytes": dict(sent)}
    said = f"cuboid {cuboid}; {where}"
    if len(ranks) > 1:
        said += f"; inside a host {', '.join(inside) or 'no axis'}, between hosts {', '.join(leaving)}"
    if any(those != list(range(those[0], those[0] + len(those))) for those in ranks.values()):
        remedy = "number ranks host by host, as torchrun does: the axes inside a host go by it"
        return Finding("topology", "error", f"{said}: ranks of a host are not consecutive", remedy, figures)
    if len({len(those) for those in ranks.values()}) > 1:
        remedy = "start as many ranks on each host, or messages between hosts go the long way"
        return Finding("topology", "warning", f"{said}: hosts have different numbers of ranks", remedy, figures)
    better = min(orders(cuboid), key=lambda other: between_hosts(other, facts, sent))
    now, then = between_hosts(cuboid, facts, sent), between_hosts(better, facts, sent)
    if now > AHEAD * then:
        order = ", ".join(f'"{axis}"' for axis in better.order)
        remedy = f"--set 'cuboid.order=[{order}]' sends {amount(then)} between hosts in a step"
        return Finding("topology", "warning", f"{said}, which sends {amount(now)} in a step", remedy, figures)
    return Finding("topology", "ok", said, figures=figures)


def between_hosts(cuboid: Cuboid, facts: Sequence[Facts], sent: Mapping[str, int]) -> int:
    """Bytes of a rank over the axes that leave its host."""
    return sum(sent.get(axis, 0) for axis in crossing(cuboid, [each.host for each in facts]))


def crossing(cuboid: Cuboid, hosts: Sequence[str]) -> list[str]:
    """The axes with lines that have ranks on several hosts."""
    found = []
    for axis in AXES:
        others = tuple(other for other in AXES if other != axis)
        lines = cuboid.array((*others, axis)).reshape(-1, cuboid.sizes[axis]).tolist()
        if any(len({hosts[rank] for rank in line}) > 1 for line in lines):
            found.append(axis)
    return found


class Hurtful(NamedTuple):
    """A variable that slows or breaks training: where it matters, which values do (empty: any), and why."""

    name: str
    where: str
    values: tuple[str, ...]
    why: str
    status: Status = "warning"


_ON = ("1", "true", "yes", "y", "on")
HURTFUL = (
    Hurtful("CUDA_LAUNCH_BLOCKING", "gpu", _ON, "the host waits for every kernel"),
    Hurtful("CUDA_DEVICE_MAX_CONNECTIONS", "gpu", ("1",), "kernels wait for messages that were launched before them"),
    Hurtful("TORCH_NCCL_BLOCKING_WAIT", "gpu", _ON, "the host waits for every collective"),
    Hurtful("NCCL_BLOCKING_WAIT", "gpu", _ON, "the host waits for every collective"),
    Hurtful("NCCL_P2P_DISABLE", "gpu", _ON, "GPUs of a host do not use NVLink"),
    Hurtful("NCCL_SHM_DISABLE", "gpu", _ON, "ranks of a host send through its network"),
    Hurtful("NCCL_IB_DISABLE", "gpu hosts", _ON, "hosts send over TCP, not InfiniBand or RoCE"),
    Hurtful("NCCL_NET", "gpu hosts", ("socket",), "hosts send over TCP, not InfiniBand or RoCE"),
    Hurtful("NCCL_ALGO", "gpu", (), "NCCL may not choose the fastest algorithm for a message's size"),
    Hurtful("NCCL_PROTO", "gpu", (), "NCCL may not choose the fastest protocol for a message's size"),
    Hurtful("NCCL_MAX_NCHANNELS", "gpu", ("1", "2", "4"), "few channels do not fill a link"),
    Hurtful("NCCL_DEBUG", "gpu", ("info", "trace"), "every rank writes about what NCCL does"),
    Hurtful("TORCH_DISTRIBUTED_DEBUG", "", ("detail",), "every collective is checked by another"),
    Hurtful("NCCL_SOCKET_IFNAME", "gpu hosts", ("lo", "=lo"), "hosts cannot reach each other over loopback", "error"),
    Hurtful("GLOO_SOCKET_IFNAME", "hosts", ("lo",), "hosts cannot reach each other over loopback", "error"),
)
#: May differ between hosts or ranks.
OF_A_RANK = ("IFNAME", "VISIBLE_DEVICES", "HOSTID", "DEBUG_FILE", "TORCHELASTIC", "IB_HCA", "CACHE")


def settings(facts: Sequence[Facts], deterministic: bool = False) -> list[Finding]:
    """Environment variables that hurt, or that differ between ranks. A deterministic run restricts NCCL on purpose."""
    hosts, gpu = len(hosts_of(facts)), any(each.gpu for each in facts)
    found = []
    for each in HURTFUL:
        matters = ("hosts" not in each.where or hosts > 1) and ("gpu" not in each.where or gpu)
        if not matters or (deterministic and each.name == "NCCL_ALGO"):
            continue
        given = {one.rank: one.environment[each.name] for one in facts if one.environment.get(each.name)}
        ranks = [rank for rank, value in given.items() if not each.values or value.lower() in each.values]
        if ranks:
            said = f"{each.name}={given[ranks[0]]} on {_span(ranks)}: {each.why}"
            breaks = f"set {each.name} to the interface between hosts, such as eth0"
            found.append(
                Finding("settings", each.status, said, breaks if each.status == "error" else f"unset {each.name}")
            )
    names = sorted({name for each in facts for name in each.environment if not any(word in name for word in OF_A_RANK)})
    for name in names:
        values_of = {each.environment.get(name) for each in facts}
        if name.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_", "CUBLAS_")) and len(values_of) > 1:
            texts = ", ".join(sorted("unset" if value is None else value for value in values_of))
            found.append(
                Finding("settings", "warning", f"{name} differs between ranks: {texts}", "set it alike on all")
            )
    if found:
        return found
    used = sorted(name for name in facts[0].environment if name.startswith("NCCL_"))
    what = f"{', '.join(used)}: nothing that hurts" if used else "no variable of NCCL's, gloo's or CUDA's that hurts"
    return [Finding("settings", "ok", what)]


def memory(facts: Sequence[Facts], need: Need, remedy: str) -> Finding:
    """Compares the peak of the configured run with the free memory of the fullest GPU, or host."""
    gpu = facts[0].gpu
    if gpu:
        fullest = min(facts, key=lambda each: each.free)
        needed, free, where = need.peak, fullest.free, f"rank {fullest.rank}'s GPU"
    else:
        by_host = hosts_of(facts)
        host = max(by_host, key=lambda name: len(by_host[name]) * need.peak / max(by_host[name][0].free, 1))
        those = by_host[host]
        needed, free = len(those) * need.peak, min(each.free for each in those)
        where = f"{host}, for {_count(len(those), 'rank')}"
    said = f"the configured model needs {amount(needed)} at its peak, {amount(free)} are free on {where}"
    figures = {"needed": needed, "free": free, "of a rank": need.by_kind}
    if needed > CLEARLY * free:
        return Finding("memory", "error", said, remedy, figures)
    if needed > TIGHT * free:
        return Finding(
            "memory", "warning", f"{said}: that is close", "leave more room, or watch the first steps", figures
        )
    return Finding("memory", "ok", said, figures=figures)


def storage(folder: str, seen: Mapping[str, bool], free: float, size: float, fault: str = "") -> Finding:
    """Checks that the first rank can write checkpoints, that all hosts see them, and that one of `size` bytes fits."""
    if fault:
        return Finding("storage", "error", f"{folder} cannot be written: {fault}", "choose another logging.folder")
    blind = [host for host, sees in seen.items() if not sees]
    if blind:
        remedy = "set logging.folder to a file system that all hosts share, or no checkpoint can be resumed"
        return Finding("storage", "error", f"{folder} is a different folder on {', '.join(blind)}", remedy)
    said = f"{folder}: {amount(free)} free, a checkpoint takes {amount(size)}"
    figures = {"folder": folder, "free": free, "checkpoint": size}
    if free < size:
        return Finding("storage", "error", said, "free some, or set logging.folder to a larger disk", figures)
    if free < 3 * size:  # two that are kept, and one being written
        remedy = "make room for three, two that are kept and one being written; or set checkpoint.keep=1"
        return Finding("storage", "warning", said, remedy, figures)
    return Finding("storage", "ok", said, figures=figures)


def hosts_of(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    found = defaultdict[str, list[Facts]](list)
    for each in facts:
        found[each.host].append(each)
    return dict(found)


def amount(size: float) -> str:
    return f"{quantity(size)}B"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return listed(ranks)
