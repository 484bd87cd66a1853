"""The variables that NCCL and PyTorch's NCCL backend read, and those that people set in vain.

NCCL: its user guide's environment page as of 2.32, with the values each takes and the version it came with (``-``: not
stated there), and behind those variables that its source reads and the guide does not list. PyTorch: the names in
``ProcessGroupNCCL.hpp`` and ``.cpp`` of 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple

#: Source of the list, for reports.
NCCL_LIST = "NCCL 2.32, PyTorch 2.13"

_LEVELS = "LOC|NVL|PIX|PXB|PHB|SYS|0|1|2|3|4|5"

# name, version it came with, values: "bool" 0 or 1, "LOW..HIGH" a whole number, "A|B" words, "*" anything.
_NCCL = f"""
NCCL_SOCKET_IFNAME - *
NCCL_SOCKET_FAMILY - AF_INET|AF_INET6
NCCL_SOCKET_MAGIC - *
NCCL_SOCKET_RETRY_CNT 2.24 1..
NCCL_SOCKET_RETRY_SLEEP_MSEC 2.24 1..
NCCL_SOCKET_POLL_TIMEOUT_MSEC 2.28 0..
NCCL_PSK - *
NCCL_SOCKET_NTHREADS 2.4.8 1..16
NCCL_NSOCKS_PERTHREAD 2.4.8 1..64
NCCL_CROSS_NIC - 0..2
NCCL_IB_HCA - *
NCCL_IB_RAIL_POLICY 2.30.5 *
NCCL_IB_TIMEOUT - 0..31
NCCL_IB_RETRY_CNT 2.1.15 0..7
NCCL_IB_GID_INDEX 2.1.4 -1..
NCCL_IB_ADDR_FAMILY 2.21 AF_INET|AF_INET6
NCCL_IB_ADDR_RANGE 2.21 *
NCCL_IB_ROCE_VERSION_NUM 2.21 1..2
NCCL_IB_PKEY 2.1.4 0..
NCCL_IB_PKEY_VALUE 2.31 *
NCCL_IB_SL 2.1.4 -1..15
NCCL_IB_TC 2.1.15 -1..255
NCCL_IB_FIFO_TC 2.22.3 -1..255
NCCL_IB_RETURN_ASYNC_EVENTS 2.23 bool
NCCL_IB_EVENT_BASED_LB 2.31 bool
NCCL_OOB_NET_ENABLE 2.23 bool
NCCL_OOB_NET_IFNAME 2.23 *
NCCL_UID_STAGGER_THRESHOLD 2.23 1..
NCCL_UID_STAGGER_RATE 2.23 1..
NCCL_NET 2.10 *
NCCL_NET_PLUGIN 2.11 *
NCCL_GIN_PLUGIN 2.29.3 *
NCCL_RMA_PLUGIN 2.30.7 *
NCCL_TUNER_PLUGIN - *
NCCL_PROFILER_PLUGIN - *
NCCL_ENV_PLUGIN 2.28 *
NCCL_IGNORE_CPU_AFFINITY 2.4.6 bool
NCCL_CONF_FILE 2.23 *
NCCL_DEBUG - VERSION|WARN|ATTN|INFO|ABORT|TRACE
NCCL_DEBUG_LEVELS 2.32 *
NCCL_DEBUG_FILE 2.2.12 *
NCCL_DEBUG_SUBSYS 2.3.4 *
NCCL_DEBUG_TIMESTAMP_FORMAT 2.26 *
NCCL_DEBUG_TIMESTAMP_LEVELS 2.26 *
NCCL_COLLNET_ENABLE 2.6 bool
NCCL_COLLNET_NODE_THRESHOLD 2.9.9 0..
NCCL_CTA_POLICY 2.27 *
NCCL_NETDEVS_POLICY 2.28 *
NCCL_MULTI_RANK_GPU_ENABLE 2.30 bool
NCCL_TOPO_FILE 2.6 *
NCCL_TOPO_DUMP_FILE 2.6 *
NCCL_SET_THREAD_NAME 2.12 bool
NCCL_P2P_DISABLE - bool
NCCL_P2P_LEVEL 2.3.4 {_LEVELS}
NCCL_P2P_DIRECT_DISABLE - bool
NCCL_SHM_DISABLE - bool
NCCL_BUFFSIZE - 1..
NCCL_NTHREADS - 64|128|256|512
NCCL_CHECK_MODE 2.29.7 DEFAULT|DEBUG_LOCAL|DEBUG_GLOBAL
NCCL_LAUNCH_MODE 2.1.0 PARALLEL|GROUP
NCCL_IB_DISABLE - bool
NCCL_IB_AR_THRESHOLD 2.6 0..
NCCL_IB_OOO_RQ 2.30 bool
NCCL_IB_QPS_PER_CONNECTION 2.10 1..128
NCCL_IB_SPLIT_DATA_ON_QPS 2.18 bool
NCCL_IB_PCI_RELAXED_ORDERING 2.12 0..2
NCCL_IB_ADAPTIVE_ROUTING 2.16 bool
NCCL_IB_ECE_ENABLE 2.23 bool
NCCL_MEM_SYNC_DOMAIN 2.16 bool
NCCL_CUMEM_ENABLE 2.18 bool
NCCL_CUMEM_HOST_ENABLE 2.23 bool
NCCL_NET_GDR_LEVEL 2.4.0 {_LEVELS}
NCCL_NET_GDR_C2C 2.26 bool
NCCL_NET_GDR_READ - bool
NCCL_GDRCOPY_ENABLE - bool
NCCL_GDRCOPY_FIFO_ENABLE - bool
NCCL_GDRCOPY_SYNC_ENABLE - bool
NCCL_GDRCOPY_FLUSH_ENABLE - bool
NCCL_NET_SHARED_BUFFERS 2.8 bool
NCCL_NET_SHARED_COMMS 2.12 bool
NCCL_IGNORE_NET_MISMATCH 2.30 bool
NCCL_IGNORE_COLLNET_MISMATCH 2.30 bool
NCCL_ALGO 2.5 *
NCCL_PROTO 2.5 *
NCCL_NVB_DISABLE 2.11 bool
NCCL_PXN_DISABLE 2.12 bool
NCCL_P2P_PXN_LEVEL 2.12 0..2
NCCL_PXN_C2C 2.27 bool
NCCL_RUNTIME_CONNECT 2.22 bool
NCCL_GRAPH_REGISTER 2.11 bool
NCCL_LOCAL_REGISTER 2.19 bool
NCCL_LEGACY_CUDA_REGISTER 2.24 bool
NCCL_WIN_ENABLE 2.27 bool
NCCL_SET_STACK_SIZE 2.9 bool
NCCL_GRAPH_MIXING_SUPPORT 2.13 bool
NCCL_GRAPH_STREAM_ORDERING 2.30 bool
NCCL_RMA_EAGER_INIT 2.31 bool
NCCL_DMABUF_ENABLE 2.13 bool
NCCL_P2P_NET_CHUNKSIZE 2.14 1..
NCCL_P2P_LL_THRESHOLD 2.14 0..
NCCL_ALLOC_P2P_NET_LL_BUFFERS 2.14 bool
NCCL_COMM_BLOCKING 2.14 bool
NCCL_CGA_CLUSTER_SIZE 2.16 0..8
NCCL_MAX_CTAS 2.17 1..64
NCCL_MIN_CTAS 2.17 1..64
NCCL_NVLS_ENABLE 2.17 0..2
NCCL_IB_MERGE_NICS 2.20 bool
NCCL_NET_MERGE_POLICY 2.30.5 ALL|RAIL
NCCL_MNNVL_ENABLE 2.21 0..2
NCCL_MNNVL_UUID 2.25 *
NCCL_MNNVL_CLIQUE_ID 2.25 *
NCCL_RAS_ENABLE 2.24 bool
NCCL_RAS_ADDR 2.24 *
NCCL_RAS_TIMEOUT_FACTOR 2.24 *
NCCL_LAUNCH_ORDER_IMPLICIT 2.26 bool
NCCL_LAUNCH_RACE_FATAL 2.26 bool
NCCL_IPC_USE_ABSTRACT_SOCKET 2.29 bool
NCCL_SYM_GIN_KERNELS_ENABLE 2.29 bool
NCCL_COMM_ID - *
NCCL_HOSTID - *
NCCL_GRAPH_FILE - *
NCCL_GRAPH_DUMP_FILE - *
NCCL_GRAPH_DUMP_FILE_RANK - *
NCCL_TOPO_DUMP_FILE_RANK - *
NCCL_TUNER_CONFIG_FILE - *
NCCL_IB_USE_INLINE - bool
NCCL_IB_ROUTABLE_FLID_GID_INDEX - *
NCCL_NET_MERGE_LEVEL - *
NCCL_NET_FORCE_FLUSH - *
NCCL_NET_DISABLE_INTRA - bool
NCCL_NET_OPTIONAL_RECV_COMPLETION - bool
NCCL_NCHANNELS_PER_NET_PEER - 1..
NCCL_MIN_P2P_NCHANNELS - 1..
NCCL_MAX_P2P_NCHANNELS - 1..
NCCL_P2P_NVL_CHUNKSIZE - 1..
NCCL_P2P_PCI_CHUNKSIZE - 1..
NCCL_P2P_READ_ENABLE - *
NCCL_P2P_USE_CUDA_MEMCPY - bool
NCCL_SHM_USE_CUDA_MEMCPY - bool
NCCL_SHM_MEMCPY_MODE - *
NCCL_SHM_LOCALITY - *
NCCL_LL_BUFFSIZE - 1..
NCCL_LL128_BUFFSIZE - 1..
NCCL_NVLS_CHUNKSIZE - 1..
NCCL_NVLS_NCHANNELS - 1..
NCCL_WORK_FIFO_DEPTH - 1..
NCCL_WORK_FIFO_BYTES - 1..
NCCL_WORK_ARGS_BYTES - 1..
NCCL_PROGRESS_APPENDOP_FREQ - 1..
NCCL_PROXY_APPEND_BATCH_SIZE - 1..
NCCL_PROXY_DUMP_SIGNAL - *
NCCL_L1_SHARED_MEMORY_CARVEOUT - 0..100
NCCL_CREATE_THREAD_CONTEXT - bool
NCCL_REPORT_CONNECT_PROGRESS - bool
NCCL_COMM_SPLIT_SHARE_RESOURCES - bool
NCCL_SOCKET_INLINE - *
NCCL_SOCKET_MIN_TASKSIZE - *
NCCL_WARN_ENABLE_DEBUG_INFO - bool
TORCH_NCCL_ASYNC_ERROR_HANDLING - 0..3
TORCH_NCCL_AVOID_RECORD_STREAMS - bool
TORCH_NCCL_BCAST_UNIQUEID - bool
TORCH_NCCL_BLOCKING_WAIT - bool
TORCH_NCCL_COORD_CHECK_MILSEC - 0..
TORCH_NCCL_CUDA_EVENT_CACHE - bool
TORCH_NCCL_DEBUG_INFO_PIPE_FILE - *
TORCH_NCCL_DEBUG_INFO_TEMP_FILE - *
TORCH_NCCL_DESYNC_DEBUG - bool
TORCH_NCCL_DUMP_ON_TIMEOUT - bool
TORCH_NCCL_ENABLE_MONITORING - bool
TORCH_NCCL_ENABLE_TIMING - bool
TORCH_NCCL_EXTRA_DUMP_ON_EXEC - bool
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC - 1..
TORCH_NCCL_HIGH_PRIORITY - bool
TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN - bool
TORCH_NCCL_NAN_CHECK - bool
TORCH_NCCL_NONBLOCKING_TIMEOUT - 1..
TORCH_NCCL_PROPAGATE_ERROR - bool
TORCH_NCCL_RANKS_PER_ROOT - 1..
TORCH_NCCL_RETHROW_CUDA_ERRORS - bool
TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING - bool
TORCH_NCCL_TRACE_BUFFER_SIZE - 0..
TORCH_NCCL_TRACE_CPP_STACK - bool
TORCH_NCCL_USE_COMM_NONBLOCKING - bool
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK - bool
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC - 0..
"""

#: Beginnings of names that plugins and tests of NCCL read, which this list does not know.
PLUGIN_PREFIXES = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHARP_", "NCCL_TESTS_", "NCCL_MSCCL", "NCCL_PROFILE_")

#: Names that images and build tools set and that NCCL itself does not read.
BUILD_NAMES = frozenset(
    {"NCCL_VERSION", "NCCL_ROOT", "NCCL_ROOT_DIR", "NCCL_HOME", "NCCL_DIR", "NCCL_PATH", "NCCL_INCLUDE_DIR",
     "NCCL_INCLUDE_DIRS", "NCCL_LIB_DIR", "NCCL_LIBRARY", "NCCL_LIBRARIES", "NCCL_PLUGIN_P2P", "NCCL_PLUGIN_PATH"}
)  # fmt: skip


class Known(NamedTuple):
    """A variable that is read: since which version ("": not stated), and which values it takes."""

    since: str
    values: str


class Retired(NamedTuple):
    """A variable that one should not set.

    Attributes:
        effect: "old" is still read under this name; "removed" was read once; "invented" never was.
        why: since when, or what people mistake it for.
        instead: what to set.
    """

    effect: Literal["old", "removed", "invented"]
    why: str
    instead: str


_PROCESS_GROUP = (
    "the timeout of a collective is torch.distributed.init_process_group(timeout=...), in rlctl sync.timeout"
)
_CONNECT = "NCCL_SOCKET_RETRY_CNT and NCCL_SOCKET_RETRY_SLEEP_MSEC (NCCL 2.24) for connecting; " + _PROCESS_GROUP

RETIRED: Mapping[str, Retired] = MappingProxyType(
    {
        **{
            f"NCCL_{name}": Retired("old", "renamed in PyTorch 2.2", f"TORCH_NCCL_{name}")
            for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING")
        },
        "NCCL_MAX_NRINGS": Retired("old", "renamed in NCCL 2.5", "NCCL_MAX_CTAS"),
        "NCCL_MIN_NRINGS": Retired("old", "renamed in NCCL 2.5", "NCCL_MIN_CTAS"),
        "NCCL_MAX_NCHANNELS": Retired("old", "deprecated in NCCL 2.17", "NCCL_MAX_CTAS"),
        "NCCL_MIN_NCHANNELS": Retired("old", "deprecated in NCCL 2.17", "NCCL_MIN_CTAS"),
        "NCCL_CHECKS_DISABLE": Retired("old", "deprecated in NCCL 2.2.12", "NCCL_CHECK_MODE, or nothing"),
        "NCCL_CHECK_POINTERS": Retired("old", "deprecated in NCCL 2.29.7", "NCCL_CHECK_MODE=DEBUG_LOCAL"),
        "NCCL_IB_GDR_LEVEL": Retired("old", "renamed in NCCL 2.4.0", "NCCL_NET_GDR_LEVEL"),
        "NCCL_IB_CUDA_SUPPORT": Retired("removed", "removed in NCCL 2.4.0", "NCCL_NET_GDR_LEVEL (LOC switches it off)"),
        "NCCL_SINGLE_RING_THRESHOLD": Retired("removed", "removed in NCCL 2.3", "nothing"),
        "NCCL_LL_THRESHOLD": Retired("removed", "removed in NCCL 2.5", "NCCL_PROTO"),
        "NCCL_TREE_THRESHOLD": Retired("removed", "removed in NCCL 2.5", "NCCL_ALGO"),
        "NCCL_RINGS": Retired("removed", "removed in NCCL 2.5", "NCCL_GRAPH_FILE"),
        "NCCL_SOCKET_TIMEOUT": Retired("invented", "NCCL has no such variable", _CONNECT),
        "NCCL_CONNECT_TIMEOUT": Retired("invented", "NCCL has no such variable", _CONNECT),
        "NCCL_TIMEOUT": Retired("invented", "NCCL has no such variable", _PROCESS_GROUP),
        "NCCL_TIMEOUT_MS": Retired("invented", "NCCL has no such variable", _PROCESS_GROUP),
        "NCCL_TIMEOUT_SEC": Retired("invented", "NCCL has no such variable", _PROCESS_GROUP),
        "NCCL_COMM_TIMEOUT": Retired("invented", "NCCL has no such variable", _PROCESS_GROUP),
        "TORCH_NCCL_TIMEOUT": Retired("invented", "PyTorch has no such variable", _PROCESS_GROUP),
        "NCCL_WATCHDOG_TIMEOUT": Retired(
            "invented", "NCCL has no such variable", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC; " + _PROCESS_GROUP
        ),
        "NCCL_HEARTBEAT_TIMEOUT_SEC": Retired("invented", "it is PyTorch's", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        "NCCL_IB_RETRY_COUNT": Retired("invented", "NCCL has no such variable", "NCCL_IB_RETRY_CNT"),
        "NCCL_IFNAME": Retired("invented", "NCCL has no such variable", "NCCL_SOCKET_IFNAME"),
        "NCCL_IB_IFNAME": Retired("invented", "NCCL has no such variable", "NCCL_IB_HCA"),
        "NCCL_IB_ENABLE": Retired("invented", "NCCL has no such variable", "NCCL_IB_DISABLE=0, which is the default"),
        "NCCL_P2P_ENABLE": Retired("invented", "NCCL has no such variable", "NCCL_P2P_DISABLE=0, which is the default"),
        "NCCL_NVLINK_DISABLE": Retired("invented", "NCCL has no such variable", "NCCL_P2P_DISABLE, or NCCL_P2P_LEVEL"),
        "NCCL_GDR_ENABLE": Retired("invented", "NCCL has no such variable", "NCCL_NET_GDR_LEVEL"),
        "NCCL_NET_GDR_ENABLE": Retired("invented", "NCCL has no such variable", "NCCL_NET_GDR_LEVEL"),
        "NCCL_DEBUG_LEVEL": Retired("invented", "NCCL has no such variable", "NCCL_DEBUG"),
        "NCCL_BUFFER_SIZE": Retired("invented", "NCCL has no such variable", "NCCL_BUFFSIZE"),
        "NCCL_NUM_CHANNELS": Retired("invented", "NCCL has no such variable", "NCCL_MIN_CTAS and NCCL_MAX_CTAS"),
    }
)


@cache
def known_names() -> Mapping[str, Known]:
    """Return every variable that is read, by name."""
    found = {}
    for line in _NCCL.split("\n"):
        if line:
            name, since, values = line.split()
            found[name] = Known("" if since == "-" else since, values)
    return MappingProxyType(found)
