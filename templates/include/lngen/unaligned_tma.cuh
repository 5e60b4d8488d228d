// unaligned_tma.cuh: bulk copies of rows, or of a block's share of them, that begin anywhere.
//
//     const bool last = row == rows - 1;
//     mbarrier_arrive_expect(full, load_tail<Row>(stage, x + row * stride, last));
//     tma_load_span<Row>(stage, x + row * stride, last, full);
//
// A bulk copy takes whole units of 16 bytes. So a row is copied with what lies around it (Span), and begins in shared
// memory as far behind a multiple of 16 as in global memory (misalignment). A block of a cluster copies its columns
// of the row in the same way. PTX cp.async.bulk, by tma.cuh.
#ifndef LNGEN_UNALIGNED_TMA_CUH
#define LNGEN_UNALIGNED_TMA_CUH

#include "lngen/tma.cuh"
#include "lngen/vector.cuh"

namespace lngen {

// The number of elements from the last multiple of 16 bytes up to p.
template <typename T> __device__ __forceinline__ int misalignment(const T* p) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(p) % 16 / sizeof(T));
}

// The bytes of the block's columns of a row, from the last multiple of 16 before them to the next one after them; both
// ends contain their neighbours. The span of the last row stops at a multiple of 16 before its end, because memory
// behind it may not exist; its remaining elements are copied one by one (load_tail). Bytes before the first row exist:
// an array that is not aligned is a view into a larger allocation.
template <typename Row, typename T> struct Span {
    const T* first;
    int bytes, shift, covered;  // covered: elements of these columns before the end of the span
    __device__ __forceinline__ Span(const T* row, bool last) {
        row += Row::first_column();
        shift = misalignment(row);
        first = row - shift;
        const int end = (shift + Row::columns()) * static_cast<int>(sizeof(T));
        bytes = last ? end / 16 * 16 : (end + 15) / 16 * 16;
        covered = bytes / static_cast<int>(sizeof(T)) - shift;
    }
};

// Copies the elements after the span of a row to a stage, zeros behind them up to a multiple of 16 bytes, and returns the
// bytes of the span.
template <typename Row, typename T> __device__ __forceinline__ unsigned load_tail(void* to, const T* row, bool last) {
    const Span<Row, T> span(row, last);
    for (int i = span.covered; i < Row::columns() || (span.shift + i) * sizeof(T) % 16; ++i)
        static_cast<T*>(to)[span.shift + i] = i < Row::columns() ? row[Row::first_column() + i] : T{};
    return span.bytes;
}

// Copies the span of a row to shared memory, where the row is as misaligned as in global memory.
template <typename Row, typename T>
__device__ __forceinline__ void tma_load_span(void* to, const T* row, bool last, unsigned long long* barrier) {
    const Span<Row, T> span(row, last);
    tma_load(to, span.first, span.bytes, barrier);
}

// Vector v of a thread, of the whole units of 16 bytes in which a stage has the block's columns of a row. Columns that begin
// inside unit 0 may end in one unit more than the threads own. The first thread takes the elements of that last unit in
// place of the elements before the columns in unit 0. Elements behind the columns are `least`. All threads together have
// every column, but a thread has other columns here than by Row::column. `from` is where column 0 would be.
template <typename Row, typename T>
__device__ __forceinline__ Vec<T, Row::N> stage_vector(const T* from, int v, unsigned short least) {
    static_assert(Row::N * sizeof(T) == 16, "a vector is a unit");
    constexpr int LAST = Row::D - (Row::BLOCKS_PER_ROW - 1) * Row::BLOCK_COLUMNS;  // columns of the last block
    const int segment = v / Row::PER_SEGMENT * Row::SEGMENT_VECTORS, columns = Row::columns();
    // Some thread may have the last column in its vector v.
    const bool ends = (segment + (v % Row::PER_SEGMENT + 1) * Row::THREADS) * Row::N > LAST;
    const T* first = from + Row::first_column();
    const int at = (segment + Row::vector_in_segment(v)) * Row::N - misalignment(first);
    const int behind = at + Row::BLOCK_COLUMNS;
    Access<T, Row::N> unit = {}, more = {};
    if (!ends || at < columns) unit.read(first + at, PlainLoad{});
    if (v == 0 && at < 0 && behind < columns) more.read(first + behind, PlainLoad{});
    Vec<T, Row::N> vector;
    for (int i = 0; i < Row::N; ++i) {
        const bool before = v == 0 && at + i < 0;
        vector[i] = before ? more[i] : unit[i];
        if ((ends && !before && at + i >= columns) || (before && behind + i >= columns)) vector[i].bits = least;
    }
    return vector;
}

// Stores the block's columns of a row from a stage, where they are as misaligned as in global memory: whole units of 16
// bytes by a bulk copy of the first thread, the elements before and after them by the first 2 * ELEMENTS threads.
// `from` is where column 0 would be if the columns began with the stage, as TmaRing::shared has it.
template <typename Row, typename T> __device__ __forceinline__ void tma_store_span(T* row, const T* from) {
    constexpr int ELEMENTS = 16 / static_cast<int>(sizeof(T));
    constexpr int LAST = Row::D - (Row::BLOCKS_PER_ROW - 1) * Row::BLOCK_COLUMNS;  // columns of the last block
    static_assert(LAST >= 2 * ELEMENTS && Row::THREADS >= 2 * ELEMENTS, "both ends have threads of their own");
    row += Row::first_column();
    const int shift = misalignment(row), thread = Row::thread(), columns = Row::columns();
    const int before = (ELEMENTS - shift) % ELEMENTS;
    const int whole = (columns - before) / ELEMENTS * ELEMENTS;
    const T* staged = from + Row::first_column() + shift;
    if (thread == 0) tma_store(row + before, staged + before, whole * static_cast<int>(sizeof(T)));
    const bool head = thread < ELEMENTS;  // these threads have the first elements, the next ones the last elements
    const int i = head ? thread : columns - 2 * ELEMENTS + thread;
    if (head ? i < before : thread < 2 * ELEMENTS && i >= before + whole) row[i] = staged[i];
}

}  // namespace lngen

#endif
