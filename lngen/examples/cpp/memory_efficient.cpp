// Memory-efficient checkpointing (useMean = false): backward rebuilds the norm's rows from y, so x need not be kept.
//
// (y - beta) / gamma has to be a good xhat: y of bf16 has 8 bits, so no |beta / gamma| may be large, and no gamma 0.

#include "arrays.hpp"
#include "lngen_kernels.hpp"

template <>
struct lngen::dtype_of<bfloat16> : lngen::dtype<LNGEN_BF16> {};

int main() try {
    constexpr std::int64_t batch = 2, sequence = 3, rows = batch * sequence, d = 96;
    begin();
    Array<bfloat16> x(rows * d, 1), gamma(d, 2), beta(d), y(rows * d);
    Array<bfloat16> dy(rows * d, 3), dx(rows * d), dgamma(d), dbeta(d);
    Array<float> rstd(rows);
    void *stream = nullptr, *streams[2] = {stream, stream};

    lngen::Normalize_Layer<bfloat16> norm({batch, sequence, d, 1e-5f, true, false});
    Array<unsigned char> workspace(norm.WorkspaceBytes(rows));
    norm.SetWorkspace(workspace, norm.WorkspaceBytes(rows));
    norm.SetVar(rstd);

    norm.Forward(rows, y, x, gamma, beta, stream);
    // From here on the memory of x is free; y is kept by the layer that reads it anyway.
    norm.Backward(rows, dy, gamma, beta, dgamma, dbeta, streams, dx, y);

    y.print("y");
    dx.print("dx");
    dgamma.print("dgamma");
    dbeta.print("dbeta");
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
