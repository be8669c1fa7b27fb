/* Makes chosen system calls on files below one folder fail, in a process that armed it.
 *
 *   cc -shared -fPIC -O2 -o faults.so faults.c -ldl ;  LD_PRELOAD=faults.so python ...
 *
 * and in the process, by ctypes:
 *   void gpurt_fault_arm(const char *prefix, int kind, int error, long nth, int after)
 *     kind   0 write, 1 read, 2 rename, 3 fsync/fdatasync
 *     error  errno to fail with; 0: a short transfer (half of the first buffer)
 *     nth    which matching call from now on, from 1;  after: all later ones too
 *   long gpurt_fault_hits(void)   calls that went wrong since
 *   void gpurt_fault_disarm(void)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, READ, RENAME, SYNC };

static char prefix[4096];
static volatile int armed, kind, error_number, after;
static volatile long nth, count, hits;

void gpurt_fault_disarm(void) { armed = 0; }
long gpurt_fault_hits(void) { return hits; }
void gpurt_fault_arm(const char *p, int k, int e, long n, int a) {
    armed = 0;
    strncpy(prefix, p, sizeof prefix - 1);
    kind = k; error_number = e; nth = n; after = a; count = 0; hits = 0;
    armed = 1;
}

static int below(int fd) {
    char link[64], path[4096];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n < 0) return 0;
    path[n] = 0;
    return !strncmp(path, prefix, strlen(prefix)) && !strstr(path, ".lock") && !strstr(path, ".dirlock");
}

/* 0: as usual; 1: fail; 2: short */
static int verdict(int k, int fd) {
    if (!armed || k != kind || !below(fd)) return 0;
    long n = __sync_add_and_fetch(&count, 1);
    if (!(n == nth || (after && n > nth))) return 0;
    __sync_add_and_fetch(&hits, 1);
    if (!error_number) return 2;
    errno = error_number;
    return 1;
}

static size_t half(size_t n) { return n > 1 ? n / 2 : n; }

#define PLAIN(name, k, buf_t, args, real_args, short_args)                                  \
    {                                                                                       \
        static ssize_t (*real) args;                                                        \
        if (!real) real = dlsym(RTLD_NEXT, name);                                           \
        int v = verdict(k, fd);                                                             \
        return v == 1 ? -1 : v == 2 ? real short_args : real real_args;                     \
    }
#define VECTOR(name, k, args, real_args, short_args)                                        \
    {                                                                                       \
        static ssize_t (*real) args;                                                        \
        if (!real) real = dlsym(RTLD_NEXT, name);                                           \
        int v = verdict(k, fd);                                                             \
        if (v == 1) return -1;                                                              \
        if (v == 2 && c > 0) {                                                              \
            struct iovec one = {iov[0].iov_base, half(iov[0].iov_len)};                     \
            return real short_args;                                                         \
        }                                                                                   \
        return real real_args;                                                              \
    }

ssize_t write(int fd, const void *b, size_t n) PLAIN("write", WRITE, const void *, (int, const void *, size_t), (fd, b, n), (fd, b, half(n)))
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) PLAIN("pwrite64", WRITE, const void *, (int, const void *, size_t, off64_t), (fd, b, n, o), (fd, b, half(n), o))
ssize_t read(int fd, void *b, size_t n) PLAIN("read", READ, void *, (int, void *, size_t), (fd, b, n), (fd, b, half(n)))
ssize_t pread64(int fd, void *b, size_t n, off64_t o) PLAIN("pread64", READ, void *, (int, void *, size_t, off64_t), (fd, b, n, o), (fd, b, half(n), o))
ssize_t writev(int fd, const struct iovec *iov, int c) VECTOR("writev", WRITE, (int, const struct iovec *, int), (fd, iov, c), (fd, &one, 1))
ssize_t pwritev64(int fd, const struct iovec *iov, int c, off64_t o) VECTOR("pwritev64", WRITE, (int, const struct iovec *, int, off64_t), (fd, iov, c, o), (fd, &one, 1, o))
ssize_t pwritev64v2(int fd, const struct iovec *iov, int c, off64_t o, int f) VECTOR("pwritev64v2", WRITE, (int, const struct iovec *, int, off64_t, int), (fd, iov, c, o, f), (fd, &one, 1, o, f))
ssize_t preadv64(int fd, const struct iovec *iov, int c, off64_t o) VECTOR("preadv64", READ, (int, const struct iovec *, int, off64_t), (fd, iov, c, o), (fd, &one, 1, o))
ssize_t preadv64v2(int fd, const struct iovec *iov, int c, off64_t o, int f) VECTOR("preadv64v2", READ, (int, const struct iovec *, int, off64_t, int), (fd, iov, c, o, f), (fd, &one, 1, o, f))
/* On 64-bit systems off_t is off64_t, and programs are linked with either name. */
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { return pwrite64(fd, b, n, o); }
ssize_t pread(int fd, void *b, size_t n, off_t o) { return pread64(fd, b, n, o); }
ssize_t pwritev(int fd, const struct iovec *iov, int c, off_t o) { return pwritev64(fd, iov, c, o); }
ssize_t preadv(int fd, const struct iovec *iov, int c, off_t o) { return preadv64(fd, iov, c, o); }
ssize_t pwritev2(int fd, const struct iovec *iov, int c, off_t o, int f) { return pwritev64v2(fd, iov, c, o, f); }
ssize_t preadv2(int fd, const struct iovec *iov, int c, off_t o, int f) { return preadv64v2(fd, iov, c, o, f); }

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return verdict(SYNC, fd) ? -1 : real(fd);
}
int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return verdict(SYNC, fd) ? -1 : real(fd);
}
int renameat(int from, const char *a, int to, const char *b) {
    static int (*real)(int, const char *, int, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "renameat");
    return verdict(RENAME, from) ? -1 : real(from, a, to, b);
}
