/* A stand-in for the CUDA driver, for tests on machines without a GPU.
 *
 * The real bindings load it as libcuda.so.1.  "Device" memory is a memfd, so that an exported
 * descriptor can be mapped by another process and read-only access is read-only; FABRIC memory is
 * a file beside the state file.  Events live in a state file that all processes map, and follow
 * the order of streams: an event recorded behind a wait is done only when what was waited for is.
 * It is stricter than the driver where the driver's documents are silent: nearly everything needs
 * a current context.
 *
 * Set by the environment:
 *   STANDIN_STATE    file with what processes share (default: nothing is shared)
 *   STANDIN_DEVICES  physical devices that are visible, in this order, as "1,0" (default "0")
 *   STANDIN_PEERS    "none": no device reaches another
 *   STANDIN_FABRIC   "off": the attribute is 0; otherwise the code that creation answers (800)
 *   STANDIN_POSIX    the same for POSIX descriptors (0)
 *   STANDIN_MEMORY   bytes per device (1 GiB)
 *   STANDIN_VMM      "off": the attribute of virtual memory management is 0
 *   STANDIN_MPS      "on": the attribute of MPS is 1
 *   STANDIN_EVENTS   "off": no event of another process can be opened
 *   STANDIN_GUARD    "off": memory mapped read-only can be filled all the same
 * and by the functions at the end, through ctypes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, NOT_PERMITTED = 800, CAPTURE_UNSUPPORTED = 900
};
enum { POSIX = 1, FABRIC = 8, INTERPROCESS = 4, READWRITE = 3 };
enum { DEVICES = 8, EVENTS = 8192, DEPS = 32, THINGS = 8192, PIECES = 1024, IPC_LIMIT = 4096, HOLDERS = 16 };
#define GRANULE (2ul << 20)

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; void *win32; uint8_t flags[8]; } Prop;
typedef struct { Location location; int flags; } Access;
typedef struct { char bytes[64]; } Handle64;

/* What all processes share. */
typedef struct { int event; uint64_t record; } Dep;
typedef struct {
    int used, owner_alive, deps, device;
    pid_t owner;
    uint32_t generation;
    uint64_t recorded, finished;
    int64_t queries_left;
    Dep dep[DEPS];
} Event;
typedef struct { pid_t process; int refs; } Holder;
typedef struct {
    ino_t inode;
    uint64_t size;
    int device, handles, fabric;
    Holder holder[HOLDERS];
} Physical;
typedef struct {
    int ready, fabrics;
    pthread_mutex_t lock;
    uint64_t used[DEVICES];
    Event event[EVENTS];
    Physical physical[PIECES];
} Shared;

/* What this process has. */
typedef struct { int used, refs, maps, fd, physical; } Piece;
typedef struct { int used, piece, flags; uint64_t address, size; } Mapping;
typedef struct { int used; uint64_t address, size; } Range;
typedef struct { int used, event, opened, interprocess; } Opening;
typedef struct { int used, deps; uint64_t stream; Dep dep[DEPS]; } Stream;
static Shared *shared;
static Piece piece[PIECES];
static Mapping mapping[PIECES];
static Range range_[PIECES];
static Opening opening[THINGS];
static Stream stream_[256];
static int contexts[DEVICES], visible[DEVICES], devices = -1;
static pid_t process;
static pthread_mutex_t local = PTHREAD_MUTEX_INITIALIZER;
static __thread int stack[64], depth, relaxed;

/* Counting, journal, and failing on demand. */
static struct { const char *name; uint64_t calls; } counter[128];
static uint64_t calls, fail_at;
static const char *failed = "";
static int fail_code, broken, hold, capturing, broken_captures, strict_streams, forked_calls;
static int64_t hold_queries;
static int slow_queries, pulled;
static char journal[1 << 16];
static size_t journal_length;

