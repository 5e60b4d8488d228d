/* Good and wrong calls of the C library, a driver that fails at each place in turn, and threads; for sanitizers. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "lngen_kernels.h"

extern _Atomic long fake_calls, fake_fails_at, fake_held;
static _Atomic int faults;

static void expect(const char *what, lngen_status wanted, lngen_status got) {
    const char *text = lngen_status_text(got);
    if (got != wanted || strlen(text) < 10 || (got != LNGEN_OK && *lngen_last_error() == 0)) {
        printf("%s: status %d, expected %d: %s %s\n", what, (int)got, (int)wanted, text, lngen_last_error());
        faults++;
    }
}

#include "calls.c"

/* After a call of the driver has failed, nothing is left, and loading works. */
static void failures(void) {
    for (long n = 1;; n++) {
        fake_fails_at = n;
        lngen_status got = lngen_load(0);
        if (fake_fails_at > 0) break; /* all calls of the driver went well */
        if (got == LNGEN_OK && n < 20) {
            printf("call %ld of the driver fails, and lngen_load does not\n", n);
            faults++;
        }
        if (got == LNGEN_OK) expect("unload", LNGEN_OK, lngen_unload(0));
        if (fake_held != 0) {
            printf("call %ld of the driver fails, and %ld handles are left\n", n, fake_held);
            faults++;
            fake_held = 0;
        }
    }
    fake_fails_at = 0;
}

static void *one_thread(void *number) {
    int device = *(int *)number % 2;
    for (int n = 0; n < 20; n++) {
        expect("load", LNGEN_OK, lngen_load(device));
        expect("supported", LNGEN_OK, lngen_supported("layernorm", 96, LNGEN_BF16, device) ? LNGEN_OK : LNGEN_NO_IMAGE);
        if (device == 0) all_groups();
    }
    return NULL;
}

static void threads(void) {
    pthread_t started[4];
    int numbers[4] = {0, 1, 2, 3};
    for (int n = 0; n < 4; n++) pthread_create(&started[n], NULL, one_thread, &numbers[n]);
    for (int n = 0; n < 4; n++) pthread_join(started[n], NULL);
}

int main(void) {
    static char long_name[1 << 16];
    memset(long_name, 'x', sizeof long_name - 1);
    for (int n = -2; n < 100; n++) faults += strlen(lngen_status_text((lngen_status)n)) < 10;
    lngen_supported(NULL, 96, LNGEN_BF16, 0);
    lngen_supported(long_name, INT64_MIN, (lngen_dtype)77, -1);
    failures();
    threads();
    expect("unload", LNGEN_OK, lngen_unload(0));
    expect("unload", LNGEN_OK, lngen_unload(1));
    if (fake_held != 0) printf("%ld handles are left\n", fake_held), faults++;
    return faults != 0;
}
