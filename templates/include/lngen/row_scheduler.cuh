// row_scheduler.cuh: which rows a block takes: one, every GRID-th of a persistent grid, or the next of a counter.
//
//     StaticRows<Row, GRID> stream{rows};
//     while (stream.next()) { ... stream.row ... }
//
// CUTLASS has the same kinds as static and dynamic persistent tile schedulers. A row group past the last row has no row
// (has_row()): it reads the last one instead (row_or_last()), and stores nothing.
#ifndef LNGEN_ROW_SCHEDULER_CUH
#define LNGEN_ROW_SCHEDULER_CUH

namespace lngen {

// The rows of a block that is not persistent: one block for each ROWS rows.
template <typename Row> struct OneRow {
    const long long rows;
    const long long row = static_cast<long long>(Row::grid_index()) * Row::ROWS + Row::group();
    __device__ __forceinline__ bool has_row() const { return Row::ROWS == 1 || row < rows; }
    __device__ __forceinline__ long long row_or_last() const { return has_row() ? row : rows - 1; }
};

// The stage before one of a ring of STAGES.
template <int STAGES> __device__ __forceinline__ int previous_stage(int stage) {
    return stage == 0 ? STAGES - 1 : stage - 1;
}

// A persistent grid: each of GRID blocks, or clusters, takes every GRID-th group of ROWS rows.
template <typename Row, int GRID> struct StaticRows {
    static constexpr long long STEP = static_cast<long long>(GRID) * Row::ROWS;
    const long long rows;
    const long long block_first_row = static_cast<long long>(Row::grid_index()) * Row::ROWS;
    long long block_row = block_first_row - STEP;  // the current row of the block's first row group
    long long row = 0;
    __device__ __forceinline__ bool next() {
        block_row += STEP;
        row = block_row + Row::group();
        return block_row < rows;
    }
    __device__ __forceinline__ bool has_row() const { return Row::ROWS == 1 || row < rows; }
    __device__ __forceinline__ long long row_or_last(long long r) const { return r < rows ? r : rows - 1; }
};

// A dynamic scheduler: the first STAGES rows of a row group are assigned statically, then a counter in global memory
// gives the next row. Multiprocessors differ in speed, and a static scheduler makes all wait for the slowest. One
// thread per row group counts, and once past the last row: so the counter hands out STEP rows too many, and the group
// that gets the last of them resets it for the next launch. With at most STATIC_ROWS rows nothing is counted.
template <typename Row, int GRID, int STAGES> struct RowCounter {
    static constexpr long long STEP = static_cast<long long>(GRID) * Row::ROWS, STATIC_ROWS = STAGES * STEP;
    const long long rows;
    unsigned long long* const global_counter;
    long long next_row = rows;
    bool ended = false;
    __device__ __forceinline__ void count() {
        unsigned long long before;
        asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(global_counter) : "memory");
        next_row = STATIC_ROWS + static_cast<long long>(before);
    }
    __device__ __forceinline__ void count_or_reset() {
        if (!ended)
            count();
        else if (next_row == rows + STEP - 1)  // STEP - 1 row groups got a smaller one
            asm volatile("{ .reg .u64 before; atom.relaxed.gpu.global.exch.b64 before, [%0], 0; }"
                :: "l"(global_counter) : "memory");
    }
};

}  // namespace lngen

#endif
