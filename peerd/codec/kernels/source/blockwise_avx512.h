/* Primitives (see blockwise_loop.h) for x86-64 with AVX512 (F, BW, VL, DQ), and with VBMI where PEERD_VBMI is 1.

Included twice, with PEERD_NAMESPACE set. Processes four registers of 16 values together. The processor packs their
32-bit lanes to bytes within each quarter of a register: each quarter of a "packed" register has four bytes of the
first, the second, the third and the fourth register. `in_order` converts that to memory order, and back.

VBMI looks up 64 bytes in a table of 128 at once. A table of singles is then four planes of bytes; unpacking reverses
the packing and reassembles the four bytes of each value. */

namespace peerd {
namespace PEERD_NAMESPACE {

#if PEERD_VBMI
#define PEERD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")))
#else
#define PEERD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#endif
#define PEERD_FN static PEERD_INLINE PEERD_TARGET
#define PEERD_LOOP static PEERD_TARGET

constexpr int GROUP = 64;

struct Values {
    __m512 v[4];
};

struct Whole {
    __m512i v[4];
};

template <int dtype>
PEERD_FN Values load(const char* from) {
    Values values;
    for (int i = 0; i < 4; ++i) {
        const char* at = from + 16 * i * value_bytes(dtype);
        if (dtype == FLOAT32) {
            values.v[i] = _mm512_loadu_ps(at);
            continue;
        }
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        values.v[i] = dtype == FLOAT16 ? _mm512_cvtph_ps(raw)
                                       : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
    return values;
}

/* bfloat16 of each value, in the upper half of its lane. */
PEERD_FN __m512i bfloat16_bits(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
}

/* The upper halves of the lanes of both, in order. */
PEERD_FN __m512i upper_halves(__m512i first, __m512i second) {
    alignas(64) static constexpr uint16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(first, _mm512_loadu_si512(UPPER), second);
}

PEERD_FN void put(__m512i bytes, void* to, bool stream) {
    if (stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bytes);
    } else {
        _mm512_storeu_si512(to, bytes);
    }
}

template <int dtype>
PEERD_FN void store(const Values& values, char* to, bool stream) {
    if (dtype == FLOAT32) {
        for (int i = 0; i < 4; ++i) put(_mm512_castps_si512(values.v[i]), to + 64 * i, stream);
        return;
    }
    for (int i = 0; i < 4; i += 2) {
        __m512i both;
        if (dtype == FLOAT16) {
            const __m256i first = _mm512_cvtps_ph(values.v[i], _MM_FROUND_TO_NEAREST_INT);
            const __m256i second = _mm512_cvtps_ph(values.v[i + 1], _MM_FROUND_TO_NEAREST_INT);
            both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        } else {
            both = upper_halves(bfloat16_bits(values.v[i]), bfloat16_bits(values.v[i + 1]));
        }
        put(both, to + 32 * i, stream);
    }
}

typedef __m512i Bits;

PEERD_FN Bits no_bits() { return _mm512_setzero_si512(); }

PEERD_FN __m512i magnitude(__m512 value) {
    return _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7FFFFFFF));
}

PEERD_FN Bits larger(Bits bits, const Values& values) {
    const __m512i first = _mm512_max_epi32(magnitude(values.v[0]), magnitude(values.v[1]));
    const __m512i second = _mm512_max_epi32(magnitude(values.v[2]), magnitude(values.v[3]));
    return _mm512_max_epi32(bits, _mm512_max_epi32(first, second));
}

PEERD_FN uint32_t largest(Bits bits) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(bits)); }

PEERD_FN __m512i in_order(__m512i packed) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, packed);
}

/* The code with bit 7 set if the value is negative; the code must leave it free. */
PEERD_FN __m512i with_sign(__m512i code, __m512 x) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(x), 24);
    return _mm512_ternarylogic_epi32(code, high, _mm512_set1_epi32(0x80), 0xF8);  // code | (high & 0x80)
}

PEERD_FN __m512i table(const unsigned int* from) { return _mm512_loadu_si512(from); }

static constexpr Nf4Buckets NF4_BUCKETS = nf4_buckets();

#if PEERD_VBMI

static constexpr Planes<128> DYNAMIC_PLANES = dynamic_planes();
static constexpr Planes<128> THRESHOLD_PLANES = dynamic_threshold_planes();
static constexpr Planes<128> E4M3_PLANES = e4m3_planes();
static constexpr DynamicBuckets BUCKETS = dynamic_buckets();
static_assert(BUCKETS.count <= 256, "a byte numbers the buckets");

