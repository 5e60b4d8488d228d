// A norm whose input has several readers: its gradient is the sum of the norm's and of the others', which come as one.
//
// dgamma and dbeta are of the first alone. The second of two streams may read dx as soon as its turn comes.

#include "arrays.hpp"
#include "lngen_kernels.hpp"

int main() try {
    constexpr std::int64_t rows = 5, d = 96;
    begin();
    Array<double> x(rows * d, 1), gamma(d, 2), beta(d, 3), y(rows * d), rstd(rows);
    Array<double> dy(rows * d, 4), others(rows * d, 5), dx(rows * d), dgamma(d), dbeta(d);
    void *streams[2];
    for (void *&stream : streams) driver("cuStreamCreate", &stream, 0);

    lngen::Normalize_Layer<double> norm({1, rows, d, 1e-5, true, false});
    Array<unsigned char> workspace(norm.WorkspaceBytes(rows));
    norm.SetWorkspace(workspace, norm.WorkspaceBytes(rows));
    norm.SetVar(rstd);

    norm.Forward(rows, y, x, gamma, beta, streams[0]);
    norm.BackwardFusedAdd(rows, dy, others, gamma, beta, dgamma, dbeta, streams, dx, y);

    dx.print("dx");
    dgamma.print("dgamma");
    dbeta.print("dbeta");
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
