// row_reduce.cuh: reductions over the threads of a row, in one order for any number of threads.
//
//     using Reduce = BlockReduce<Row, float, /* values */ 1>;
//     __shared__ Reduce::Buffers buffers;
//     Reduce reduce{buffers};
//     float mean_sum;
//     row_sums<Add<float>, Row>(reduce, [&](int v, float& sum) { ... }, mean_sum);  // every thread gets it
//
// The order is a tree: while more than one part is left, the upper half is combined into the lower half; first the
// vectors of a thread, then the warps lane by lane, last the lanes (shfl.sync.bfly). cub::BlockReduce and
// cub::WarpReduce fix no order. An operation is a template of the type that sums are added in.
#ifndef LNGEN_ROW_REDUCE_CUH
#define LNGEN_ROW_REDUCE_CUH

#include "lngen/numeric.cuh"

namespace lngen {

// What a thread reduces its own elements in, ``part``, and what it starts from: here the type of the result.
template <typename Real> struct InWhole {
    using type = Real;
    using part = Real;
    static __device__ __forceinline__ Real whole(Real v) { return v; }
};

// Addition. The neutral element: x + -0.0 is x for every x, also for -0.0 (+0.0 would turn -0.0 into +0.0). But the sum
// of nothing is +0.0.
template <typename Real> struct Add : InWhole<Real> {
    static constexpr bool ANY_ORDER = false;
    static __device__ __forceinline__ Real neutral() { return static_cast<Real>(-0.0); }
    static __device__ __forceinline__ Real start() { return neutral(); }
    static __device__ __forceinline__ Real of(Real a, Real b) { return a + b; }
    static __device__ __forceinline__ Real of_nothing() { return 0; }
};

// The maximum. The neutral element, and the maximum of nothing, is -infinity.
template <typename Real> struct Max : InWhole<Real> {
    static constexpr bool ANY_ORDER = true;  // the result has the same bits
    static __device__ __forceinline__ Real neutral() { return -__int_as_float(0x7f800000); }
    static __device__ __forceinline__ Real start() { return neutral(); }
    static __device__ __forceinline__ Real of(Real a, Real b) { return maximum(a, b); }
    static __device__ __forceinline__ Real of_nothing() { return neutral(); }
};

// The largest power of two below n.
__device__ constexpr int half_of(int n) { return n <= 2 ? 1 : 2 * half_of((n + 1) / 2); }

// Tree reduction of the first LIVE parts; it overwrites them.
template <typename Op, int LIVE, int N, typename Real>
__device__ __forceinline__ Real tree_reduce(Real (&part)[N]) {
    if constexpr (LIVE > 1) {
        constexpr int HALF = half_of(LIVE);
        for (int i = 0; i + HALF < LIVE; ++i) part[i] = Op::of(part[i], part[i + HALF]);
        return tree_reduce<Op, HALF>(part);
    }
    return part[0];
}

// Tree reduction over groups of LANES lanes of a warp; every lane gets the result.
template <typename Op, int LANES, int N, typename Real>
__device__ __forceinline__ void reduce_lanes(Real (&part)[N]) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        for (int n = 0; n < N; ++n) part[n] = Op::of(part[n], __shfl_xor_sync(0xffffffffu, part[n], distance));
    }
}

// The same of blocks of which a thread has a run of each half: the first level of the tree is between these.
template <typename Op, int LANES, typename Real> __device__ __forceinline__ void reduce_halves(Real (&part)[2]) {
    Real sum[1] = {Op::of(part[0], part[1])};
    reduce_lanes<Op, LANES>(sum);
    part[0] = sum[0];
}

// A barrier of the threads of a row: within a warp, a whole block, or a row group at its named barrier.
template <typename Row> __device__ __forceinline__ void row_barrier() {
    if constexpr (Row::THREADS <= 32)
        __syncwarp();
    else if constexpr (Row::ROWS == 1)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" :: "r"(Row::group() + 1), "n"(Row::THREADS) : "memory");
}

