/* y[rows] += scale * B A x[rows] for every adapter of a batch, each with its own rows and its own rank; then, for an
 * adapter with vectors, y[rows] = g * y[rows] + c.
 *
 * A and B lie in panels: [panel][k][PANEL columns], the columns being those of the product's result, so that the inner
 * loop reads a panel front to back, once for a tile of rows, and keeps the tile's sums in registers. With few rows
 * (decoding) that is as fast as the memory gives the panels; with many it is bound by the arithmetic.
 *
 * x, y and the panels are of ELEMENT (float32, bfloat16 or float16: one library for each); all sums are of float32.
 * bfloat16 lies in panels in pairs, [panel][k / 2][column][2]: two shifts make float32 of a register of them, and
 * processors with AVX-512 BF16 or ARM's BF16 multiply them as they are (Intel's Intrinsics Guide, _mm512_dpbf16_ps;
 * Arm's, vbfdotq_f32). With AMX 16 rows meet 16 columns in one instruction (_tile_dpbf16ps).
 *
 * The idea of tiles kept in registers over packed panels: Goto and van de Geijn, "Anatomy of High-Performance Matrix
 * Multiplication" (2008); of grouping rows by adapter: Punica and S-LoRA (arXiv:2310.18547, arXiv:2311.03285).
 */
#include <stdint.h>

#if defined(LANES_16) || defined(__AVX512F__)
#define LANES 16
#define TALL 8   /* rows of the largest tile: 12, whose sums fill more of the 32 registers, are slower on Zen 4 */
#define CHUNK 96 /* rows of one task: their x stays in the second-level cache from panel to panel */
#elif defined(__AVX__)
#define LANES 8
#define TALL 6
#define CHUNK 48
#else
#define LANES 4
#define TALL 8
#define CHUNK 64
#endif
#define PANEL (2 * LANES)
#define BLOCK 8          /* panels of one task of the second product */
#define RUN 4            /* most blocks that are computed together */
#define DEPTH 256        /* elements of a sum at a time, where a tile's rows are prepared on the stack; even */
#define MOST_SUMMED 64   /* rank of a slice, up to which the first product's sum may be divided */
#define STEP 8           /* units of each column that are turned at a time when panels are made */
/* Bytes between what a tile reads of the panels and what it asks of the memory, for the second-level cache: the memory
 * works while rows are multiplied. 4 to 32 KB were tried, and 8 was the best, with 1, 4 and 16 rows of each adapter. */
#define AHEAD 8192

#include "elements.h"

#if DOT && defined(AMX) && (defined(__AMX_BF16__) || defined(__AMXBF16__)) /* GCC's name, clang 14's name */
#define HAS_TILES
#define STRIP 32 /* rows that are prepared together: those of two registers of AMX */
#else
#define STRIP TALL
#endif

struct slice {
    const element *b; /* panels of `rank` rows */
    int64_t rank, top, first, width; /* top: its first column of the shrunk rows; first, width: columns of y */
    const float *g, *c; /* of `width`: y becomes g * y + c in the end; none, or both */
};

struct group {
    const int32_t *rows;
    int64_t n_rows;
    const element *a; /* panels of `in` rows */
    int64_t rank;   /* of all slices together */
    int64_t n_slices;
    const struct slice *slices;
    float *shrunk; /* [parts][n_rows][rank, up to a full register] */
};

struct work {
    const struct group *groups;
    int64_t n_groups;
    int64_t in;
    int64_t parts; /* of the first product's sum, each computed by itself */
    int64_t x_stride;
    int64_t y_stride;
    float scale;
    const element *x; /* x and y come with each call */
    element *y;
};

int64_t lora_panel(void) { return PANEL; }
int64_t lora_lanes(void) { return LANES; }
int64_t lora_pair(void) { return PAIR; }

static inline int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
typedef uvec packed_uvec __attribute__((aligned(4)));

/* A step of a tile: its next place in the panel, of one element of each row or of a pair. */
#if DOT
#define SUM(ROWS, WIDE)                                                                                      \
    uvec b[WIDE];                                                                                            \
    _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) b[w] = *(const packed_uvec *)(p + w * LANES);     \
    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                  \
    {                                                                                                        \
        uint32_t pair;                                                                                       \
        __builtin_memcpy(&pair, x[r] + 2 * k, sizeof pair);                                                  \
        _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) sum[r][w] = dot(sum[r][w], pair, b[w]);       \
    }
