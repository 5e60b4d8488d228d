// vector.cuh: vectors of a thread, and the policies by which memory is read and written.
//
//     const auto x = load<Row, ReadOnlyLoad>(x_ptr, v);  // Vec<bf16, Row::N>, zeros past the end of the row
//     store<Row, PlainStore>(y_ptr, v, y);               // nothing past the end of the row
//
// A policy reads or writes one word of 1 to 16 bytes: ld.global, ld.global.nc, st.global and their cache hints in PTX,
// what cub::CacheModifiedInputIterator is in CUB. A row layout (row_layout.cuh) says where the elements of a vector
// lie.
#ifndef LNGEN_VECTOR_CUH
#define LNGEN_VECTOR_CUH

#include "lngen/numeric.cuh"

namespace lngen {

template <int BYTES> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Consecutive elements that are moved at once, in words of up to 16 bytes.
template <typename T, int COUNT> union Access {
    using word = typename Word<(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16)>::type;
    static constexpr int WORDS = COUNT * sizeof(T) / sizeof(word);
    T items[COUNT];
    word words[WORDS];
    template <typename Path> __device__ __forceinline__ void read(const T* p, Path) {
        for (int w = 0; w < WORDS; ++w) words[w] = Path::read(reinterpret_cast<const word*>(p) + w);
    }
    template <typename Path> __device__ __forceinline__ void write(T* p, Path) const {
        for (int w = 0; w < WORDS; ++w) Path::write(reinterpret_cast<word*>(p) + w, words[w]);
    }
    // A shift extracts half a word, because the compiler merges it with the following conversion.
    __device__ __forceinline__ T operator[](int i) const {
        if constexpr (sizeof(T) == 2 && COUNT > 1)
            return T{static_cast<unsigned short>(reinterpret_cast<const unsigned*>(words)[i / 2] >> i % 2 * 16)};
        else
            return items[i];
    }
};

// The vector of a thread: N elements in registers.
template <typename T, int N> struct Vec {
    T items[N];
    __device__ __forceinline__ T operator[](int i) const { return items[i]; }
    __device__ __forceinline__ T& operator[](int i) { return items[i]; }
};

// What load policies have in common. KEEP_WHOLE: the address comes from Row::at, so that the compiler cannot split one
// wide load into narrow ones. Row::at takes more registers than Row::column. The asm of an UnmovedLoad is whole anyway.
struct Load {
    static constexpr bool KEEP_WHOLE = false;
};

// Reads shared memory, or global memory as the compiler chooses.
struct PlainLoad : Load {
    template <typename W> static __device__ __forceinline__ W read(const W* p) { return *p; }
};

// Reads rows, which a result may overwrite in place: a thread reads an element before it writes that element, never
// reads it again, and no other thread reads it.
struct RowLoad : Load {
    static constexpr bool KEEP_WHOLE = true;
    template <typename W> static __device__ __forceinline__ W read(const W* p) { return *p; }
};

// Reads what no kernel of the launch writes, through the read-only path (ld.global.nc).
struct ReadOnlyLoad : Load {
    static constexpr bool KEEP_WHOLE = true;
    template <typename W> static __device__ __forceinline__ W read(const W* p) { return __ldg(p); }
};

// UnmovedLoad: reads 16, 8, 4, 2 or 1 bytes where the statement stands. The compiler moves other loads past barriers, next
// to their use.
struct UnmovedLoad16 : Load {
    static __device__ __forceinline__ uint4 read(const uint4* p) {
        uint4 w;
        asm volatile("ld.global.v4.u32 { %0, %1, %2, %3 }, [%4];"
            : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(__cvta_generic_to_global(p)) : "memory");
        return w;
    }
};

struct UnmovedLoad8 : Load {
    static __device__ __forceinline__ uint2 read(const uint2* p) {
        uint2 w;
        asm volatile("ld.global.v2.u32 { %0, %1 }, [%2];"
            : "=r"(w.x), "=r"(w.y) : "l"(__cvta_generic_to_global(p)) : "memory");
        return w;
    }
};

struct UnmovedLoad4 : Load {
    static __device__ __forceinline__ unsigned read(const unsigned* p) {
        unsigned w;
        asm volatile("ld.global.u32 %0, [%1];"
            : "=r"(w) : "l"(__cvta_generic_to_global(p)) : "memory");
        return w;
    }
};

struct UnmovedLoad2 : Load {
    static __device__ __forceinline__ unsigned short read(const unsigned short* p) {
        unsigned short w;
        asm volatile("ld.global.u16 %0, [%1];"
            : "=h"(w) : "l"(__cvta_generic_to_global(p)) : "memory");
        return w;
    }
};

struct UnmovedLoad1 : Load {
    static __device__ __forceinline__ unsigned char read(const unsigned char* p) {
        unsigned w;
        asm volatile("ld.global.u8 %0, [%1];"
            : "=r"(w) : "l"(__cvta_generic_to_global(p)) : "memory");
        return static_cast<unsigned char>(w);
    }
};

// Loads a per-row input (mean, rstd).
template <typename Path, typename T> __device__ __forceinline__ T load_scalar(const T* p) {
    Access<T, 1> scalar;
    scalar.read(p, Path{});
    return scalar[0];
}

// Loads vector v of the row that starts at p, with zeros past the end of the row. Where a cluster shares a row, its
// address contains the rank, and the compiler may split any access: Row::at prevents it.
template <typename Row, typename Path, typename T> __device__ __forceinline__ Vec<T, Row::N> load(const T* p, int v) {
    Vec<T, Row::N> vector;
    for (int j = 0; j < Row::N; j += Row::ACCESS) {
        Access<T, Row::ACCESS> access = {};
        if (Row::holds(v, j)) {
            const bool whole = Path::KEEP_WHOLE || Row::BLOCKS_PER_ROW > 1;
            access.read(whole ? Row::at(p, v, j) : p + Row::column(v, j), Path{});
        }
        for (int i = 0; i < Row::ACCESS; ++i) vector[j + i] = access[i];
    }
    return vector;
}

// Loads all vectors of the row that starts at p.
template <typename Row, typename Path, typename T>
__device__ __forceinline__ void load_row(Vec<T, Row::N> (&row)[Row::VECTORS], const T* p) {
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) row[v] = load<Row, Path>(p, v);
}

