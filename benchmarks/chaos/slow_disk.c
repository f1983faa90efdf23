/* A library to preload that makes file operations as slow as on a busy network disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define SLOW(result, name, us, parameters, arguments) \
    result name parameters { usleep(us); return ((result (*) parameters) dlsym(RTLD_NEXT, #name)) arguments; }

SLOW(int, fsync, 200000, (int file), (file))
SLOW(int, fdatasync, 200000, (int file), (file))
SLOW(int, rename, 20000, (const char *from, const char *to), (from, to))
SLOW(int, unlink, 20000, (const char *path), (path))
SLOW(int, mkdir, 20000, (const char *path, mode_t mode), (path, mode))

ssize_t write(int file, const void *data, size_t count) {
    struct stat status;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode)) usleep(1000);
    return ((ssize_t (*)(int, const void *, size_t)) dlsym(RTLD_NEXT, "write"))(file, data, count);
}