#elif PAIR == 2
#define SUM(ROWS, WIDE)                                                                                      \
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)                                             \
    {                                                                                                        \
        vec b[WIDE];                                                                                         \
        __asm__("" : "+r"(p)); /* loaded twice: registers are scarcer than loads */                           \
        _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++)                                               \
        {                                                                                                    \
            uvec pairs = *(const packed_uvec *)(p + w * LANES);                                              \
            b[w] = half ? (vec)(pairs & 0xffff0000u) : (vec)(pairs << 16);                                   \
        }                                                                                                    \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                              \
        {                                                                                                    \
            vec one = x[r][2 * k + half] - (vec){0};                                                         \
            _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) sum[r][w] += one * b[w];                  \
        }                                                                                                    \
    }
#else
#define SUM(ROWS, WIDE)                                                                                      \
    vec b[WIDE];                                                                                             \
    _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) b[w] = load(p + w * LANES);                       \
    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                  \
    {                                                                                                        \
        vec one = x[r][k] - (vec){0};                                                                        \
        _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) sum[r][w] += one * b[w];                      \
    }
#endif

/* One tile: ROWS rows, WIDE registers of columns. `from` and `to` are the rows' places; ADD: sums start from `to`; END
 * keeps them there, or adds them to y. An odd depth is summed to the next even one where elements lie in pairs: both
 * sides have a 0 there. */
#define TILE(NAME, ROWS, WIDE, ADD, TO, END)                                                                 \
    static inline __attribute__((always_inline)) void NAME(                                                  \
        const operand *const *from, const unit *p, int64_t depth, TO *const *to)                             \
    {                                                                                                        \
        vec sum[ROWS][WIDE];                                                                                 \
        const operand *x[ROWS];                                                                              \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                              \
        {                                                                                                    \
            x[r] = from[r];                                                                                  \
            _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) sum[r][w] =                               \
                ADD ? *(const vec *)(to[r] + w * LANES) : (vec){0};                                          \
        }                                                                                                    \
        int64_t units = (depth + PAIR - 1) / PAIR;                                                           \
        for (int64_t k = 0; k < units; k++, p += WIDE * LANES) {                                             \
            _Pragma("GCC unroll 2") for (int n = 0; n < WIDE * LANES * (int)sizeof *p; n += 64)              \
                __builtin_prefetch((const char *)p + AHEAD + n, 0, 2);                                       \
            SUM(ROWS, WIDE)                                                                                  \
        }                                                                                                    \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                              \
            _Pragma("GCC unroll 2") for (int w = 0; w < WIDE; w++) END(to[r] + w * LANES, sum[r][w]);        \
    }

