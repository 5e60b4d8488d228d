// rotary.cuh: the planes of heads, which a rotation turns (RoPE), and the tables of its angles.
//
//     float x[Row::N];  // the elements of vector v
//     turn_halves<Row, /* head */ 128, /* width */ 128>(x, v);
//
// Neighbouring lanes of a warp have the vectors of a head. Of the planes (a, b) of its first WIDTH features, an element
// gets -b in place of a, and a in place of b; elements behind them get 0.
#ifndef LNGEN_ROTARY_CUH
#define LNGEN_ROTARY_CUH

namespace lngen {

// Features j and j + WIDTH / 2 of a head are a plane. The other one is the same element of another lane's vector.
template <typename Row, int HEAD, int WIDTH, typename Real>
__device__ __forceinline__ void turn_halves(Real (&x)[Row::N], int v) {
    constexpr int AWAY = WIDTH / 2 / Row::N;
    const int place = Row::column(v, 0) % HEAD, lane = static_cast<int>(threadIdx.x) % 32;
    const bool first = place < WIDTH / 2;
    for (int i = 0; i < Row::N; ++i) {
        const Real other = __shfl_sync(0xffffffffu, x[i], first ? lane + AWAY : lane - AWAY);
        x[i] = first ? -other : WIDTH == HEAD || place < WIDTH ? other : Real(0);
    }
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
