/* Primitives (see blockwise_loop.h) in plain C++, for processors without a specific implementation. */

namespace peerd {
namespace plain {

#define PEERD_FN static PEERD_INLINE
#define PEERD_LOOP static

constexpr int GROUP = 64;

struct Values {
    float v[GROUP];
};

template <int dtype>
PEERD_FN Values load(const char* from) {
    Values values;
    if (dtype == FLOAT32) {
        memcpy(values.v, from, sizeof values.v);
        return values;
    }
    uint16_t raw[GROUP];
    memcpy(raw, from, sizeof raw);
    for (int i = 0; i < GROUP; ++i)
        values.v[i] = float_of(dtype == BFLOAT16 ? static_cast<uint32_t>(raw[i]) << 16 : float16_to_bits(raw[i]));
    return values;
}

template <int dtype>
PEERD_FN void store(const Values& values, char* to, bool) {
    if (dtype == FLOAT32) {
        memcpy(to, values.v, sizeof values.v);
        return;
    }
    uint16_t raw[GROUP];
    for (int i = 0; i < GROUP; ++i) raw[i] = dtype == BFLOAT16 ? bfloat16_of(values.v[i]) : float16_of(values.v[i]);
    memcpy(to, raw, sizeof raw);
}

/* Signed, because the bits of magnitudes are below 2^31 and more processors have signed comparisons. */
struct Bits {
    int32_t most[16];
};

PEERD_FN Bits no_bits() { return Bits{}; }

PEERD_FN Bits larger(Bits bits, const Values& values) {
    for (int i = 0; i < GROUP; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(values.v[i]) & 0x7FFFFFFFu);
        int32_t& most = bits.most[i % 16];
        most = magnitude > most ? magnitude : most;
    }
    return bits;
}

PEERD_FN uint32_t largest(const Bits& bits) {
    int32_t most = 0;
    for (int i = 0; i < 16; ++i) most = bits.most[i] > most ? bits.most[i] : most;
    return static_cast<uint32_t>(most);
}

/* The value rounded to nearest even, in the lowest bits; its integer part must fit into 21 bits. */
PEERD_FN uint32_t rounded(float value) { return bits_of(value + 12582912.0f); }

PEERD_FN uint32_t dynamic_of(float n, uint32_t x_bits) {
    constexpr uint32_t least = PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT;
    uint32_t a = bits_of(n) & 0x7FFFFFFFu;
    a = a < least ? least : a > PEERD_ONE_BITS ? PEERD_ONE_BITS : a;
    const uint32_t entry = PEERD_DYNAMIC_LUT[(a >> PEERD_DYNAMIC_LUT_SHIFT) - PEERD_DYNAMIC_LUT_FIRST];
    const uint32_t low = a & ((1u << PEERD_DYNAMIC_LUT_SHIFT) - 1);
    return (entry & 0xFFu) + (low >= entry >> 8) + (x_bits >> 24 & 0x80u);
}

PEERD_FN uint32_t nf4_of(float n) {
    uint32_t above = 0;
    for (int i = 0; i < 15; ++i) above += n >= float_of(PEERD_NF4_THRESHOLD_BITS[i]);
    return above;
}

PEERD_FN uint32_t e4m3_of(float n, uint32_t x_bits) {
    const uint32_t a = bits_of(n * 448.0f) & 0x7FFFFFFFu;
    const uint32_t normal = (a + 0x7FFFFu + (a >> 20 & 1u) - (120u << 23)) >> 20;
    const uint32_t subnormal = bits_of(float_of(a) + 16384.0f) - bits_of(16384.0f);  // in units of 2^-9
    return (a < 0x3C800000u ? subnormal : normal) | (x_bits >> 24 & 0x80u);
}

template <int code>
PEERD_FN void encode(const Values& x, float inverse, uint8_t* to, bool) {
    uint8_t each[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        const float n = x.v[i] * inverse;
        uint32_t found;
        if (code == DYNAMIC8) found = dynamic_of(n, bits_of(x.v[i]));
        if (code == INT8) found = rounded(n * 127.0f);
        if (code == INT4) found = rounded(n * 7.0f) + 8;
        if (code == NF4) found = nf4_of(n);
        if (code == E4M3) found = e4m3_of(n, bits_of(x.v[i]));
        each[i] = static_cast<uint8_t>(found);
    }
    if (!two_a_byte(code)) {
        memcpy(to, each, GROUP);
        return;
    }
    for (int i = 0; i < GROUP / 2; ++i) to[i] = static_cast<uint8_t>((each[2 * i] & 15) | each[2 * i + 1] << 4);
}

PEERD_FN float value_of_e4m3(uint8_t byte) {
    const uint32_t magnitude = (byte & 0x7Fu) == 0x7Fu ? 0x7Eu : byte & 0x7Fu;
    return float_of(magnitude << 20 | (byte & 0x80u) << 24) * float_of(0x7B800000u);  // 2^120, exact for subnormals too
}

template <int code>
PEERD_FN Values decode(const uint8_t* from, float by) {
    Values values;
    for (int i = 0; i < GROUP; ++i) {
        const uint8_t byte = from[two_a_byte(code) ? i / 2 : i];
        const int nibble = i % 2 ? byte >> 4 : byte & 15;
        const int whole = byte < 128 ? byte : byte - 256;
        float value;
        if (code == DYNAMIC8) value = float_of(PEERD_DYNAMIC_BITS[byte & 0x7F] | (byte & 0x80u) << 24);
        if (code == INT8) value = static_cast<float>(whole < -127 ? -127 : whole);
        if (code == INT4) value = static_cast<float>(nibble < 1 ? -7 : nibble - 8);
        if (code == NF4) value = float_of(PEERD_NF4_BITS[nibble]);
        if (code == E4M3) value = value_of_e4m3(byte);
        values.v[i] = value * by;
    }
    return values;
}

#include "blockwise_loop.h"
#undef PEERD_FN
#undef PEERD_LOOP

}  // namespace plain
}  // namespace peerd
