// What the C++ header refuses with a pack that has layernorm.fwd:d=96,dtype=f32,eps=run alone; and rows that are apart.

#include <functional>

#include "arrays.hpp"
#include "lngen_kernels.hpp"

static void refused(const char *what, const std::function<void()> &call) {
    try {
        call();
        std::cout << what << ": nothing" << std::endl;
    } catch (const lngen::Error &error) {
        std::cout << what << ": " << error.status() << ' ' << error.what() << std::endl;
    }
}

int main() {
    using Layer = lngen::Normalize_Layer<float>;
    constexpr std::int64_t rows = 4, d = 96;
    begin();
    Array<float> x(2 * rows * d, 1), gamma(d, 2), beta(d, 3), y(rows * d), mean(rows), rstd(rows), dy(rows * d, 4);
    void *streams[2] = {};
    const lngen::Pack pack(0);
    lngen::Pack other = pack;  // the kernels stay loaded

    Layer norm({1, rows, d}, other), invertible({1, rows, d, 1e-12, true, false}, other);
    Layer serving({1, rows, d, 1e-12, false}, other), wider({1, rows, d + 1}, other);
    refused("null", [&] { norm.SetVar(nullptr); });
    refused("no statistics", [&] { norm.ForwardCheckpoint(rows, y, x, gamma, beta, nullptr); });
    for (Layer *one : {&norm, &invertible, &serving, &wider}) one->SetMean(mean), one->SetVar(rstd);

    const auto checkpoint = [&](Layer &of) { of.ForwardCheckpoint(rows, y, x, gamma, beta, nullptr); };
    const auto backward = [&](Layer &of) { of.Backward(rows, dy, gamma, beta, beta, streams, y, x); };
    const auto from_y = [&](Layer &of) { of.Backward(rows, dy, gamma, beta, beta, beta, streams, y, x); };
    const auto fused = [&](Layer &of) { of.BackwardFusedAdd(rows, dy, dy, gamma, beta, beta, streams, y, x); };
    const auto fused_y = [&](Layer &of) { of.BackwardFusedAdd(rows, dy, dy, gamma, beta, beta, beta, streams, y, x); };
    refused("wider", [&] { checkpoint(wider); });
    refused("serving", [&] { checkpoint(serving); });
    refused("forward", [&] { norm.Forward(rows, y, x, gamma, beta, nullptr); });
    refused("backward", [&] { backward(norm); });
    refused("backward from y", [&] { from_y(invertible); });
    refused("fused", [&] { fused(norm); });
    refused("fused from y", [&] { fused_y(invertible); });
    refused("mean and y", [&] { from_y(norm); });
    refused("no mean and x", [&] { fused(invertible); });
    refused("serving backward", [&] { backward(serving); });
    refused("no streams", [&] { norm.Backward(rows, dy, gamma, beta, beta, static_cast<void **>(nullptr), y, x); });
    std::cout << "workspace " << norm.WorkspaceBytes(rows) << " use of the mean " << norm.UseMean() << std::endl;

    const lngen::LayernormForwardEpsRun<float> apart(other, d, 1e-12);
    auto call = apart.args(rows);
    call.x = x, call.gamma = gamma, call.beta = beta, call.y = y, call.mean = mean, call.rstd = rstd;
    call.x_stride = 2 * d;
    apart(call, nullptr);
    y.print("y");
    checkpoint(norm);
    y.print("y");
}