static void lock_all(void) {
    pthread_mutex_lock(&local);
    if (shared && pthread_mutex_lock(&shared->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&shared->lock);
}
static void unlock_all(void) {
    if (shared) pthread_mutex_unlock(&shared->lock);
    pthread_mutex_unlock(&local);
}

static CUresult enter(const char *name, int unsafe) {
    if (!process) return NOT_INITIALIZED;
    if (getpid() != process) { forked_calls++; return NOT_INITIALIZED; }
    lock_all();
    int i = 0;
    while (counter[i].name && strcmp(counter[i].name, name)) i++;
    counter[i].name = name;
    counter[i].calls++;
    calls++;
    if (journal_length + strlen(name) + 2 < sizeof journal)
        journal_length += (size_t)sprintf(journal + journal_length, "%s\n", name);
    if (unsafe && capturing && !relaxed) { broken_captures++; return CAPTURE_UNSUPPORTED; }
    /* A context that a fault has ended can be named and left, and nothing else. */
    if (broken && strncmp(name, "cuCtxGet", 8) && strncmp(name, "cuCtxP", 6) &&
        strncmp(name, "cuThread", 8) && strncmp(name, "cuDevice", 8)) {
        failed = name;
        return broken;
    }
    if (calls != fail_at) return OK;
    failed = name;
    return fail_code;
}
#define ENTER(unsafe) CUresult r = enter(__func__, unsafe); if (r) goto out
#define FAIL(code) do { r = (code); goto out; } while (0)
#define LEAVE out: if (getpid() == process) unlock_all(); return r
#define CURRENT (depth ? stack[depth - 1] : -1)
#define NEED_CONTEXT do { if (CURRENT < 0) FAIL(INVALID_CONTEXT); } while (0)
#define SLOT(table, count, i) \
    int i = 0; while (i < (count) && (table)[i].used) i++; if (i == (count)) FAIL(OUT_OF_MEMORY)

static const char *setting(const char *name, const char *otherwise) {
    const char *found = getenv(name);
    return found ? found : otherwise;
}
static int handle_setting(int kind) {
    const char *s = kind == FABRIC ? setting("STANDIN_FABRIC", "800") : setting("STANDIN_POSIX", "0");
    return strcmp(s, "off") ? atoi(s) : -1;
}

static int open_state(void) {
    const char *path = getenv("STANDIN_STATE");
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                  : memfd_create("standin-state", MFD_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_EX) || ftruncate(fd, sizeof(Shared))) return -1;
    shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) return -1;
    if (!shared->ready) {
        pthread_mutexattr_t how;
        pthread_mutexattr_init(&how);
        pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&shared->lock, &how);
        shared->ready = 1;
    }
    flock(fd, LOCK_UN);
    close(fd);
    return 0;
}

/* Make these physical devices visible, in this order, as "1,0". */
void standin_devices(const char *list) {
    devices = 0;
    for (; *list && devices < DEVICES; list++)
        if (*list >= '0' && *list < '0' + DEVICES) visible[devices++] = *list - '0';
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    if (process == getpid()) return OK;
    if (process || open_state()) return NOT_INITIALIZED;
    process = getpid();
    standin_devices(setting("STANDIN_DEVICES", "0"));
    return devices ? OK : NO_DEVICE;
}

/* ---- devices and contexts ---- */

CUresult cuDeviceGetCount(int *count) { ENTER(0); *count = devices; LEAVE; }

CUresult cuDriverGetVersion(int *version) { *version = 13000; return OK; }

CUresult cuDeviceGetName(char *name, int length, int device) {
    ENTER(0);
    snprintf(name, length, "Stand-in %d", visible[device]);
    LEAVE;
}
CUresult cuDeviceGet(int *device, int number) {
    ENTER(0);
    if (number < 0 || number >= devices) FAIL(INVALID_DEVICE);
    *device = number;
    LEAVE;
}
CUresult cuDeviceGetUuid_v2(char *uuid, int device) {
    ENTER(0);
    for (int i = 0; i < 16; i++) uuid[i] = (char)(0xa0 + i);
    uuid[15] = (char)visible[device];
    LEAVE;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(0);
    (void)device;
    if (attribute == 103) *value = handle_setting(POSIX) >= 0;
    else if (attribute == 128) *value = handle_setting(FABRIC) >= 0;
    else if (attribute == 102) *value = strcmp(setting("STANDIN_VMM", "on"), "off") != 0;
    else if (attribute == 133) *value = !strcmp(setting("STANDIN_MPS", "off"), "on");
    else *value = 1;
    LEAVE;
}
CUresult cuDeviceCanAccessPeer(int *can, int device, int other) {
    ENTER(0);
    *can = device != other && strcmp(setting("STANDIN_PEERS", "all"), "none") != 0;
    LEAVE;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(0);
    contexts[device]++;
    *context = (void *)(uintptr_t)(0xc0000 + device);
    LEAVE;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(0);
    if (contexts[device] <= 0) FAIL(INVALID_CONTEXT);
    contexts[device]--;
    LEAVE;
}
CUresult cuCtxGetCurrent(void **context) {
    ENTER(0);
    *context = (void *)(uintptr_t)(CURRENT < 0 ? 0 : 0xc0000 + CURRENT);
    LEAVE;
}
CUresult cuCtxPushCurrent_v2(void *context) {
    ENTER(0);
    int device = (int)((uintptr_t)context - 0xc0000);
    if (device < 0 || device >= devices || !contexts[device]) FAIL(INVALID_CONTEXT);
    if (depth == 64) FAIL(INVALID_VALUE);
    stack[depth++] = device;
    LEAVE;
}
CUresult cuCtxPopCurrent_v2(void **context) {
    ENTER(0);
    NEED_CONTEXT;
    if (context) *context = (void *)(uintptr_t)(0xc0000 + CURRENT);
    depth--;
    LEAVE;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(0);
    int before = relaxed ? 2 : 0;
    relaxed = *mode == 2;
    *mode = before;
    LEAVE;
}

