// stretch_tma.cuh: the pipeline of tma.cuh for the rows of stretches.
//
//     using Stream = StretchTmaStream<Row, GRID, STAGES, STAGE_BYTES, /* early release */ true, Cut>;
//     Stream stream{rows, per_set, ring, stages};
#ifndef LNGEN_STRETCH_TMA_CUH
#define LNGEN_STRETCH_TMA_CUH

#include "lngen/stretches.cuh"
#include "lngen/tma.cuh"

namespace lngen {

// The rows that are copied run ahead of those that are added.
template <typename Row, int GRID, int STAGES, int STAGE_BYTES, bool EARLY, typename Cut>
struct StretchTmaStream : StretchRows<Row, GRID, Cut>, TmaRing<Row, STAGES, STAGE_BYTES> {
    using Rows = StretchRows<Row, GRID, Cut>;
    using Ring = TmaRing<Row, STAGES, STAGE_BYTES>;
    Rows ahead;
    bool begun = EARLY;
    __device__ __forceinline__ StretchTmaStream(
        long long rows, long long per_set, unsigned char* ring, typename Ring::Buffers& buffers)
        : Rows{rows, per_set}, Ring(ring, buffers), ahead{rows, per_set} {}

    template <typename CopyRow> __device__ __forceinline__ void fill(CopyRow copy_row, int s) {
        if (ahead.next() && Row::thread() == 0)
            copy_row(this->slot(s), ahead.row_or_last(ahead.row), &this->full[s][Row::group()]);
    }
    template <typename CopyRow> __device__ __forceinline__ void prime(CopyRow copy_row) {
        for (int s = 0; s < STAGES; ++s) fill(copy_row, s);
    }
    __device__ __forceinline__ bool next() {
        this->advance();
        return Rows::next();
    }
    // As that of TmaStream.
    template <typename CopyRow> __device__ __forceinline__ void release(CopyRow copy_row) {
        if (begun) fill(copy_row, EARLY ? this->stage : previous_stage<STAGES>(this->stage));
        begun = true;
    }
};

}  // namespace lngen

#endif
