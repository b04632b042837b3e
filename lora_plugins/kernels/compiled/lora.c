/* y[rows] += scale * B A x[rows] for every adapter of a batch, each with its own rows and its own rank.
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
#define TALL 12 /* rows of the largest tile: its sums, 2 registers a row, fill 24 of 32 */
#elif defined(__AVX__)
#define LANES 8
#define TALL 6
#else
#define LANES 4
#define TALL 8
#endif
#define PANEL (2 * LANES)
#define CHUNK (8 * TALL) /* rows of one task: their x stays in the second-level cache from panel to panel */
#define BLOCK 8          /* panels of one task of the second product */
#define DEPTH 256        /* elements of a sum at a time, where a tile's rows are prepared on the stack; even */
#define MOST_SUMMED 64   /* rank of a slice, up to which the first product's sum may be divided */
#define STEP 8           /* units of each column that are turned at a time when panels are made */
/* Bytes between what a tile reads of the panels and what it asks of the memory, for the second-level cache: the memory
 * works while rows are multiplied. 4 to 32 KB were tried, and 8 was the best, with 1, 4 and 16 rows of each adapter. */
#define AHEAD 8192

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#define FLOAT32 1
#define BFLOAT16 2
#define FLOAT16 3

#if ELEMENT == FLOAT32
typedef float element;
typedef float unit; /* what a panel has of one column at one place: an element, or two */
static inline vec load(const element *p) { return *(const vec *)p; }
static inline void store(element *p, vec v) { *(vec *)p = v; }
static inline float wide(element e) { return e; }
static inline element narrow(float f) { return f; }

