/* The wall clock of every process that this is preloaded into, ahead by as many seconds as a file says.

   The file holds one 64-bit number and is mapped, so that all processes jump at once. What the kernel does at a time of
   the wall clock is told the real one. Clocks that can't be set (CLOCK_MONOTONIC and others) are left alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none = 0;
static const volatile int64_t *ahead = &none;
static const time_t WALL = 1000000000; /* no machine is up for thirty years */

__attribute__((constructor)) static void map_file(void) {
    const char *name = getenv("CLOCK_FILE");
    int file = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
    close(file);
}

#define REAL(name, version) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlvsym(RTLD_NEXT, #name, version); \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *at) {
    REAL(clock_gettime, "GLIBC_2.17");
    int failed = real(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}

static struct timespec really(const struct timespec *at) {
    struct timespec real = *at;
    if (real.tv_sec - *ahead > WALL) real.tv_sec -= *ahead;
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    REAL(pthread_cond_timedwait, "GLIBC_2.3.2");
    struct timespec at = really(until);
    return real(condition, mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    REAL(sem_timedwait, "GLIBC_2.34");
    struct timespec at = really(until);
    return real(semaphore, &at);
}
