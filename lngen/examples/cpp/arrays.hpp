// Arrays on a GPU for the examples, through libcuda alone: the programs need no CUDA toolkit, neither to build nor to run.
// A program of your own has cudaMalloc, or the arrays of its framework.

#ifndef LNGEN_EXAMPLES_ARRAYS_HPP
#define LNGEN_EXAMPLES_ARRAYS_HPP

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#ifndef LNGEN_CUDA_LIBRARY
#define LNGEN_CUDA_LIBRARY "libcuda.so.1"
#endif

// A type of your own for 16-bit elements, as __nv_bfloat16 is.
struct bfloat16 {
    std::uint16_t bits;
};

template <typename T>
void convert(float from, T &to) {
    to = static_cast<T>(from);
}
inline void convert(float from, bfloat16 &to) {  // exact for numbers of 8 bits
    std::uint32_t bits;
    std::memcpy(&bits, &from, sizeof bits);
    to.bits = static_cast<std::uint16_t>(bits >> 16);
}

// A function of the driver, called with these arguments.
template <typename... Given>
void driver(const char *name, Given... given) {
    static void *const library = dlopen(LNGEN_CUDA_LIBRARY, RTLD_NOW);
    void *const found = library == nullptr ? nullptr : dlsym(library, name);
    if (found == nullptr) throw std::runtime_error(LNGEN_CUDA_LIBRARY " is expected, with " + std::string(name));
    const int status = reinterpret_cast<int (*)(Given...)>(found)(given...);
    if (status != 0) throw std::runtime_error(std::string(name) + " has failed with status " + std::to_string(status));
}

// The first GPU, for the calls of this thread.
inline void begin() {
    void *context = nullptr;
    driver("cuInit", 0);
    driver("cuDevicePrimaryCtxRetain", &context, 0);
    driver("cuCtxSetCurrent", context);
}

// `count` elements on the GPU: numbers that follow from `seed`, or zeros if that is 0.
template <typename T>
class Array {
public:
    explicit Array(std::int64_t count, int seed = 0) : host_(static_cast<std::size_t>(count)) {
        std::int64_t i = 0;
        for (T &element : host_) convert(seed == 0 ? 0.0f : float((i++ * 7919 + seed * 101) % 511 - 255) / 128, element);
        driver("cuMemAlloc_v2", &address_, bytes());
        driver("cuMemcpyHtoD_v2", address_, static_cast<const void *>(host_.data()), bytes());
    }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    ~Array() { driver("cuMemFree_v2", address_); }

    operator T *() const { return reinterpret_cast<T *>(address_); }

    // A hash of the bytes (FNV-1a), after all work on the GPU. It is the same on every GPU.
    void print(const char *name) {
        driver("cuCtxSynchronize");
        driver("cuMemcpyDtoH_v2", static_cast<void *>(host_.data()), address_, bytes());
        std::uint64_t hash = 0xcbf29ce484222325;
        for (std::size_t i = 0; i < bytes(); ++i)
            hash = (hash ^ reinterpret_cast<const unsigned char *>(host_.data())[i]) * 0x100000001b3;
        std::cout << name << ' ' << std::hex << std::setw(16) << std::setfill('0') << hash << std::endl;
    }

private:
    std::size_t bytes() const { return host_.size() * sizeof(T); }

    std::vector<T> host_;
    std::uintptr_t address_ = 0;
};

#endif
