/* Preloaded into a server: file systems that fail and a clock that jumps, as a control file says.
 *
 * INTERPOSER_CONTROL: a file of four 32-bit integers: an errno (0 for none), how often of 1000 calls, which calls
 * (OPEN, READ, WRITE and SYNC added up), and seconds that the clock of the day is off.
 * INTERPOSER_UNDER: the folders whose files fail, separated by colons.
 * INTERPOSER_KILL_AT: at this one of its writes, syncs, cuts and removals of such files, counted from 1, the process is
 * killed: in the midst of a write, and before any other.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8 };
static volatile int32_t *control;
static const char *under = "";
static long kill_at, calls_so_far;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("INTERPOSER_CONTROL"), *folders = getenv("INTERPOSER_UNDER");
    const char *at = getenv("INTERPOSER_KILL_AT");
    if (path == NULL || folders == NULL) return;
    under = strdup(folders);
    kill_at = at ? atol(at) : 0;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return;
    void *mapped = mmap(NULL, 4 * sizeof(int32_t), PROT_READ, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int is_under(const char *path) {
    for (const char *folder = under; *folder;) {
        size_t length = strcspn(folder, ":");
        if (length && strncmp(path, folder, length) == 0) return 1;
        folder += length + (folder[length] == ':');
    }
    return 0;
}

static int fails(int call) {
    static __thread unsigned int state;
    if (control == NULL || control[0] == 0 || !(control[2] & call)) return 0;
    if (state == 0) state = (unsigned int)syscall(SYS_gettid);
    return rand_r(&state) % 1000 < control[1];
}

static int descriptor_is_under(int descriptor) {
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX);
    if (length < 0) return 0;
    path[length] = 0;
    return is_under(path);
}

static int descriptor_fails(int descriptor, int call) {
    return fails(call) && descriptor_is_under(descriptor) ? control[0] : 0;
}

static int is_last(void) { return __atomic_add_fetch(&calls_so_far, 1, __ATOMIC_SEQ_CST) == kill_at; }
static int is_last_of(int descriptor) { return kill_at && descriptor_is_under(descriptor) && is_last(); }

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    if (path != NULL && path[0] == '/' && fails(OPEN) && is_under(path)) {
        /* Nothing that only reads a file fills a disk. */
        if (control[0] != ENOSPC || (flags & (O_CREAT | O_WRONLY | O_RDWR))) {
            errno = control[0];
            return -1;
        }
    }
    return syscall(SYS_openat, folder, path, flags, mode);
}

#define OPENED(folder)                                   \
    mode_t mode = 0;                                     \
    if (flags & (O_CREAT | O_TMPFILE)) {                 \
        va_list more;                                    \
        va_start(more, flags);                           \
        mode = va_arg(more, mode_t);                     \
        va_end(more);                                    \
    }                                                    \
    return opened(folder, path, flags, mode)

int open(const char *path, int flags, ...) { OPENED(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPENED(AT_FDCWD); }
int openat(int folder, const char *path, int flags, ...) { OPENED(folder); }
int openat64(int folder, const char *path, int flags, ...) { OPENED(folder); }

#define ORDINARY(call, descriptor, ...)                  \
    int code = descriptor_fails(descriptor, call);       \
    if (code) {                                          \
        errno = code;                                    \
        return -1;                                       \
    }                                                    \
    return syscall(__VA_ARGS__)

ssize_t read(int file, void *data, size_t size) { ORDINARY(READ, file, SYS_read, file, data, size); }
ssize_t pread(int file, void *data, size_t size, off_t at) { ORDINARY(READ, file, SYS_pread64, file, data, size, at); }
ssize_t pread64(int file, void *data, size_t size, off_t at) {
    ORDINARY(READ, file, SYS_pread64, file, data, size, at);
}
ssize_t write(int file, const void *data, size_t size) {
    if (is_last_of(file)) {
        syscall(SYS_write, file, data, size / 2);
        die();
    }
    ORDINARY(WRITE, file, SYS_write, file, data, size);
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t at) {
    if (is_last_of(file)) {
        syscall(SYS_pwrite64, file, data, size / 2, at);
        die();
    }
    ORDINARY(WRITE, file, SYS_pwrite64, file, data, size, at);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return pwrite64(file, data, size, at); }
int ftruncate64(int file, off_t size) {
    if (is_last_of(file)) die();
    return syscall(SYS_ftruncate, file, size);
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }
int unlink(const char *path) {
    if (kill_at && is_under(path) && is_last()) die();
    return syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
/* Returns the error, instead of setting errno. */
int posix_fallocate(int file, off_t at, off_t size) {
    int code = descriptor_fails(file, WRITE);
    if (code) return code;
    return syscall(SYS_fallocate, file, 0, at, size) ? errno : 0;
}
int posix_fallocate64(int file, off_t at, off_t size) { return posix_fallocate(file, at, size); }
int fsync(int file) {
    if (is_last_of(file)) die();
    ORDINARY(SYNC, file, SYS_fsync, file);
}
int fdatasync(int file) {
    if (is_last_of(file)) die();
    ORDINARY(SYNC, file, SYS_fdatasync, file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = real_clock ? real_clock(clock, now) : syscall(SYS_clock_gettime, clock, now);
    if (control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control[3];
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec at;
    int code = clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return code;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
