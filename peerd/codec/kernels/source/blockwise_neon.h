/* Primitives (see blockwise_loop.h) for aarch64, where every processor has NEON. */

namespace peerd {
namespace neon {

#define PEERD_FN static PEERD_INLINE
#define PEERD_LOOP static

constexpr int GROUP = 16;

struct Values {
    float32x4_t v[4];
};

template <int dtype>
PEERD_FN Values load(const char* from) {
    Values values;
    for (int i = 0; i < 4; ++i) {
        const uint8_t* at = reinterpret_cast<const uint8_t*>(from) + 4 * i * value_bytes(dtype);
        if (dtype == FLOAT32) {
            values.v[i] = vreinterpretq_f32_u8(vld1q_u8(at));
            continue;
        }
        const uint8x8_t raw = vld1_u8(at);
        values.v[i] = dtype == FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u8(raw))
                                       : vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(raw), 16));
    }
    return values;
}

PEERD_FN uint8x8_t bfloat16_bits(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vreinterpret_u8_u16(vshrn_n_u32(vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7FFF)), 16));
}

template <int dtype>
PEERD_FN void store(const Values& values, char* to, bool) {
    for (int i = 0; i < 4; ++i) {
        uint8_t* at = reinterpret_cast<uint8_t*>(to) + 4 * i * value_bytes(dtype);
        if (dtype == FLOAT32) vst1q_u8(at, vreinterpretq_u8_f32(values.v[i]));
        if (dtype == BFLOAT16) vst1_u8(at, bfloat16_bits(values.v[i]));
        if (dtype == FLOAT16) vst1_u8(at, vreinterpret_u8_f16(vcvt_f16_f32(values.v[i])));
    }
}

typedef uint32x4_t Bits;

PEERD_FN Bits no_bits() { return vdupq_n_u32(0); }

PEERD_FN uint32x4_t magnitude(float32x4_t value) {
    return vandq_u32(vreinterpretq_u32_f32(value), vdupq_n_u32(0x7FFFFFFFu));
}

PEERD_FN Bits larger(Bits bits, const Values& values) {
    const uint32x4_t first = vmaxq_u32(magnitude(values.v[0]), magnitude(values.v[1]));
    const uint32x4_t second = vmaxq_u32(magnitude(values.v[2]), magnitude(values.v[3]));
    return vmaxq_u32(bits, vmaxq_u32(first, second));
}

PEERD_FN uint32_t largest(Bits bits) { return vmaxvq_u32(bits); }

/* The code with bit 7 set if the value is negative; the code must leave it free. */
PEERD_FN uint32x4_t with_sign(uint32x4_t code, float32x4_t x) {
    return vorrq_u32(code, vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 24), vdupq_n_u32(0x80)));
}

/* NEON cannot look up tables of this size, so each lane loads its entry. */
PEERD_FN uint32x4_t entries(const unsigned int* from, uint32x4_t index) {
    uint32x4_t found = vdupq_n_u32(from[vgetq_lane_u32(index, 0)]);
    found = vsetq_lane_u32(from[vgetq_lane_u32(index, 1)], found, 1);
    found = vsetq_lane_u32(from[vgetq_lane_u32(index, 2)], found, 2);
    return vsetq_lane_u32(from[vgetq_lane_u32(index, 3)], found, 3);
}

PEERD_FN uint32x4_t dynamic_of(float32x4_t n, float32x4_t x) {
    uint32x4_t a = magnitude(n);
    a = vmaxq_u32(a, vdupq_n_u32(PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT));
    a = vminq_u32(a, vdupq_n_u32(PEERD_ONE_BITS));
    const uint32x4_t bucket = vsubq_u32(vshrq_n_u32(a, PEERD_DYNAMIC_LUT_SHIFT), vdupq_n_u32(PEERD_DYNAMIC_LUT_FIRST));
    const uint32x4_t entry = entries(PEERD_DYNAMIC_LUT, bucket);
    const uint32x4_t low = vandq_u32(a, vdupq_n_u32((1u << PEERD_DYNAMIC_LUT_SHIFT) - 1));
    const uint32x4_t above = vcgeq_u32(low, vshrq_n_u32(entry, 8));  // all bits: -1
    return with_sign(vsubq_u32(vandq_u32(entry, vdupq_n_u32(0xFF)), above), x);
}

/* Table of sixteen singles, as the bytes of four registers. */
PEERD_FN uint8x16x4_t table(const unsigned int* from) { return vld1q_u8_x4(reinterpret_cast<const uint8_t*>(from)); }

/* Entries of such a table at indices 0 to 15: byte k of entry i is byte 4 i + k. */
PEERD_FN float32x4_t entries_of_16(uint8x16x4_t from, uint32x4_t index) {
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100u), index, vdupq_n_u32(0x04040404u));
    return vreinterpretq_f32_u8(vqtbl4q_u8(from, vreinterpretq_u8_u32(bytes)));
}

alignas(64) static constexpr unsigned int NF4_THRESHOLDS[16] = {
    PEERD_NF4_THRESHOLD_BITS[0],  PEERD_NF4_THRESHOLD_BITS[1],  PEERD_NF4_THRESHOLD_BITS[2],
    PEERD_NF4_THRESHOLD_BITS[3],  PEERD_NF4_THRESHOLD_BITS[4],  PEERD_NF4_THRESHOLD_BITS[5],
    PEERD_NF4_THRESHOLD_BITS[6],  PEERD_NF4_THRESHOLD_BITS[7],  PEERD_NF4_THRESHOLD_BITS[8],
    PEERD_NF4_THRESHOLD_BITS[9],  PEERD_NF4_THRESHOLD_BITS[10], PEERD_NF4_THRESHOLD_BITS[11],
    PEERD_NF4_THRESHOLD_BITS[12], PEERD_NF4_THRESHOLD_BITS[13], PEERD_NF4_THRESHOLD_BITS[14],
    0x7F800000u,
};

