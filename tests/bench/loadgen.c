/* Closed-loop load generator: N connections, each with D requests under way.
 *
 *   loadgen HOST PORT CONNECTIONS DEPTH WARMUP_MS MEASURE_MS SCRIPT
 *
 * Knows no Kafka: SCRIPT holds framed requests and what must stand in their answers
 * (tests/bench/load.py writes it and says how; loadgen.py is the same in Python).
 * Prints "measure" when the warm-up is over, then one JSON line when the time is, and
 * waits for its standard input to end before it closes the connections, so that
 * whoever reads the broker's CPU meter at both lines sees no connect and no close. For
 * that a warm-up lasts until every connection was answered, too: the kernel connects
 * thousands of them sooner than a broker takes them.
 *
 * In C because on a small machine the load runs on the broker's own cores: a request
 * costs about 3 us here against 15 in Python.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define CORRELATION_AT 8 /* size, api key, api version */
#define HEAD 12          /* up to and with the correlation id */
#define MAX_DEPTH 64
#define SUB_BITS 6 /* latency buckets: 64 to a power of two, 1.6 % wide */
#define BUCKETS (64 << SUB_BITS)
#define PATIENCE_NS 30000000000ull /* with connections that are never answered */

struct check { uint32_t at, size; uint8_t *want; };
struct template { uint32_t size; uint8_t *bytes; uint32_t exact, least, end, checks; struct check *check; };
struct flight { uint32_t correlation; uint32_t template; uint64_t sent_ns; };
struct connection {
    int fd;
    uint32_t index, sent, sending_at; /* sending_at: bytes of the current request written */
    int sending, blocked, greeted;
    uint8_t head[HEAD];
    struct flight flight[MAX_DEPTH];
    uint32_t first, under_way;
    uint8_t *buffer;
    uint32_t have;
    uint64_t skip;
};

static struct template *templates;
static uint32_t template_count, buffer_size, connection_count, depth, greeted;
static uint64_t answered, received_bytes, histogram[BUCKETS], largest_ns;
static int measuring, stopping;
static uint8_t scratch[1 << 20];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "loadgen: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    exit(1);
}

static uint32_t be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3];
}

static void put_be32(uint8_t *p, uint32_t v) {
    p[0] = v >> 24; p[1] = v >> 16; p[2] = v >> 8; p[3] = v;
}

static uint32_t read_u32(FILE *f) {
    uint32_t v;
    if (fread(&v, 4, 1, f) != 1) die("script is cut short");
    return v;
}

static uint8_t *read_bytes(FILE *f, uint32_t size) {
    uint8_t *p = malloc(size ? size : 1);
    if (!p || fread(p, 1, size, f) != size) die("script is cut short");
    return p;
}

static void load_script(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) die(path);
    template_count = read_u32(f);
    templates = calloc(template_count, sizeof *templates);
    buffer_size = 16384;
    for (uint32_t i = 0; i < template_count; i++) {
        struct template *t = &templates[i];
        t->size = read_u32(f);
        t->bytes = read_bytes(f, t->size);
        t->exact = read_u32(f);
        t->least = read_u32(f);
        t->checks = read_u32(f);
        t->check = calloc(t->checks ? t->checks : 1, sizeof *t->check);
        t->end = 4;
        for (uint32_t c = 0; c < t->checks; c++) {
            struct check *check = &t->check[c];
            check->at = read_u32(f);
            check->size = read_u32(f);
            check->want = read_bytes(f, check->size);
            if (check->at + check->size > t->end) t->end = check->at + check->size;
        }
        if (t->end + 4 > buffer_size) buffer_size = t->end + 4;
    }
    fclose(f);
}

static uint32_t bucket_of(uint64_t ns) {
    if (ns < (1u << SUB_BITS)) return ns;
    int shift = 63 - __builtin_clzll(ns) - SUB_BITS;
    return ((shift + 1) << SUB_BITS) + (ns >> shift) - (1u << SUB_BITS);
}

static double bucket_us(uint32_t b) {
    if (b < (1u << SUB_BITS)) return b / 1e3;
    int shift = (b >> SUB_BITS) - 1;
    return (((uint64_t)(b & ((1u << SUB_BITS) - 1)) + (1u << SUB_BITS)) << shift) / 1e3;
}

