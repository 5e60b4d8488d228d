// A post-LN block: y is the norm of the sum h of the residual and a sublayer's result x.
//
// One kernel adds and normalises, where DeepSpeed launches two. The gradient dx is that of both terms.

#include "arrays.hpp"
#include "lngen_kernels.hpp"

int main() try {
    constexpr std::int64_t batch = 2, sequence = 3, rows = batch * sequence, d = 96;
    begin();
    Array<float> x(rows * d, 1), residual(rows * d, 2), gamma(d, 3), beta(d, 4), h(rows * d), y(rows * d);
    Array<float> mean(rows), rstd(rows), dy(rows * d, 5), dx(rows * d), dgamma(d), dbeta(d);
    void *stream = nullptr, *streams[2] = {stream, stream};

    const lngen::Pack pack(0);
    const lngen::AddLayernormForwardEpsRun<float> add(pack, d, 1e-5);
    lngen::Normalize_Layer<float> norm({batch, sequence, d, 1e-5f}, pack);
    Array<unsigned char> workspace(norm.WorkspaceBytes(rows));
    norm.SetWorkspace(workspace, norm.WorkspaceBytes(rows));
    norm.SetMean(mean);
    norm.SetVar(rstd);

    add(rows, x, residual, gamma, beta, y, h, mean, rstd, stream);
    norm.Backward(rows, dy, gamma, dgamma, dbeta, streams, dx, h);

    y.print("y");
    h.print("h");
    dx.print("dx");
    dgamma.print("dgamma");
    dbeta.print("dbeta");
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
