// stretch_cp_async.cuh: the pipeline of cp_async.cuh for the rows of stretches.
//
//     using Stream = StretchCpAsyncStream<Row, GRID, STAGES, STAGE_BYTES, Cut>;
//     Stream stream{rows, per_set, ring};
#ifndef LNGEN_STRETCH_CP_ASYNC_CUH
#define LNGEN_STRETCH_CP_ASYNC_CUH

#include "lngen/cp_async.cuh"
#include "lngen/stretches.cuh"

namespace lngen {

// The rows that are copied run ahead of those that are added.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, typename Cut>
struct StretchCpAsyncStream : StretchRows<Row, GRID, Cut> {
    using Rows = StretchRows<Row, GRID, Cut>;
    Rows ahead;
    unsigned char* const ring;
    int stage = STAGES - 1;
    bool begun = false;
    __device__ __forceinline__ StretchCpAsyncStream(long long rows, long long per_set, unsigned char* ring)
        : Rows(rows, per_set), ahead(rows, per_set), ring(ring) {}
    __device__ __forceinline__ unsigned char* slot(int s) const {
        return ring + (s * Row::ROWS + Row::group()) * STAGE_BYTES;
    }
    template <typename T> __device__ __forceinline__ T* shared(int offset) const {
        return reinterpret_cast<T*>(slot(stage) + offset);
    }

    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s) {
        if (ahead.next_of_all()) copy_row(slot(s), ahead.place());
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s);
    }
    __device__ __forceinline__ bool next() {
        if (!Rows::next()) return false;
        if (++stage == STAGES) stage = 0;
        return true;
    }
    // As those of CpAsyncStream.
    __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory"); }
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (begun) fill(copy_row, previous_stage<STAGES>(stage));
        begun = true;
    }
};

}  // namespace lngen

#endif