static void start_next(struct connection *c, uint64_t now) {
    uint32_t k = (c->index + (uint64_t)c->sent * connection_count) % template_count;
    struct flight *flight = &c->flight[(c->first + c->under_way) % MAX_DEPTH];
    flight->correlation = c->sent;
    flight->template = k;
    flight->sent_ns = now;
    memcpy(c->head, templates[k].bytes, HEAD);
    put_be32(c->head + CORRELATION_AT, c->sent);
    c->sent++;
    c->under_way++;
    c->sending = 1;
    c->sending_at = 0;
}

/* Write until the depth is reached or the socket is full. */
static void send_some(struct connection *c) {
    while (!c->blocked) {
        if (!c->sending) {
            if (stopping || c->under_way >= depth) return;
            start_next(c, now_ns());
        }
        struct flight *flight = &c->flight[(c->first + c->under_way - 1) % MAX_DEPTH];
        struct template *t = &templates[flight->template];
        struct iovec parts[2];
        int n = 0;
        if (c->sending_at < HEAD) parts[n++] = (struct iovec){c->head + c->sending_at, HEAD - c->sending_at};
        uint32_t at = c->sending_at < HEAD ? HEAD : c->sending_at;
        parts[n++] = (struct iovec){t->bytes + at, t->size - at};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = n};
        ssize_t wrote = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (wrote < 0) {
            if (errno != EAGAIN) die("send");
            c->blocked = 1;
            return;
        }
        c->sending_at += wrote;
        if (c->sending_at == t->size) c->sending = 0;
    }
}

static void take_answer(struct connection *c, uint32_t size, const uint8_t *payload, uint64_t now) {
    errno = 0;
    if (!c->under_way) die("an answer that nobody asked for");
    struct flight *flight = &c->flight[c->first];
    struct template *t = &templates[flight->template];
    if (size < 4 || be32(payload) != flight->correlation) die("wrong correlation id");
    if (size < t->least || (t->exact && size != t->exact)) {
        fprintf(stderr, "loadgen: answer of %u bytes where %u (at least %u) were due\n", size, t->exact, t->least);
        exit(1);
    }
    for (uint32_t i = 0; i < t->checks; i++)
        if (memcmp(payload + t->check[i].at, t->check[i].want, t->check[i].size)) {
            fprintf(stderr, "loadgen: answer differs in the %u bytes at %u:", t->check[i].size, t->check[i].at);
            for (uint32_t b = 0; b < t->check[i].size && b < 16; b++)
                fprintf(stderr, " %02x", payload[t->check[i].at + b]);
            fprintf(stderr, "\n");
            exit(1);
        }
    c->first = (c->first + 1) % MAX_DEPTH;
    c->under_way--;
    greeted += !c->greeted;
    c->greeted = 1;
    if (measuring) {
        uint64_t ns = now - flight->sent_ns;
        uint32_t b = bucket_of(ns);
        histogram[b < BUCKETS ? b : BUCKETS - 1]++;
        if (ns > largest_ns) largest_ns = ns;
        answered++;
        received_bytes += size;
    }
}

static void take_frames(struct connection *c) {
    uint32_t at = 0;
    uint64_t now = 0;
    while (c->have - at >= 4) {
        uint32_t size = be32(c->buffer + at), end;
        if (!c->under_way) { errno = 0; die("an answer that nobody asked for"); }
        end = templates[c->flight[c->first].template].end;
        if (end > size) end = size;
        int whole = c->have - at >= 4 + (uint64_t)size;
        /* A long answer is checked when its last byte is here, and only then counted. */
        if (!whole && (uint64_t)size + 4 <= buffer_size) break;
        if (!whole && c->have - at < 4 + end) break;
        if (!now) now = now_ns();
        if (whole) {
            take_answer(c, size, c->buffer + at + 4, now);
            at += 4 + size;
        } else {
            c->skip = 4 + (uint64_t)size - (c->have - at);
            memmove(c->buffer, c->buffer + at, 4 + end);
            c->have = 4 + end;
            return;
        }
    }
    memmove(c->buffer, c->buffer + at, c->have - at);
    c->have -= at;
}

