// Inference (training = false): no statistics are written, and the number of rows differs from call to call.

#include "arrays.hpp"
#include "lngen_kernels.hpp"

template <>
struct lngen::dtype_of<bfloat16> : lngen::dtype<LNGEN_BF16> {};

int main() try {
    constexpr std::int64_t prompt = 7, d = 96;
    begin();
    Array<bfloat16> x(prompt * d, 1), gamma(d, 2), beta(d, 3), y(prompt * d), next(d);
    void *stream = nullptr;

    lngen::Normalize_Layer<bfloat16> norm({1, prompt, d, 1e-5f, false});

    norm.ForwardCheckpoint(prompt, y, x, gamma, beta, stream);  // the prompt
    y.print("y");
    norm.ForwardCheckpoint(1, next, x, gamma, beta, stream);  // a token: the bits of the prompt's first row
    next.print("y");
} catch (const std::exception &error) {
    std::cerr << error.what() << std::endl;
    return 1;
}
