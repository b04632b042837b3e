/* One adapter and one slice through a library of lora.c, which is linked: for processors that only an emulator has.
 * Reads seven int64 (bytes of an element, rows, in, rank, out, 0, 0), then x, A, B and y; writes y. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct slice { const void *b; int64_t rank, top, first, width; };
struct group {
    const int32_t *rows; int64_t n_rows; const void *a; int64_t rank, n_slices; const struct slice *slices; float *shrunk;
};
int64_t lora_lanes(void), lora_pair(void), lora_threads(void);
void lora_pack(const void *, int64_t, int64_t, int64_t, void *, int64_t, int64_t);
struct work {
    const struct group *groups; int64_t n_groups, in, parts, x_stride, y_stride; float scale; const void *x; void *y;
};
void lora_add(const struct work *, const void *, void *);

static void *take(int64_t n) { void *p = aligned_alloc(64, (n + 63) / 64 * 64); if (!p) exit(1); return p; }
static int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
static void *input(int64_t n)
{
    void *p = take(n);
    if (fread(p, 1, n, stdin) != (size_t)n) exit(2);
    return p;
}

int main(void)
{
    int64_t h[7];
    if (fread(h, sizeof h, 1, stdin) != 1) return 3;
    int64_t size = h[0], rows = h[1], in = h[2], rank = h[3], out = h[4], lanes = lora_lanes(), pair = lora_pair();
    void *x = input(size * rows * in), *a = input(size * rank * in), *b = input(size * out * rank);
    void *y = input(size * rows * out);
    void *packed_a = take(size * up(rank, lanes) * up(in, pair)), *packed_b = take(size * up(out, lanes) * up(rank, pair));
    lora_pack(a, in, rank, in, packed_a, 0, rank);
    lora_pack(b, rank, out, rank, packed_b, 0, out);
    int32_t *of = take(4 * rows);
    for (int64_t r = 0; r < rows; r++) of[r] = r;
    struct slice s = {packed_b, rank, 0, 0, out};
    struct group g = {of, rows, packed_a, rank, 1, &s, take(4 * rows * up(rank, lanes))};
    if (lora_threads() != 1) return 4; /* without OpenMP in the process */
    struct work w = {&g, 1, in, 1, in, out, 1, 0, 0};
    lora_add(&w, x, y);
    return fwrite(y, size, rows * out, stdout) != (size_t)(rows * out);
}
