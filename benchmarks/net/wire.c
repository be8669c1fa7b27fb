/* A slow wire between two network namespaces, for kernels without sch_netem.
 *
 *   wire NETNS_A TAP_A NETNS_B TAP_B DELAY_MS RATE_MBIT
 *
 * Creates one TAP device in each namespace and carries every Ethernet frame from one to the other, after the time that
 * its bytes take at the rate (a frame waits for the one before it) plus the delay. Each direction on its own: full
 * duplex. A frame that would wait longer than LIMIT_S of the rate is dropped, as a router with a full buffer does.
 * Prints "ready" when both devices are there. Ends with its standard input, so that it never outlives who started it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { FRAME = 65536, SLOTS = 8192 };
static const double LIMIT_S = 0.25;

struct frame { double when; int size; unsigned char *bytes; };
struct lane { struct frame ring[SLOTS]; unsigned head, tail; double busy_until; int from, to; };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int open_tap(const char *netns, const char *name) {
    char path[256];
    struct ifreq request;
    int ns, fd;
    snprintf(path, sizeof path, "/run/netns/%s", netns);
    ns = open(path, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET) < 0) { perror(path); exit(1); }
    close(ns);
    fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    memset(&request, 0, sizeof request);
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0) { perror("/dev/net/tun"); exit(1); }
    return fd;
}

static void take_in(struct lane *l, double rate, double delay) {
    static unsigned char buffer[FRAME];
    for (int i = 0; i < 64; i++) {
        ssize_t n = read(l->from, buffer, sizeof buffer);
        double now = seconds(), start;
        struct frame *f;
        if (n <= 0) return;
        start = l->busy_until > now ? l->busy_until : now;
        if (start - now > LIMIT_S || l->tail - l->head == SLOTS) continue;
        f = &l->ring[l->tail % SLOTS];
        f->bytes = malloc((size_t)n);
        if (!f->bytes) continue;
        memcpy(f->bytes, buffer, (size_t)n);
        f->size = (int)n;
        l->busy_until = start + (double)n / rate;
        f->when = l->busy_until + delay;
        l->tail++;
    }
}

static double give_out(struct lane *l, double now) {
    while (l->head != l->tail) {
        struct frame *f = &l->ring[l->head % SLOTS];
        if (f->when > now) return f->when;
        if (write(l->to, f->bytes, (size_t)f->size) < 0 && errno == EAGAIN) return now + 1e-3;
        free(f->bytes);
        l->head++;
    }
    return now + 1.0;
}

int main(int argc, char **argv) {
    static struct lane lanes[2];
    double delay, rate;
    int home, a, b;
    if (argc != 7) { fprintf(stderr, "usage: wire NETNS_A TAP_A NETNS_B TAP_B DELAY_MS RATE_MBIT\n"); return 2; }
    home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    a = open_tap(argv[1], argv[2]);
    b = open_tap(argv[3], argv[4]);
    if (setns(home, CLONE_NEWNET) < 0) { perror("setns"); return 1; }
    delay = atof(argv[5]) * 1e-3;
    rate = atof(argv[6]) * 1e6 / 8;
    lanes[0].from = lanes[1].to = a;
    lanes[0].to = lanes[1].from = b;
    puts("ready");
    fflush(stdout);
    for (;;) {
        double now = seconds(), next = give_out(&lanes[0], now), other = give_out(&lanes[1], now), wait;
        struct pollfd watched[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
        struct timespec t;
        if (other < next) next = other;
        wait = next - seconds();
        if (wait < 0) wait = 0;
        t.tv_sec = (time_t)wait;
        t.tv_nsec = (long)((wait - (double)t.tv_sec) * 1e9);
        if (ppoll(watched, 3, &t, NULL) < 0 && errno != EINTR) return 1;
        if (watched[2].revents) { char c[64]; if (read(0, c, sizeof c) <= 0) return 0; }
        take_in(&lanes[0], rate, delay);
        take_in(&lanes[1], rate, delay);
    }
}
