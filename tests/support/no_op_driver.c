/* A libcuda that does nothing and says yes: an H100 whose driver takes no time, runs no kernel and reads no image.
 *
 * fake_calls     functions called so far
 * fake_fails_at  the number of the call, from now on, that fails; 0: none. cuCtxPopCurrent and cuGetErrorName never do
 * fake_held      modules that are loaded, and primary contexts that are retained
 * fake_launch    is given every launch, if it is set; a function is the hash of its name (FNV-1a)
 * fake_memset    is given every place that is set to zero, and its size, if it is set
 */
#include <stddef.h>
#include <stdint.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-value"

_Atomic long fake_calls, fake_fails_at, fake_held;
void (*fake_launch)(const void *config, uintptr_t function, void **arguments);
void (*fake_memset)(uint64_t to, size_t size);
static _Thread_local uintptr_t current[8];
static _Thread_local int depth;

static int fails(void) { return fake_calls++, fake_fails_at > 0 && --fake_fails_at == 0; }

#define DRIVER(name, parameters, done) int name parameters { return fails() ? 999 : (done, 0); }

static int attribute(int number) { return number == 75 ? 9 : number == 76 ? 0 : number == 16 ? 132 : 227 << 10; }

static uintptr_t hash(const char *name)
{
    uint64_t found = 0xcbf29ce484222325;
    for (; *name; name++) found = (found ^ (unsigned char)*name) * 0x100000001b3;
    return found;
}

DRIVER(cuInit, (unsigned flags), 0)
DRIVER(cuDriverGetVersion, (int *version), *version = 14000)
DRIVER(cuDeviceGetCount, (int *count), *count = 2)
DRIVER(cuDeviceGet, (int *device, int number), *device = number)
DRIVER(cuDeviceGetName, (char *name, int size, int device), *name = 0)
DRIVER(cuDeviceGetAttribute, (int *value, int number, int device), *value = attribute(number))
DRIVER(cuDevicePrimaryCtxRetain, (uintptr_t *context, int device), (*context = 4096u + (unsigned)device, fake_held++))
DRIVER(cuDevicePrimaryCtxRelease_v2, (int device), fake_held--)
DRIVER(cuCtxGetCurrent, (uintptr_t *context), *context = current[depth])
DRIVER(cuCtxSetCurrent, (uintptr_t context), current[depth] = context)
DRIVER(cuCtxPushCurrent_v2, (uintptr_t context), current[++depth] = context)
DRIVER(cuModuleLoadDataEx, (uintptr_t *made, const void *image, unsigned n, int *options, void **values),
       (*made = 64, fake_held++))
DRIVER(cuModuleUnload, (uintptr_t module), fake_held--)
DRIVER(cuModuleGetFunction, (uintptr_t *function, uintptr_t module, const char *name), *function = hash(name))
DRIVER(cuFuncGetAttribute, (int *value, int number, uintptr_t function), *value = 0)
DRIVER(cuFuncSetAttribute, (uintptr_t function, int number, int value), 0)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *n, uintptr_t function, int block, size_t shared), *n = 32)
DRIVER(cuMemsetD8Async, (uint64_t to, unsigned char value, size_t size, void *stream),
       fake_memset ? fake_memset(to, size) : (void)0)
DRIVER(cuPointerGetAttribute, (int *value, int number, uint64_t pointer), *value = current[depth] == 4097)
DRIVER(cuEventCreate, (uintptr_t *event, unsigned flags), *event = 256)
DRIVER(cuEventRecord, (uintptr_t event, void *stream), 0)
DRIVER(cuEventDestroy_v2, (uintptr_t event), 0)
DRIVER(cuStreamWaitEvent, (void *stream, uintptr_t event, unsigned flags), 0)
DRIVER(cuStreamGetCaptureInfo_v2, (void *stream, int *state, uint64_t *n, void *graph, void *nodes, void *count),
       *state = 0)
DRIVER(cuLaunchKernelEx, (const void *config, uintptr_t function, void **arguments, void **extra),
       fake_launch ? fake_launch(config, function, arguments) : (void)0)

int cuCtxPopCurrent_v2(uintptr_t *context) { return fake_calls++, *context = current[depth--], 0; }

int cuGetErrorName(int status, const char **text) { return *text = "CUDA_ERROR_UNKNOWN", 0; }
