/* AMX's instructions for bfloat16 where the processor has none: the signal of an unknown instruction computes them.
 *
 * Between amx_start and amx_stop a process can run an object that was compiled with -mamx-tile -mamx-bf16. Whatever
 * the processor would refuse ends the process here too: shapes that do not fit, registers without a shape. Two things
 * differ: numbers below the smallest normal number are kept, and a product is rounded before it is added.
 *
 * Source: Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILERELEASE, TILESTORED, TILEZERO,
 * TDPBF16PS).
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

struct tile {
    int rows, row_bytes;
    uint8_t at[16][64];
};
static __thread struct tile tiles[8];
static struct sigaction before;
static int64_t multiplied; /* TDPBF16PS of all threads */

static void refuse(const char *why)
{
    if (write(2, "AMX: ", 5) < 0 || write(2, why, strlen(why)) < 0 || write(2, "\n", 1) < 0) _exit(97);
    abort();
}

static struct tile *shaped(int i)
{
    if (!tiles[i].rows) refuse("a register without a shape");
    return tiles + i;
}

static float wide(uint16_t bits)
{
    uint32_t both = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &both, sizeof f);
    return f;
}

static void configure(const uint8_t *from)
{
    memset(tiles, 0, sizeof tiles);
    if (from[0] != 1 || from[1]) refuse("another palette than 1, or a first row");
    for (int i = 2; i < 64; i++)
        if (from[i] && (i < 16 || (i >= 32 && i < 48) || i >= 56)) refuse("reserved bytes");
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, from + 16 + 2 * i, 2);
        tiles[i].rows = from[48 + i];
        tiles[i].row_bytes = row_bytes;
        if (tiles[i].rows > 16 || row_bytes > 64 || !tiles[i].rows != !row_bytes) refuse("a shape beyond a register");
    }
}

static void multiply(struct tile *c, const struct tile *a, const struct tile *b)
{
    if (a->row_bytes % 4 || b->row_bytes % 4 || a->rows != c->rows || b->row_bytes != c->row_bytes ||
        a->row_bytes / 4 != b->rows)
        refuse("shapes that do not fit");
    for (int m = 0; m < c->rows; m++)
        for (int n = 0; n < c->row_bytes / 4; n++) {
            float sums[2] = {0, 0}, sum;
            for (int k = 0; k < b->rows; k++) {
                uint16_t x[2], y[2];
                memcpy(x, a->at[m] + 4 * k, 4);
                memcpy(y, b->at[k] + 4 * n, 4);
                for (int i = 0; i < 2; i++) sums[i] += wide(x[i]) * wide(y[i]);
            }
            memcpy(&sum, c->at[m] + 4 * n, 4);
            sum += sums[0] + sums[1];
            memcpy(c->at[m] + 4 * n, &sum, 4);
        }
}

static const int of_number[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* The operand in memory of the instruction whose ModRM byte is `p`; its length from there on, and SIB's index. */
static char *in_memory(const uint8_t *p, const greg_t *registers, const uint8_t *vex, int *length, int64_t *stride)
{
    int mode = p[0] >> 6, base = p[0] & 7, at = 1, has_base = 1;
    int64_t address = 0;
    *stride = 0;
    if (base == 4) {
        int sib = p[at++], index = (sib >> 3 & 7) | (vex[1] & 0x40 ? 0 : 8);
        base = sib & 7;
        if (index != 4) *stride = (int64_t)((uint64_t)registers[of_number[index]] << (sib >> 6));
    } else if (mode == 0 && base == 5) {
        refuse("an address relative to the instruction");
    }
    if (mode == 0 && base == 5) has_base = 0;
    if (has_base) address = registers[of_number[base | (vex[1] & 0x20 ? 0 : 8)]];
    if (mode == 1) {
        address += (int8_t)p[at++];
    } else if (mode == 2 || !has_base) {
        int32_t by;
        memcpy(&by, p + at, 4);
        address += by;
        at += 4;
    }
    *length = at;
    return (char *)address;
}

static void on_unknown(int signal_number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *p = (const uint8_t *)registers[REG_RIP];
    int prefix = p[2] & 3, reg = p[4] >> 3 & 7, is_register = p[4] >> 6 == 3, length = 1;
    int64_t stride = 0;
    (void)info;
    if (p[0] != 0xc4 || (p[1] & 0x1f) != 2 || p[2] & 0x84 || (p[3] != 0x49 && p[3] != 0x4b && p[3] != 0x5c)) {
        signal(signal_number, SIG_DFL); /* not AMX's: the processor's own answer, at the next try */
        return;
    }
    char *memory = is_register ? NULL : in_memory(p + 4, registers, p, &length, &stride);
    if (p[3] == 0x49 && prefix == 0 && memory) {
        configure((const uint8_t *)memory + stride); /* SIB's index is part of this address */
    } else if (p[3] == 0x49 && prefix == 0) {
        memset(tiles, 0, sizeof tiles);
    } else if (p[3] == 0x49 && prefix == 3 && is_register) {
        memset(shaped(reg)->at, 0, sizeof tiles->at);
    } else if (p[3] == 0x4b && prefix && memory) {
        struct tile *tile = shaped(reg);
        if (prefix != 2) memset(tile->at, 0, sizeof tile->at);
        for (int row = 0; row < tile->rows; row++, memory += stride)
            if (prefix == 2)
                memcpy(memory, tile->at[row], tile->row_bytes);
            else
                memcpy(tile->at[row], memory, tile->row_bytes);
    } else if (p[3] == 0x5c && prefix == 2 && is_register) {
        multiply(shaped(reg), shaped(p[4] & 7), shaped(~p[2] >> 3 & 7));
        __atomic_add_fetch(&multiplied, 1, __ATOMIC_RELAXED);
    } else {
        refuse("an instruction that is not written here");
    }
    registers[REG_RIP] += 4 + length;
}

void amx_start(void)
{
    struct sigaction action = {.sa_sigaction = on_unknown, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGILL, &action, &before)) refuse("sigaction failed");
}

void amx_stop(void) { sigaction(SIGILL, &before, NULL); }

/* The number of products since the process began. */
int64_t amx_multiplied(void) { return __atomic_load_n(&multiplied, __ATOMIC_RELAXED); }