/* ---- memory ---- */

/* Add to what this process holds of the memory; what dead processes held is given back. */
static void hold_physical(int index, int more) {
    Physical *p = &shared->physical[index];
    int all = 0, mine = -1, free_ = -1;
    for (int i = 0; i < HOLDERS; i++) {
        Holder *h = &p->holder[i];
        if (h->refs && kill(h->process, 0) && errno == ESRCH) h->refs = 0;
        all += h->refs;
        if (h->refs && h->process == getpid()) mine = i;
        if (!h->refs) free_ = i;
    }
    if (more) {
        if (mine < 0) p->holder[mine = free_] = (Holder){getpid(), 0};
        p->holder[mine].refs += more;
    }
    if (p->size && all + more == 0) {
        shared->used[p->device] -= p->size;
        memset(p, 0, sizeof *p);
    }
}
static uint64_t used_on(int device) {
    for (int i = 0; i < PIECES; i++)
        if (shared->physical[i].size && shared->physical[i].device == device) hold_physical(i, 0);
    return shared->used[device];
}
static void drop_piece(int index) {
    Piece *p = &piece[index];
    if (p->refs || p->maps) return;
    close(p->fd);
    hold_physical(p->physical, -1);
    memset(p, 0, sizeof *p);
}
static Piece *piece_of(uint64_t handle) {
    uint64_t index = handle - 0x9000;
    return index < PIECES && piece[index].used && piece[index].refs ? &piece[index] : NULL;
}
static void fabric_path(char *path, size_t n, int number) {
    snprintf(path, n, "%s.fabric.%d", setting("STANDIN_STATE", "/tmp/standin"), number);
}

CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    ENTER(0);
    (void)prop, (void)option;
    *size = GRANULE;
    LEAVE;
}
CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(0);
    NEED_CONTEXT;
    *total = strtoull(setting("STANDIN_MEMORY", "1073741824"), NULL, 10);
    *available = *total - used_on(visible[CURRENT]);
    LEAVE;
}
CUresult cuMemCreate(uint64_t *handle, size_t size, const Prop *prop, uint64_t flags) {
    ENTER(1);
    (void)flags;
    NEED_CONTEXT;
    if (!size || size % GRANULE || prop->location.id >= devices) FAIL(INVALID_VALUE);
    if (handle_setting(prop->handles)) FAIL(handle_setting(prop->handles));
    int device = visible[prop->location.id];
    uint64_t total = strtoull(setting("STANDIN_MEMORY", "1073741824"), NULL, 10);
    if (used_on(device) + size > total) FAIL(OUT_OF_MEMORY);
    SLOT(piece, PIECES, i);
    int j = 0;
    while (j < PIECES && shared->physical[j].size) j++;
    if (j == PIECES) FAIL(OUT_OF_MEMORY);
    char path[4096];
    int number = ++shared->fabrics, fd;
    fabric_path(path, sizeof path, number);
    fd = prop->handles == FABRIC ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                                 : memfd_create("standin-memory", MFD_CLOEXEC);
    struct stat info;
    if (fd < 0 || ftruncate(fd, (off_t)size) || fstat(fd, &info)) FAIL(OUT_OF_MEMORY);
    shared->physical[j] = (Physical){.inode = info.st_ino, .size = size, .device = device,
                                     .handles = prop->handles, .fabric = number};
    shared->used[device] += size;
    hold_physical(j, 1);
    piece[i] = (Piece){1, 1, 0, fd, j};
    *handle = 0x9000 + (uint64_t)i;
    LEAVE;
}
CUresult cuMemRelease(uint64_t handle) {
    ENTER(1);
    NEED_CONTEXT;
    Piece *p = piece_of(handle);
    if (!p) FAIL(INVALID_VALUE);
    p->refs--;
    drop_piece((int)(p - piece));
    LEAVE;
}
CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    ENTER(0);
    NEED_CONTEXT;
    for (int i = 0; i < PIECES; i++)
        if (mapping[i].used && (uint64_t)address - mapping[i].address < mapping[i].size) {
            piece[mapping[i].piece].refs++;
            *handle = 0x9000 + (uint64_t)mapping[i].piece;
            goto out;
        }
    r = INVALID_VALUE;
    LEAVE;
}
CUresult cuMemExportToShareableHandle(void *out_, uint64_t handle, int kind, uint64_t flags) {
    ENTER(0);
    (void)flags;
    NEED_CONTEXT;
    Piece *p = piece_of(handle);
    if (!p || shared->physical[p->physical].handles != kind) FAIL(INVALID_VALUE);
    if (kind == FABRIC) {
        memset(out_, 0, 64);
        snprintf(out_, 64, "FABR %d", shared->physical[p->physical].fabric);
    } else if ((*(int *)out_ = fcntl(p->fd, F_DUPFD_CLOEXEC, 3)) < 0) FAIL(OUT_OF_MEMORY);
    LEAVE;
}
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *from, int kind) {
    ENTER(1);
    NEED_CONTEXT;
    SLOT(piece, PIECES, i);
    int fd, number = 0;
    if (kind == FABRIC) {
        char path[4096];
        if (sscanf(from, "FABR %d", &number) != 1) FAIL(INVALID_VALUE);
        fabric_path(path, sizeof path, number);
        fd = open(path, O_RDWR | O_CLOEXEC);
    } else fd = fcntl((int)(intptr_t)from, F_DUPFD_CLOEXEC, 3);
    struct stat info;
    if (fd < 0 || fstat(fd, &info)) FAIL(INVALID_VALUE);
    for (int j = 0; j < PIECES; j++)
        if (shared->physical[j].size && shared->physical[j].inode == info.st_ino) {
            hold_physical(j, 1);
            piece[i] = (Piece){1, 1, 0, fd, j};
            *handle = 0x9000 + (uint64_t)i;
            goto out;
        }
    close(fd);
    r = INVALID_VALUE;
    LEAVE;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t align, CUdeviceptr at, uint64_t flags) {
    ENTER(0);
    (void)align, (void)at, (void)flags;
    NEED_CONTEXT;
    if (!size || size % GRANULE) FAIL(INVALID_VALUE);
    SLOT(range_, PIECES, i);
    char *wide = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) FAIL(OUT_OF_MEMORY);
    char *start = (char *)(((uintptr_t)wide + GRANULE - 1) / GRANULE * GRANULE);
    if (start > wide) munmap(wide, (size_t)(start - wide));
    if (wide + GRANULE > start) munmap(start + size, (size_t)(wide + GRANULE - start));
    range_[i] = (Range){1, (uint64_t)start, size};
    *address = (uint64_t)start;
    LEAVE;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER(0);
    NEED_CONTEXT;
    for (int i = 0; i < PIECES; i++)
        if (mapping[i].used && mapping[i].address - address < size) FAIL(INVALID_VALUE);
    for (int i = 0; i < PIECES; i++)
        if (range_[i].used && range_[i].address == address && range_[i].size == size) {
            munmap((void *)address, size);
            range_[i].used = 0;
            goto out;
        }
    r = INVALID_VALUE;
    LEAVE;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER(1);
    (void)flags;
    NEED_CONTEXT;
    Piece *p = piece_of(handle);
    if (!p || offset || address % GRANULE || shared->physical[p->physical].size != size)
        FAIL(INVALID_VALUE);
    int inside = 0;
    for (int i = 0; i < PIECES; i++) {
        if (range_[i].used && address >= range_[i].address
            && address + size <= range_[i].address + range_[i].size) inside = 1;
        if (mapping[i].used && mapping[i].address < address + size
            && address < mapping[i].address + mapping[i].size) FAIL(INVALID_VALUE);
    }
    SLOT(mapping, PIECES, i);
    if (!inside || mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED)
        FAIL(INVALID_VALUE);
    p->maps++;
    mapping[i] = (Mapping){1, (int)(p - piece), 0, address, size};
    LEAVE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER(1);
    NEED_CONTEXT;
    for (int i = 0; i < PIECES; i++)
        if (mapping[i].used && mapping[i].address == address && mapping[i].size == size) {
            mmap((void *)address, size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            mapping[i].used = 0;
            piece[mapping[i].piece].maps--;
            drop_piece(mapping[i].piece);
            goto out;
        }
    r = INVALID_VALUE;
    LEAVE;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const Access *access, size_t count) {
    ENTER(1);
    NEED_CONTEXT;
    if (count != 1 || access->location.id >= devices || access->location.id != CURRENT)
        FAIL(INVALID_DEVICE);
    for (int i = 0; i < PIECES; i++)
        if (mapping[i].used && mapping[i].address == address && mapping[i].size == size) {
            mapping[i].flags = access->flags;
            int rights = access->flags == READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
            if (mprotect((void *)address, size, rights)) FAIL(INVALID_VALUE);
            goto out;
        }
    r = INVALID_VALUE;
    LEAVE;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, void *stream) {
    ENTER(0);
    (void)stream;
    NEED_CONTEXT;
    memmove((void *)target, (void *)source, size);
    LEAVE;
}
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, void *stream) {
    ENTER(0);
    (void)stream;
    NEED_CONTEXT;
    for (int i = 0; i < PIECES; i++)
        if (mapping[i].used && address >= mapping[i].address
            && address + size <= mapping[i].address + mapping[i].size) {
            if (mapping[i].flags == READWRITE) memset((void *)address, value, size);
            else if (strcmp(setting("STANDIN_GUARD", "on"), "off")) FAIL(INVALID_VALUE);
            goto out;
        }
    r = INVALID_VALUE;
    LEAVE;
}

