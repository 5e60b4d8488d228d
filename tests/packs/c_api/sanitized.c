/* Good and wrong calls of the C library, a driver that fails at each place in turn, and threads; for sanitizers. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "lngen_kernels.h"

extern _Atomic long fake_fails_at, fake_held;
static _Atomic int faults;
static int alone = 1;

static void fault(const char *what, long number) {
    printf("%s: %ld; %s\n", what, number, lngen_last_error());
    faults++;
}

static void expect(const char *what, lngen_status wanted, lngen_status got) {
    if (got != wanted || (got != LNGEN_OK && *lngen_last_error() == 0)) fault(what, got);
}

/* A call while each of its calls of the driver fails in turn. It fails, too, but for `unharmed` of them. */
#define EACH_FAILS(what, call, unharmed) \
    for (long n = 1, fine = 0; alone; n++) { \
        fake_fails_at = n; \
        fine += (call) == LNGEN_OK; \
        if (fake_fails_at > 0) { \
            if (fine != (unharmed) + 1) fault(what, fine); \
            break; \
        } \
    } \
    fake_fails_at = 0;

#define WRONG(field, value, status) \
    a = good; \
    a.field = value; \
    expect(#field ": " #value, LNGEN_##status, call(&a, device, NULL));

#define GROUP(name, fields, wrong) \
    static void try_##name(int device) { \
        lngen_##name##_args good = {0}, a; \
        lngen_status (*call)(const lngen_##name##_args *, int, void *) = lngen_##name; \
        size_t bytes = 0; \
        fields \
        expect(#name, LNGEN_OK, lngen_##name##_workspace_bytes(&good, device, &bytes)); \
        good.workspace_bytes = bytes; \
        expect(#name, LNGEN_OK, lngen_##name##_init_workspace(&good, device, NULL)); \
        expect(#name, LNGEN_OK, call(&good, device, NULL)); \
        EACH_FAILS(#name, call(&good, device, NULL), 1) /* cuCtxGetCurrent */ \
        expect(#name, LNGEN_NULL_POINTER, call(NULL, device, NULL)); \
        expect(#name, LNGEN_NULL_POINTER, lngen_##name##_workspace_bytes(&good, device, NULL)); \
        wrong \
        if (bytes) { \
            WRONG(workspace, NULL, NULL_POINTER) \
            WRONG(workspace, (void *)(UINTPTR_MAX - 255), WORKSPACE_TOO_SMALL) \
            WRONG(workspace_bytes, bytes - 1, WORKSPACE_TOO_SMALL) \
        } \
        good.rows = 0; \
        expect(#name, LNGEN_OK, call(&good, device, NULL)); \
    }

#include "calls.c"

static lngen_status load_and_unload(void) {
    lngen_status got = lngen_load(0);
    long left = fake_fails_at;
    fake_fails_at = 0;
    expect("unload", got == LNGEN_OK ? LNGEN_OK : LNGEN_NOT_LOADED, lngen_unload(0));
    if (fake_held != 0) fault("handles are left", fake_held);
    fake_held = 0;
    fake_fails_at = left;
    return got;
}

static void *one_thread(void *number) {
    int device = *(int *)number % 2;
    for (int n = 0; n < 5; n++) {
        expect("load", LNGEN_OK, lngen_load(device));
        if (!lngen_supported("layernorm", 96, LNGEN_BF16, device)) fault("supported", device);
        all_groups(device);
    }
    return NULL;
}

int main(void) {
    static char long_name[1 << 16];
    pthread_t started[4];
    int numbers[4] = {0, 1, 2, 3};
    memset(long_name, 'x', sizeof long_name - 1);
    for (int n = -2; n < 100; n++) faults += strlen(lngen_status_text((lngen_status)n)) < 10;
    if (lngen_supported(NULL, 96, LNGEN_BF16, 0) || lngen_supported(long_name, INT64_MIN, (lngen_dtype)77, -1))
        fault("supported", 0);
    if (lngen_set_folder(NULL) == LNGEN_OK || lngen_set_folder(long_name) == LNGEN_OK) fault("folder", 0);
    expect("folder", LNGEN_OK, lngen_set_folder(TAMPERED));
    expect("tampered", LNGEN_TAMPERED, lngen_load(0));
    expect("folder", LNGEN_OK, lngen_set_folder(LNGEN_PACK_DIR));
#ifdef __SANITIZE_THREAD__
    alone = 0;
#endif
    EACH_FAILS("load", load_and_unload(), 0)
    expect("load", LNGEN_OK, lngen_load(0));
    all_groups(0);
    alone = 0;
    for (int n = 0; n < 4; n++) pthread_create(&started[n], NULL, one_thread, &numbers[n]);
    for (int n = 0; n < 4; n++) pthread_join(started[n], NULL);
    for (int n = 0; n < 2; n++) expect("unload", LNGEN_OK, lngen_unload(n));
    if (fake_held != 0) fault("handles are left", fake_held);
    return faults != 0;
}
