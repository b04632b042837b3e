/* Blocks of rows from one adapter's memory into one slot of many layers, in one call.
 *
 * A slot is padded to the largest rank, so that the rows of B are short and lie far apart. Written past the caches
 * (non-temporal stores), their lines are not read first; nothing of a slot is used before the next step.
 */
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct block {
    char *to;                       /* its place in slot 0 */
    int64_t slot_stride, to_stride; /* bytes from slot to slot, and from row to row */
    const char *from;
    int64_t from_stride, rows, bytes; /* bytes: of a row */
};

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
extern int omp_get_max_threads(void) __attribute__((weak));

struct work {
    const struct block *blocks;
    int64_t n, slot;
};

static inline int64_t within(int64_t n, int64_t most) { return n < 0 ? 0 : n < most ? n : most; }

static void copy_rows(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t rows, int64_t bytes)
{
#if defined(__AVX2__)
    if (((uintptr_t)to | (uintptr_t)to_stride | (uintptr_t)bytes) % sizeof(__m256i) == 0) {
        for (int64_t r = 0; r < rows; r++, to += to_stride, from += from_stride)
            for (int64_t i = 0; i < bytes; i += sizeof(__m256i))
                _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
        return;
    }
#endif
    for (int64_t r = 0; r < rows; r++, to += to_stride, from += from_stride) __builtin_memcpy(to, from, bytes);
}

/* The share of one thread: rows, counted in bytes over all blocks. */
static void share(const struct work *w, int64_t mine, int64_t threads)
{
    int64_t total = 0, before = 0;
    for (int64_t i = 0; i < w->n; i++) total += w->blocks[i].rows * w->blocks[i].bytes;
    int64_t start = total * mine / threads, end = total * (mine + 1) / threads;
    for (int64_t i = 0; i < w->n && before < end; i++) {
        const struct block *b = w->blocks + i;
        int64_t size = b->rows * b->bytes;
        if (size && before + size > start) {
            int64_t first = within((start - before + b->bytes - 1) / b->bytes, b->rows);
            int64_t last = within((end - before + b->bytes - 1) / b->bytes, b->rows);
            copy_rows(b->to + w->slot * b->slot_stride + first * b->to_stride, b->to_stride,
                      b->from + first * b->from_stride, b->from_stride, last - first, b->bytes);
        }
        before += size;
    }
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

static void in_team(void *work) { share(work, omp_get_thread_num(), omp_get_num_threads()); }

void lora_copy(const struct block *blocks, int64_t n, int64_t slot)
{
    struct work w = {blocks, n, slot};
    if (GOMP_parallel && omp_get_thread_num && omp_get_num_threads && omp_get_max_threads && omp_get_max_threads() > 1)
        GOMP_parallel(in_team, &w, 0, 0);
    else
        share(&w, 0, 1);
}
