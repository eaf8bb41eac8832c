#define _GNU_SOURCE
#include "moves.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Progress calls without any event before the thread goes to sleep on the worker's file descriptor. */
#define SPINS_BEFORE_SLEEP 2000
/* Another thread that progresses the same worker may take the event that this one sleeps for, so no sleep is long. */
#define SLEEP_MS 1
/* Of a bell, before others on this core have their turn: on x86 a microsecond or two. */
#define LOOKS_PER_YIELD 32
/* How often the loops look at the clock and at `stop`. */
#define OPERATIONS_PER_CHECK 64
#define BYTES_PER_CHECK (4u << 20)
/* After a stop or the deadline, what is in flight gets this long to land, longer than a busy machine needs; then the
 * caller closes the endpoint. */
#define DRAIN_NS 1000000000u

/* Shared with completion callbacks, which may run after the posting call has given up: freed by whoever is last. */
typedef struct hurray_closing {
    uint64_t completed;
    int status;
    int64_t holders;
    int described;
    char description[HURRAY_DESCRIPTION_SIZE]; /* while `described` is 0, UCX may be writing it */
} progress_t;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static progress_t *progress_new(void)
{
    progress_t *progress = calloc(1, sizeof(*progress));
    if (progress != NULL) {
        progress->holders = 1;
    }
    return progress;
}

static void progress_drop(progress_t *progress)
{
    if (__atomic_sub_fetch(&progress->holders, 1, __ATOMIC_ACQ_REL) == 0) {
        free(progress);
    }
}

static void progress_fail(progress_t *progress, ucs_status_t status)
{
    int expected = UCS_OK;
    __atomic_compare_exchange_n(&progress->status, &expected, (int)status, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static void on_complete(void *request, ucs_status_t status, void *user_data)
{
    progress_t *progress = user_data;
    if (status != UCS_OK) {
        progress_fail(progress, status);
    }
    ucp_request_free(request);
    __atomic_add_fetch(&progress->completed, 1, __ATOMIC_ACQ_REL);
    progress_drop(progress);
}

/* The same, and asks UCX what it did. Here, within its progress, nothing of what UCX looks at changes meanwhile. */
static void on_complete_describe(void *request, ucs_status_t status, void *user_data)
{
    progress_t *progress = user_data;
    ucp_request_attr_t attr = {
        .field_mask = UCP_REQUEST_ATTR_FIELD_INFO_STRING | UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE,
        .debug_string = progress->description,
        .debug_string_size = sizeof(progress->description),
    };

    if (status == UCS_OK && ucp_request_query(request, &attr) == UCS_OK) {
        __atomic_store_n(&progress->described, 1, __ATOMIC_RELEASE);
    }
    on_complete(request, status, user_data);
}

/* True when the time is up; a stop brings the deadline forward. */
static int is_late(const volatile int *stop, uint64_t *deadline_ns)
{
    uint64_t now = now_ns();

    if (stop != NULL && *stop && *deadline_ns > now + DRAIN_NS) {
        *deadline_ns = now + DRAIN_NS;
    }
    return now >= *deadline_ns;
}

static ucs_status_t why_late(const volatile int *stop)
{
    return (stop != NULL && *stop) ? UCS_ERR_CANCELED : UCS_ERR_TIMED_OUT;
}

/* Drives the worker until `completed` of `progress` reaches `target`; sleeps when nothing happens. */
static ucs_status_t wait_for(ucp_worker_h worker, progress_t *progress, uint64_t target, const volatile int *stop,
                             uint64_t *deadline_ns)
{
    unsigned spins = 0;
    int fd = -1;

    while (__atomic_load_n(&progress->completed, __ATOMIC_ACQUIRE) < target) {
        if (ucp_worker_progress(worker) != 0) {
            spins = 0;
            continue;
        }
        if ((++spins % OPERATIONS_PER_CHECK == 0) && is_late(stop, deadline_ns)) {
            return why_late(stop);
        }
        if (spins < SPINS_BEFORE_SLEEP) {
            continue;
        }
        if (((fd < 0) && (ucp_worker_get_efd(worker, &fd) != UCS_OK)) || (ucp_worker_arm(worker) != UCS_OK)) {
            continue;
        }
        struct pollfd event = {.fd = fd, .events = POLLIN};
        (void)poll(&event, 1, SLEEP_MS); /* an interrupted sleep is as good as a finished one */
        if (is_late(stop, deadline_ns)) {
            return why_late(stop);
        }
    }
    return UCS_OK;
}

static ucp_request_param_t tracked_by(progress_t *progress)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_MULTI_SEND,
        .cb.send = on_complete,
        .user_data = progress,
    };
    return param;
}

