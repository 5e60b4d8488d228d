// A pre-LN block: the norm of the residual stream x goes into a sublayer, whose result is added to x.
//
// x has two gradients: dh from the stream, and the norm's, which follows from dy. BackwardFusedAdd adds them in its
// one pass over memory.

#include "arrays.hpp"
#include "lngen_kernels.hpp"

int main() try {
    constexpr std::int64_t batch = 2, sequence = 3, rows = batch * sequence, d = 96;
    begin();
    Array<float> x(rows * d, 1), gamma(d, 2), beta(d, 3), y(rows * d), mean(rows), rstd(rows);
    Array<float> dy(rows * d, 4), dh(rows * d, 5), dx(rows * d), dgamma(d), dbeta(d);
    void *stream = nullptr, *streams[2] = {stream, stream};

    lngen::Normalize_Layer<float> norm({batch, sequence, d, 1e-5f});
    Array<unsigned char> workspace(norm.WorkspaceBytes(rows));
    norm.SetWorkspace(workspace, norm.WorkspaceBytes(rows));
    norm.SetMean(mean);
    norm.SetVar(rstd);

    norm.ForwardCheckpoint(rows, y, x, gamma, beta, stream, true);
    // The sublayer comes here: h = x + sublayer(y), and its backward gives dy from dh.
    norm.BackwardFusedAdd(rows, dy, dh, gamma, dgamma, dbeta, streams, dx, x);

    y.print("y");
    dx.print("dx");
    dgamma.print("dgamma");
    dbeta.print("dbeta");
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