/* ---- streams and events ---- */

static int done(int index, uint64_t record) {
    Event *e = &shared->event[index];
    if (!e->used || !e->owner_alive || (kill(e->owner, 0) && errno == ESRCH)) return 1;
    if (e->queries_left > 0 && record == e->recorded) return 0;
    if (e->finished < record) return 0;
    if (record == e->recorded)
        for (int i = 0; i < e->deps; i++)
            if (!done(e->dep[i].event, e->dep[i].record)) return 0;
    return 1;
}
static int add_dep(Dep *deps, int count, Dep one) {
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (deps[i].event != one.event && !done(deps[i].event, deps[i].record)) deps[kept++] = deps[i];
    if (done(one.event, one.record)) return kept;
    if (kept == DEPS) { fprintf(stderr, "stand-in: too many waits on one stream\n"); abort(); }
    deps[kept++] = one;
    return kept;
}
/* Each context has its own default stream. */
static Stream *stream_of(uint64_t stream) {
    if (stream <= 2) stream += (uint64_t)(CURRENT + 1) << 32;
    for (int i = 0; i < 256; i++)
        if (stream_[i].used && stream_[i].stream == stream) return &stream_[i];
    for (int i = 0; i < 256; i++)
        if (!stream_[i].used) { stream_[i] = (Stream){1, 0, stream, {{0, 0}}}; return &stream_[i]; }
    fprintf(stderr, "stand-in: too many streams\n");
    abort();
}
static Opening *opening_of(void *event) {
    uint64_t index = (uint64_t)event - 0xe0000;
    return index < THINGS && opening[index].used ? &opening[index] : NULL;
}
static int interprocess_events(void) {
    int count = 0;
    for (int i = 0; i < THINGS; i++) count += opening[i].used && opening[i].interprocess;
    return count;
}
/* The default stream is that of the current context, which must be the event's. */
static CUresult stream_fits(void *stream, int event_device) {
    if ((uintptr_t)stream > 2 && !strict_streams) return OK;
    if (CURRENT < 0) return INVALID_CONTEXT;
    return event_device >= 0 && visible[CURRENT] != event_device ? INVALID_HANDLE : OK;
}

