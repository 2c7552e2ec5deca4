/* The wide-area network of a lab: carries packets between the namespaces that are attached to it.
 *
 * Each attached namespace (a host or a router) has a TUN device "wan0"; its packets come here whole, up to 64 KB where
 * the kernel has put TCP segments together (they are cut again by whoever needs them cut), which is what makes this
 * cheap. A packet passes the sender's upward lane, then the receiver's downward lane. A lane has a loss, a rate with a
 * queue that drops what would wait too long, and a delay; it never reorders. Rates count Ethernet frames, as they would
 * be on a wire. A packet from an address that is not its line's own, or to one that nobody has, is dropped silently.
 *
 * Commands are lines on standard input, each answered by one line, "ok ..." or "error ...":
 *
 *   line PATH                                          attach the namespace at PATH; the answer names its number
 *   own NUMBER ADDRESS                                 packets to ADDRESS go there
 *   lane NUMBER up|down BITS_PER_S DELAY_NS LOSS QUEUE_NS     (no rate: 0)
 *   twice NUMBER SHARE                                 of the frames that arrive there, so many arrive twice
 *   cut NUMBER MS                                      lose all for so long; 0: no more; negative: until told
 *   count NUMBER                                       bytes up, bytes down, frames lost, overflown, cut off, astray
 *
 * It ends when standard input does. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define LINES 200
#define ADDRESSES 1000
#define MOST_BYTES (512u << 20) /* in flight, in all */
#define PACKET_BYTES (sizeof(struct virtio_net_hdr) + 65536)
#define AT_ONCE 64               /* packets of one line before the others have their turn */
#define ETHERNET 14
#define FRAME 1514
#define QUEUE_FRAMES 8           /* the shortest queue there is */
#define NEVER INT64_MAX
#define SHORTEST_WAIT 50000      /* ns: waking up more often costs more than it is worth */

struct lane {
    double rate, loss;
    int64_t delay, queue;
    int64_t free_at;             /* when the last frame that was let in has been sent */
    int64_t latest;              /* when the last one comes out */
};

struct line {
    int tun;
    int64_t cut_until;
    double twice;
    struct lane up, down;
    uint64_t sent, received, lost, overflown, cut, astray;
};

struct packet {
    int64_t at;
    uint64_t order;
    int from, to;
    int arriving;                /* has passed the upward lane, is in the downward one */
    unsigned frames, wire_bytes;
    unsigned size;
    char data[];                 /* virtio header, then the IP packet */
};

