/* Code shared by all instruction sets: constants, tables and scalar conversions between the three value types.

Arithmetic is IEEE single precision, rounded to nearest even, without contraction. The results match the definition in
tables.py and reference.py bit for bit. */
#ifndef PEERD_BLOCKWISE_COMMON_H
#define PEERD_BLOCKWISE_COMMON_H

#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "single precision has to be computed in single precision (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

#define PEERD_TABLE alignas(64) static constexpr
#include "tables.h"

#if defined(__GNUC__)
#define PEERD_INLINE inline __attribute__((always_inline))
#else
#define PEERD_INLINE inline
#endif

namespace peerd {

enum Dtype { FLOAT32, BFLOAT16, FLOAT16, DTYPES };
enum Code { DYNAMIC8, INT8, INT4, NF4, E4M3, CODES };  // in the order of their numbers on the wire
constexpr int FIRST_CODE = 16;
constexpr int64_t RUN = 1024;  // values scanned for scales before they are encoded, unless a block is longer

constexpr int value_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
constexpr bool two_a_byte(int code) { return code == INT4 || code == NF4; }
constexpr int64_t code_bytes(int code, int64_t count) { return two_a_byte(code) ? (count + 1) / 2 : count; }
/* Every byte of a block that cannot be encoded, or contains only zeros. */
constexpr uint8_t zero_byte(int code) { return code == INT4 ? 0x88 : code == NF4 ? 0x77 : 0; }

static PEERD_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static PEERD_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static PEERD_INLINE uint32_t float16_to_bits(uint16_t half) {
    const uint32_t magnitude = half & 0x7FFFu;
    uint32_t bits = bits_of(float_of(magnitude << 13) * float_of(0x77800000u));  // 2^112, exact for subnormals too
    if (magnitude >= 0x7C00u) bits |= 0x7F800000u;
    return bits | (half & 0x8000u) << 16;
}

static PEERD_INLINE uint16_t float16_of(float value) {
    const uint32_t bits = bits_of(value), a = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (a >= 0x47800000u) {
        half = a > 0x7F800000u ? 0x7E00u : 0x7C00u;
    } else if (a < 0x38800000u) {
        half = bits_of(float_of(a) + 0.5f) - bits_of(0.5f);  // 0.5's unit in the last place is float16's smallest value
    } else {
        half = (a + 0xFFFu + (a >> 13 & 1u) - (112u << 23)) >> 13;
    }
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

/* Not for NaN whose upper mantissa bits are all set; `multiplier` avoids these. */
static PEERD_INLINE uint16_t bfloat16_of(float value) {
    const uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* The factor that decoding multiplies by; any NaN becomes the default NaN, whose bits survive rounding. */
static PEERD_INLINE float multiplier(int code, float scale) {
    if (scale != scale) scale = float_of(0x7FC00000u);
    if (code == INT8) return scale * float_of(PEERD_INV127_BITS);
    if (code == INT4) return scale * float_of(PEERD_INV7_BITS);
    if (code == E4M3) return scale * float_of(PEERD_INV448_BITS);
    return scale;
}

/* One implementation: functions by value type and code. `stream`: bypass the caches, for large outputs. */
struct Kernels {
    void (*quantize[DTYPES][CODES])(const char* x, int64_t n, int64_t block, char* scales, uint8_t* codes, bool stream);
    void (*dequantize[DTYPES][CODES])(const uint8_t* codes, const char* scales, int64_t n, int64_t block, char* out,
                                      bool stream);
    void (*scales[DTYPES])(const char* x, int64_t n, int64_t block, char* scales);
};

}  // namespace peerd

#endif
