// stretch_tma.cuh: the pipeline of tma.cuh for the rows of stretches.
//
//     using Stream = StretchTmaStream<Row, GRID, STAGES, STAGE_BYTES, /* early release */ true, Cut>;
//     Stream stream{rows, per_set, ring, stages};
#ifndef LNGEN_STRETCH_TMA_CUH
#define LNGEN_STRETCH_TMA_CUH

#include "lngen/stretches.cuh"
#include "lngen/tma.cuh"

namespace lngen {

// The rows that are copied run ahead of those that are added. Where they are is in shared memory: one thread of a row
// group copies them, and all would have registers for it.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY, typename Cut>
struct StretchTmaStream : StretchRows<Row, GRID, Cut>, TmaRing<Row, STAGES, STAGE_BYTES> {
    using Rows = StretchRows<Row, GRID, Cut>;
    using Ring = TmaRing<Row, STAGES, STAGE_BYTES>;
    struct Buffers : Ring::Buffers { typename Rows::Place ahead[Row::ROWS]; };
    typename Rows::Place& ahead;
    bool begun = EARLY;
    __device__ __forceinline__ StretchTmaStream(
        long long rows, long long per_set, unsigned char* ring, Buffers& buffers)
        : Rows(rows, per_set), Ring(ring, buffers), ahead(buffers.ahead[Row::group()]) {
        if (Row::thread() == 0) ahead = this->at;
    }

    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s) {
        if (Row::thread() > 0) return;
        Rows copied(this->rows, this->per_set, ahead);
        if (copied.next_of_all()) copy_row(this->slot(s), copied.place(), &this->full[s][Row::group()]);
        ahead = copied.at;
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s);
    }
    __device__ __forceinline__ bool next() {
        if (!Rows::next()) return false;
        this->advance();
        return true;
    }
    // As that of TmaStream.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (begun) fill(copy_row, EARLY ? this->stage : previous_stage<STAGES>(this->stage));
        begun = true;
    }
};

}  // namespace lngen

#endif