/* Byte k of the entries at the lower seven bits of `index`. */
PEERD_FN __m512i plane_of(const uint8_t* plane, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_loadu_si512(plane), index, _mm512_loadu_si512(plane + 64));
}

/* The lower (`upper` = 0) or upper 16 bits of each lane, packed in the order of the resulting codes. */
PEERD_FN __m512i halves(int upper, __m512i first, __m512i second) {
    alignas(64) static constexpr uint16_t LOWER[32] = {0,  2,  4,  6,  32, 34, 36, 38, 8,  10, 12, 14, 40, 42, 44, 46,
                                                       16, 18, 20, 22, 48, 50, 52, 54, 24, 26, 28, 30, 56, 58, 60, 62};
    const __m512i which = _mm512_add_epi16(_mm512_loadu_si512(LOWER), _mm512_set1_epi16(static_cast<short>(upper)));
    return _mm512_permutex2var_epi16(first, which, second);
}

/* Bucket numbers for the upper 16 bits of 32 magnitudes. */
PEERD_FN __m512i bucket_of(__m512i upper) {
    upper = _mm512_max_epu16(upper, _mm512_set1_epi16(DynamicBuckets::FIRST_EXPONENT << 7));
    const __m512i exponent = _mm512_srli_epi16(upper, 7);
    const __m512i shift = _mm512_permutexvar_epi16(exponent, _mm512_loadu_si512(BUCKETS.shift));
    const __m512i base = _mm512_permutexvar_epi16(exponent, _mm512_loadu_si512(BUCKETS.base));
    return _mm512_add_epi16(_mm512_srlv_epi16(upper, shift), base);
}

PEERD_FN Whole unpacked(__m512i plane0, __m512i plane1, __m512i plane2, __m512i plane3) {
    const __m512i low01 = _mm512_unpacklo_epi8(plane0, plane1), high01 = _mm512_unpackhi_epi8(plane0, plane1);
    const __m512i low23 = _mm512_unpacklo_epi8(plane2, plane3), high23 = _mm512_unpackhi_epi8(plane2, plane3);
    return {{_mm512_unpacklo_epi16(low01, low23), _mm512_unpackhi_epi16(low01, low23),
             _mm512_unpacklo_epi16(high01, high23), _mm512_unpackhi_epi16(high01, high23)}};
}

/* Sign bit of a - b, for magnitudes split into halves. */
PEERD_FN __m512i less(__m512i a_upper, __m512i a_lower, __m512i b_upper, __m512i b_lower) {
    const __m512i borrow = _mm512_min_epu16(_mm512_subs_epu16(b_lower, a_lower), _mm512_set1_epi16(1));
    return _mm512_sub_epi16(_mm512_sub_epi16(a_upper, b_upper), borrow);
}

PEERD_FN __m512i encode_dynamic(const Values& x, __m512 by) {
    __m512i n[4], upper[2], lower[2], magnitude[2];
    for (int i = 0; i < 4; ++i) n[i] = _mm512_castps_si512(_mm512_mul_ps(x.v[i], by));
    for (int i = 0; i < 2; ++i) {
        upper[i] = halves(1, n[2 * i], n[2 * i + 1]);
        lower[i] = halves(0, n[2 * i], n[2 * i + 1]);
        magnitude[i] = _mm512_and_si512(upper[i], _mm512_set1_epi16(0x7FFF));
    }
    const __m512i bucket = _mm512_packus_epi16(bucket_of(magnitude[0]), bucket_of(magnitude[1]));
    const __m512i below = _mm512_mask_blend_epi8(_mm512_movepi8_mask(bucket), plane_of(BUCKETS.below, bucket),
                                                 plane_of(BUCKETS.below + 128, bucket));
    __m512i plane[4];  // byte planes of the next threshold
    for (int k = 0; k < 4; ++k) plane[k] = plane_of(THRESHOLD_PLANES.byte[k], below);
    const __m512i first = less(magnitude[0], lower[0], _mm512_unpacklo_epi8(plane[2], plane[3]),
                               _mm512_unpacklo_epi8(plane[0], plane[1]));
    const __m512i second = less(magnitude[1], lower[1], _mm512_unpackhi_epi8(plane[2], plane[3]),
                                _mm512_unpackhi_epi8(plane[0], plane[1]));
    // packing saturates but keeps the signs, first of the differences, then of the values
    const __mmask64 not_above = _mm512_movepi8_mask(_mm512_packs_epi16(first, second));
    const __m512i magnitudes = _mm512_mask_mov_epi8(_mm512_add_epi8(below, _mm512_set1_epi8(1)), not_above, below);
    const __m512i signs = _mm512_packs_epi16(upper[0], upper[1]);
    return in_order(_mm512_ternarylogic_epi32(magnitudes, signs, _mm512_set1_epi8(-128), 0xF8));
}