/* Accounts for what a posting call returned: a request in flight, success at once, or failure. */
static ucs_status_t account(progress_t *progress, ucs_status_ptr_t result)
{
    if (UCS_PTR_IS_PTR(result)) {
        return UCS_OK; /* on_complete does the rest, or has done it: without immediate completion it may run in the call */
    }
    __atomic_add_fetch(&progress->completed, 1, __ATOMIC_ACQ_REL);
    progress_drop(progress);
    if (result != NULL) {
        progress_fail(progress, UCS_PTR_STATUS(result));
        return UCS_PTR_STATUS(result);
    }
    return UCS_OK;
}

static ucs_status_t flush_tracked(ucp_worker_h worker, ucp_ep_h ep, progress_t *progress, uint64_t posted,
                                  const volatile int *stop, uint64_t *deadline_ns)
{
    ucp_request_param_t param = tracked_by(progress);

    param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FLAG_MULTI_SEND;
    __atomic_add_fetch(&progress->holders, 1, __ATOMIC_ACQ_REL);
    account(progress, ucp_ep_flush_nbx(ep, &param));
    return wait_for(worker, progress, posted + 1, stop, deadline_ns);
}

ucs_status_t hurray_flush(ucp_worker_h worker, ucp_ep_h ep, const volatile int *stop, uint64_t deadline_ns)
{
    progress_t *progress = progress_new();
    ucs_status_t status;

    if (progress == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    status = flush_tracked(worker, ep, progress, 0, stop, &deadline_ns);
    if (status == UCS_OK) {
        status = (ucs_status_t)__atomic_load_n(&progress->status, __ATOMIC_ACQUIRE);
    }
    progress_drop(progress);
    return status;
}

hurray_closing_t *hurray_close_begin(ucp_ep_h ep, int force)
{
    progress_t *progress = progress_new();
    ucp_request_param_t param;

    if (progress != NULL) {
        param = tracked_by(progress);
        param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FLAG_MULTI_SEND;
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
        __atomic_add_fetch(&progress->holders, 1, __ATOMIC_ACQ_REL);
        account(progress, ucp_ep_close_nbx(ep, &param));
    }
    return progress;
}

ucs_status_t hurray_close_wait(ucp_worker_h worker, hurray_closing_t *closing, uint64_t deadline_ns)
{
    /* A close that "fails" tells of the connection; the endpoint is released all the same (ucp.h). */
    return wait_for(worker, closing, 1, NULL, &deadline_ns);
}

void hurray_close_drop(hurray_closing_t *closing)
{
    progress_drop(closing);
}

hurray_outcome_t hurray_post(ucp_worker_h worker, ucp_ep_h ep, hurray_direction_t direction, uint64_t local_base,
                             ucp_mem_h local_memory, uint64_t remote_base, ucp_rkey_h rkey, hurray_plan_t plan,
                             uint64_t window, const volatile int *stop, uint64_t deadline_ns, char *description)
{
    hurray_outcome_t outcome = {0, 0, 0, UCS_OK, 1};
    progress_t *progress = progress_new();
    ucp_request_param_t param;
    ucs_status_t waited, drained, failed;
    const uint64_t asked_ns = deadline_ns;

    if (progress == NULL) {
        outcome.status = UCS_ERR_NO_MEMORY;
        return outcome;
    }
    param = tracked_by(progress);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = local_memory;

    while (outcome.posted < plan.count && outcome.status == UCS_OK) {
        uint64_t i = outcome.posted;
        void *local = (void *)(local_base + plan.local_offsets[i]);
        uint64_t remote = remote_base + plan.remote_offsets[i];

        if (i % OPERATIONS_PER_CHECK == 0) {
            if (*stop) {
                outcome.status = UCS_ERR_CANCELED;
                break;
            }
            if (now_ns() >= deadline_ns) {
                outcome.status = UCS_ERR_TIMED_OUT;
                break;
            }
        }
        if (i >= window) {
            outcome.status = wait_for(worker, progress, i - window + 1, stop, &deadline_ns);
            if (outcome.status != UCS_OK) {
                break;
            }
        }
        __atomic_add_fetch(&progress->holders, 1, __ATOMIC_ACQ_REL);
        outcome.posted++;
        outcome.nbytes += plan.lengths[i];
        if (description != NULL && i == 0) { /* UCX tells only of what it has made a request for */
            param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
            param.cb.send = on_complete_describe;
        } else {
            param.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
            param.cb.send = on_complete;
        }
        outcome.status = account(progress, direction == HURRAY_PUT
                                               ? ucp_put_nbx(ep, local, plan.lengths[i], remote, rkey, &param)
                                               : ucp_get_nbx(ep, local, plan.lengths[i], remote, rkey, &param));
    }

    /* Also after a failure: what is in flight must land, or be known not to, before the caller may go on. */
    waited = flush_tracked(worker, ep, progress, outcome.posted, stop, &deadline_ns);
    drained = waited;
    /* A stop has brought the deadline forward and left time to land; a deadline that came by itself has not. */
    if ((waited == UCS_ERR_TIMED_OUT || waited == UCS_ERR_CANCELED) && deadline_ns == asked_ns) {
        uint64_t drained_by = now_ns() + DRAIN_NS;

        drained = wait_for(worker, progress, outcome.posted + 1, NULL, &drained_by);
    }
    failed = (ucs_status_t)__atomic_load_n(&progress->status, __ATOMIC_ACQUIRE);
    outcome.completed = __atomic_load_n(&progress->completed, __ATOMIC_ACQUIRE);
    if (outcome.completed > outcome.posted) {
        outcome.completed = outcome.posted; /* the flush itself is not one of the plan's operations */
    } else if (drained != UCS_OK && outcome.completed == outcome.posted && outcome.posted > 0) {
        outcome.completed = outcome.posted - 1; /* the flush may be the one that completed: claim nothing */
    }
    if (outcome.status == UCS_OK) {
        outcome.status = failed != UCS_OK ? failed : waited;
    }
    outcome.settled = (outcome.posted == 0) || (drained == UCS_OK && failed == UCS_OK);
    if (description != NULL && __atomic_load_n(&progress->described, __ATOMIC_ACQUIRE)) {
        memcpy(description, progress->description, sizeof(progress->description));
    }
    progress_drop(progress);
    return outcome;
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void stream_avx2(char *dst, const char *src, uint64_t nbytes)
{
    uint64_t head = (32 - ((uintptr_t)dst & 31)) & 31;

    head = head < nbytes ? head : nbytes;
    memcpy(dst, src, head);
    dst += head;
    src += head;
    nbytes -= head;
    for (; nbytes >= 128; nbytes -= 128, dst += 128, src += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)src);
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(src + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(src + 96));
        _mm_prefetch(src + 512, _MM_HINT_NTA);
        _mm_prefetch(src + 576, _MM_HINT_NTA);
        _mm256_stream_si256((__m256i *)dst, a);
        _mm256_stream_si256((__m256i *)(dst + 32), b);
        _mm256_stream_si256((__m256i *)(dst + 64), c);
        _mm256_stream_si256((__m256i *)(dst + 96), d);
    }
    memcpy(dst, src, nbytes);
}