static void receive_some(struct connection *c) {
    for (;;) {
        uint8_t *to = c->skip ? scratch : c->buffer + c->have;
        size_t room = buffer_size - c->have;
        if (c->skip) room = c->skip < sizeof scratch ? c->skip : sizeof scratch;
        ssize_t got = recv(c->fd, to, room, 0);
        if (got == 0) { errno = 0; die("the broker closed a connection"); }
        if (got < 0) {
            if (errno == EAGAIN) return;
            die("recv");
        }
        if (!c->skip) {
            c->have += got;
            take_frames(c);
        } else if (!(c->skip -= got)) {
            take_answer(c, be32(c->buffer), c->buffer + 4, now_ns());
            c->have = 0;
        }
        if ((size_t)got < room) return; /* edge-triggered: the next byte wakes us */
    }
}

static void dial(struct connection *c, struct sockaddr_in *to, int poll, uint32_t index) {
    int one = 1;
    c->index = index;
    c->buffer = malloc(buffer_size);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || !c->buffer) die("socket");
    if (connect(c->fd, (struct sockaddr *)to, sizeof *to)) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    if (epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &event)) die("epoll_ctl");
}

static int is_warm(uint64_t past_ns, uint64_t warmup_ns) {
    if (past_ns < warmup_ns) return 0;
    return !warmup_ns || greeted == connection_count || past_ns >= warmup_ns + PATIENCE_NS;
}

static double percentile_us(double share) {
    uint64_t target = share * answered, seen = 0;
    for (uint32_t b = 0; b < BUCKETS; b++)
        if ((seen += histogram[b]) > target) return bucket_us(b);
    return largest_ns / 1e3;
}

int main(int argc, char **argv) {
    if (argc != 8) {
        fprintf(stderr, "usage: loadgen HOST PORT CONNECTIONS DEPTH WARMUP_MS MEASURE_MS SCRIPT\n");
        return 2;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
    if (inet_pton(AF_INET, argv[1], &to.sin_addr) != 1) die("HOST is an IPv4 address");
    connection_count = atoi(argv[3]);
    depth = atoi(argv[4]);
    if (depth < 1 || depth > MAX_DEPTH) die("DEPTH is 1 to 64");
    uint64_t warmup_ns = strtoull(argv[5], 0, 10) * 1000000, measure_ns = strtoull(argv[6], 0, 10) * 1000000;
    load_script(argv[7]);
    int poll = epoll_create1(0);
    struct connection *connections = calloc(connection_count, sizeof *connections);
    for (uint32_t i = 0; i < connection_count; i++) dial(&connections[i], &to, poll, i);
    uint64_t began = now_ns(), measured_from = 0, elapsed = 0, cpu_from = 0;
    for (uint32_t i = 0; i < connection_count; i++) send_some(&connections[i]);
    struct epoll_event events[256];
    for (;;) {
        int n = epoll_wait(poll, events, 256, 1);
        uint64_t now = now_ns();
        if (!measuring && is_warm(now - began, warmup_ns)) {
            measuring = 1;
            measured_from = now;
            cpu_from = cpu_ns();
            printf("measure\n");
            fflush(stdout);
        }
        if (measuring && now - measured_from >= measure_ns) {
            elapsed = now - measured_from;
            break;
        }
        if (now - began > warmup_ns + measure_ns + 60000000000ull) die("stuck");
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) c->blocked = 0;
            receive_some(c);
            send_some(c);
        }
    }
    printf("{\"answered\": %llu, \"seconds\": %.6f, \"received_bytes\": %llu, \"own_cpu_s\": %.6f, \"p50_us\": %.1f, \"p90_us\": %.1f, "
           "\"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f}\n",
           (unsigned long long)answered, elapsed / 1e9, (unsigned long long)received_bytes,
           (cpu_ns() - cpu_from) / 1e9, percentile_us(.5),
           percentile_us(.9), percentile_us(.99), percentile_us(.999), largest_ns / 1e3);
    fflush(stdout);
    while (read(0, scratch, sizeof scratch) > 0) {}
    return 0;
}
