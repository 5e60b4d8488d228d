// row_place.cuh: where a row lies if rows lie at two distances.
//
//     const RowPlace place(row, inner);  // one division for a row, whatever the number of its tensors
//     const T* x_row = row_of(x, place, x_outer, x_stride);
//
// Row r begins (r / inner) * outer + (r % inner) * stride elements after row 0: `inner` rows are `stride` apart, then
// the next `inner` rows begin `outer` after these. So the heads of q in a packed projection [tokens, 3 * heads * D] are
// rows: inner is the number of heads, stride is D, and outer is 3 * heads * D.
#ifndef LNGEN_ROW_PLACE_CUH
#define LNGEN_ROW_PLACE_CUH

namespace lngen {

// The quotient and the remainder of a row and the number of inner rows; both are positive or 0. The compiler itself
// divides by 32 bits where both numbers have no more.
struct RowPlace {
    const long long quotient, remainder;
    __device__ __forceinline__ RowPlace(long long row, long long inner) : RowPlace(row, inner, row / inner) {}
    __device__ __forceinline__ RowPlace(long long row, long long inner, long long quotient)
        : quotient(quotient), remainder(row - quotient * inner) {}
};

// The address of a row; distances are in elements.
template <typename T>
__device__ __forceinline__ T* row_of(T* row_0, const RowPlace& place, long long outer, long long stride) {
    return row_0 + place.quotient * outer + place.remainder * stride;
}

}  // namespace lngen

#endif