static void stream(char *dst, const char *src, uint64_t nbytes)
{
    if (__builtin_cpu_supports("avx2")) {
        stream_avx2(dst, src, nbytes);
    } else {
        memcpy(dst, src, nbytes);
    }
}

static void store_fence(void)
{
    _mm_sfence();
}

static void spin_pause(void)
{
    _mm_pause();
}
#else
static void stream(char *dst, const char *src, uint64_t nbytes)
{
    memcpy(dst, src, nbytes);
}

static void store_fence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void spin_pause(void)
{
#ifdef __aarch64__
    __asm__ volatile("isb"); /* `yield` does nothing on the cores of servers */
#endif
}
#endif

/* What looks, now and then, whether a copy is to end early. */
typedef struct {
    const volatile int *stop;
    uint64_t deadline_ns;
    uint64_t unchecked; /* bytes since it looked last */
} watch_t;

static ucs_status_t look(watch_t *watch)
{
    watch->unchecked = 0;
    if (*watch->stop) {
        return UCS_ERR_CANCELED;
    }
    return now_ns() >= watch->deadline_ns ? UCS_ERR_TIMED_OUT : UCS_OK;
}

static void copy_piece(hurray_outcome_t *outcome, watch_t *watch, char *dst, const char *src, uint64_t nbytes)
{
    uint64_t done = 0;

    /* A long run is copied in parts, so that a stop or a deadline is noticed within one of them. */
    while (done < nbytes) {
        uint64_t part = nbytes - done;

        part = part < BYTES_PER_CHECK ? part : BYTES_PER_CHECK;
        if (watch->unchecked >= BYTES_PER_CHECK && (outcome->status = look(watch)) != UCS_OK) {
            return;
        }
        stream(dst + done, src + done, part);
        done += part;
        watch->unchecked += part;
    }
    outcome->posted++;
    outcome->nbytes += nbytes;
}

