"""Rules on shared memory, locked memory, huge pages and the libraries that transports load."""

from __future__ import annotations

from collections.abc import Collection

from rlctl.hardware.host import HostFacts
from rlctl.hardware.rules.outcome import Outcome, fail, ok, skipped, warn
from rlctl.units import format_bytes

_DOCKER_SHM = 64 << 20
_USUAL_SHM = 1 << 30
#: Transports that register memory with a network card, so that it must be locked.
REGISTERING = frozenset({"nixl", "mooncake", "nccl", "kimi"})


def shared_memory(host: HostFacts, needed: int = 0, what: str = "") -> Outcome:
    """Check the size of /dev/shm.

    Args:
        host: what was found.
        needed: bytes that the run puts there; ``what`` says what they are.
    """
    rule = "shared-memory"
    larger = (
        "docker run --shm-size=64g (or --ipc=host); in Kubernetes an emptyDir of medium Memory; mount -o remount,size="
    )
    if host.shm_total is None or host.shm_free is None:
        return fail(rule, "there is no /dev/shm", "mount a tmpfs there")
    size = f"shared memory (/dev/shm) has {format_bytes(host.shm_total)}, {format_bytes(host.shm_free)} of it free"
    if needed > host.shm_free:
        return fail(rule, f"{size}; {what} takes {format_bytes(needed)}", larger)
    if host.shm_total <= _DOCKER_SHM:
        return fail(rule, f"{size}: a container's default, too little for NCCL and data loaders", larger)
    if host.shm_total < _USUAL_SHM:
        return warn(rule, f"{size}: NCCL, data loaders and vLLM share it", larger)
    return ok(rule, size)


def locked_memory(host: HostFacts, *, rdma: bool, backend: str | None = None) -> Outcome:
    """Check how much memory a process may lock, which whatever a network card reads must be."""
    rule = "locked-memory"
    if host.memlock is None:
        return ok(rule, "no limit on locked memory")
    size = f"a process may lock {format_bytes(host.memlock)}"
    if not rdma:
        return ok(rule, f"{size}; nothing here needs more without an InfiniBand or RoCE device")
    user = f"{backend} over RDMA" if backend in REGISTERING else "RDMA"
    fix = "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity of the service"
    return fail(rule, f"{size}, and {user} registers buffers of gigabytes", fix)


def huge_pages(host: HostFacts) -> Outcome:
    """Check that no memory lies idle in huge pages that nothing uses."""
    rule = "huge-pages"
    aside = host.hugepages * host.hugepage_size
    mode = f"transparent huge pages: {host.transparent_hugepages or 'unknown'}"
    if aside >= _USUAL_SHM and host.hugepages_free == host.hugepages:
        message = f"{format_bytes(aside)} are set aside in huge pages, none of which is in use; {mode}"
        return warn(rule, message, "sysctl vm.nr_hugepages=0 gives the memory back, unless something is still to come")
    return ok(rule, f"{host.hugepages} huge pages of {format_bytes(host.hugepage_size)} set aside; {mode}")


def rdma_access(host: HostFacts, *, rdma: bool, gpus: bool) -> list[Outcome]:
    """Check that InfiniBand devices can be opened here, and that they may read GPU memory."""
    rule = "rdma-access"
    if not rdma:
        return [skipped(rule, "no InfiniBand or RoCE device here")]
    usable, there = host.rdma_doors
    if not usable:
        message = f"there are cards, and of {there} device files in /dev/infiniband this process may open none"
        return [fail(rule, message, "docker run --device=/dev/infiniband (or a device plugin), and the group rdma")]
    found = [ok(rule, f"{usable} of {there} device files in /dev/infiniband can be opened")]
    if gpus and not host.peer_memory:
        message = "nvidia_peermem is not loaded: cards reach GPU memory by dma-buf only, or through host memory"
        found.append(
            warn("gpu-direct", message, "modprobe nvidia_peermem, or see that the kernel and NCCL use dma-buf")
        )
    return found


def libraries(host: HostFacts, *, rdma: bool, backend: str | None, packages: Collection[str]) -> list[Outcome]:
    """Check that libibverbs and UCX are there for the transports that load them."""
    verbs = host.libraries.get("libibverbs.so.1")
    ucx = host.libraries.get("libucp.so.0")
    bundled = sorted(name for name in packages if name.startswith("nixl"))
    found = []
    if verbs is not None:
        found.append(ok("libibverbs", f"libibverbs is {verbs}"))
    elif rdma or backend == "mooncake":
        user = "mooncake's library" if backend == "mooncake" else "RDMA"
        fix = "apt-get install libibverbs1 librdmacm1 libnuma1 ibverbs-providers"
        found.append(fail("libibverbs", f"libibverbs is not installed, which {user} needs", fix))
    else:
        found.append(ok("libibverbs", "libibverbs is not installed; nothing needs it without an RDMA device"))
    if bundled:
        found.append(ok("ucx", f"UCX comes with {', '.join(bundled)}"))
    elif ucx is not None:
        found.append(ok("ucx", f"UCX is {ucx}"))
    elif backend == "nixl":
        found.append(
            fail("ucx", "neither nixl (which brings UCX along) nor UCX is installed", "pip install 'rlctl[nixl]'")
        )
    else:
        found.append(skipped("ucx", "UCX is not installed; backend nixl brings it along"))
    return found
