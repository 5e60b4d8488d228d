"""What compute-sanitizer's synccheck does with mbarriers in clusters of 16 blocks: a kernel reduced to one.

    compute-sanitizer --tool synccheck python tests/proof/synccheck_clusters.py [--nothing|--exchange] [--shared BYTES]

Thread 0 of each block initialises an mbarrier in its own shared memory, and the cluster meets at a barrier. With
``--nothing`` there is no mbarrier, with ``--exchange`` every block also sends a number to all blocks, as
``ClusterExchange`` does. ``--shared`` bytes a block let so many blocks share a multiprocessor. Needs sm_90.
"""

from __future__ import annotations

import argparse
import ctypes

import cupy

from lngen.runtime.driver import CLUSTER_DIMENSION, Launch, allow_cluster, allow_shared
from lngen.toolchain import compile_cubin

THREADS, CLUSTERS = 64, 15
SOURCE = """
__device__ unsigned at(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ unsigned there(const void* p, int rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(at(p)), "r"(rank));
    return address;
}
extern "C" __global__ void k(float* out) {
    __shared__ float values[CLUSTER];
    __shared__ unsigned long long full;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (MBARRIER && threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&full)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    float sum = 0;
    if (EXCHANGE) {
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                :: "r"(at(&full)), "r"(4 * CLUSTER) : "memory");
        if (threadIdx.x < CLUSTER) {
            const unsigned value = there(&values[rank], threadIdx.x), barrier = there(&full, threadIdx.x);
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                :: "r"(value), "r"(__float_as_int(rank)), "r"(barrier) : "memory");
        }
        asm volatile("{\\n.reg .pred done;\\nagain:\\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\\n"
            "@!done bra again;\\n}" :: "r"(at(&full)) : "memory");
        for (int i = 0; i < CLUSTER; ++i) sum += values[i];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def main() -> None:
    """Launch once and compare every number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nothing", action="store_true")
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--cluster", type=int, default=16)
    parser.add_argument("--shared", type=int, default=40_000)
    options = parser.parse_args()
    cluster, grid = options.cluster, options.cluster * CLUSTERS
    names = {"CLUSTER": cluster, "MBARRIER": int(not options.nothing), "EXCHANGE": int(options.exchange)}
    source = "".join(f"#define {name} {value}\n" for name, value in names.items()) + SOURCE
    cupy.cuda.runtime.setDevice(0)
    module = cupy.cuda.function.Module()
    module.load(compile_cubin(source, "sm_90", name="k.cu").image)
    function = module.get_function("k")
    allow_shared(function.ptr, options.shared)
    allow_cluster(function.ptr, cluster)
    out = cupy.zeros(grid * THREADS, cupy.float32)
    value = (ctypes.c_longlong * 1)(out.data.ptr)
    table = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    Launch(function.ptr, (grid, 1), THREADS, options.shared, {CLUSTER_DIMENSION: cluster}, table, "k")(0)
    cupy.cuda.runtime.deviceSynchronize()
    want = sum(range(cluster)) if options.exchange else 0
    print("right" if (out == want).all() else f"expected {want}, got {out}")


if __name__ == "__main__":
    main()