static struct line lines[LINES];
static int line_count;
static struct { uint32_t address; int line; } addresses[ADDRESSES];
static int address_count;
static struct packet **heap;
static size_t heap_count, heap_room;
static size_t bytes_held;
static uint64_t next_order;
static unsigned short dice[3] = { 11, 22, 33 };

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* --- what waits, earliest first ------------------------------------------------------------------------------- */
static int sooner(const struct packet *a, const struct packet *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void hold(struct packet *packet)
{
    if (heap_count == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 1024;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (heap == NULL) abort();
    }
    packet->order = next_order++;
    size_t place = heap_count++;
    while (place > 0) {
        size_t above = (place - 1) / 2;
        if (!sooner(packet, heap[above])) break;
        heap[place] = heap[above];
        place = above;
    }
    heap[place] = packet;
}

static struct packet *take(void)
{
    struct packet *first = heap[0], *moved = heap[--heap_count];
    size_t place = 0;
    for (;;) {
        size_t below = 2 * place + 1;
        if (below >= heap_count) break;
        if (below + 1 < heap_count && sooner(heap[below + 1], heap[below])) below++;
        if (!sooner(heap[below], moved)) break;
        heap[place] = heap[below];
        place = below;
    }
    if (heap_count > 0) heap[place] = moved;
    return first;
}

/* --- packets ------------------------------------------------------------------------------------------------- */
static void forget(struct packet *packet)
{
    bytes_held -= packet->size;
    free(packet);
}

/* How many frames on a wire this is, and how many bytes they have. */
static void weigh(struct packet *packet)
{
    const struct virtio_net_hdr *how = (const void *)packet->data;
    const uint8_t *ip = (const uint8_t *)packet->data + sizeof *how;
    unsigned bytes = packet->size - sizeof *how;
    packet->frames = 1;
    packet->wire_bytes = bytes + ETHERNET;
    if ((how->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) != VIRTIO_NET_HDR_GSO_TCPV4 || how->gso_size == 0) return;
    unsigned ip_header = (ip[0] & 15) * 4;
    if (ip_header + 20 > bytes) return;
    unsigned headers = ip_header + (ip[ip_header + 12] >> 4) * 4;
    if (headers >= bytes) return;
    packet->frames = (bytes - headers + how->gso_size - 1) / how->gso_size;
    packet->wire_bytes = bytes - headers + packet->frames * (headers + ETHERNET);
}

static int line_of(const char *address)
{
    uint32_t wanted;
    memcpy(&wanted, address, sizeof wanted);
    for (int i = 0; i < address_count; i++)
        if (addresses[i].address == wanted) return addresses[i].line;
    return -1;
}

/* When a packet that enters the lane at `now` comes out; negative: it does not. */
static int64_t pass(struct lane *lane, struct line *counts, const struct packet *packet, int64_t now)
{
    if (lane->loss > 0 && erand48(dice) < lane->loss) {
        counts->lost++;
        return -1;
    }
    int64_t out = now;
    if (lane->rate > 0) {
        double ns_per_byte = 8e9 / lane->rate;
        int64_t start = lane->free_at > now ? lane->free_at : now;
        int64_t longest = (int64_t)(QUEUE_FRAMES * FRAME * ns_per_byte);
        if (start - now > (lane->queue > longest ? lane->queue : longest)) {
            counts->overflown++;
            return -1;
        }
        out = lane->free_at = start + (int64_t)(packet->wire_bytes * ns_per_byte);
    }
    out += lane->delay;
    if (out < lane->latest) out = lane->latest;
    lane->latest = out;
    return out;
}

static void arrive(struct packet *packet)
{
    struct line *line = &lines[packet->to];
    int times = line->twice > 0 && erand48(dice) < line->twice ? 2 : 1;
    while (times-- > 0) {
        if (write(line->tun, packet->data, packet->size) == (ssize_t)packet->size) line->received += packet->wire_bytes;
        else line->overflown++;
    }
    forget(packet);
}

/* The packet is at the end of a lane at `now`. */
static void onward(struct packet *packet, int64_t now)
{
    struct line *from = &lines[packet->from], *to = &lines[packet->to];
    if (from->cut_until > now || to->cut_until > now) {
        to->cut++;
        forget(packet);
        return;
    }
    if (packet->arriving) {
        arrive(packet);
        return;
    }
    packet->arriving = 1;
    packet->at = pass(&to->down, to, packet, packet->at); /* not now: a late waking must not add up */
    if (packet->at < 0) forget(packet);
    else if (packet->at <= now) arrive(packet);
    else hold(packet);
}

static void depart(int number, const char *data, size_t size, int64_t now)
{
    struct line *line = &lines[number];
    const char *ip = data + sizeof(struct virtio_net_hdr);
    if (size < sizeof(struct virtio_net_hdr) + 20 || (uint8_t)ip[0] >> 4 != 4) return;
    int to = line_of(ip + 16);
    if (to < 0 || line_of(ip + 12) != number || bytes_held > MOST_BYTES) {
        line->astray++;
        return;
    }
    struct packet *packet = malloc(sizeof *packet + size);
    if (packet == NULL) return;
    packet->size = size;
    packet->from = number;
    packet->to = to;
    packet->arriving = 0;
    memcpy(packet->data, data, size);
    bytes_held += size;
    weigh(packet);
    line->sent += packet->wire_bytes;
    packet->at = line->cut_until > now ? -1 : pass(&line->up, line, packet, now);
    if (packet->at < 0) forget(packet);
    else if (packet->at <= now) onward(packet, now);
    else hold(packet);
}

static void collect(int number)
{
    static char data[PACKET_BYTES];
    int64_t now = clock_ns();
    for (int i = 0; i < AT_ONCE; i++) {
        ssize_t size = read(lines[number].tun, data, sizeof data);
        if (size <= 0) return;
        depart(number, data, size, now);
    }
}

/* --- commands ------------------------------------------------------------------------------------------------ */
/* Where packets are lost or doubled one by one, the kernel has to hand them over one by one. */
static void choose_sizes(void)
{
    int single = 0;
    for (int i = 0; i < line_count; i++)
        single |= lines[i].up.loss > 0 || lines[i].down.loss > 0 || lines[i].twice > 0;
    for (int i = 0; i < line_count; i++)
        if (ioctl(lines[i].tun, TUNSETOFFLOAD, single ? TUN_F_CSUM : TUN_F_CSUM | TUN_F_TSO4) != 0)
            fprintf(stderr, "offloads: %s\n", strerror(errno));
}

static void attach(const char *path)
{
    struct ifreq wanted = { .ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR };
    int size = sizeof(struct virtio_net_hdr);
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), there = open(path, O_RDONLY | O_CLOEXEC), tun = -1;
    int done = line_count < LINES && home >= 0 && there >= 0 && setns(there, CLONE_NEWNET) == 0
        && (tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC)) >= 0 && ioctl(tun, TUNSETIFF, &wanted) == 0
        && ioctl(tun, TUNSETVNETHDRSZ, &size) == 0;
    const char *reason = strerror(errno);
    if (home >= 0 && setns(home, CLONE_NEWNET) != 0) abort();
    close(there);
    close(home);
    if (!done) {
        printf("error %s: %s\n", path, reason);
        return;
    }
    lines[line_count].tun = tun;
    printf("ok %d\n", line_count++);
    choose_sizes();
}