/* Some rows with one panel, in tiles as tall as there are rows left. */
#define PRODUCT(NAME, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_tall, TALL, WIDE, ADD, TO, END)                                                              \
    TILE(NAME##_4, 4, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_2, 2, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_1, 1, WIDE, ADD, TO, END)                                                                    \
    static void NAME(const operand *const *from, int64_t n, const unit *p, int64_t depth, TO *const *to)     \
    {                                                                                                        \
        int64_t r = 0;                                                                                       \
        for (; r + TALL <= n; r += TALL) NAME##_tall(from + r, p, depth, to + r);                            \
        for (; r + 4 <= n; r += 4) NAME##_4(from + r, p, depth, to + r);                                     \
        for (; r + 2 <= n; r += 2) NAME##_2(from + r, p, depth, to + r);                                     \
        for (; r < n; r++) NAME##_1(from + r, p, depth, to + r);                                             \
    }

static inline void keep(float *to, vec sum) { *(vec *)to = sum; }
static inline void add(element *to, vec sum) { store(to, load(to) + sum); }
PRODUCT(write_wide, 2, 0, float, keep)
PRODUCT(write_narrow, 1, 0, float, keep)
PRODUCT(further_wide, 2, 1, float, keep)
PRODUCT(further_narrow, 1, 1, float, keep)
PRODUCT(add_wide, 2, 0, element, add)
PRODUCT(add_narrow, 1, 0, element, add)

#ifdef HAS_TILES
#include "amx.h"
#else
#define by_tiles(...) 0
#define add_by_tiles(...) 0
static void free_tiles(void) {}
#endif

static void product(int is_further, int64_t columns, const operand *const *from, int64_t n, const unit *p,
                    int64_t depth, float *const *to)
{
    int64_t done = by_tiles(is_further, columns, from, n, p, depth, to[0], n > 1 ? to[1] - to[0] : 0);
    from += done, n -= done, to += done;
    if (columns > LANES)
        (is_further ? further_wide : write_wide)(from, n, p, depth, to);
    else
        (is_further ? further_narrow : write_narrow)(from, n, p, depth, to);
}

/* At most STRIP rows with one panel of whole registers, added to y. */
static void add_product(int64_t columns, const operand *const *from, int64_t n, const unit *p, int64_t depth,
                        element *const *to)
{
    int64_t done = add_by_tiles(columns, from, n, p, depth, to);
    (columns > LANES ? add_wide : add_narrow)(from + done, n - done, p, depth, to + done);
}

/* `n` columns of `depth` elements each, side by side in `from`, into a panel of `width` columns, or a part of one. */
static inline __attribute__((always_inline)) void interleave(
    const element *from, int64_t stride, int64_t n, int64_t depth, unit *to, int64_t width)
{
    int64_t k = 0, whole = depth / PAIR;
    for (; k + STEP <= whole; k += STEP) {
        unit tile[PANEL][STEP];
        for (int64_t c = 0; c < n; c++) __builtin_memcpy(tile[c], from + c * stride + k * PAIR, sizeof tile[c]);
        for (int64_t i = 0; i < STEP; i++)
            for (int64_t c = 0; c < n; c++) to[(k + i) * width + c] = tile[c][i];
    }
    for (; k < up(depth, PAIR); k++)
        for (int64_t c = 0; c < n; c++) {
            unit last = 0; /* half of it is beyond an odd depth */
            __builtin_memcpy(&last, from + c * stride + k * PAIR, k < whole ? sizeof last : sizeof(element));
            to[k * width + c] = last;
        }
}

/* Columns `first` and following of the `total` that `panels` are for; after the last one, zeros up to a register. A
 * column's `depth` elements lie side by side in `from`, those of the next one `stride` elements further on. */
void lora_pack(const element *from, int64_t stride, int64_t columns, int64_t depth, unit *panels, int64_t first,
               int64_t total)
{
    int64_t filled = up(total, LANES) * LANES, last = first + columns, units = up(depth, PAIR);
    while (first < last) {
        int64_t within = first % PANEL, width = least(PANEL, filled - first + within);
        int64_t n = least(width - within, last - first);
        unit *to = panels + (first - within) * units + within;
        if (n == PANEL)
            interleave(from, stride, PANEL, depth, to, PANEL);
        else if (n == LANES && width == LANES)
            interleave(from, stride, LANES, depth, to, LANES);
        else if (n == LANES && width == PANEL)
            interleave(from, stride, LANES, depth, to, PANEL);
        else
            interleave(from, stride, n, depth, to, width);
        first += n;
        from += n * stride;
    }
    if (last == total && filled > total) {
        int64_t within = total % PANEL, start = total - within, width = filled - start;
        for (int64_t k = 0; k < units; k++)
            for (int64_t c = within; c < width; c++) panels[start * units + k * width + c] = 0;
    }
}

static inline int64_t shrunk_width(const struct group *g) { return up(g->rank, LANES) * LANES; }

static inline int64_t shrunk_size(const struct group *g) { return g->n_rows * shrunk_width(g); }

/* `n` elements of x, as a tile has them; after an odd number, a 0. */
static inline void prepare(operand *to, const element *x, int64_t n)
{
#if DOT || ELEMENT == FLOAT32
    __builtin_memcpy(to, x, n * sizeof *x);
#else
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(vec *)(to + i) = load(x + i);
    for (; i < n; i++) to[i] = wide(x[i]);
#endif
    if (n % PAIR) to[n] = 0;
}

/* The first element of one part of the first product's sum: the parts are of whole registers of AMX. */
static inline int64_t part_start(const struct work *w, int64_t part)
{
    return up(w->in, PAIR) * part / w->parts / 16 * 16 * PAIR;
}

/* Task `t` of one part of the first product: one panel of A with one chunk of rows. */
static void shrink(const struct work *w, const struct group *g, int64_t part, int64_t t)
{
    const operand *from[CHUNK];
    float *to[CHUNK];
    int64_t panels = up(g->rank, PANEL), width = shrunk_width(g);
    int64_t column = t % panels * PANEL, row = t / panels * CHUNK;
    int64_t n = least(CHUNK, g->n_rows - row), columns = least(PANEL, width - column);
    int64_t units = up(w->in, PAIR), start = part_start(w, part);
    int64_t end = part + 1 < w->parts ? part_start(w, part + 1) : w->in;
    const unit *p = (const unit *)g->a + column * units;
    float *shrunk = g->shrunk + part * shrunk_size(g);
    for (int64_t r = 0; r < n; r++) to[r] = shrunk + (row + r) * width + column;
    if (sizeof(operand) == sizeof(element) && w->in % PAIR == 0) {
        for (int64_t r = 0; r < n; r++) from[r] = (const operand *)(w->x + g->rows[row + r] * w->x_stride + start);
        product(0, columns, from, n, p + start / PAIR * columns, end - start, to);
    } else {
        operand x[STRIP][DEPTH];
        for (int64_t r = 0; r < STRIP; r++) from[r] = x[r];
        if (start == end)
            for (int64_t r = 0; r < n; r++) __builtin_memset(to[r], 0, columns * sizeof(float));
        for (int64_t k = start; k < end; k += DEPTH) {
            int64_t depth = least(DEPTH, end - k);
            for (int64_t strip = 0; strip < n; strip += STRIP) {
                int64_t tall = least(STRIP, n - strip);
                for (int64_t r = 0; r < tall; r++)
                    prepare(x[r], w->x + g->rows[row + strip + r] * w->x_stride + k, depth);
                product(k > start, columns, from, tall, p + k / PAIR * columns, depth, to + strip);
            }
        }
    }
    if (w->scale != 1)
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = 0; c < columns; c++) to[r][c] *= w->scale;
}

