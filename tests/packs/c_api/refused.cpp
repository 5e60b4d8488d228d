// What the C++ header refuses with a pack that has layernorm.fwd:d=96,dtype=f32,eps=run alone; then rows that are apart.

#include <functional>

#include "arrays.hpp"
#include "lngen_kernels.hpp"

static void refused(const std::function<void()> &call) try {
    call();
    std::cout << "nothing is refused" << std::endl;
} catch (const lngen::Error &error) {
    std::cout << error.status() << ' ' << error.what() << std::endl;
}

int main() {
    using Layer = lngen::Normalize_Layer<float>;
    constexpr std::int64_t rows = 4, d = 96;
    begin();
    Array<float> x(2 * rows * d, 1), gamma(d, 2), beta(d, 3), y(rows * d), mean(rows), rstd(rows);
    float *const g = beta;
    void *streams[2] = {}, **none = nullptr;
    lngen::Pack pack(0), other = pack;
    pack = lngen::Pack(0);  // the kernels stay loaded

    Layer norm({1, rows, d}, pack), from_y({1, rows, d, 1e-12, true, false}, other);
    Layer serving({1, rows, d, 1e-12, false}, other), wider({1, rows, d + 1}, other);
    refused([&] { norm.SetVar(nullptr); });
    refused([&] { norm.ForwardCheckpoint(rows, y, x, gamma, beta, nullptr); });
    norm.SetMean(mean);
    norm.SetVar(rstd);

    refused([&] { norm.Forward(rows, y, x, gamma, beta, nullptr); });
    refused([&] { serving.Forward(rows, y, x, gamma, beta, nullptr); });
    refused([&] { norm.Backward(rows, x, gamma, g, g, streams, y, x); });
    refused([&] { from_y.Backward(rows, x, gamma, beta, g, g, streams, y, x); });
    refused([&] { norm.BackwardFusedAdd(rows, x, x, gamma, g, g, streams, y, x); });
    refused([&] { from_y.BackwardFusedAdd(rows, x, x, gamma, beta, g, g, streams, y, x); });

    refused([&] { wider.ForwardCheckpoint(rows, y, x, gamma, beta, nullptr); });
    refused([&] { norm.BackwardFusedAdd(rows, x, x, gamma, beta, g, g, streams, y, x); });
    refused([&] { from_y.Backward(rows, x, gamma, g, g, streams, y, x); });
    refused([&] { serving.Backward(rows, x, gamma, g, g, streams, y, x); });
    refused([&] { norm.Backward(rows, x, gamma, g, g, none, y, x); });

    const lngen::LayernormForwardEpsRun<float> apart(other, d, 1e-12);
    auto call = apart.args(rows);
    call.x = x, call.gamma = gamma, call.beta = beta, call.y = y, call.mean = mean, call.rstd = rstd;
    call.x_stride = 2 * d;
    apart(call, nullptr);
    y.print("y");
    norm.ForwardCheckpoint(rows, y, x, gamma, beta, nullptr);
    y.print("y");
    std::cout << "workspace " << norm.WorkspaceBytes(rows) << ", means " << norm.UseMean() << from_y.UseMean() << std::endl;
}