#else

/* Entries of a table of 128 singles, at the lower seven bits of each lane. */
PEERD_FN __m512i look_up(const unsigned int* from, __m512i index) {
    __m512i part[4];
    for (int i = 0; i < 4; ++i)
        part[i] = _mm512_permutex2var_epi32(table(from + 32 * i), index, table(from + 32 * i + 16));
    const __mmask16 odd = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
    const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
    return _mm512_mask_blend_epi32(upper, _mm512_mask_blend_epi32(odd, part[0], part[1]),
                                   _mm512_mask_blend_epi32(odd, part[2], part[3]));
}

PEERD_FN __m512i dynamic_of(__m512 n, __m512 x) {
    __m512i a = magnitude(n);
    a = _mm512_max_epi32(a, _mm512_set1_epi32(PEERD_DYNAMIC_LUT_FIRST << PEERD_DYNAMIC_LUT_SHIFT));
    a = _mm512_min_epi32(a, _mm512_set1_epi32(PEERD_ONE_BITS));
    const __m512i bucket = _mm512_sub_epi32(_mm512_srli_epi32(a, PEERD_DYNAMIC_LUT_SHIFT),
                                            _mm512_set1_epi32(PEERD_DYNAMIC_LUT_FIRST));
    const __m512i entry = _mm512_i32gather_epi32(bucket, PEERD_DYNAMIC_LUT, 4);
    const __m512i low = _mm512_and_si512(a, _mm512_set1_epi32((1 << PEERD_DYNAMIC_LUT_SHIFT) - 1));
    const __mmask16 above = _mm512_cmple_epi32_mask(_mm512_srli_epi32(entry, 8), low);
    const __m512i code = _mm512_and_si512(entry, _mm512_set1_epi32(0xFF));
    return with_sign(_mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1)), x);
}

#endif

/* Each bucket contains at most one threshold, see Nf4Buckets. */
PEERD_FN __m512i nf4_of(__m512 n) {
    const __m512 steps = _mm512_set1_ps(Nf4Buckets::STEPS), middle = _mm512_set1_ps(Nf4Buckets::MIDDLE);
    const __m512i bucket = _mm512_castps_si512(_mm512_fmadd_ps(n, steps, middle));  // in the lower five bits
    const __m512i code = _mm512_permutex2var_epi32(table(NF4_BUCKETS.below), bucket, table(NF4_BUCKETS.below + 16));
    const __m512i next = _mm512_permutex2var_epi32(table(NF4_BUCKETS.next), bucket, table(NF4_BUCKETS.next + 16));
    const __mmask16 above = _mm512_cmp_ps_mask(n, _mm512_castsi512_ps(next), _CMP_GE_OQ);
    return _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(1));
}

PEERD_FN __m512i e4m3_of(__m512 n, __m512 x) {
    const __m512i a = magnitude(_mm512_mul_ps(n, _mm512_set1_ps(448.0f)));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, 20), _mm512_set1_epi32(1));
    const __m512i half = _mm512_set1_epi32(0x7FFFF - (120 << 23));
    const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(a, odd), half), 20);
    const __m512 unit = _mm512_set1_ps(16384.0f);  // its unit in the last place is the step of the subnormals, 2^-9
    const __m512i raised = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), unit));
    const __mmask16 small = _mm512_cmplt_epi32_mask(a, _mm512_set1_epi32(0x3C800000));
    return with_sign(_mm512_mask_sub_epi32(normal, small, raised, _mm512_castps_si512(unit)), x);
}

template <int code>
PEERD_FN __m512i encode_sixteen(__m512 x, __m512 by) {
    const __m512 n = _mm512_mul_ps(x, by);
    if (code == INT8) return _mm512_cvtps_epi32(_mm512_mul_ps(n, _mm512_set1_ps(127.0f)));
    if (code == INT4)
        return _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(n, _mm512_set1_ps(7.0f))), _mm512_set1_epi32(8));
    if (code == NF4) return nf4_of(n);
#if !PEERD_VBMI
    if (code == DYNAMIC8) return dynamic_of(n, x);
#endif
    return e4m3_of(n, x);
}