static int64_t shrink_tasks(const struct group *g) { return up(g->rank, PANEL) * up(g->n_rows, CHUNK); }

/* Adds a tile's sums to y, where y ends within a register, or the rank is larger than a depth. */
static void add_to(element *const *to, int64_t n, float (*sums)[PANEL], int64_t columns)
{
    for (int64_t r = 0; r < n; r++) {
        int64_t c = 0;
        for (; c + LANES <= columns; c += LANES) store(to[r] + c, load(to[r] + c) + *(vec *)(sums[r] + c));
        for (; c < columns; c++) to[r][c] = narrow(wide(to[r][c]) + sums[r][c]);
    }
}

/* y = g * y + c, for some columns of a few rows; apart, so that products without vectors stay as they are. */
static __attribute__((noinline)) void turn(element *const *to, int64_t n, const float *g, const float *c,
                                           int64_t columns)
{
    for (int64_t r = 0; r < n; r++) {
        int64_t i = 0;
        for (; i + LANES <= columns; i += LANES)
            store(to[r] + i, *(const vec *)(g + i) * load(to[r] + i) + *(const vec *)(c + i));
        for (; i < columns; i++) to[r][i] = narrow(g[i] * wide(to[r][i]) + c[i]);
    }
}

/* Shrunk values `first` to `last` of a slice and one row, all parts of their sums together. */
static inline void whole_sums(
    const struct work *w, const struct group *g, const float *shrunk, int64_t first, int64_t last, operand *to)
{
    int64_t n = last - first, size = w->parts * shrunk_size(g);
    for (int64_t k = 0; w->parts == 1 && k < n; k++) to[k] = prepared(shrunk[first + k]);
    for (int64_t k = 0; w->parts > 1 && k < n; k++) {
        float sum = 0;
        for (int64_t part = 0; part < size; part += shrunk_size(g)) sum += shrunk[part + first + k];
        to[k] = prepared(sum);
    }
    if (n % PAIR) to[n] = 0;
}

/* Tasks `t` and following of the second product, which end before `end`: some blocks of a slice's panels of B with one
 * chunk of rows. Returns the next task. */
static int64_t expand(const struct work *w, const struct group *g, const struct slice *s, int64_t t, int64_t end)
{
    const operand *from[STRIP];
    const float *shrunk[STRIP];
    operand whole[STRIP][DEPTH];
    float sums[STRIP][PANEL];
    float *beside[STRIP];
    element *to[STRIP];
    int64_t blocks = up(up(s->width, PANEL), BLOCK), width = shrunk_width(g);
    int64_t first = t % blocks * BLOCK * PANEL, row = t / blocks * CHUNK;
    int64_t next = least(least(end, t + RUN), t - t % blocks + blocks); /* together: a row is prepared once for them */
    int64_t last_row = least(row + CHUNK, g->n_rows), last = least(s->width, first + (next - t) * BLOCK * PANEL);
    int64_t depth = PAIR == 1 && w->parts == 1 ? s->rank : DEPTH; /* of a product; the second reads what is prepared */
    for (int64_t r = 0; r < STRIP; r++) beside[r] = sums[r];
    /* A strip's rows of y from left to right: streams that the processor sees coming. */
    for (; row < last_row; row += STRIP) {
        int64_t n = least(STRIP, last_row - row);
        for (int64_t r = 0; r < n; r++) {
            shrunk[r] = g->shrunk + (row + r) * width + s->top;
            to[r] = w->y + g->rows[row + r] * w->y_stride + s->first + first;
        }
        for (int64_t column = first; column < last; column += PANEL) {
            int64_t columns = least(PANEL, last - column);
            const unit *p = (const unit *)s->b + column * up(s->rank, PAIR);
            int is_whole = columns % LANES == 0 && s->rank <= depth;
            for (int64_t k = 0; k < s->rank; k += depth) {
                int64_t some = least(depth, s->rank - k);
                if (column == first || s->rank > depth)
                    for (int64_t r = 0; r < n; r++) {
                        from[r] = whole[r];
                        if (PAIR > 1 || w->parts > 1)
                            whole_sums(w, g, shrunk[r], k, k + some, whole[r]);
                        else
                            from[r] = (const operand *)shrunk[r];
                    }
                if (is_whole)
                    add_product(columns, from, n, p, some, to);
                else
                    product(k > 0, columns, from, n, p + k / PAIR * up(columns, LANES) * LANES, some, beside);
            }
            if (!is_whole && s->rank) add_to(to, n, sums, columns);
            if (s->g) turn(to, n, s->g + column, s->c + column, columns);
            for (int64_t r = 0; r < n; r++) to[r] += PANEL;
        }
    }
    return next;
}

