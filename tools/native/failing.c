// An allocator that fails when it is told to: LD_PRELOAD it. See tools/check_native.py.
//
// Only allocations that hold no GIL count: those of Python in callbacks are not the library's. Nor do those of the
// loader, for variables of threads: glibc ends the process where one fails, and no program can help it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <stdint.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);

#define LOADER_SIZE 0x40000 // no library lies within it

static atomic_long n_seen;
static atomic_int  is_armed;
static long        first, last;
static int         by_others; // only in threads other than the one that armed
static pthread_t   armed_by;
static int (*holds_gil)(void);

// Fails the allocations number `from` .. `from + more`, counted from 0; a negative `from` fails none and counts.
void failing_arm(long from, long more, int others) {
    if (!holds_gil) {
        holds_gil = (int (*)(void)) dlsym(RTLD_DEFAULT, "PyGILState_Check");
    }
    first     = from;
    last      = from + more;
    by_others = others;
    armed_by  = pthread_self();
    n_seen    = 0;
    is_armed  = 1;
}

// Gives how many allocations there were since.
long failing_disarm(void) {
    is_armed = 0;
    return n_seen;
}

static int fails(void * caller) {
    const uintptr_t into_loader = (uintptr_t) caller - getauxval(AT_BASE);
    if (!is_armed || into_loader < LOADER_SIZE || (by_others && pthread_equal(pthread_self(), armed_by)) || (holds_gil && holds_gil())) {
        return 0;
    }
    const long n = atomic_fetch_add(&n_seen, 1);
    if (first < 0 || n < first || n > last) {
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

void * malloc(size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }
void * calloc(size_t n, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, size); }
void * realloc(void * old, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size); }
void * memalign(size_t alignment, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size); }
void * aligned_alloc(size_t alignment, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size); }

int posix_memalign(void ** out, size_t alignment, size_t size) {
    void * got = fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
    if (!got) {
        return ENOMEM;
    }
    *out = got;
    return 0;
}

void * mmap(void * at, size_t size, int protection, int flags, int fd, off_t offset) {
    return fails(__builtin_return_address(0)) ? MAP_FAILED : (void *) syscall(SYS_mmap, at, size, protection, flags, fd, offset);
}

void * mmap64(void * at, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(at, size, protection, flags, fd, offset);
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    if (!real) {
        real = (int (*)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *)) dlsym(RTLD_NEXT, "pthread_create");
    }
    return fails(__builtin_return_address(0)) ? EAGAIN : real(thread, attributes, run, argument);
}
