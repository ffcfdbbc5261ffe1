"""Starts ranks: forks them on this machine, or joins those that torchrun has started.

Forking after `import torch` starts eight ranks in hundredths of a second; spawned ones would import torch again.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor

from cuboid.comm.transport.sharing import late_timers
from cuboid.device import any_gpu, backend_for, computes_bf16, gpus_for, group_options, hide_gpus, is_gpu, take
from cuboid.run.cluster import PR_SET_PDEATHSIG, Cluster, Host
from cuboid.run.errors import RankError, RunError
from cuboid.run.interfaces import check_interfaces
from cuboid.run.meeting import meet, quietly, unreachable
from cuboid.run.report import report
from cuboid.run.started import place_on_host, under_torchrun
from cuboid.run.stop import Stop, leave_signals_to_parent
from cuboid.run.watch import Watch

TIMEOUT = 600.0  # seconds, of a collective
SIGILL_HINT = (
    "; the processor does not support an instruction: where a virtual machine shows AMX but does not have it, "
    "bf16 matmuls work with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment"
)


CROWD = 4  # ranks per core


@dataclass(frozen=True)
class World:
    """What a rank knows of its run. Functions that ranks run get it as their first argument.

    Args:
        rank: This rank's number, from 0.
        size: The number of ranks.
        device: Where this rank computes.
        local_size: The number of ranks on its host.
        attempt: How often the run's ranks were restarted before.
        stop: Whether the run was asked to stop.
        watch: The watchdog, if there is one.
        host: The emulated host of the rank, if any; it has no GPU.
        bf16: Whether every rank's device computes faster in bf16 than in fp32.
    """

    rank: int
    size: int
    device: torch.device
    local_size: int
    attempt: int = 0
    stop: Stop | None = None
    watch: Watch | None = None
    host: Host | None = None
    bf16: bool = False

    @property
    def apart(self) -> bool:
        """Whether other hardware than the computing processors sends messages, so that overlap gains something."""
        return is_gpu(self.device) or self.local_size < self.size

    @property
    def crowded(self) -> bool:
        """Whether emulated hosts have enough ranks per core for threads that poll for messages to matter."""
        return self.host is not None and self.size > CROWD * (os.cpu_count() or 1)


class RankDied(RankError):
    """A rank died without an exception: killed, crashed, out of memory."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed  # by SIGKILL


def join_world(
    store: dist.Store | None = None, timeout: float = TIMEOUT, attempt: int = 0, stop: Stop | None = None
) -> World:
    """Join the process group that the environment describes: NCCL if there is a GPU for each rank, else gloo. gloo
    connects two ranks when one first sends to the other, not all at once."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, local_size = place_on_host(rank, size)
    if store is None:
        store = meet(rank, size, timeout, late=max(timeout, TIMEOUT))  # a late import is not a stalled collective
    device = take(local) if _all_on_gpus(store, rank, size, local_size) else torch.device("cpu")
    bf16 = is_gpu(device) and _totals(store, size, {"without bf16": not computes_bf16(device)}) == [0]
    for backend in (backend_for(device), "gloo"):  # which checkpoints need everywhere
        check_interfaces(backend)
    if not is_gpu(device):
        _keep_memory()
        torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    with late_timers() if size > CROWD * (os.cpu_count() or 1) else nullcontext():
        dist.init_process_group(
            backend_for(device),
            rank=rank,
            world_size=size,
            store=store,
            timeout=limit,
            device_id=device if is_gpu(device) else None,
            pg_options=group_options(device, limit),
        )
    return World(rank, size, device, local_size, attempt, stop, bf16=bf16)


def _all_on_gpus(store: dist.Store, rank: int, size: int, local_size: int) -> bool:
    """Whether every rank of every host gets a GPU. If one does not, all compute on CPUs: no backend connects both."""
    lacking, seeing = _totals(store, size, {"without a GPU": not gpus_for(local_size), "seeing GPUs": any_gpu()})
    if rank == 0 and lacking and seeing:
        print(
            f"warning: {lacking} of {size} ranks are on hosts with fewer GPUs than ranks, so all compute on CPUs, over "
            "gloo; to use the GPUs, start at most as many ranks on each host as it has",
            file=sys.stderr,
            flush=True,
        )
    return not lacking


def _totals(store: dist.Store, size: int, mine: Mapping[str, bool]) -> list[int]:
    """Of how many ranks each is true. INVARIANT: identical on all ranks, which must all ask."""
    names = [f"cuboid/{name}" for name in mine]
    for name, holds in zip(names, mine.values(), strict=True):
        store.add(name, int(holds))
    asked, agreed = f"{names[0]}, asked", f"{names[0]}, agreed"
    if store.add(asked, 1) >= size:
        store.set(agreed, "")
    store.wait([agreed])
    return [store.add(name, 0) for name in names]


def _keep_memory() -> None:
    """Make glibc's allocator keep freed memory. Otherwise a step's large buffers return to the system, and a page fault
    for every 4 KB takes a seventh of the step."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _serve(
    rank: int,
    size: int,
    local: int,
    local_size: int,
    host: Host | None,
    door: socket.socket,
    pipe: connection.Connection,
    stop: Stop | None,
    attempt: int,
    timeout: float,
) -> None:
    """A forked rank: runs what arrives on the pipe until it closes. `door`: the socket of the ranks' rendezvous."""
    if stop is None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        leave_signals_to_parent()
    where = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({name: str(value) for name, value in where.items()})
    if host is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        host.enter()
        hide_gpus()  # its ranks do not know of other hosts', which would take the same one
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = _meet(rank, size, door)
    with suppress(EOFError, KeyboardInterrupt):
        try:
            world = replace(join_world(store, timeout, attempt, stop), host=host)
        except Exception as error:  # the answer to whatever is asked first
            pipe.recv()
            _send(pipe, (False, (error, traceback.format_exc())))
            os._exit(1)
        while True:
            task = pipe.recv()
            if task is None:
                break
            fn, args = task
            try:
                answer = (True, fn(world, *args))
            except Exception as error:
                answer = (False, (error, traceback.format_exc()))
            sys.stdout.flush()
            _send(pipe, answer)
    with suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)


