/* The time of a launch through the C library beyond that of the driver's calls in it, with a driver that does nothing. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lngen_kernels.h"

#define CALLS 1000000
#define RUNS 7

extern int cuCtxGetCurrent(void **context);
extern int cuCtxSetCurrent(void *context);
extern int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra);

static _Alignas(256) char memory[1 << 22];
static lngen_layernorm_forward_args forward;
static lngen_layernorm_backward_args backward;
static int kernels;

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
    cuCtxGetCurrent(&context);
    for (int k = 0; k < kernels; k++) cuLaunchKernelEx(memory, memory, NULL, NULL);
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

static void report(const char *name, int many, void (*call)(void)) {
    kernels = many;
    double own = fastest(direct), all = fastest(call);
    printf("%-8s  %7d  %7.0f  %12.0f  %9.0f\n", name, many, all, own, all - own);
}

int main(void) {
    check(lngen_load(0));
    void *context = (void *)4096;
    cuCtxSetCurrent(context);
    forward.d = backward.d = D;
    forward.dtype = backward.dtype = LNGEN_BF16;
    forward.rows = backward.rows = 4096;
    forward.x = forward.gamma = forward.beta = forward.y = memory;
    forward.mean = forward.rstd = (void *)memory;
    backward.dy = backward.x = backward.gamma = backward.dx = backward.dgamma = backward.dbeta = memory;
    backward.mean = backward.rstd = (void *)memory;
    check(lngen_layernorm_backward_workspace_bytes(&backward, 0, &backward.workspace_bytes));
    backward.workspace = aligned_alloc(256, backward.workspace_bytes);
    printf("call      kernels  ns/call  ns of driver  ns beyond\n");
    report("forward", 1, through_forward);
    report("backward", 2, through_backward);
    free(backward.workspace);
    return 0;
}
