// cp_async.cuh: a pipeline of rows in shared memory, filled by cp.async (cuda::memcpy_async).
//
//     using Stream = CpAsyncStream<Row, GRID, STAGES, STAGE_BYTES>;
//     stream.prime(copy_row);
//     while (stream.next()) {
//         stream.wait();
//         ... load<Row, PlainLoad>(stream.shared<float>(/* byte */ 0), v) ...
//         stream.release(copy_row);
//     }
//
// copy_row(stage, row) issues the copies of a row, PTX cp.async. Each thread copies the vectors that it reads, so no
// thread waits for another. Needs sm_80.
#ifndef LNGEN_CP_ASYNC_CUH
#define LNGEN_CP_ASYNC_CUH

#include "lngen/row_scheduler.cuh"

namespace lngen {

// Copies vector v of a row to shared memory, without elements past the end of the row.
template <typename Row, typename T> __device__ __forceinline__ void cp_async(T* to, const T* from, int v) {
    constexpr int BYTES = Row::ACCESS * sizeof(T) < 16 ? Row::ACCESS * sizeof(T) : 16, ELEMENTS = BYTES / sizeof(T);
    for (int j = 0; j < Row::N; j += ELEMENTS) {
        const int column = Row::column(v, j);
        if (Row::holds(v, j)) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(to + column))), "l"(from + column), "n"(BYTES)
                : "memory");
        }
    }
}

// STAGES rows in shared memory for each row group. The first next() wraps to stage 0.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES> struct CpAsyncStream : StaticRows<Row, GRID> {
    using Rows = StaticRows<Row, GRID>;
    unsigned char* const ring;
    int stage = STAGES - 1;
    __device__ __forceinline__ CpAsyncStream(long long rows, unsigned char* ring) : Rows{rows}, ring(ring) {}
    __device__ __forceinline__ unsigned char* slot(int s) const {
        return ring + (s * Row::ROWS + Row::group()) * STAGE_BYTES;
    }
    template <typename T> __device__ __forceinline__ T* shared(int offset) const {
        return reinterpret_cast<T*>(slot(stage) + offset);
    }

    // Copies row `first` + group() into stage s; `first` is the row of the block's first row group.
    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s, long long first) {
        if (first < this->rows) copy_row(slot(s), this->row_or_last(first + Row::group()));
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s, this->block_first_row + s * Rows::STEP);
    }
    __device__ __forceinline__ bool next() {
        if (++stage == STAGES) stage = 0;
        return Rows::next();
    }
    // At row k >= 1, STAGES + k - 1 groups are committed, and the first k + 1 must be complete: at most STAGES - 2 may
    // be pending. Row 0 could allow one more.
    __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory"); }
    // Refills the stage of the previous row: this thread has read the vectors that it copied there.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (this->block_row > this->block_first_row)
            fill(copy_row, previous_stage<STAGES>(stage), this->block_row + (STAGES - 1) * Rows::STEP);
    }
};

}  // namespace lngen

#endif
