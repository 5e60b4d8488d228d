/* The time of a launch through the C library beyond that of the driver's calls in it, with a driver that does nothing. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "lngen_kernels.h"

#define CALLS 1000000
#define RUNS 7

extern int cuDevicePrimaryCtxRetain(void **context, int device);
extern int cuCtxGetCurrent(void **context);
extern int cuCtxSetCurrent(void *context);
extern int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer);
extern int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra);

static lngen_layernorm_forward_args forward;
static lngen_layernorm_backward_args backward;
static int kernels, pointers; /* of a call */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static void check(lngen_status status) {
    if (status != LNGEN_OK) {
        fprintf(stderr, "%s %s\n", lngen_status_text(status), lngen_last_error());
        exit(1);
    }
}

static void through_forward(void) { check(lngen_layernorm_forward(&forward, 0, NULL)); }

static void through_backward(void) { check(lngen_layernorm_backward(&backward, 0, NULL)); }

static void direct(void) {
    void *context;
    int device;
    cuCtxGetCurrent(&context);
    for (int n = 0; n < pointers; n++) cuPointerGetAttribute(&device, 9, 4096);
    for (int n = 0; n < kernels; n++) cuLaunchKernelEx(&context, context, NULL, NULL);
}

/* Nanoseconds of a call: the fastest of some runs, which other work has disturbed least. */
static double fastest(void (*call)(void)) {
    double least = 1e30;
    for (int run = 0; run < RUNS; run++) {
        double start = now();
        for (int n = 0; n < CALLS; n++) call();
        double took = (now() - start) / CALLS;
        if (took < least) least = took;
    }
    return least;
}

static void report(const char *name, int of_kernels, int of_pointers, void (*call)(void)) {
#ifdef LNGEN_TRUST_POINTERS
    of_pointers = 0;
#endif
    kernels = of_kernels, pointers = of_pointers;
    double own = fastest(direct), all = fastest(call);
    printf("%-8s %8d %9d %6.0f %7.0f %7.0f\n", name, kernels, pointers, all, own, all - own);
}

/* An address of its own, behind which nothing is: the driver does not look. */
static void *place(void) {
    static uintptr_t next = 1 << 28;
    return (void *)(next += 1 << 28);
}

int main(void) {
    check(lngen_load(0));
    void *context;
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    forward.d = backward.d = D;
    forward.dtype = backward.dtype = LNGEN_BF16;
    forward.rows = backward.rows = 4096;
    forward.x = place(), forward.gamma = place(), forward.beta = place(), forward.y = place();
    forward.mean = place(), forward.rstd = place();
    backward.dy = place(), backward.x = place(), backward.gamma = place(), backward.mean = place();
    backward.rstd = place(), backward.dx = place(), backward.dgamma = place(), backward.dbeta = place();
    backward.workspace = place();
    check(lngen_layernorm_backward_workspace_bytes(&backward, 0, &backward.workspace_bytes));
    printf("call      kernels  pointers   call  driver  beyond\n");
    report("forward", 1, 6, through_forward);
    report("backward", 2, 9, through_backward);
    return 0;
}