// Writes as the compiler chooses.
struct PlainStore {
    template <typename W> static __device__ __forceinline__ void write(W* p, W w) { *p = w; }
};

// Writes 16 bytes of global memory by one instruction. Where a cluster shares a row, the compiler would make four of
// it.
struct GlobalStore {
    template <typename W> static __device__ __forceinline__ void write(W* p, W w) { *p = w; }
    static __device__ __forceinline__ void write(uint4* p, uint4 w) {
        asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4 };"
            :: "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
    }
};

// EvictLastStore: writes 16, 8 or 4 bytes to a line that L2 evicts last. The next kernel reads it, and rows would
// otherwise evict it.
struct EvictLastStore16 {
    static __device__ __forceinline__ void write(uint4* p, uint4 w) {
#if __CUDA_ARCH__ >= 800
        asm volatile("{ .reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy;\n"
            "st.global.L2::cache_hint.v4.u32 [%0], { %1, %2, %3, %4 }, policy; }"
            :: "l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
#else
        *p = w;
#endif
    }
};

struct EvictLastStore8 {
    static __device__ __forceinline__ void write(uint2* p, uint2 w) {
#if __CUDA_ARCH__ >= 800
        asm volatile("{ .reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy;\n"
            "st.global.L2::cache_hint.v2.u32 [%0], { %1, %2 }, policy; }" :: "l"(p), "r"(w.x), "r"(w.y) : "memory");
#else
        *p = w;
#endif
    }
};

struct EvictLastStore4 {
    static __device__ __forceinline__ void write(unsigned* p, unsigned w) {
#if __CUDA_ARCH__ >= 800
        asm volatile("{ .reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy;\n"
            "st.global.L2::cache_hint.u32 [%0], %1, policy; }" :: "l"(p), "r"(w) : "memory");
#else
        *p = w;
#endif
    }
};

// Stores COUNT consecutive elements at p.
template <typename Path, int COUNT, typename T> __device__ __forceinline__ void write(T* p, const T* items) {
    Access<T, COUNT> access;
    for (int i = 0; i < COUNT; ++i) access.items[i] = items[i];
    access.write(p, Path{});
}

// Stores vector v of the row that starts at p, without elements past the end of the row.
template <typename Row, typename Path, typename T>
__device__ __forceinline__ void store(T* p, int v, const Vec<T, Row::N>& vector) {
    for (int j = 0; j < Row::N; j += Row::ACCESS) {
        if (Row::holds(v, j)) {
            T* to = Row::BLOCKS_PER_ROW > 1 ? Row::at(p, v, j) : p + Row::column(v, j);
            write<Path, Row::ACCESS>(to, vector.items + j);
        }
    }
}

// Stores a number for the block of FEATURES neighbouring columns that vector v begins, if it begins one.
template <typename Row, int FEATURES, typename T>
__device__ __forceinline__ void store_block(T* p, int v, T number) {
    const int column = Row::column(v, 0);
    if (Row::holds(v, 0) && column % FEATURES == 0) p[column / FEATURES] = number;
}

// The same into a matrix of columns, stride elements apart. The last row has up to three zeros behind it, so that padded
// numbers are written.
template <typename Row, int FEATURES, typename T>
__device__ __forceinline__ void store_block_by_columns(
    T* p, long long stride, long long row, long long rows, long long padded, int v, T number) {
    const int column = Row::column(v, 0);
    if (!Row::holds(v, 0) || column % FEATURES != 0) return;
    T* numbers = p + column / FEATURES * stride;
    numbers[row] = number;
    #pragma unroll
    for (int i = 1; i < 4; ++i) {
        if (row == rows - 1 && row + i < padded) numbers[row + i] = T(0);
    }
}

// Prefetches elements into L2, a line of 128 bytes per thread. A prefetch may precede the wait for the previous
// kernel: that kernel's stores reach L2, where the loads after the wait find them.
template <typename Row, typename T> __device__ __forceinline__ void prefetch_l2(const T* p, int count) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / static_cast<int>(sizeof(T));
    #pragma unroll 1
    for (int i = Row::thread() * LINE; i < count; i += Row::THREADS * LINE) {
        asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(p + i)));
    }