static int64_t expand_tasks(const struct group *g, const struct slice *s)
{
    return up(up(s->width, PANEL), BLOCK) * up(g->n_rows, CHUNK);
}

/* Threads: those of the OpenMP that PyTorch has loaded, which vLLM has bound to cores. All of them or one: a smaller
 * team would end threads, and new ones would not be bound. Without OpenMP in the process there is one. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern void GOMP_barrier(void) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
extern int omp_get_max_threads(void) __attribute__((weak));

int64_t lora_threads(void)
{
    int can = GOMP_parallel && GOMP_barrier && omp_get_thread_num && omp_get_num_threads && omp_get_max_threads;
    return can ? omp_get_max_threads() : 1;
}

/* The parts of the first product's sum: more than one where its tasks are too few to keep every thread busy, which
 * they are while decoding with few adapters. Every thread of the second product reads all parts again, so that they
 * stay fewer than would make them larger than A's own share. */
int64_t lora_parts(const struct work *w)
{
    int64_t threads = lora_threads(), tasks = 0, rows = 1, parts = 1;
    for (int64_t i = 0; i < w->n_groups; i++) {
        const struct group *g = w->groups + i;
        tasks += shrink_tasks(g);
        rows = most(rows, least(CHUNK, g->n_rows));
        for (int64_t j = 0; j < g->n_slices; j++)
            if (g->slices[j].rank > MOST_SUMMED) return 1;
    }
    int64_t wanted = least(threads, up(4 * threads, most(1, tasks)));
    while (parts < wanted && (parts + 1) * (parts + 1) * rows <= w->in) parts++;
    return parts;
}

/* This thread's share of one of the two products' tasks; those of one part of the sum lie together. */
static void share(const struct work *w, int second, int64_t mine, int64_t threads)
{
    int64_t parts = second ? 1 : w->parts, tasks = 0, start = 0;
    for (int64_t i = 0; i < w->n_groups; i++) {
        const struct group *g = w->groups + i;
        if (!second) tasks += shrink_tasks(g);
        for (int64_t j = 0; second && j < g->n_slices; j++) tasks += expand_tasks(g, g->slices + j);
    }
    int64_t first = parts * tasks * mine / threads, last = parts * tasks * (mine + 1) / threads;
    for (int64_t part = 0; part < parts; part++)
        for (int64_t i = 0; i < w->n_groups; i++) {
            const struct group *g = w->groups + i;
            for (int64_t j = 0; j < (second ? g->n_slices : 1); j++) {
                int64_t own = second ? expand_tasks(g, g->slices + j) : shrink_tasks(g);
                int64_t t = most(0, first - start), end = least(own, last - start);
                while (t < end)
                    if (second)
                        t = expand(w, g, g->slices + j, t, end);
                    else
                        shrink(w, g, part, t++);
                start += own;
            }
        }
}

static void in_team(void *work)
{
    int64_t mine = omp_get_thread_num(), threads = omp_get_num_threads();
    share(work, 0, mine, threads);
    GOMP_barrier();
    share(work, 1, mine, threads);
    free_tiles();
}

void lora_add(const struct work *prepared, const element *x, element *y)
{
    struct work w = *prepared;
    w.x = x;
    w.y = y;
    if (lora_threads() > 1) {
        GOMP_parallel(in_team, &w, 0, 0);
    } else {
        share(&w, 0, 0, 1);
        share(&w, 1, 0, 1);
        free_tiles();
    }
}
