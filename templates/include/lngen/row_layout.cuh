// row_layout.cuh: where a row lies over threads: which thread has which elements.
//
//     using Row = RowLayout<Block<128, 1>, /* D */ 4096, /* segment */ 4096, /* vector */ 8, /* access */ 8>;
//     for (int v = 0; v < Row::VECTORS; ++v)
//         for (int i = 0; i < Row::N; ++i)
//             if (Row::holds(v, i)) use(p[Row::column(v, i)]);
//
// A layout is a CuTe layout of (thread, v, i) written out. A row is cut into segments of SEGMENT elements and these
// into vectors of N, so that the order of sums depends on neither threads nor blocks.
#ifndef LNGEN_ROW_LAYOUT_CUH
#define LNGEN_ROW_LAYOUT_CUH

#include "lngen/cluster.cuh"

namespace lngen {

// The threads of a row: a block works on ROWS rows side by side, one for each row group of THREADS threads.
// thread(): index within the row group; group(): index of the row group within the block; rank(): index of the block
// among those that share a row; grid_index(): index of the block in the grid.
template <int THREADS_, int ROWS_> struct Block {
    static constexpr int THREADS = THREADS_, ROWS = ROWS_, BLOCKS_PER_ROW = 1;
    static __device__ __forceinline__ int thread() { return threadIdx.x % THREADS; }
    static __device__ __forceinline__ int group() { return threadIdx.x / THREADS; }
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int grid_index() { return blockIdx.x; }
};

// The threads of a row that the BLOCKS_PER_ROW blocks of a cluster share, each with a part of its segments.
// thread(): index within the row group of a block; group(): index of the row group within the block; rank(): index of
// the block in the cluster; grid_index(): index of the cluster in the grid.
template <int BLOCKS_PER_ROW_, int THREADS_, int ROWS_> struct Cluster {
    static constexpr int THREADS = THREADS_, ROWS = ROWS_, BLOCKS_PER_ROW = BLOCKS_PER_ROW_;
    static __device__ __forceinline__ int thread() { return threadIdx.x % THREADS; }
    static __device__ __forceinline__ int group() { return threadIdx.x / THREADS; }
    static __device__ __forceinline__ int rank() { return cluster_rank(); }
    static __device__ __forceinline__ int grid_index() { return blockIdx.x / BLOCKS_PER_ROW; }
};

// The layout of a row of D elements over its threads. A vector is N consecutive elements, moved ACCESS at a time. Of
// each segment, thread t has the vectors t, t + THREADS, t + 2 * THREADS, ... A block has SEGMENTS of the segments.
template <typename Threads, int D_, int SEGMENT_, int N_, int ACCESS_> struct RowLayout : Threads {
    static constexpr int D = D_, SEGMENT = SEGMENT_, N = N_, RUN = N_, ACCESS = ACCESS_;
    static constexpr int SEGMENTS = D / SEGMENT / Threads::BLOCKS_PER_ROW, BLOCK_COLUMNS = SEGMENTS * SEGMENT;
    static constexpr int PER_SEGMENT = SEGMENT / (Threads::THREADS * N), VECTORS = SEGMENTS * PER_SEGMENT;
    static_assert(PER_SEGMENT * Threads::THREADS * N == SEGMENT, "the vectors of all threads cover a segment");
    static_assert(BLOCK_COLUMNS * Threads::BLOCKS_PER_ROW == D, "whole segments for each block");
    static __device__ __forceinline__ int first_column() { return Threads::rank() * BLOCK_COLUMNS; }
    static __device__ __forceinline__ int columns() { return BLOCK_COLUMNS; }
    static __device__ __forceinline__ int column(int v, int i) {
        return first_column() + Threads::thread() * N + (v * Threads::THREADS * N + i);
    }
    // The address of an element. The asm hides how the offset of the thread is computed: an access whose address the
    // compiler can take apart, it splits into narrower ones.
    template <typename T> static __device__ __forceinline__ T* at(T* p, int v, int i) {
        int own = first_column() + Threads::thread() * N;
        asm("" : "+r"(own));
        return p + own + (v * Threads::THREADS * N + i);
    }
    static __device__ __forceinline__ constexpr bool owns(int) { return true; }
    static __device__ __forceinline__ constexpr bool holds(int, int) { return true; }
};

// The layout of a row of D elements that threads do not divide evenly: some threads own fewer vectors, and the last
// vector may be partial. A vector is N elements, moved ACCESS at a time, in runs of RUN neighbours; a segment has the
// first runs of all its vectors, then the second ones, and so on. A block has SEGMENTS of the segments.
// owns(v): the thread has a vector v; holds(v, i): element i of it is in the row.
template <typename Threads, int D_, int SEGMENT_, int N_, int RUN_, int ACCESS_> struct PartialRowLayout : Threads {
    static constexpr int D = D_, SEGMENT = SEGMENT_, N = N_, RUN = RUN_, ACCESS = ACCESS_;
    static constexpr int SEGMENTS = (D + SEGMENT - 1) / SEGMENT / Threads::BLOCKS_PER_ROW;
    static constexpr int BLOCK_COLUMNS = SEGMENTS * SEGMENT;
    static constexpr int SEGMENT_VECTORS = SEGMENT / N;
    static constexpr int PER_SEGMENT = (SEGMENT_VECTORS + Threads::THREADS - 1) / Threads::THREADS;
    static constexpr int VECTORS = SEGMENTS * PER_SEGMENT;
    static constexpr bool WHOLE = D % SEGMENT == 0;  // no segment is shorter
    static constexpr int LEAST = WHOLE ? SEGMENT : D % SEGMENT;  // elements of the shortest segment, the last one
    static_assert((D + SEGMENT - 1) / SEGMENT % Threads::BLOCKS_PER_ROW == 0, "as many segments for each block");
    static __device__ __forceinline__ int first_column() { return Threads::rank() * BLOCK_COLUMNS; }
    static __device__ __forceinline__ int columns() {
        return WHOLE || D - first_column() >= BLOCK_COLUMNS ? BLOCK_COLUMNS : D - first_column();
    }
    static __device__ __forceinline__ int vector_in_segment(int v) {
        return v % PER_SEGMENT * Threads::THREADS + Threads::thread();
    }
    static __device__ __forceinline__ int column(int v, int i) {
        const int segment = first_column() + v / PER_SEGMENT * SEGMENT, run = i / RUN * (SEGMENT_VECTORS * RUN);
        return segment + vector_in_segment(v) * RUN + run + i % RUN;
    }
    // The address of an element: that of the thread, which all of them share, and a constant. The compiler splits no
    // access of this layout.
    template <typename T> static __device__ __forceinline__ T* at(T* p, int v, int i) {
        const int segment = v / PER_SEGMENT * SEGMENT, run = i / RUN * (SEGMENT_VECTORS * RUN);
        return p + (first_column() + Threads::thread() * RUN)
            + (segment + v % PER_SEGMENT * Threads::THREADS * RUN + run + i % RUN);
    }
    static __device__ __forceinline__ bool owns(int v) {
        return (v % PER_SEGMENT + 1) * Threads::THREADS <= SEGMENT_VECTORS || vector_in_segment(v) < SEGMENT_VECTORS;
    }
    // Most runs lie within the shortest segment for all threads; of them no column is compared.
    static __device__ __forceinline__ bool holds(int v, int i) {
        return owns(v) && ((i / RUN + 1) * (SEGMENT_VECTORS * RUN) <= LEAST || column(v, i) < D);
    }
};

// The same for a row of heads: a vector has two runs of N / 2 neighbours, as far apart as the halves of a head. Its elements
// i and i + N / 2 are a plane of a rotation by halves, and the first level of a tree over the head. So HEAD / N
// neighbouring threads have a head. Segments are whole heads.
template <typename Threads, int D, int SEGMENT, int HEAD, int N, int ACCESS>
struct HeadRowLayout : PartialRowLayout<Threads, D, SEGMENT, N, N / 2, ACCESS> {
    using Base = PartialRowLayout<Threads, D, SEGMENT, N, N / 2, ACCESS>;
    static constexpr int LANES = HEAD / N;
    static_assert(D % SEGMENT == 0 && SEGMENT % HEAD == 0 && HEAD % N == 0, "whole heads in each segment");
    static_assert(Threads::THREADS % LANES == 0, "threads have whole heads");
    static __device__ __forceinline__ int own() {  // the thread's first column
        return Base::first_column() + Threads::thread() / LANES * HEAD + Threads::thread() % LANES * Base::RUN;
    }
    static __device__ __forceinline__ constexpr int behind(int v, int i) {  // columns from there to element i of vector v
        const int vector = v / Base::PER_SEGMENT * SEGMENT + v % Base::PER_SEGMENT * Threads::THREADS * N;
        return vector + i / Base::RUN * (HEAD / 2) + i % Base::RUN;
    }
    static __device__ __forceinline__ int column(int v, int i) { return own() + behind(v, i); }
    template <typename T> static __device__ __forceinline__ T* at(T* p, int v, int i) { return p + own() + behind(v, i); }
};

// The layout of columns over the grid's first dimension: each thread has a vector of N columns, moved ACCESS at a time.
template <int D_, int THREADS, int N_, int ACCESS_> struct ColumnLayout {
    static constexpr int D = D_, N = N_, RUN = N_, ACCESS = ACCESS_, BLOCKS_PER_ROW = 1;
    static __device__ __forceinline__ int column(int, int i) {
        return (static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x)) * N + i;
    }
    template <typename T> static __device__ __forceinline__ T* at(T* p, int v, int i) { return p + column(v, i); }
    static __device__ __forceinline__ bool holds(int v, int i) { return column(v, i) < D; }
};

// The same with several row groups side by side in a block, each with the same columns.
template <typename Threads, int D_, int N_, int ACCESS_> struct GroupedColumnLayout : Threads {
    static constexpr int D = D_, N = N_, RUN = N_, ACCESS = ACCESS_;
    static __device__ __forceinline__ int column(int, int i) {
        return (static_cast<int>(blockIdx.x) * Threads::THREADS + Threads::thread()) * N + i;
    }
    template <typename T> static __device__ __forceinline__ T* at(T* p, int v, int i) { return p + column(v, i); }
    static __device__ __forceinline__ bool holds(int v, int i) { return column(v, i) < D; }
};

}  // namespace lngen

#endif