// A barrier of the threads of a row that has at most a warp; the reductions of wider rows contain one.
template <typename Row> __device__ __forceinline__ void warp_barrier() {
    if constexpr (Row::THREADS <= 32) __syncwarp();
}

// Reductions over the threads of a row that has at most a warp.
template <typename Row> struct WarpReduce {
    template <typename Op, int N, typename Real> __device__ __forceinline__ void threads(Real (&part)[N], Op) {
        reduce_lanes<Op, Row::THREADS>(part);
    }
};

// Reductions over the threads of a row, at most MAX_VALUES values at a time. Every thread reads from shared memory what
// its lane has in each warp and reduces it; then the lanes of a warp are reduced. Two buffers are used in turn, so one
// barrier per call is enough.
template <typename Row, typename Real, int MAX_VALUES> struct BlockReduce {
    static constexpr int WARPS = Row::THREADS / 32;
    struct Buffers { Real parts[Row::ROWS][2][MAX_VALUES][Row::THREADS]; };
    Buffers& buffers;
    int turn = 0;
    explicit __device__ __forceinline__ BlockReduce(Buffers& b) : buffers(b) {}

    template <typename Op, int N> __device__ __forceinline__ void threads(Real (&part)[N], Op) {
        auto& parts = buffers.parts[Row::group()][turn];
        for (int n = 0; n < N; ++n) parts[n][Row::thread()] = part[n];
        row_barrier<Row>();
        for (int n = 0; n < N; ++n) {
            Real warp[WARPS];
            for (int w = 0; w < WARPS; ++w) warp[w] = parts[n][w * 32 + Row::thread() % 32];
            part[n] = tree_reduce<Op, WARPS>(warp);
        }
        turn ^= 1;
        reduce_lanes<Op, 32>(part);
    }
};

// Calls term(v, sums[0], sums[1], ...).
template <typename Term, typename V, typename Part, int N, typename... Sums>
__device__ __forceinline__ void add_terms(Term& term, V v, Part (&sums)[N], Sums&... given) {
    if constexpr (sizeof...(given) == N)
        term(v, given...);
    else
        add_terms(term, v, sums, given..., sums[sizeof...(given)]);
}

// Adds the terms that each thread has of segment s: term(v, sum, ...) adds the elements of vector v left to right, then
// the vectors of a thread are tree-reduced.
template <typename Op, typename Row, int N, typename Real, typename Term>
__device__ __forceinline__ void thread_sums(Real (&sums)[N], int s, Term term) {
    using Part = typename Op::part;
    Part vectors[N][Row::PER_SEGMENT];
    #pragma unroll
    for (int v = 0; v < Row::PER_SEGMENT; ++v) {
        Part sum[N];
        for (int n = 0; n < N; ++n) sum[n] = Op::start();
        add_terms(term, s * Row::PER_SEGMENT + v, sum);
        const bool holds = Row::holds(s * Row::PER_SEGMENT + v, 0);
        for (int n = 0; n < N; ++n) vectors[n][v] = holds ? sum[n] : Op::start();
    }
    for (int n = 0; n < N; ++n) sums[n] = Op::whole(tree_reduce<Op, Row::PER_SEGMENT>(vectors[n]));
}

// Gives each number of an array a name of its own.
template <typename Real, int N, typename... Names>
__device__ __forceinline__ void name_sums(const Real (&sums)[N], Names&... names) {
    static_assert(sizeof...(names) == N, "a name for each sum");
    int n = 0;
    ((names = sums[n++]), ...);
}

// Computes the sums of a row of one segment.
template <typename Op, typename Row, typename Reduce, typename Term, typename... Names>
__device__ __forceinline__ void row_sums(Reduce& reduce, Term term, Names&... names) {
    typename Op::type sums[sizeof...(names)];
    thread_sums<Op, Row>(sums, 0, term);
    reduce.threads(sums, Op{});
    name_sums(sums, names...);
}

}  // namespace lngen

#endif