static void copy_end(hurray_outcome_t *outcome)
{
    store_fence();
    outcome->completed = outcome->posted; /* a copy is complete when the call returns */
}

hurray_outcome_t hurray_copy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets,
                             const uint64_t *dst_offsets, const uint64_t *lengths, uint64_t count,
                             const volatile int *stop, uint64_t deadline_ns)
{
    hurray_outcome_t outcome = {0, 0, 0, UCS_OK, 1};
    watch_t watch = {stop, deadline_ns, BYTES_PER_CHECK};

    for (uint64_t i = 0; i < count && outcome.status == UCS_OK; i++) {
        copy_piece(&outcome, &watch, (char *)(dst_base + dst_offsets[i]), (const char *)(src_base + src_offsets[i]),
                   lengths[i]);
    }
    copy_end(&outcome);
    return outcome;
}

static uint64_t highest(const uint32_t *rows, uint64_t num_rows)
{
    uint32_t found = 0;

    for (uint64_t i = 0; i < num_rows; i++) {
        found = rows[i] > found ? rows[i] : found;
    }
    return found;
}

/* How many rows from this one on lie one after the other on both sides: they are one piece. */
static uint64_t run_of(const hurray_rows_t *rows, const hurray_place_t *place, uint64_t row)
{
    uint64_t run = 1;

    if (place->src_stride != place->nbytes || place->dst_stride != place->nbytes) {
        return 1;
    }
    while (row + run < rows->num_rows && rows->src_rows[row + run] == rows->src_rows[row] + run &&
           rows->dst_rows[row + run] == rows->dst_rows[row] + run) {
        run++;
    }
    return run;
}

