/* Registers of LANES numbers, and the dtypes in memory: how an ELEMENT becomes float32 and back, and how two of bfloat16
 * are multiplied. Part of lora.c. */
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
#if defined(__AVX2__)
#include <immintrin.h>
#endif
static inline vec load(const element *p)
{
#if LANES == 16 && defined(__AVX512F__) /* compilers convert a half_vec in two halves */
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
#else
    return (vec)(__builtin_convertvector(*(const half_vec *)p, uvec) << 16);
#endif
}
#if defined(__AVX512BF16__)
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
