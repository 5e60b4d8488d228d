/* A libcuda that does nothing and says yes, as a driver whose calls cost nothing. It runs no kernel and reads no image.
 *
 * fake_calls     functions called so far
 * fake_fails_at  the number of the call, from now on, that fails with fake_status; 0: none
 * fake_held      modules that are loaded, and primary contexts that are retained
 */
#include <stddef.h>
#include <stdint.h>

#ifndef CAPABILITY
#define CAPABILITY 90
#endif

_Atomic long fake_calls, fake_fails_at, fake_held;
int fake_status = 999;
static _Thread_local uintptr_t current[8];
static _Thread_local int depth;

static int called(void) {
    fake_calls++;
    return fake_fails_at > 0 && --fake_fails_at == 0;
}

#define DRIVER(name, given, done) \
    int name given { \
        if (called()) return fake_status; \
        done; \
        return 0; \
    }

static int attribute(int number) {
    switch (number) {
        case 75: return CAPABILITY / 10;
        case 76: return CAPABILITY % 10;
        case 16: return 132;
        case 97: return 227 << 10;
        default: return 1024;
    }
}

DRIVER(cuInit, (unsigned flags), (void)flags)
DRIVER(cuDriverGetVersion, (int *version), *version = 14000)
DRIVER(cuDeviceGetCount, (int *count), *count = 2)
DRIVER(cuDeviceGet, (int *device, int number), *device = number)
DRIVER(cuDeviceGetName, (char *text, int size, int device), (void)size; (void)device; text[0] = 'G'; text[1] = 0)
DRIVER(cuDeviceGetAttribute, (int *value, int number, int device), (void)device; *value = attribute(number))
DRIVER(cuDevicePrimaryCtxRetain, (uintptr_t *context, int device), *context = 4096u + (unsigned)device; fake_held++)
DRIVER(cuDevicePrimaryCtxRelease_v2, (int device), (void)device; fake_held--)
DRIVER(cuCtxGetCurrent, (uintptr_t *context), *context = current[depth])
DRIVER(cuCtxSetCurrent, (uintptr_t context), current[depth] = context)
DRIVER(cuCtxPushCurrent_v2, (uintptr_t context), current[++depth] = context)
DRIVER(cuCtxPopCurrent_v2, (uintptr_t *context), if (context) *context = current[depth]; depth--)
DRIVER(cuModuleLoadData, (uintptr_t *module, const void *image), (void)image; *module = 64; fake_held++)
DRIVER(cuModuleLoadDataEx, (uintptr_t *module, const void *image, unsigned count, int *options, void **values),
       (void)image; (void)count; (void)options; (void)values; *module = 64; fake_held++)
DRIVER(cuModuleUnload, (uintptr_t module), (void)module; fake_held--)
DRIVER(cuModuleGetFunction, (uintptr_t *function, uintptr_t module, const char *name),
       (void)module; (void)name; *function = 128)
DRIVER(cuFuncGetAttribute, (int *value, int number, uintptr_t function), (void)number; (void)function; *value = 32)
DRIVER(cuFuncSetAttribute, (uintptr_t function, int number, int value), (void)function; (void)number; (void)value)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *count, uintptr_t function, int block, size_t shared),
       (void)function; (void)block; (void)shared; *count = 32)
DRIVER(cuMemsetD8Async, (uint64_t to, unsigned char value, size_t size, void *stream),
       (void)to; (void)value; (void)size; (void)stream)
DRIVER(cuPointerGetAttribute, (void *data, int number, uint64_t pointer), (void)number; (void)pointer; *(int *)data = 0)
DRIVER(cuEventCreate, (uintptr_t *event, unsigned flags), (void)flags; *event = 256)
DRIVER(cuEventRecord, (uintptr_t event, void *stream), (void)event; (void)stream)
DRIVER(cuEventDestroy_v2, (uintptr_t event), (void)event)
DRIVER(cuStreamWaitEvent, (void *stream, uintptr_t event, unsigned flags), (void)stream; (void)event; (void)flags)
DRIVER(cuLaunchKernelEx, (const void *config, uintptr_t function, void **arguments, void **extra),
       (void)config; (void)function; (void)arguments; (void)extra)

int cuGetErrorName(int status, const char **text) {
    (void)status;
    *text = "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuGetErrorString(int status, const char **text) {
    (void)status;
    *text = "unknown error";
    return 0;
}
