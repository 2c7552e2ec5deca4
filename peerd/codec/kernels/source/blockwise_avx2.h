/* Primitives (see blockwise_loop.h) for x86-64 with AVX2, FMA and F16C.

Codes are computed in 32-bit lanes and packed at the end. The processor packs within each half of a register, so the
last step reorders the parts. */

namespace peerd {
namespace avx2 {

#define PEERD_TARGET __attribute__((target("avx2,fma,f16c")))
#define PEERD_FN static PEERD_INLINE PEERD_TARGET
#define PEERD_LOOP static PEERD_TARGET

constexpr int GROUP = 32;

struct Values {
    __m256 v[4];
};

template <int dtype>
PEERD_FN Values load(const char* from) {
    Values values;
    for (int i = 0; i < 4; ++i) {
        const char* at = from + 8 * i * value_bytes(dtype);
        if (dtype == FLOAT32) {
            values.v[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(at));
            continue;
        }
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        values.v[i] = dtype == FLOAT16 ? _mm256_cvtph_ps(raw)
                                       : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
    return values;
}

PEERD_FN __m256i bfloat16_bits(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF)), 16);
}

PEERD_FN void put(__m256i bytes, char* to, bool stream) {
    if (stream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes);
    } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    }
}

template <int dtype>
PEERD_FN void store(const Values& values, char* to, bool stream) {
    if (dtype == FLOAT32) {
        for (int i = 0; i < 4; ++i) put(_mm256_castps_si256(values.v[i]), to + 32 * i, stream);
        return;
    }
    for (int i = 0; i < 4; i += 2) {
        __m256i both;
        if (dtype == FLOAT16) {
            both = _mm256_set_m128i(_mm256_cvtps_ph(values.v[i + 1], _MM_FROUND_TO_NEAREST_INT),
                                    _mm256_cvtps_ph(values.v[i], _MM_FROUND_TO_NEAREST_INT));
        } else {
            both = _mm256_packus_epi32(bfloat16_bits(values.v[i]), bfloat16_bits(values.v[i + 1]));
            both = _mm256_permute4x64_epi64(both, 0xD8);
        }
        put(both, to + 16 * i, stream);
    }
}

typedef __m256i Bits;

PEERD_FN Bits no_bits() { return _mm256_setzero_si256(); }

PEERD_FN __m256i magnitude(__m256 value) {
    return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7FFFFFFF));
}

PEERD_FN Bits larger(Bits bits, const Values& values) {
    const __m256i first = _mm256_max_epi32(magnitude(values.v[0]), magnitude(values.v[1]));
    const __m256i second = _mm256_max_epi32(magnitude(values.v[2]), magnitude(values.v[3]));
    return _mm256_max_epi32(bits, _mm256_max_epi32(first, second));
}

PEERD_FN uint32_t largest(Bits bits) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}

/* Bit 7 if the value is negative. */
PEERD_FN __m256i sign_bit(__m256 x) {
    return _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 24), _mm256_set1_epi32(0x80));
}

PEERD_FN __m256i dynamic_of(__m256 n, __m256 x) {
    __m256i a = magnitude(n);
    a = _mm256_max_epi32(a, _mm256_set1_epi32(PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT));
    a = _mm256_min_epi32(a, _mm256_set1_epi32(PEERD_ONE_BITS));
    const __m256i bucket = _mm256_sub_epi32(_mm256_srli_epi32(a, PEERD_DYNAMIC_LUT_SHIFT),
                                            _mm256_set1_epi32(PEERD_DYNAMIC_LUT_FIRST));
    const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(PEERD_DYNAMIC_LUT), bucket, 4);
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32((1 << PEERD_DYNAMIC_LUT_SHIFT) - 1));
    const __m256i below = _mm256_cmpgt_epi32(_mm256_srli_epi32(entry, 8), low);  // -1: below the bucket's threshold
    const __m256i code = _mm256_add_epi32(_mm256_and_si256(entry, _mm256_set1_epi32(0xFF)), below);
    return _mm256_or_si256(_mm256_add_epi32(code, _mm256_set1_epi32(1)), sign_bit(x));
}

/* Binary search: each step compares with the middle threshold of the remaining range and adds a bit to the code. */
PEERD_FN __m256i nf4_of(__m256 n) {
    const int* t = reinterpret_cast<const int*>(PEERD_NF4_THRESHOLD_BITS);
    const __m256i quarters = _mm256_setr_epi32(t[3], t[11], 0, 0, 0, 0, 0, 0);
    const __m256i eighths = _mm256_setr_epi32(t[1], t[5], t[9], t[13], 0, 0, 0, 0);
    const __m256i last = _mm256_setr_epi32(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]);
    __m256i code = _mm256_castps_si256(_mm256_cmp_ps(n, _mm256_castsi256_ps(_mm256_set1_epi32(t[7])), _CMP_GE_OQ));
    code = _mm256_srli_epi32(code, 31);
    const __m256i tables[3] = {quarters, eighths, last};
    for (int i = 0; i < 3; ++i) {
        const __m256 middle = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(tables[i], code));
        const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(n, middle, _CMP_GE_OQ));
        code = _mm256_sub_epi32(_mm256_add_epi32(code, code), above);
    }
    return code;
}