static int inside(uint64_t start, uint64_t stride, uint64_t row, uint64_t row_nbytes, uint64_t nbytes)
{
    uint64_t at, end;

    return !__builtin_mul_overflow(stride, row, &at) && !__builtin_add_overflow(at, start, &at) &&
           !__builtin_add_overflow(at, row_nbytes, &end) && end <= nbytes;
}

int hurray_rows_inside(hurray_rows_t rows, uint64_t src_nbytes, uint64_t dst_nbytes)
{
    uint64_t last_src = highest(rows.src_rows, rows.num_rows), last_dst = highest(rows.dst_rows, rows.num_rows);

    for (uint64_t i = 0; i < rows.num_places && rows.num_rows > 0; i++) {
        const hurray_place_t *place = &rows.places[i];

        if (!inside(place->src_start, place->src_stride, last_src, place->nbytes, src_nbytes) ||
            !inside(place->dst_start, place->dst_stride, last_dst, place->nbytes, dst_nbytes)) {
            return 0;
        }
    }
    return 1;
}

hurray_outcome_t hurray_copy_rows(uint64_t src_base, uint64_t dst_base, hurray_rows_t rows, const volatile int *stop,
                                  uint64_t deadline_ns, uint64_t *bell, uint64_t token)
{
    hurray_outcome_t outcome = {0, 0, 0, UCS_OK, 1};
    watch_t watch = {stop, deadline_ns, BYTES_PER_CHECK};

    for (uint64_t i = 0; i < rows.num_places; i++) {
        const hurray_place_t *place = &rows.places[i];
        char *dst = (char *)(dst_base + place->dst_start);
        const char *src = (const char *)(src_base + place->src_start);

        for (uint64_t row = 0, run; row < rows.num_rows && outcome.status == UCS_OK; row += run) {
            run = run_of(&rows, place, row);
            copy_piece(&outcome, &watch, dst + rows.dst_rows[row] * place->dst_stride,
                       src + rows.src_rows[row] * place->src_stride, run * place->nbytes);
        }
    }
    copy_end(&outcome);
    if (bell != NULL && outcome.status == UCS_OK) {
        __atomic_store_n(bell, token, __ATOMIC_RELEASE);
    }
    return outcome;
}

int hurray_rings(const uint64_t *bell, uint64_t token, uint64_t timeout_ns)
{
    uint64_t deadline_ns = now_ns() + timeout_ns;

    for (;;) {
        /* Whoever copies may wait for this core. */
        for (int i = 0; i < LOOKS_PER_YIELD; i++) {
            if (__atomic_load_n(bell, __ATOMIC_ACQUIRE) == token) {
                return 1;
            }
            spin_pause();
        }
        if (now_ns() >= deadline_ns) {
            return 0;
        }
        sched_yield();
    }
}

void hurray_memcpy(uint64_t src_base, uint64_t dst_base, const uint64_t *src_offsets, const uint64_t *dst_offsets,
                   const uint64_t *lengths, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        memcpy((void *)(dst_base + dst_offsets[i]), (const void *)(src_base + src_offsets[i]), lengths[i]);
    }
}

int hurray_map_over(uint64_t from, uint64_t to, uint64_t nbytes)
{
    /* An old size of 0 asks for a second mapping of the same shared pages (mremap(2)). */
    void *mapped = mremap((void *)from, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)to);
    return mapped == MAP_FAILED ? errno : 0;
}

int hurray_unmapped(uint64_t start, uint64_t nbytes)
{
    uint64_t skip = start % (uint64_t)sysconf(_SC_PAGESIZE);
    void *wanted = (void *)(start - skip), *mapped;

    if (nbytes > UINT64_MAX - start) {
        return 0;
    }
    /* The kernel maps it for a moment, without room, if it can; a kernel before 4.17 does so elsewhere, if it cannot. */
    mapped = mmap(wanted, skip + nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                  -1, 0);
    if (mapped == MAP_FAILED) {
        return 0;
    }
    munmap(mapped, skip + nbytes);
    return mapped == wanted;
}
