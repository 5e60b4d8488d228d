// exchange.cuh: the DSMEM exchange: every block of a cluster gets the values that each block has for a row.
//
//     using Exchange = ClusterExchange<Row, float, /* values */ 2, AcquireShared>;
//     __shared__ Exchange::Buffers buffers;
//     Exchange exchange{buffers};
//     cluster_barrier();
//     const float* all = exchange.all(sums);  // all[exchange.index(n, s, N)]: sum n of N of segment s of the row
//
// PTX st.async and mbarrier (cluster.cuh). Two buffers are used in turn, so that no block overtakes another. Between
// reading the values and the next call there has to be a row barrier: otherwise a remote block may overwrite values
// that slower warps still read. Needs sm_90 and a launch with clusters.
#ifndef LNGEN_EXCHANGE_CUH
#define LNGEN_EXCHANGE_CUH

#include "lngen/cluster.cuh"
#include "lngen/mbarrier.cuh"

namespace lngen {

// At most VALUES values of each block; Acquire is one of the waits of cluster.cuh.
template <typename Row, typename Real, int VALUES, typename Acquire> struct ClusterExchange {
    struct alignas(16) Buffers {
        Real values[2][Row::ROWS][Row::BLOCKS_PER_ROW * VALUES];
        unsigned long long full[2][Row::ROWS];
    };
    Buffers& buffers;
    unsigned count = 0;  // exchanges so far

    explicit __device__ __forceinline__ ClusterExchange(Buffers& b) : buffers(b) {
        if (threadIdx.x == 0) {
            for (int r = 0; r < Row::ROWS; ++r) {
                for (int turn = 0; turn < 2; ++turn) mbarrier_init(&buffers.full[turn][r]);
            }
            mbarrier_init_fence();
        }
    }

    // The mbarrier of the next exchange.
    __device__ __forceinline__ unsigned long long* barrier() { return &buffers.full[count % 2][Row::group()]; }

    // The index of sum n of `sums` of segment s of the row, in what all() returns.
    static __device__ __forceinline__ int index(int n, int s, int sums) {
        return (s / Row::SEGMENTS * sums + n) * Row::SEGMENTS + s % Row::SEGMENTS;
    }

    // Sends the values of this block to all blocks, in pairs where it can, and returns those of all, block after block.
    template <int N> __device__ __forceinline__ const Real* all(const Real (&part)[N]) {
        Real* values = buffers.values[count % 2][Row::group()];
        unsigned long long* full = barrier();
        if (Row::thread() == 0) mbarrier_arrive_expect(full, Row::BLOCKS_PER_ROW * N * sizeof(Real));
        if (Row::thread() < Row::BLOCKS_PER_ROW) {
            Real* own = values + Row::rank() * N;
            if constexpr (N % 2 == 0 && sizeof(Real) == 4) {
                for (int n = 0; n < N; n += 2) {
                    send(reinterpret_cast<float2*>(own + n), make_float2(part[n], part[n + 1]), full, Row::thread());
                }
            } else {
                for (int n = 0; n < N; ++n) send(own + n, part[n], full, Row::thread());
            }
        }
        Acquire::wait(full, count / 2 % 2);
        ++count;
        return values;
    }
};

}  // namespace lngen

#endif