CUresult cuStreamCreate(void **stream, unsigned flags) {
    ENTER(1);
    (void)flags;
    NEED_CONTEXT;
    static uint64_t next = 0x50000;
    Stream *s = stream_of(next += 16);
    s->used = 2;
    *stream = (void *)s->stream;
    LEAVE;
}
CUresult cuStreamDestroy_v2(void *stream) {
    ENTER(0);
    Stream *s = stream_of((uint64_t)stream);
    if (s->used != 2) FAIL(INVALID_HANDLE);
    s->used = 0;
    LEAVE;
}
CUresult cuStreamSynchronize(void *stream) {
    ENTER(1);
    (void)stream;
    NEED_CONTEXT;
    LEAVE;
}
CUresult cuCtxSynchronize(void) { ENTER(1); NEED_CONTEXT; LEAVE; }

CUresult cuEventCreate(void **event, unsigned flags) {
    ENTER(1);
    NEED_CONTEXT;
    if ((flags & INTERPROCESS) && interprocess_events() >= IPC_LIMIT) FAIL(OUT_OF_MEMORY);
    SLOT(opening, THINGS, i);
    SLOT(shared->event, EVENTS, j);
    /* What waits for an earlier event here waits for what is over. */
    uint32_t generation = shared->event[j].generation + 1;
    uint64_t recorded = shared->event[j].recorded;
    shared->event[j] = (Event){.used = 1, .owner_alive = 1, .device = visible[CURRENT],
                               .owner = getpid(), .generation = generation,
                               .recorded = recorded, .finished = recorded};
    opening[i] = (Opening){1, j, 0, (flags & INTERPROCESS) != 0};
    *event = (void *)(uintptr_t)(0xe0000 + i);
    LEAVE;
}
CUresult cuEventDestroy_v2(void *event) {
    ENTER(0);
    NEED_CONTEXT;
    Opening *o = opening_of(event);
    if (!o) FAIL(INVALID_HANDLE);
    Event *e = &shared->event[o->event];
    if (!o->opened) e->owner_alive = 0;
    e->used--;
    o->used = 0;
    LEAVE;
}
CUresult cuIpcGetEventHandle(Handle64 *handle, void *event) {
    ENTER(0);
    NEED_CONTEXT;
    Opening *o = opening_of(event);
    if (!o || !o->interprocess || o->opened) FAIL(INVALID_VALUE);
    memset(handle, 0, sizeof *handle);
    snprintf(handle->bytes, 64, "EVNT %d %u", o->event, shared->event[o->event].generation);
    LEAVE;
}
CUresult cuIpcOpenEventHandle(void **event, Handle64 handle) {
    ENTER(1);
    NEED_CONTEXT;
    int index;
    unsigned generation;
    if (!strcmp(setting("STANDIN_EVENTS", "on"), "off")) FAIL(INVALID_VALUE);
    if (sscanf(handle.bytes, "EVNT %d %u", &index, &generation) != 2 || index < 0 || index >= EVENTS
        || !shared->event[index].used || shared->event[index].generation != generation)
        FAIL(INVALID_VALUE);
    if (interprocess_events() >= IPC_LIMIT) FAIL(OUT_OF_MEMORY);
    SLOT(opening, THINGS, i);
    shared->event[index].used++;
    opening[i] = (Opening){1, index, 1, 1};
    *event = (void *)(uintptr_t)(0xe0000 + i);
    LEAVE;
}
CUresult cuEventRecord(void *event, void *stream) {
    ENTER(0);
    Opening *o = opening_of(event);
    if (!o) FAIL(INVALID_HANDLE);
    Event *e = &shared->event[o->event];
    if ((r = stream_fits(stream, e->device))) goto out;
    Stream *s = stream_of((uint64_t)stream);
    e->recorded++;
    e->queries_left = hold_queries;
    if (!hold) e->finished = e->recorded;
    e->deps = 0;
    for (int i = 0; i < s->deps; i++) e->deps = add_dep(e->dep, e->deps, s->dep[i]);
    LEAVE;
}
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER(0);
    (void)flags;
    Opening *o = opening_of(event);
    if (!o) FAIL(INVALID_HANDLE);
    if ((r = stream_fits(stream, -1))) goto out;
    Stream *s = stream_of((uint64_t)stream);
    Event *e = &shared->event[o->event];
    s->deps = add_dep(s->dep, s->deps, (Dep){o->event, e->recorded});
    /* Recorded again meanwhile, the event forgets what this record is behind. */
    for (int i = 0; i < e->deps; i++) s->deps = add_dep(s->dep, s->deps, e->dep[i]);
    LEAVE;
}
CUresult cuEventQuery(void *event) {
    ENTER(1);
    Opening *o = opening_of(event);
    if (!o) FAIL(INVALID_HANDLE);
    Event *e = &shared->event[o->event];
    if (slow_queries) {
        unlock_all();
        usleep((useconds_t)slow_queries);
        lock_all();
        if (!o->used || &shared->event[o->event] != e) pulled++;
    }
    if (e->queries_left > 0) e->queries_left--;
    r = done(o->event, e->recorded) ? OK : NOT_READY;
    LEAVE;
}
CUresult cuEventSynchronize(void *event) {
    ENTER(1);
    NEED_CONTEXT;
    Opening *o = opening_of(event);
    if (!o) FAIL(INVALID_HANDLE);
    int index = o->event;
    shared->event[index].queries_left = 0;
    while (!done(index, shared->event[index].recorded)) {
        unlock_all();
        usleep(200);
        lock_all();
    }
    LEAVE;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    Dl_info self;
    char name[128];
    *found = NULL;
    if (dladdr((void *)cuInit, &self)) {
        void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        snprintf(name, sizeof name, "%s_v2", symbol);
        if (library && !(*found = dlsym(library, name))) *found = dlsym(library, symbol);
        if (library) dlclose(library);
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
CUresult cuGetProcAddress(const char *symbol, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, found, version, flags, NULL);
}

/* ---- for the tests ---- */

/* Fail the k-th call from now with this code, once; 0 for never. */
void standin_fail(uint64_t k, int code) {
    fail_at = k ? calls + k : 0;
    fail_code = code;
    failed = "";
}
/* From now on every call fails with this code, as after a fault on the device; 0 for no more. */
void standin_break(int code) { broken = code; }
/* Return the name of the call that was failed; empty if none was yet. */
const char *standin_failed(void) { return failed; }
uint64_t standin_calls(const char *name) {
    if (!name) return calls;
    for (int i = 0; counter[i].name; i++)
        if (!strcmp(counter[i].name, name)) return counter[i].calls;
    return 0;
}
/* Return the names of the calls since the last time, one a line. */
const char *standin_journal(void) {
    static char copy[sizeof journal];
    pthread_mutex_lock(&local);
    memcpy(copy, journal, journal_length);
    copy[journal_length] = 0;
    journal_length = 0;
    pthread_mutex_unlock(&local);
    return copy;
}
/* From now on, records of this process stay pending until standin_finish. */
void standin_hold(int on) { hold = on; }
void standin_finish(void) {
    lock_all();
    for (int i = 0; i < EVENTS; i++)
        if (shared->event[i].owner == getpid()) shared->event[i].finished = shared->event[i].recorded;
    unlock_all();
}
/* From now on, an event is done at the earliest after so many queries. */
void standin_hold_queries(int64_t queries) { hold_queries = queries; }
/* A query takes so many microseconds; how many events were destroyed under one? */
void standin_slow_queries(int us) { slow_queries = us; }
int standin_pulled(void) { return pulled; }
/* A graph is being captured in another thread: count what would break it. */
void standin_capture(int on) { capturing = on; }
int standin_broken_captures(void) { return broken_captures; }
/* Real streams need a current context too. */
void standin_strict_streams(int on) { strict_streams = on; }
int standin_forked_calls(void) { return forked_calls; }
/* What this process has and has not given back, the memory in use on all devices by anyone, and
 * the descriptors that are this library's own (a driver would have none). */
void standin_ledger(int64_t ledger[9]) {
    memset(ledger, 0, 9 * sizeof *ledger);
    lock_all();
    for (int i = 0; i < PIECES; i++) {
        ledger[0] += piece[i].used ? piece[i].refs : 0;
        ledger[1] += mapping[i].used;
        ledger[2] += range_[i].used;
        ledger[8] += piece[i].used;
    }
    for (int i = 0; i < THINGS; i++) ledger[opening[i].opened ? 4 : 3] += opening[i].used;
    for (int i = 0; i < DEVICES; i++) {
        ledger[5] += contexts[i];
        ledger[7] += (int64_t)used_on(i);
    }
    for (int i = 0; i < 256; i++) ledger[6] += stream_[i].used == 2;
    unlock_all();
}
int standin_contexts(int device) { return contexts[device]; }
int standin_depth(void) { return depth; }
void standin_reset_thread(void) { depth = 0; relaxed = 0; }