/* Binary search: each step compares with the middle threshold of the remaining range and adds a bit to the code. */
PEERD_FN uint32x4_t nf4_of(float32x4_t n) {
    const uint8x16x4_t thresholds = table(NF4_THRESHOLDS);
    uint32x4_t code = vdupq_n_u32(0);
    for (uint32_t step = 8; step >= 1; step /= 2) {
        const float32x4_t middle = entries_of_16(thresholds, vaddq_u32(code, vdupq_n_u32(step - 1)));
        code = vaddq_u32(code, vandq_u32(vcgeq_f32(n, middle), vdupq_n_u32(step)));
    }
    return code;
}

PEERD_FN uint32x4_t e4m3_of(float32x4_t n, float32x4_t x) {
    const uint32x4_t a = magnitude(vmulq_f32(n, vdupq_n_f32(448.0f)));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(a, 20), vdupq_n_u32(1));
    const uint32x4_t half = vdupq_n_u32(0x7FFFFu - (120u << 23));
    const uint32x4_t normal = vshrq_n_u32(vaddq_u32(vaddq_u32(a, odd), half), 20);
    const float32x4_t unit = vdupq_n_f32(16384.0f);  // its unit in the last place is the step of the subnormals, 2^-9
    const uint32x4_t raised = vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(a), unit));
    const uint32x4_t subnormal = vsubq_u32(raised, vreinterpretq_u32_f32(unit));
    return with_sign(vbslq_u32(vcltq_u32(a, vdupq_n_u32(0x3C800000u)), subnormal, normal), x);
}

PEERD_FN uint32x4_t rounded(float32x4_t value) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(value)); }

template <int code>
PEERD_FN uint32x4_t encode_four(float32x4_t x, float inverse) {
    const float32x4_t n = vmulq_n_f32(x, inverse);
    if (code == INT8) return rounded(vmulq_n_f32(n, 127.0f));
    if (code == INT4) return vaddq_u32(rounded(vmulq_n_f32(n, 7.0f)), vdupq_n_u32(8));
    if (code == NF4) return nf4_of(n);
    return code == DYNAMIC8 ? dynamic_of(n, x) : e4m3_of(n, x);
}

template <int code>
PEERD_FN void encode(const Values& x, float inverse, uint8_t* to, bool) {
    uint16x8_t v[4];
    for (int i = 0; i < 4; ++i) v[i] = vreinterpretq_u16_u32(encode_four<code>(x.v[i], inverse));
    const uint8x16_t first = vreinterpretq_u8_u16(vuzp1q_u16(v[0], v[1]));
    const uint8x16_t second = vreinterpretq_u8_u16(vuzp1q_u16(v[2], v[3]));
    const uint8x16_t bytes = vuzp1q_u8(first, second);
    if (two_a_byte(code)) {
        const uint16x8_t pairs = vreinterpretq_u16_u8(bytes);
        vst1_u8(to, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));  // high byte's code in the upper half
    } else {
        vst1q_u8(to, bytes);
    }
}

/* Sixteen codes, one per byte. */
template <int code>
PEERD_FN uint8x16_t codes_of(const uint8_t* from) {
    if (!two_a_byte(code)) return vld1q_u8(from);
    const uint8x8_t packed = vld1_u8(from);
    const uint8x8x2_t each = vzip_u8(vand_u8(packed, vdup_n_u8(15)), vshr_n_u8(packed, 4));
    return vcombine_u8(each.val[0], each.val[1]);
}

/* Values of four widened codes, without their scale. */
template <int code>
PEERD_FN float32x4_t decode_four(uint32x4_t byte) {
    if (code == INT8) {
        const int32x4_t whole = vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(byte, 24)), 24);
        return vcvtq_f32_s32(vmaxq_s32(whole, vdupq_n_s32(-127)));
    }
    if (code == INT4) {
        const uint32x4_t raised = vmaxq_u32(byte, vdupq_n_u32(1));
        return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(raised), vdupq_n_s32(8)));
    }
    if (code == NF4) return entries_of_16(table(PEERD_NF4_BITS), byte);
    const uint32x4_t sign = vshlq_n_u32(vandq_u32(byte, vdupq_n_u32(0x80)), 24);
    const uint32x4_t magnitude = vandq_u32(byte, vdupq_n_u32(0x7F));
    if (code == DYNAMIC8) return vreinterpretq_f32_u32(vorrq_u32(entries(PEERD_DYNAMIC_BITS, magnitude), sign));
    // a single has more bits of mantissa, and an exponent larger by 120
    const uint32x4_t below_nan = vminq_u32(magnitude, vdupq_n_u32(0x7E));
    const float32x4_t small = vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32(below_nan, 20), sign));
    return vmulq_f32(small, vreinterpretq_f32_u32(vdupq_n_u32(0x7B800000u)));  // 2^120, exact for subnormals too
}

template <int code>
PEERD_FN Values decode(const uint8_t* from, float by) {
    const uint8x16_t codes = codes_of<code>(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(codes)), high = vmovl_u8(vget_high_u8(codes));
    const uint32x4_t parts[4] = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)),
                                 vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
    Values values;
    for (int i = 0; i < 4; ++i) values.v[i] = vmulq_n_f32(decode_four<code>(parts[i]), by);
    return values;
}

#include "blockwise_loop.h"
#undef PEERD_FN
#undef PEERD_LOOP

}  // namespace neon
}  // namespace peerd