static void own(int number, const char *address)
{
    if (address_count == ADDRESSES || inet_pton(AF_INET, address, &addresses[address_count].address) != 1) {
        printf("error address %s\n", address);
        return;
    }
    addresses[address_count++].line = number;
    printf("ok\n");
}

static void obey(char *command)
{
    char word[256], which[8];
    int number, ms;
    double share;
    struct lane lane = { 0 };
    if (sscanf(command, "line %255s", word) == 1) {
        attach(word);
        return;
    }
    if (sscanf(command, "%*s %d", &number) != 1 || number < 0 || number >= line_count) {
        printf("error no such line: %s", command);
        return;
    }
    struct line *line = &lines[number];
    if (sscanf(command, "own %d %255s", &number, word) == 2) {
        own(number, word);
    } else if (sscanf(command, "lane %d %7s %lf %ld %lf %ld", &number, which, &lane.rate, &lane.delay, &lane.loss,
                      &lane.queue) == 6) {
        struct lane *changed = strcmp(which, "up") == 0 ? &line->up : &line->down;
        lane.free_at = changed->free_at;
        lane.latest = changed->latest;
        *changed = lane;
        choose_sizes();
        printf("ok\n");
    } else if (sscanf(command, "twice %d %lf", &number, &share) == 2) {
        line->twice = share;
        choose_sizes();
        printf("ok\n");
    } else if (sscanf(command, "cut %d %d", &number, &ms) == 2) {
        line->cut_until = ms < 0 ? NEVER : ms == 0 ? 0 : clock_ns() + ms * INT64_C(1000000);
        printf("ok\n");
    } else if (strncmp(command, "count ", 6) == 0) {
        printf("ok %lu %lu %lu %lu %lu %lu\n", line->sent, line->received, line->lost, line->overflown, line->cut,
               line->astray);
    } else {
        printf("error unknown: %s", command);
    }
}

/* Every whole line that has come. 0: the owner is gone. */
static int listen_to_owner(void)
{
    static char text[4096];
    static size_t have;
    ssize_t more = read(0, text + have, sizeof text - 1 - have);
    if (more <= 0) return 0;
    have += more;
    text[have] = 0;
    char *begin = text, *end;
    while ((end = strchr(begin, '\n')) != NULL) {
        char command[1024];
        snprintf(command, sizeof command, "%.*s", (int)(end - begin + 1), begin);
        obey(command);
        begin = end + 1;
    }
    have -= begin - text;
    memmove(text, begin, have);
    fflush(stdout);
    return have < sizeof text - 1;
}

int main(void)
{
    struct pollfd wanted[LINES + 1];
    prctl(PR_SET_TIMERSLACK, 1000UL);
    setpriority(PRIO_PROCESS, 0, -10); /* keeps time where others are busy */
    for (;;) {
        int64_t now = clock_ns();
        while (heap_count > 0 && heap[0]->at <= now) onward(take(), now);
        struct timespec wait = { 3600, 0 };
        if (heap_count > 0) {
            int64_t left = heap[0]->at - now;
            if (left < SHORTEST_WAIT) left = SHORTEST_WAIT;
            wait = (struct timespec){ left / 1000000000, left % 1000000000 };
        }
        wanted[0] = (struct pollfd){ 0, POLLIN, 0 };
        for (int i = 0; i < line_count; i++) wanted[i + 1] = (struct pollfd){ lines[i].tun, POLLIN, 0 };
        int count = line_count;
        if (ppoll(wanted, count + 1, &wait, NULL) <= 0) continue;
        for (int i = 0; i < count; i++)
            if (wanted[i + 1].revents) collect(i);
        if (wanted[0].revents && !listen_to_owner()) return 0;
    }
}
