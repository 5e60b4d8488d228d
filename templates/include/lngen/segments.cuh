// segments.cuh: sums of rows of several segments.
//
//     joined_sums<Add<float>, Row, /* interleave */ 4>(reduce, term, mean_sum);
//
// Each segment is a tree of its own (row_reduce.cuh). The sums of the segments are added as interleaved partial sums,
// which are tree-reduced: the same order for one block, for a cluster, and for a row that is read segment by segment.
#ifndef LNGEN_SEGMENTS_CUH
#define LNGEN_SEGMENTS_CUH

#include "lngen/row_reduce.cuh"

namespace lngen {

// Interleaved partial sums: segment s is added to partial sum s % INTERLEAVE; the partial sums are tree-reduced.
// UNROLL rounds are unrolled at a time, since more need more registers.
template <typename Op, int SEGMENTS, int INTERLEAVE, int UNROLL, typename Part>
__device__ __forceinline__ auto join_segments(Part part) {
    using Real = decltype(part(0));
    constexpr int SUMS = SEGMENTS < INTERLEAVE ? SEGMENTS : INTERLEAVE;
    Real sums[SUMS];
    for (int j = 0; j < SUMS; ++j) sums[j] = part(j);
    #pragma unroll UNROLL
    for (int s = SUMS; s < SEGMENTS; s += SUMS) {
        for (int j = 0; j < SUMS; ++j) {
            if (s + j < SEGMENTS) sums[j] = Op::of(sums[j], part(s + j));
        }
    }
    return tree_reduce<Op, SUMS>(sums);
}

// Computes N sums of the segments of a block: sums[n * SEGMENTS + s] is sum n of segment s.
template <typename Op, typename Row, int N = 1, int PARTS, typename Real, typename Reduce, typename Term>
__device__ __forceinline__ void segment_sums(Reduce& reduce, Term term, Real (&sums)[PARTS]) {
    #pragma unroll
    for (int s = 0; s < Row::SEGMENTS; ++s) {
        Real segment[N];
        thread_sums<Op, Row>(segment, s, term);
        for (int n = 0; n < N; ++n) sums[n * Row::SEGMENTS + s] = segment[n];
    }
    reduce.threads(sums, Op{});
}

// The same of all that a block has of a row, in an order of its own: what a thread has of all segments is first.
template <typename Op, typename Row, int N, typename Real, typename Reduce, typename Term>
__device__ __forceinline__ void block_reduce(Reduce& reduce, Term term, Real (&results)[N]) {
    thread_sums<Op, Row>(results, 0, term);
    #pragma unroll
    for (int s = 1; s < Row::SEGMENTS; ++s) {
        Real segment[N];
        thread_sums<Op, Row>(segment, s, term);
        for (int n = 0; n < N; ++n) results[n] = Op::of(results[n], segment[n]);
    }
    reduce.threads(results, Op{});
}

// Computes the sums of a row of several segments.
template <typename Op, typename Row, int INTERLEAVE, typename Reduce, typename Term, typename... Names>
__device__ __forceinline__ void joined_sums(Reduce& reduce, Term term, Names&... names) {
    constexpr int N = sizeof...(names);
    typename Op::type parts[N * Row::SEGMENTS], sums[N];
    if constexpr (Op::ANY_ORDER) {
        block_reduce<Op, Row>(reduce, term, sums);
    } else {
        segment_sums<Op, Row, N>(reduce, term, parts);
        for (int n = 0; n < N; ++n) {
            sums[n] = join_segments<Op, Row::SEGMENTS, INTERLEAVE, Row::SEGMENTS>(
                [&](int s) { return parts[n * Row::SEGMENTS + s]; });
        }
    }
    name_sums(sums, names...);
}

// Computes the sums of a row that is read again from global memory, one segment after the other. Lane l has the
// partial sum l % INTERLEAVE.
template <typename Op, typename Row, int INTERLEAVE, typename Reduce, typename Term, typename... Names>
__device__ __forceinline__ void multipass_sums(Reduce& reduce, Term term, Names&... names) {
    constexpr int N = sizeof...(names);
    typename Op::type sums[N];
    for (int n = 0; n < N; ++n) sums[n] = Op::neutral();
    #pragma unroll 1
    for (int s = 0; s < Row::SEGMENTS; ++s) {
        typename Op::type parts[N];
        thread_sums<Op, Row>(parts, s, term);
        reduce.threads(parts, Op{});
        if (Row::thread() % INTERLEAVE == s % INTERLEAVE) {
            for (int n = 0; n < N; ++n) sums[n] = Op::of(sums[n], parts[n]);
        }
    }
    reduce_lanes<Op, INTERLEAVE>(sums);
    name_sums(sums, names...);
}

// Computes the sums of a row that the blocks of a cluster share: every block gets the sums of all segments.
template <typename Op, typename Row, int INTERLEAVE, typename Reduce, typename Exchange, typename Term,
          typename... Names>
__device__ __forceinline__ void cluster_sums(Reduce& reduce, Exchange& exchange, Term term, Names&... names) {
    constexpr int N = sizeof...(names), ALL = Row::BLOCKS_PER_ROW * Row::SEGMENTS;
    typename Op::type parts[N * Row::SEGMENTS], sums[N];
    if constexpr (Op::ANY_ORDER) {
        block_reduce<Op, Row>(reduce, term, sums);
        const auto* all = exchange.all(sums);
        for (int n = 0; n < N; ++n) {
            sums[n] = join_segments<Op, Row::BLOCKS_PER_ROW, 1, Row::BLOCKS_PER_ROW>(
                [&](int b) { return all[b * N + n]; });
        }
    } else {
        segment_sums<Op, Row, N>(reduce, term, parts);
        const auto* all = exchange.all(parts);
        for (int n = 0; n < N; ++n) {
            sums[n] = join_segments<Op, ALL, INTERLEAVE, ALL>(
                [&](int s) { return all[exchange.index(n, s, N)]; });
        }
    }
    name_sums(sums, names...);
}

// Exchanges the sums of the segments of each block, and returns those of all blocks: all[exchange.index(n, s, N)] is
// array n of N of segment s.
template <typename Row, typename Exchange, typename Real, typename... Arrays>
__device__ __forceinline__ const Real* exchange_segments(
    Exchange& exchange, const Real (&first)[Row::SEGMENTS], const Arrays&... others) {
    constexpr int N = 1 + sizeof...(others);
    const Real* const arrays[N] = {first, others...};
    Real parts[N * Row::SEGMENTS];
    for (int s = 0; s < Row::SEGMENTS; ++s) {
        for (int n = 0; n < N; ++n) parts[n * Row::SEGMENTS + s] = arrays[n][s];
    }
    return exchange.all(parts);
}

// The number of elements of segment s; the last segment may be shorter.
template <typename Row> __device__ __forceinline__ constexpr int segment_size(int s) {
    return (s + 1) * Row::SEGMENT <= Row::D ? Row::SEGMENT : (Row::D - 1) % Row::SEGMENT + 1;
}

// Computes the sums of the segments of a row that is read again from global memory, for all threads.
template <typename Op, typename Row, typename Real, typename Reduce, typename Term>
__device__ __forceinline__ void multipass_segment_sums(Reduce& reduce, Term term, Real (&sums)[Row::SEGMENTS]) {
    #pragma unroll 1
    for (int s = 0; s < Row::SEGMENTS; ++s) {
        Real part[1];
        thread_sums<Op, Row>(part, s, term);
        reduce.threads(part, Op{});
        if (Row::thread() == 0) sums[s] = part[0];
    }
    row_barrier<Row>();
}

}  // namespace lngen

#endif