/* 64 codes, one per byte. */
template <int code>
PEERD_FN __m512i encode_each(const Values& x, __m512 by) {
#if PEERD_VBMI
    if (code == DYNAMIC8) return encode_dynamic(x, by);
#endif
    __m512i v[4];
    for (int i = 0; i < 4; ++i) v[i] = encode_sixteen<code>(x.v[i], by);
    const __m512i first = _mm512_packs_epi32(v[0], v[1]), second = _mm512_packs_epi32(v[2], v[3]);
    return in_order(code == INT8 ? _mm512_packs_epi16(first, second) : _mm512_packus_epi16(first, second));
}

template <int code>
PEERD_FN void encode(const Values& x, float inverse, uint8_t* to, bool stream) {
    const __m512i bytes = encode_each<code>(x, _mm512_set1_ps(inverse));
    if (!two_a_byte(code)) {
        put(bytes, to, stream);
        return;
    }
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));  // first + 16 * second
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(pairs));
}

/* Values of sixteen codes, one per byte, without their scale. */
template <int code>
PEERD_FN __m512 decode_sixteen(__m128i codes) {
    if (code == INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_max_epi8(codes, _mm_set1_epi8(-127))));
    const __m512i byte = _mm512_cvtepu8_epi32(codes);
    if (code == INT4) {
        const __m512i whole = _mm512_max_epi32(byte, _mm512_set1_epi32(1));
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, _mm512_set1_epi32(8)));
    }
    if (code == NF4) return _mm512_castsi512_ps(_mm512_permutexvar_epi32(byte, table(PEERD_NF4_BITS)));
#if !PEERD_VBMI
    if (code == DYNAMIC8) {
        const __m512i sign = _mm512_slli_epi32(byte, 24);
        const __m512i value = look_up(PEERD_DYNAMIC_BITS, byte);
        const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80000000u));
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(value, sign, top, 0xF8));  // value | (sign & top)
    }
#endif
    // float16 has the same layout, with three more bits of mantissa and an exponent larger by 8
    const __m256i wide = _mm256_cvtepu8_epi16(codes);
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
    const __m256i below_nan = _mm256_min_epu16(magnitude, _mm256_set1_epi16(0x7E));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-0x8000));
    const __m256i half = _mm256_or_si256(_mm256_slli_epi16(below_nan, 7), sign);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

#if PEERD_VBMI
/* Values of 64 codes in memory order, looked up by planes, without their scale. */
template <int code>
PEERD_FN Whole decode_planes(__m512i codes) {
    const __m512i packed = in_order(codes);
    const __m512i top = _mm512_set1_epi8(-128);
    const uint8_t(*plane)[128] = code == DYNAMIC8 ? DYNAMIC_PLANES.byte : E4M3_PLANES.byte;
    const __m512i magnitude = plane_of(plane[3], packed);
    const __m512i highest = _mm512_ternarylogic_epi32(magnitude, packed, top, 0xF8);  // magnitude | (packed & top)
    const __m512i zero = _mm512_setzero_si512();  // values of e4m3 have no bits in the lower two planes
    const __m512i plane0 = code == DYNAMIC8 ? plane_of(plane[0], packed) : zero;
    const __m512i plane1 = code == DYNAMIC8 ? plane_of(plane[1], packed) : zero;
    return unpacked(plane0, plane1, plane_of(plane[2], packed), highest);
}
#endif

template <int code>
PEERD_FN Values decode(const uint8_t* from, float by) {
    Values values;
#if PEERD_VBMI
    if (code == DYNAMIC8 || code == E4M3) {
        const Whole bits = decode_planes<code>(_mm512_loadu_si512(from));
        for (int i = 0; i < 4; ++i)
            values.v[i] = _mm512_mul_ps(_mm512_castsi512_ps(bits.v[i]), _mm512_set1_ps(by));
        return values;
    }
#endif
    for (int i = 0; i < 4; ++i) {
        __m128i codes;
        if (two_a_byte(code)) {
            const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i)));
            codes = _mm_and_si128(_mm_or_si128(bytes, _mm_slli_epi16(bytes, 4)), _mm_set1_epi8(15));
        } else {
            codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i));
        }
        values.v[i] = _mm512_mul_ps(decode_sixteen<code>(codes), _mm512_set1_ps(by));
    }
    return values;
}

#include "blockwise_loop.h"
#undef PEERD_FN
#undef PEERD_LOOP
#undef PEERD_TARGET

}  // namespace PEERD_NAMESPACE
}  // namespace peerd