#elif ELEMENT == BFLOAT16 /* the upper half of a float32 */
#define PAIR 2
typedef uint16_t element;
typedef uint32_t unit;
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2)));
static inline vec load(const element *p)
{
    return (vec)(__builtin_convertvector(*(const half_vec *)p, uvec) << 16);
}
#if defined(__AVX512BF16__)
#include <immintrin.h>
static inline void store(element *p, vec v) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v)); }
#else
static inline void store(element *p, vec v)
{
    uvec bits = (uvec)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
    uvec is_nan = (uvec)(v != v);
    *(half_vec *)p = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded), half_vec);
}
#endif
static inline float wide(element e)
{
    union { uint32_t bits; float f; } u = {(uint32_t)e << 16};
    return u.f;
}
static inline element narrow(float f)
{
    union { float f; uint32_t bits; } u = {f};
    return f != f ? (u.bits >> 16) | 0x40 : (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}

#elif ELEMENT == FLOAT16 && defined(__F16C__) /* no _Float16: compilers of 2021 have none */
#include <immintrin.h>
typedef uint16_t element, unit;
#if LANES == 16 && defined(__AVX512F__)
static inline vec load(const element *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
static inline void store(element *p, vec v)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif LANES == 8
static inline vec load(const element *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
static inline void store(element *p, vec v)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
#error "float16 in registers that this processor does not have"
#endif
static inline float wide(element e) { return _cvtsh_ss(e); }
static inline element narrow(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

#elif ELEMENT == FLOAT16 && defined(__ARM_FP16_FORMAT_IEEE)
typedef __fp16 element, unit;
typedef element half_vec __attribute__((vector_size(2 * LANES), aligned(2)));
static inline vec load(const element *p) { return __builtin_convertvector(*(const half_vec *)p, vec); }
static inline void store(element *p, vec v) { *(half_vec *)p = __builtin_convertvector(v, half_vec); }
static inline float wide(element e) { return e; }
static inline element narrow(float f) { return f; }

#else
#error "float16 needs a processor that converts it (F16C, or ARM)"
#endif

#ifndef PAIR
#define PAIR 1
#endif

/* A tile's rows as they are multiplied: float32, or bfloat16 where the processor multiplies pairs of it. */
#if PAIR == 2 && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(DOT_IN_C))
#define DOT 1
typedef element operand;
static inline operand prepared(float f) { return narrow(f); }
#if defined(__AVX512BF16__)
static inline vec dot(vec sum, uint32_t x, uvec pairs)
{
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)pairs);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
static inline vec dot(vec sum, uint32_t x, uvec pairs)
{
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)vdupq_n_u32(x), (bfloat16x8_t)pairs);
}
#else /* the same without that instruction, to test the rest */
static inline vec dot(vec sum, uint32_t x, uvec pairs)
{
    return sum + wide(x >> 16) * (vec)(pairs & 0xffff0000u) + wide((element)x) * (vec)(pairs << 16);
}
#endif
#else
#define DOT 0
typedef float operand;
static inline operand prepared(float f) { return f; }
#endif

#if DOT && defined(AMX) && defined(__AMX_BF16__)
#include <immintrin.h>
#define STRIP 32 /* rows that are prepared together: those of two registers of AMX */
#else
#define STRIP TALL
#endif

struct slice {
    const element *b; /* panels of `rank` rows */
    int64_t rank, top, first, width; /* top: its first column of the shrunk rows; first, width: columns of y */
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
    TILE(NAME##_8, 8, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_4, 4, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_2, 2, WIDE, ADD, TO, END)                                                                    \
    TILE(NAME##_1, 1, WIDE, ADD, TO, END)                                                                    \
    static void NAME(const operand *const *from, int64_t n, const unit *p, int64_t depth, TO *const *to)     \
    {                                                                                                        \
        int64_t r = 0;                                                                                       \
        for (; r + TALL <= n; r += TALL) NAME##_tall(from + r, p, depth, to + r);                            \
        for (; TALL > 8 && r + 8 <= n; r += 8) NAME##_8(from + r, p, depth, to + r);                         \
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

#if STRIP > TALL
#define TILE_ROWS 16 /* of a register of AMX; so many units are in a row, too */
/* The compiler writes what lies there: GCC's functions for AMX do not say all that they read. */
#define WRITTEN(PLACE) __asm__ volatile("" : : "r"(PLACE) : "memory")
#define FEW 4        /* rows that AVX-512 multiplies as fast as the memory gives the panels */

/* What LDTILECFG reads: Intel's Software Developer's Manual, volume 1, chapter 18. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static __thread int64_t shapes; /* what this thread's registers have, 0 for none */

/* Registers 0 to 3 are for sums, those of the second 16 rows from 2; 4 and 5 for rows of x, 6 and 7 for a panel. */
static void shape_tiles(int64_t n, int64_t step)
{
    if (shapes == n * 256 + step) return;
    struct tile_shapes wanted = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int64_t rows = i > 5 ? step : i == 2 || i == 3 || i == 5 ? most(0, n - TILE_ROWS) : least(n, TILE_ROWS);
        wanted.rows[i] = rows;
        wanted.row_bytes[i] = !rows ? 0 : i == 4 || i == 5 ? 4 * step : 64;
    }
    WRITTEN(&wanted);
    _tile_loadconfig(&wanted);
    shapes = n * 256 + step;
}

/* `n` rows, at most STRIP, with one panel, `step` units at a time; sums start from `to` or from 0, and stay in `to`. */
static inline __attribute__((always_inline)) void tiles(
    const operand *const *from, int64_t n, const unit *p, int64_t units, int64_t step, int is_further, int is_wide,
    int is_tall, float *to, int64_t to_stride)
{
    operand gathered[STRIP][DEPTH];
    int64_t x_stride = n > 1 ? (intptr_t)from[1] - (intptr_t)from[0] : 0, has_stride = 1;
    for (int64_t r = 2; r < n; r++) has_stride &= (intptr_t)from[r] - (intptr_t)from[r - 1] == x_stride;
    int64_t some = has_stride ? units : DEPTH / PAIR / step * step;
    float *second = to + TILE_ROWS * to_stride;
    shape_tiles(n, step);
    _tile_zero(0);
    if (is_wide) _tile_zero(1);
    if (is_tall) _tile_zero(2);
    if (is_tall && is_wide) _tile_zero(3);
    if (is_further) {
        WRITTEN(to);
        _tile_loadd(0, to, 4 * to_stride);
        if (is_wide) _tile_loadd(1, to + LANES, 4 * to_stride);
        if (is_tall) _tile_loadd(2, second, 4 * to_stride);
        if (is_tall && is_wide) _tile_loadd(3, second + LANES, 4 * to_stride);
    }
    int64_t row = (is_wide + 1) * LANES; /* units of the panel */
    for (int64_t start = 0; start < units; start += some) {
        int64_t end = least(units, start + some);
        const operand *x = from[0] + PAIR * start;
        if (!has_stride) { /* then the rows are copied to have one */
            for (int64_t r = 0; r < n; r++)
                __builtin_memcpy(gathered[r], from[r] + PAIR * start, (end - start) * sizeof(unit));
            x = gathered[0];
            x_stride = sizeof gathered[0];
        }
        WRITTEN(x);
        for (int64_t k = start; k < end; k += step, x += PAIR * step, p += step * row) {
            for (int64_t i = 0; i < step * row; i += 16) __builtin_prefetch((const char *)(p + i) + AHEAD, 0, 2);
            _tile_loadd(4, x, x_stride);
            _tile_loadd(6, p, 4 * row);
            _tile_dpbf16ps(0, 4, 6);
            if (is_wide) _tile_loadd(7, p + LANES, 4 * row);
            if (is_wide) _tile_dpbf16ps(1, 4, 7);
            if (is_tall) _tile_loadd(5, (const char *)x + TILE_ROWS * x_stride, x_stride);
            if (is_tall) _tile_dpbf16ps(2, 5, 6);
            if (is_tall && is_wide) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, 4 * to_stride);
    if (is_wide) _tile_stored(1, to + LANES, 4 * to_stride);
    if (is_tall) _tile_stored(2, second, 4 * to_stride);
    if (is_tall && is_wide) _tile_stored(3, second + LANES, 4 * to_stride);
}

/* The largest step, up to a register, that divides the units; 0 where every such step is small. */
static int64_t tile_step(int64_t units)
{
    int64_t step = least(TILE_ROWS, units);
    while (step && units % step) step--;
    return step < 4 ? 0 : step;
}

/* The first rows with one panel, into `to`, whose rows have a stride; returns how many rows. */
static int64_t by_tiles(int is_further, int64_t columns, const operand *const *from, int64_t n, const unit *p,
                        int64_t depth, float *to, int64_t to_stride)
{
    int64_t units = up(depth, PAIR), step = tile_step(units), r = 0;
    while (step && n - r > FEW) {
        int64_t some = least(STRIP, n - r);
        float *place = to + r * to_stride;
        if (columns > LANES && some > TILE_ROWS)
            tiles(from + r, some, p, units, step, is_further, 1, 1, place, to_stride);
        else if (columns > LANES)
            tiles(from + r, some, p, units, step, is_further, 1, 0, place, to_stride);
        else
            tiles(from + r, some, p, units, step, is_further, 0, some > TILE_ROWS, place, to_stride);
        r += some;
    }
    return r;
}

/* As for sums, with a panel of whole registers whose products are added to y. */
static int64_t add_by_tiles(int64_t columns, const operand *const *from, int64_t n, const unit *p, int64_t depth,
                            element *const *to)
{
    float sums[STRIP][PANEL];
    int64_t done = by_tiles(0, columns, from, least(STRIP, n), p, depth, sums[0], PANEL);
    for (int64_t r = 0; r < done; r++)
        for (int64_t c = 0; c < columns; c += LANES) add(to[r] + c, *(vec *)(sums[r] + c));
    return done;
}

static void free_tiles(void)
{
    if (shapes) _tile_release();
    shapes = 0;
}
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

/* Task `t` of the second product: one block of a slice's panels of B with one chunk of rows. */
static void expand(const struct work *w, const struct group *g, const struct slice *s, int64_t t)
{
    const operand *from[STRIP];
    const float *shrunk[STRIP];
    operand whole[STRIP][DEPTH];
    float sums[STRIP][PANEL];
    float *beside[STRIP];
    element *to[STRIP];
    int64_t blocks = up(up(s->width, PANEL), BLOCK), width = shrunk_width(g);
    int64_t first = t % blocks * BLOCK * PANEL, row = t / blocks * CHUNK;
    int64_t last_row = least(row + CHUNK, g->n_rows), last = least(s->width, first + BLOCK * PANEL);
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
            if (!is_whole) add_to(to, n, sums, columns);
            for (int64_t r = 0; r < n; r++) to[r] += PANEL;
        }
    }
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
                for (int64_t t = most(0, first - start); t < own && start + t < last; t++)
                    if (second)
                        expand(w, g, g->slices + j, t);
                    else
                        shrink(w, g, part, t);
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