PEERD_FN __m256i e4m3_of(__m256 n, __m256 x) {
    const __m256i a = magnitude(_mm256_mul_ps(n, _mm256_set1_ps(448.0f)));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, 20), _mm256_set1_epi32(1));
    const __m256i half = _mm256_set1_epi32(0x7FFFF - (120 << 23));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(a, odd), half), 20);
    const __m256 unit = _mm256_set1_ps(16384.0f);  // its unit in the last place is the step of the subnormals, 2^-9
    const __m256i subnormal = _mm256_sub_epi32(
        _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), unit)), _mm256_castps_si256(unit));
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), a);
    return _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, small), sign_bit(x));
}

template <int code>
PEERD_FN __m256i encode_eight(__m256 x, __m256 inverse) {
    const __m256 n = _mm256_mul_ps(x, inverse);
    if (code == INT8) return _mm256_cvtps_epi32(_mm256_mul_ps(n, _mm256_set1_ps(127.0f)));
    if (code == INT4)
        return _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(n, _mm256_set1_ps(7.0f))), _mm256_set1_epi32(8));
    if (code == NF4) return nf4_of(n);
    return code == DYNAMIC8 ? dynamic_of(n, x) : e4m3_of(n, x);
}

template <int code>
PEERD_FN void encode(const Values& x, float inverse, uint8_t* to, bool) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i v[4];
    for (int i = 0; i < 4; ++i) v[i] = encode_eight<code>(x.v[i], by);
    const __m256i first = _mm256_packs_epi32(v[0], v[1]), second = _mm256_packs_epi32(v[2], v[3]);
    __m256i bytes = code == INT8 ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (!two_a_byte(code)) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
        return;
    }
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // first + 16 * second
    const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

/* 32 codes, one per byte. */
template <int code>
PEERD_FN __m256i codes_of(const uint8_t* from) {
    if (!two_a_byte(code)) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i low = _mm_and_si128(packed, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

/* Values of eight codes, in the lower bytes of `codes`, without their scale. */
template <int code>
PEERD_FN __m256 decode_eight(__m128i codes) {
    const __m256i byte = _mm256_cvtepu8_epi32(codes);
    if (code == INT8) {
        const __m256i whole = _mm256_max_epi32(_mm256_cvtepi8_epi32(codes), _mm256_set1_epi32(-127));
        return _mm256_cvtepi32_ps(whole);
    }
    if (code == INT4) {
        const __m256i whole = _mm256_max_epi32(byte, _mm256_set1_epi32(1));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(whole, _mm256_set1_epi32(8)));
    }
    if (code == NF4) {
        const __m256* table = reinterpret_cast<const __m256*>(PEERD_NF4_BITS);
        const __m256 low = _mm256_permutevar8x32_ps(table[0], byte), high = _mm256_permutevar8x32_ps(table[1], byte);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(byte, 28)));
    }
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(byte, _mm256_set1_epi32(0x80)), 24);
    const __m256i magnitude = _mm256_and_si256(byte, _mm256_set1_epi32(0x7F));
    if (code == DYNAMIC8) {
        const int* table = reinterpret_cast<const int*>(PEERD_DYNAMIC_BITS);
        return _mm256_castsi256_ps(_mm256_or_si256(_mm256_i32gather_epi32(table, magnitude, 4), sign));
    }
    // float16 has the same layout, with three more bits of mantissa and an exponent larger by 8
    const __m256i below_nan = _mm256_min_epi32(magnitude, _mm256_set1_epi32(0x7E));
    const __m256i half = _mm256_or_si256(_mm256_slli_epi32(below_nan, 7), _mm256_srli_epi32(sign, 16));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
}

template <int code>
PEERD_FN Values decode(const uint8_t* from, float by) {
    const __m256i codes = codes_of<code>(from);
    const __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
    const __m128i parts[4] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
    Values values;
    for (int i = 0; i < 4; ++i)
        values.v[i] = _mm256_mul_ps(decode_eight<code>(parts[i]), _mm256_set1_ps(by));
    return values;
}

#include "blockwise_loop.h"
#undef PEERD_FN
#undef PEERD_LOOP
#undef PEERD_TARGET

}  // namespace avx2
}  // namespace peerd
