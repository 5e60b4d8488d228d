/* The time of a launch through the C library beyond that of its calls of the driver, which does nothing. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "lngen_kernels.h"

#define CALLS 1000000
#define RUNS 7
#define D 1024

extern _Atomic long fake_calls;
extern int cuDevicePrimaryCtxRetain(void **context, int device);
extern int cuCtxPushCurrent_v2(void *context);
extern int cuCtxGetCurrent(void **context);

static lngen_layernorm_forward_args forward;
static lngen_layernorm_backward_args backward;

static void check(lngen_status status) {
    if (status != LNGEN_OK) exit((fprintf(stderr, "%s %s\n", lngen_status_text(status), lngen_last_error()), 1));
}

static void call_forward(void) { check(lngen_layernorm_forward(&forward, 0, NULL)); }

static void call_backward(void) { check(lngen_layernorm_backward(&backward, 0, NULL)); }

static void call_driver(void) {
    void *context;
    cuCtxGetCurrent(&context);
}

/* Nanoseconds of a call: those of the fastest of some runs, which other work has disturbed least. */
static double fastest(void (*call)(void)) {
    double least = 1e30;
    for (int run = 0; run < RUNS; run++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int n = 0; n < CALLS; n++) call();
        clock_gettime(CLOCK_MONOTONIC, &end);
        double took = (1e9 * (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec)) / CALLS;
        least = took < least ? took : least;
    }
    return least;
}

static void report(const char *name, void (*call)(void)) {
    long before = fake_calls;
    call();
    long calls = fake_calls - before;
    double all = fastest(call), own = (double)calls * fastest(call_driver);
    printf("%-8s %14ld %6.0f %7.0f %7.0f\n", name, calls, all, own, all - own);
}

/* An address of its own, behind which nothing is: the driver does not look. */
static void *place(void) {
    static uintptr_t next;
    return (void *)(next += 1 << 28);
}

int main(void) {
    void *context;
    check(lngen_load(0));
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxPushCurrent_v2(context);
    forward = (lngen_layernorm_forward_args){
        .d = D, .dtype = LNGEN_BF16, .rows = 4096, .x = place(), .gamma = place(), .beta = place(), .y = place(),
        .mean = place(), .rstd = place(),
    };
    backward = (lngen_layernorm_backward_args){
        .d = D, .dtype = LNGEN_BF16, .rows = 4096, .dy = place(), .x = place(), .gamma = place(), .mean = place(),
        .rstd = place(), .dx = place(), .dgamma = place(), .dbeta = place(), .workspace = place(),
    };
    check(lngen_layernorm_backward_workspace_bytes(&backward, 0, &backward.workspace_bytes));
    printf("call     driver's calls    all  driver  beyond\n");
    report("forward", call_forward);
    report("backward", call_backward);
    return 0;
}
