// rotary.cuh: the planes of heads, which a rotation turns (RoPE), and the tables of its angles.
//
//     float x[Row::N];  // the elements of vector v
//     turn_halves<Row, /* head */ 128, /* width */ 128>(x, v);
//
// Neighbouring lanes of a warp have the vectors of a head. Of the planes (a, b) of its first WIDTH features, an element
// gets -b in place of a, and a in place of b; elements behind them get 0. Where threads of several warps have a head,
// its elements meet in shared memory:
//
//     auto& elements = *reinterpret_cast<Elements<Row, float>*>(ring);
//     share_elements<Row>(elements, v, x);  // in a loop: vector v, x
//     row_barrier<Row>();
//     turn_met_halves<Row, /* head */ 80, /* width */ 80>(x, elements, v);
#ifndef LNGEN_ROTARY_CUH
#define LNGEN_ROTARY_CUH

#include "lngen/vector.cuh"

namespace lngen {

// Features j and j + WIDTH / 2 of a head are a plane. The other one is the same element of another lane's vector.
template <typename Row, int HEAD, int WIDTH, typename Real>
__device__ __forceinline__ void turn_halves(Real (&x)[Row::N], int v) {
    if constexpr (Row::RUN < Row::N) {  // HeadRowLayout
        static_assert(WIDTH == HEAD, "a thread has both elements of a plane");
        for (int i = 0; i < Row::RUN; ++i) {
            const Real first = x[i];
            x[i] = -x[i + Row::RUN];
            x[i + Row::RUN] = first;
        }
        return;
    }
    constexpr int AWAY = WIDTH / 2 / Row::N;
    const int place = Row::column(v, 0) % HEAD, lane = static_cast<int>(threadIdx.x) % 32;
    const bool first = place < WIDTH / 2;
    for (int i = 0; i < Row::N; ++i) {
        const Real other = __shfl_sync(0xffffffffu, x[i], first ? lane + AWAY : lane - AWAY);
        x[i] = first ? -other : WIDTH == HEAD || place < WIDTH ? other : Real(0);
    }
}

// The elements of the rows of a block, and the place of vector v among them.
template <typename Row, typename Real> struct Elements {
    Real of[Row::ROWS][Row::BLOCK_COLUMNS];
    __device__ __forceinline__ Real* at(int v) { return of[Row::group()] + (Row::column(v, 0) - Row::first_column()); }
};

// Shares the elements of vector v with the threads of the row.
template <typename Row, typename Real>
__device__ __forceinline__ void share_elements(Elements<Row, Real>& elements, int v, const Real (&x)[Row::N]) {
    if (Row::holds(v, 0)) write<PlainStore, Row::N>(elements.at(v), x);
}

// The same planes as of turn_halves, of elements that have met.
template <typename Row, int HEAD, int WIDTH, typename Real>
__device__ __forceinline__ void turn_met_halves(Real (&x)[Row::N], Elements<Row, Real>& elements, int v) {
    constexpr int AWAY = WIDTH / 2;
    const int place = Row::column(v, 0) % HEAD;
    const bool first = place < AWAY, turns = Row::holds(v, 0) && (WIDTH == HEAD || place < WIDTH);
    Access<Real, Row::N> other = {};
    if (turns) other.read(elements.at(v) + (first ? AWAY : -AWAY), PlainLoad{});
    for (int i = 0; i < Row::N; ++i) x[i] = first ? -other[i] : other[i];
}

// Features 2 * j and 2 * j + 1 of a head are a plane.
template <typename Row, int HEAD, int WIDTH, typename Real>
__device__ __forceinline__ void turn_pairs(Real (&x)[Row::N], int v) {
    for (int i = 0; i < Row::N; i += 2) {
        const bool turns = WIDTH == HEAD || Row::column(v, i) % HEAD < WIDTH;
        const Real first = x[i];
        x[i] = turns ? -x[i + 1] : Real(0);
        x[i + 1] = turns ? first : Real(0);
    }
}

// Where the row of a table begins that an index names, stride elements from one to the next.
template <typename T> __device__ __forceinline__ const T* row_of_table(const T* p, long long row, long long stride) {
    return p + row * stride;
}

}  // namespace lngen

#endif