def _send(pipe: connection.Connection, answer: tuple[bool, Any]) -> None:
    try:
        pipe.send(answer)
    except Exception as error:  # it cannot be sent as it is
        pipe.send((False, (RuntimeError(str(error)), traceback.format_exc())))


def _end_with_parent() -> None:
    """End this rank when the process that started it is killed."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _door(cluster: Cluster | None) -> socket.socket:
    """The socket of the rendezvous: on loopback, or on the first emulated host."""
    if cluster is None:
        return socket.create_server(("127.0.0.1", 0))
    first = cluster.host(0)
    with first.visit():
        return socket.create_server((first.address, 0))


def _meet(rank: int, size: int, door: socket.socket) -> dist.TCPStore:
    """The store behind the door. Its complaints on stderr about a missing name service (emulated hosts) are dropped."""
    address, port = door.getsockname()
    listen = door.detach() if rank == 0 else None
    with quietly():
        return dist.TCPStore(address, port, size, is_master=rank == 0, master_listen_fd=listen)


class Pool:
    """Ranks that stay up and run one function after another. Ranks are forked: create it before this process uses
    autograd.

    Examples:
        >>> with Pool(2) as pool:
        ...     pool.run(rank_of)
        [0, 1]

    Args:
        ranks: The number of ranks to start on this machine.
        cluster: Emulated hosts; rank r lives on host r // per_host. Without them all ranks are on loopback.
        stop: Asks ranks to stop when this process gets a signal.
        attempt: The value of `World.attempt`.
        timeout: Seconds until a collective fails.
        names: What errors call the ranks; empty: by their numbers.

    Raises:
        ValueError: If `ranks` is below 1, or is not hosts × ranks per host.
    """

    def __init__(
        self,
        ranks: int,
        cluster: Cluster | None = None,
        stop: Stop | None = None,
        attempt: int = 0,
        timeout: float = TIMEOUT,
        names: Sequence[str] = (),
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: at least one rank is needed")
        if cluster is not None and ranks != cluster.size * cluster.per_host:
            raise ValueError(
                f"{ranks} ranks cannot run {cluster.per_host} on each of {cluster.size} hosts; "
                "hosts × ranks per host must be the number of ranks"
            )
        self._names = names or [f"rank {rank}" for rank in range(ranks)]
        fork = get_context("fork")
        self._pipes: list[connection.Connection] = []
        self._ranks = []
        with _door(cluster) as door:
            for rank in range(ranks):
                ours, theirs = fork.Pipe()
                local, local_size, host = rank, ranks, None
                if cluster is not None:
                    local, local_size = rank % cluster.per_host, cluster.per_host
                    host = cluster.place(rank)
                args = (rank, ranks, local, local_size, host, door, theirs, stop, attempt, timeout)
                process = fork.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._ranks.append(process)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(world, *args)` on every rank.

        Args:
            fn: A function that ranks find by module and name.
            args: Its arguments after `world`; pickled.

        Returns:
            The results in rank order.

        Raises:
            ValueError: If a rank raised one; `RunError` likewise.
            RankError: If a rank failed otherwise, or died.
        """
        for pipe in self._pipes:
            with suppress(ConnectionError):  # the rank has died, which is noticed below
                pipe.send((fn, args))
        waiting, answers = dict(enumerate(self._pipes)), {}
        while waiting:
            ready = connection.wait([*waiting.values(), *(self._ranks[rank].sentinel for rank in waiting)])
            # A rank that died comes first: it is the cause, and others' errors are the consequence. Its sentinel is
            # reliable; `is_alive` may still be true.
            for rank, pipe in sorted(waiting.items(), key=lambda item: self._ranks[item[0]].sentinel not in ready):
                if pipe in ready:
                    try:
                        ok, answer = pipe.recv()
                    except (EOFError, ConnectionError):
                        ok, answer = False, (None, "")
                elif self._ranks[rank].sentinel in ready:
                    ok, answer = False, (None, "")
                else:
                    continue
                del waiting[rank]
                if not ok:
                    if not isinstance(answer[0], ValueError):
                        rank, answer = self._cause(rank, answer)
                    self.close(kill=True)
                    self._fail(rank, *answer)
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self._pipes))]

    def _cause(self, rank: int, answer: tuple[Exception | None, str]) -> tuple[int, tuple[Exception | None, str]]:
        """The cause of a rank's failure: another's death, if there is one, which may show later than a lost
        connection."""
        gone = connection.wait([process.sentinel for process in self._ranks], timeout=1)
        dead = [other for other, process in enumerate(self._ranks) if process.sentinel in gone]
        return (dead[0], (None, "")) if dead and rank not in dead else (rank, answer)

    def _fail(self, rank: int, error: Exception | None, trace: str) -> None:
        if isinstance(error, ValueError | RunError | RankError):  # its message is complete
            raise error
        if trace:
            raise RankError(f"{self._names[rank]} failed\n{trace}") from error
        code = self._ranks[rank].exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RankDied(f"{self._names[rank]} {how}" + SIGILL_HINT * (code == -signal.SIGILL), code == -signal.SIGKILL)

    def close(self, kill: bool = False) -> None:
        """End all ranks: those that do not end within 10 seconds are killed; with `kill`, all at once."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._ranks:
            if kill:
                process.kill()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(kill=exc[0] is not None)


def rank_of(world: World) -> int:
    return world.rank


def launch(
    fn: Callable[..., Any],
    ranks: int = 8,
    args: Sequence[Any] = (),
    stop: Stop | None = None,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Run `fn(world, *args)` on `ranks` ranks of this machine and return what each returned.

    Under torchrun the ranks exist already: this one joins them, and the list has only its own result.

    Args:
        fn: A function that ranks find by module and name.
        ranks: The number of ranks; under torchrun, the number that it must have started.
        args: Arguments of `fn` after `world`.
        stop: Asks ranks to stop when this process gets a signal.
        timeout: Seconds until a collective fails.

    Returns:
        The results in rank order.

    Raises:
        ValueError: If torchrun started another number of ranks, or a rank raised one.
        RankError: If a rank failed otherwise, or died.
    """
    if not under_torchrun():
        with Pool(ranks, stop=stop, timeout=timeout) as pool:
            return pool.run(fn, *args)
    size = int(os.environ["WORLD_SIZE"])
    if size != ranks:
        raise ValueError(
            f"torchrun started {size} ranks but this command needs {ranks}; set --nproc-per-node and --nnodes to match"
        )
    _end_with_agent()
    try:
        try:
            world = join_world(None, timeout, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), stop)
        except (dist.DistError, TimeoutError) as error:
            raise unreachable(error) from None
        found = fn(world, *args)
    except ValueError:
        raise
    except Exception as error:  # threads that wait for dead ranks would keep this one from ending
        report(error, int(os.environ["RANK"]))
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()
    return [found]


def _end_with_agent() -> None:
    """End this rank if torchrun's agent is killed: a rank left behind would hold up others, or train on alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, AttributeError):  # not on Linux
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
