/* What reading a batch's panels takes by itself: `lora_read` is called as `lora_add`, and only reads, with the same
 * threads. Each thread reads its share of every panel, 64 bytes at a time. */
#include "lora.c"

typedef uint64_t line __attribute__((vector_size(64), aligned(4)));
static volatile uint64_t sink; /* the compiler must not leave the reads out */

static uint64_t read_share(const void *panels, int64_t units, int64_t mine, int64_t threads)
{
    const char *from = panels;
    int64_t lines = units * (int64_t)sizeof(unit) / 64;
    line sum = {0};
    for (int64_t i = lines * mine / threads; i < lines * (mine + 1) / threads; i++) {
        __builtin_prefetch(from + 64 * i + AHEAD, 0, 2); /* as the product does */
        sum |= *(const line *)(from + 64 * i);
    }
    return sum[0] | sum[1] | sum[2] | sum[3] | sum[4] | sum[5] | sum[6] | sum[7];
}

static void read_in_team(void *work)
{
    const struct work *w = work;
    int64_t mine = lora_threads() > 1 ? omp_get_thread_num() : 0;
    int64_t threads = lora_threads() > 1 ? omp_get_num_threads() : 1;
    uint64_t found = 0;
    for (int64_t i = 0; i < w->n_groups; i++) {
        const struct group *g = w->groups + i;
        found |= read_share(g->a, up(g->rank, LANES) * LANES * up(w->in, PAIR), mine, threads);
        for (int64_t j = 0; j < g->n_slices; j++) {
            const struct slice *s = g->slices + j;
            found |= read_share(s->b, up(s->width, LANES) * LANES * up(s->rank, PAIR), mine, threads);
        }
    }
    sink = found;
}

void lora_read(const struct work *prepared, const element *x, element *y)
{
    (void)x, (void)y;
    if (lora_threads() > 1)
        GOMP_parallel(read_in_team, (void *)prepared, 0, 0);
    else
        read_in_team((void *)prepared);
}
