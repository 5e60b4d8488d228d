// tma.cuh: a pipeline of rows in shared memory, filled by bulk copies: CUTLASS PipelineTmaAsync, for rows.
//
//     using Stream = TmaStream<Row, GRID, STAGES, STAGE_BYTES, /* early release */ true>;
//     extern __shared__ __align__(128) unsigned char ring[];
//     __shared__ Stream::Buffers stages;
//     Stream stream{rows, ring, stages};
//     stream.prime(copy_row);
//     while (stream.next()) {
//         stream.wait();
//         ... load<Row, PlainLoad>(stream.shared<float>(/* byte */ 0), v) ...
//         stream.release(copy_row);
//     }
//
// copy_row(stage, row, full) tells the mbarrier `full` how many bytes will come, and issues tma_load (PTX
// cp.async.bulk). Addresses and bytes are multiples of 16. Needs sm_90.
#ifndef LNGEN_TMA_CUH
#define LNGEN_TMA_CUH

#include "lngen/mbarrier.cuh"
#include "lngen/row_scheduler.cuh"

namespace lngen {

// Bulk copy from global to shared memory; its bytes complete on the barrier.
__device__ __forceinline__ void tma_load(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Bulk copy from shared to global memory, in the group of stores that this thread commits next.
__device__ __forceinline__ void tma_store(void* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Ends the group of stores that tma_store_wait waits for.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all committed stores of this thread have read shared memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders stores of the threads to shared memory before bulk copies from there.
__device__ __forceinline__ void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// STAGES rows in shared memory for each of ROWS row groups. One mbarrier per stage and row group counts the bytes that
// have arrived. The first advance() wraps to stage 0, parity 0.
template <typename Row, int STAGES, int STAGE_BYTES> struct TmaRing {
    struct Buffers { unsigned long long full[STAGES][Row::ROWS]; };
    unsigned char* const ring;
    unsigned long long (&full)[STAGES][Row::ROWS];
    int stage = STAGES - 1;
    unsigned parity = 1;

    __device__ __forceinline__ TmaRing(unsigned char* ring, Buffers& buffers) : ring(ring), full(buffers.full) {
        if (threadIdx.x == 0) {
            for (int r = 0; r < Row::ROWS; ++r) {
                for (int s = 0; s < STAGES; ++s) mbarrier_init(&full[s][r]);
            }
            mbarrier_init_fence();
        }
    }
    __device__ __forceinline__ unsigned char* slot(int s) const {
        return ring + (s * Row::ROWS + Row::group()) * STAGE_BYTES;
    }
    // Column 0 of a tensor whose columns of this block begin at that byte of the stage; it may lie before the stage.
    template <typename T> __device__ __forceinline__ T* shared(int offset) const {
        return reinterpret_cast<T*>(slot(stage) + offset) - Row::first_column();
    }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait() { mbarrier_wait(&full[stage][Row::group()], parity); }
};

// The pipeline of a persistent grid with a static scheduler. With EARLY release the stage of a row is refilled as soon
// as all threads have the row in registers, else during the next row.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY>
struct TmaStream : StaticRows<Row, GRID>, TmaRing<Row, STAGES, STAGE_BYTES> {
    using Rows = StaticRows<Row, GRID>;
    using Ring = TmaRing<Row, STAGES, STAGE_BYTES>;
    __device__ __forceinline__ TmaStream(long long rows, unsigned char* ring, typename Ring::Buffers& buffers)
        : Rows{rows}, Ring(ring, buffers) {}

    // Copies row `first` + group() into stage s; `first` is the row of the block's first row group.
    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s, long long first) {
        if (Row::thread() == 0 && first < this->rows)
            copy_row(this->slot(s), this->row_or_last(first + Row::group()), &this->full[s][Row::group()]);
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s, this->block_first_row + s * Rows::STEP);
    }
    __device__ __forceinline__ bool next() {
        this->advance();
        return Rows::next();
    }
    // Call after a barrier that every thread of the row group passes once it has read the current row into registers
    // (EARLY), or has finished the previous row (else). Refills that row's stage.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if constexpr (EARLY)
            fill(copy_row, this->stage, this->block_row + STAGES * Rows::STEP);
        else if (this->block_row > this->block_first_row)
            fill(copy_row, previous_stage<STAGES>(this->stage), this->block_row + (STAGES - 1) * Rows::STEP);
    }
};

}  // namespace lngen

#endif
