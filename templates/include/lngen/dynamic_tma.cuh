// dynamic_tma.cuh: the pipeline of tma.cuh with a dynamic scheduler: a counter in global memory gives the next row.
//
//     using Stream = DynamicTmaStream<Row, GRID, STAGES, STAGE_BYTES, /* early release */ true>;
//     Stream stream{rows, ring, stages, counter};
//
// CUTLASS calls this a dynamic persistent tile scheduler; row_scheduler.cuh says why. The thread that fills a stage
// stores the index of its row beside it; an index past the last row ends the loop of the row group. Needs sm_90.
#ifndef LNGEN_DYNAMIC_TMA_CUH
#define LNGEN_DYNAMIC_TMA_CUH

#include "lngen/cluster.cuh"
#include "lngen/row_scheduler.cuh"
#include "lngen/tma.cuh"

namespace lngen {

// What both streams below share. They differ in who reads the counter.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY>
struct DynamicTmaRing : TmaRing<Row, STAGES, STAGE_BYTES> {
    using Ring = TmaRing<Row, STAGES, STAGE_BYTES>;
    using Counter = RowCounter<Row, GRID, STAGES>;
    struct Buffers : Ring::Buffers { long long row[STAGES][Row::ROWS]; };
    long long (&staged)[STAGES][Row::ROWS];
    Counter counter;
    const long long group_first_row = static_cast<long long>(Row::grid_index()) * Row::ROWS + Row::group();
    long long row = 0;
    __device__ __forceinline__ DynamicTmaRing(
        long long rows, unsigned char* ring, Buffers& buffers, unsigned long long* global_counter)
        : Ring(ring, buffers), staged(buffers.row), counter{rows, global_counter} {}

    // Copies row r into stage s; past the last row the stage only learns its index.
    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s, long long r) {
        if (Row::thread() != 0) return;
        unsigned long long* full = &this->full[s][Row::group()];
        staged[s][Row::group()] = r;
        if (r < counter.rows) copy_row(this->slot(s), r, full);
        else mbarrier_arrive(full);
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s, group_first_row + s * Counter::STEP);
        if (counter.rows > Counter::STATIC_ROWS && Row::thread() == 0 && Row::rank() == 0) counter.count();
    }
    __device__ __forceinline__ bool next() {
        this->advance();
        Ring::wait();
        row = staged[this->stage][Row::group()];
        return row < counter.rows;
    }
    __device__ __forceinline__ void wait() const {}  // next() has waited, for the index of the row
    __device__ __forceinline__ bool has_row() const { return true; }
    // True for the thread that refills a stage: that of this row with EARLY release, else that of the previous row.
    __device__ __forceinline__ bool has_free_stage() const {
        return Row::thread() == 0 && (EARLY || row != group_first_row) && !counter.ended;
    }
    template <typename CopyRow> __device__ __forceinline__ void refill(CopyRow copy_row) {
        fill(copy_row, EARLY ? this->stage : previous_stage<STAGES>(this->stage), counter.next_row);
        counter.ended = counter.next_row >= counter.rows;
        if (Row::rank() == 0) counter.count_or_reset();
    }
};

// Each block has rows of its own: the first thread of a row group reads the counter.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY>
struct DynamicTmaStream : DynamicTmaRing<Row, GRID, STAGES, STAGE_BYTES, EARLY> {
    using DynamicTmaRing<Row, GRID, STAGES, STAGE_BYTES, EARLY>::DynamicTmaRing;
    // Call after a barrier that every thread of the row group passes once it has read the current row into registers
    // (EARLY), or has finished the previous row (else). Refills that row's stage.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (this->has_free_stage()) this->refill(copy_row);
    }
};

// The blocks of a cluster share a row: the first block reads the counter, and broadcasts the next row with the values
// of the DSMEM exchange.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY>
struct ClusterDynamicTmaStream : DynamicTmaRing<Row, GRID, STAGES, STAGE_BYTES, EARLY> {
    using Base = DynamicTmaRing<Row, GRID, STAGES, STAGE_BYTES, EARLY>;
    struct Buffers : Base::Buffers { long long next_row[2][Row::ROWS]; };
    long long (&next_row)[2][Row::ROWS];  // used in turn: a block may read one while the other is sent
    unsigned turn = 0;
    __device__ __forceinline__ ClusterDynamicTmaStream(
        long long rows, unsigned char* ring, Buffers& buffers, unsigned long long* global_counter)
        : Base(rows, ring, buffers, global_counter), next_row(buffers.next_row) {}

    // Call before an exchange, which every block of the cluster waits for.
    template <typename Exchange> __device__ __forceinline__ void broadcast(Exchange& exchange) {
        unsigned long long* full = exchange.barrier();
        turn ^= 1;
        if (Row::thread() == 0) mbarrier_expect_more(full, sizeof(long long));
        if (Row::thread() >= 32 || Row::rank() != 0) return;
        const long long next = __shfl_sync(0xffffffffu, this->counter.next_row, 0);
        if (Row::thread() < Row::BLOCKS_PER_ROW) send(&next_row[turn][Row::group()], next, full, Row::thread());
    }
    // Call after that exchange, and after the barrier that DynamicTmaStream::release needs.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (!this->has_free_stage()) return;
        this->counter.next_row = next_row[turn][Row::group()];
        this->refill(copy_row);
    }
};

}  // namespace lngen

#endif