#endif
}

// Keeps 16-bit elements two to a register. The compiler would otherwise widen cached weights once, before the row loop,
// and run out of registers; it cannot move the results of an asm statement out of the loop.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> packed(Vec<T, N> vector) {
    union { T items[N]; unsigned words[N * sizeof(T) / 4]; } u;
    for (int i = 0; i < N; ++i) u.items[i] = vector[i];
    for (unsigned& word : u.words) asm volatile("" : "+r"(word));
    for (int i = 0; i < N; ++i) vector[i] = T{static_cast<unsigned short>(u.words[i / 2] >> i % 2 * 16)};
    return vector;
}

// Widens f16 elements to floats, once before the row loop; the compiler would otherwise widen them in every row.
template <int N> __device__ __forceinline__ Vec<float, N> widened(const Vec<f16, N>& vector) {
    Vec<float, N> wide;
    for (int i = 0; i < N; ++i) wide[i] = materialised(f32_from_f16(vector[i]));
    return wide;
}

// Widens all vectors of a row.
template <typename Row>
__device__ __forceinline__ void widen_row(
    Vec<float, Row::N> (&wide)[Row::VECTORS], const Vec<f16, Row::N> (&row)[Row::VECTORS]) {
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) wide[v] = widened(row[v]);
}

// The element at an index of a row of D elements; 0 where that is outside the row, and without a row.
template <int D, typename T> __device__ __forceinline__ T taken(const T* row, long long index, bool has_row) {
    return has_row && index >= 0 && index < D ? row[index] : T{};
}

// COLUMNS columns that repeat along a row, such as the weights of a head for every head, from p on: an element for EACH
// neighbours. The columns are whole vectors.
template <int COLUMNS, int EACH, typename T> struct Repeated { const T* p; };

template <int COLUMNS, int EACH = 1, typename T>
__device__ __forceinline__ Repeated<COLUMNS, EACH, T> repeated(const T* p) { return {p}; }

template <typename Row, typename Path, int COLUMNS, int EACH, typename T>
__device__ __forceinline__ Vec<T, Row::N> load(Repeated<COLUMNS, EACH, T> columns, int v) {
    constexpr int COUNT = Row::ACCESS < EACH ? 1 : Row::ACCESS / EACH;
    Vec<T, Row::N> vector;
    for (int j = 0; j < Row::N; j += COUNT * EACH) {
        Access<T, COUNT> access = {};
        if (Row::holds(v, j)) access.read(columns.p + static_cast<unsigned>(Row::column(v, j)) % COLUMNS / EACH, Path{});
        for (int i = 0; i < COUNT * EACH; ++i) vector[j + i] = access[i / EACH];
    }
    return vector;
}

// Loads all vectors; where those of a thread are the same columns, one of them stays in registers.
template <typename Row, typename Path, int COLUMNS, int EACH, typename T>
__device__ __forceinline__ void load_row(Vec<T, Row::N> (&row)[Row::VECTORS], Repeated<COLUMNS, EACH, T> columns) {
    constexpr bool ALIKE = Row::THREADS * Row::N % COLUMNS == 0 && Row::SEGMENT % COLUMNS == 0;
    #pragma unroll
    for (int v = 0; v < Row::VECTORS; ++v) row[v] = ALIKE && v > 0 ? row[0] : load<Row, Path>(columns, v);
}

}  // namespace lngen

#endif
