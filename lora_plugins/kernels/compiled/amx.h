/* Products of bfloat16 with AMX, whose registers hold 16 rows of 64 bytes: 16 rows of x with 16 pairs of each meet the
 * pairs of 16 columns, as they lie in a panel, in one instruction. Part of lora.c.
 *
 * Source: Intel's Software Developer's Manual, volume 2 (LDTILECFG, TDPBF16PS).
 */
#include <immintrin.h>

#define TILE_ROWS 16 /* of a register of AMX; so many units are in a row, too */
#define FEW 4        /* rows that AVX-512 multiplies as fast as the memory gives the panels */

/* The compiler writes what lies there: GCC's functions for AMX do not say all that they read. */
#define WRITTEN(PLACE) __asm__ volatile("" : : "r"(PLACE) : "memory")

/* What LDTILECFG reads. */
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
    int64_t first = least(n, TILE_ROWS), second = n - first;
    const int64_t rows[8] = {first, first, second, second, first, second, step, step};
    for (int i = 0; i < 8; i++) {
        wanted.rows[i] = rows[i];
        wanted.row_bytes[i] = !rows[i] ? 0 : i == 4 || i == 5 ? 4 * step : 64;
    }
    WRITTEN(&wanted);
    _tile_loadconfig(&wanted);
    shapes = n * 256 + step;
}

/* `n` rows, more than FEW and at most STRIP, with one panel, `step` units at a time; sums start from `to` or from 0, and stay in `to`. */
static inline __attribute__((always_inline)) void tiles(
    const operand *const *from, int64_t n, const unit *p, int64_t units, int64_t step, int is_further, int is_wide,
    int is_tall, float *to, int64_t to_stride)
{
    operand gathered[STRIP][DEPTH];
    int64_t x_stride = (intptr_t)from[1] - (intptr_t)from[0], has_stride = 1;
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
